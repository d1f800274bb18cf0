#!/bin/sh
# mneme tokenizer: learns, encodes, decodes and describes; text comes back; mistakes are named.
set -eu
. "$2/tests/cli/support/expect.sh"

text=$work/text
cat "$source/README.md" "$source/CONTRIBUTING.md" "$source/docs/internals/architecture.md" >"$text" 2>/dev/null ||
    cat "$source/docs/internals/architecture.md" >"$text"

for verb in train encode decode info; do
    run 0 tokenizer "$verb" --help
    quiet
    says "^usage: mneme tokenizer $verb"
    run 2 tokenizer "$verb" --no-such-option
    complains 'no-such-option'
done

# train, the same twice, and back again for every pattern
for pattern in gpt2 llama3 qwen2; do
    run 0 tokenizer train "$text" --vocab-size 600 --pattern "$pattern" --special '<|endoftext|>' \
        -o "$work/$pattern.json"
    says '600 tokens (bpe)'
    complains '[0-9]'                              # progress, as lines
    cp "$work/$pattern.json" "$work/first.json"
    run 0 tokenizer train "$text" --vocab-size 600 --pattern "$pattern" --special '<|endoftext|>' \
        --out "$work/$pattern.json" --quiet
    quiet
    cmp -s "$work/$pattern.json" "$work/first.json" || fail "two runs of $pattern differ"
    run 0 tokenizer encode --tokenizer "$work/$pattern.json" "$text"
    cp "$work/out" "$work/ids"
    run 0 tokenizer decode --tokenizer "$work/$pattern.json" "$work/ids"
    cmp -s "$work/out" "$text" || fail "$pattern: the text does not come back"
done

run 0 tokenizer train --kind bytes -o "$work/bytes.json"
run 0 tokenizer train --kind chars "$text" -o "$work/chars.json"
for kind in bytes chars; do
    run 0 tokenizer encode --tokenizer "$work/$kind.json" "$text"
    cp "$work/out" "$work/ids"
    run 0 tokenizer decode --tokenizer "$work/$kind.json" "$work/ids"
    cmp -s "$work/out" "$text" || fail "$kind: the text does not come back"
    run 0 tokenizer info "$work/$kind.json"
    says "^kind  *$kind\$"
done

# standard input, special tokens, JSON
printf 'a<|endoftext|>b' >"$work/small"
mkdir "$work/folder"
cp "$work/gpt2.json" "$work/folder/tokenizer.json"
run 0 tokenizer encode --tokenizer "$work/folder" --json "$work/small"
json 'd["count"] == 3 and d["ids"][1] == 0 and d["tokens"] == ["a", "<|endoftext|>", "b"]'
run 0 tokenizer encode --tokenizer "$work/folder" --plain --json "$work/small"
json 'd["count"] > 3 and 0 not in d["ids"]'
"$mneme" tokenizer encode --tokenizer "$work/bytes.json" - <"$work/small" >"$work/ids"
[ "$(cut -d' ' -f1-3 "$work/ids")" = '97 60 124' ] || fail 'standard input is not encoded'
run 0 tokenizer encode --tokenizer "$work/folder" --count "$work/small"
says '^3 tokens, 15 bytes'
printf '"a b"\n{"text": "a\\nb", "more": 1}\n' >"$work/lines"
run 0 tokenizer encode --tokenizer "$work/bytes.json" --lines "$work/lines"
says '^\[97, 32, 98\]$'
says '^\[97, 10, 98\]$'
cp "$work/out" "$work/ids"
run 0 tokenizer decode --tokenizer "$work/bytes.json" --lines "$work/ids"
says '^"a\\nb"$'
printf '[1, 0, 2]' >"$work/ids"
run 0 tokenizer decode --tokenizer "$work/folder" "$work/ids"
[ "$(cat "$work/out")" = '!"' ] || fail 'special tokens are not left out'
run 0 tokenizer decode --tokenizer "$work/folder" --special "$work/ids"
says '^!<|endoftext|>"$'
run 0 tokenizer info "$work/folder" --json
json 'd["kind"] == "bpe" and d["size"] == 600 and d["eos"]["id"] == 0 and d["bos"] is None'
json 'len(d["fingerprint"]) == 16'

# mistakes
run 2 tokenizer
run 2 tokenizer stir
complains 'stir'
run 1 tokenizer train "$text" --vocab-size 600
complains '-o tokenizer.json'
run 1 tokenizer train "$text" -o "$work/x.json"
complains '--vocab-size'
run 2 tokenizer train "$text" --vocab-size many -o "$work/x.json"
complains 'many'
run 2 tokenizer train "$text" -o
complains 'train: -o needs a value'
run 1 tokenizer train "$text" --vocab-size 100 -o "$work/x.json"
complains '256 bytes'
run 1 tokenizer train "$text" --vocab-size 300 --pattern gpt9 -o "$work/x.json"
complains 'gpt9'
run 1 tokenizer train "$text" --kind syllables -o "$work/x.json"
complains 'syllables'
run 1 tokenizer train --vocab-size 300 -o "$work/x.json"
complains 'at least one text file'
run 1 tokenizer train "$work/nowhere" --vocab-size 300 -o "$work/x.json"
complains 'nowhere'
[ ! -e "$work/x.json" ] || fail 'a failed training leaves a file'
run 2 tokenizer encode
complains 'name one file'
run 1 tokenizer encode --tokenizer "$work/nowhere.json" "$text"
complains 'nowhere.json: no such file'
run 1 tokenizer encode --tokenizer "$text" "$text"
complains 'text'
run 1 tokenizer encode --tokenizer "$work/bytes.json" "$work/nowhere"
complains 'nowhere'
printf '12 x' >"$work/ids"
run 1 tokenizer decode --tokenizer "$work/bytes.json" "$work/ids"
complains 'found "x"'
printf '256' >"$work/ids"
run 1 tokenizer decode --tokenizer "$work/bytes.json" "$work/ids"
complains '256'
