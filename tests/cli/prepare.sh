#!/bin/sh
# mneme prepare: text in, shards out; the same at any number of jobs and after a kill; checked.
set -eu
. "$2/tests/cli/support/expect.sh"

text=$work/text
mkdir -p "$text/more"
i=0
while [ $i -lt 3000 ]; do
    printf 'Paragraph %d of the first file, and some words more.\n\n' $i
    i=$((i + 1))
done >"$text/a.txt"
printf '{"text": "a line"}\n{"text": "another, \\u00e9"}\n' >"$text/more/b.jsonl"
printf 'hidden' >"$text/.hidden"
bytes=$(wc -c <"$text/a.txt")

# what it says, and what lies there
run 0 prepare "$text" -o "$work/one" --tokenizer bytes --separator '\n\n' --valid 0.1 --jobs 1 --quiet
quiet
says '^train: [0-9]* tokens, [0-9]* documents, 1 shard$'
says '^valid: [0-9]* tokens, [0-9]* documents, 1 shard$'
for name in index.json tokenizer.json train_000000.bin train_000000.documents valid_000000.bin; do
    [ -s "$work/one/$name" ] || fail "no $name"
done
[ "$(ls -A "$work/one" | grep -c tmp)" = 0 ] || fail "temporary files left"

# the same bytes at any number of jobs
for jobs in 2 5; do
    run 0 prepare "$text" -o "$work/jobs" --tokenizer bytes --separator '\n\n' --valid 0.1 \
        --jobs $jobs --quiet
    diff -r "$work/one" "$work/jobs" || fail "$jobs jobs give other bytes"
    rm -r "$work/jobs"
done

# the numbers add up: every byte but the separators; nothing is appended by bytes
run 0 prepare "$text/a.txt" -o "$work/sum" --tokenizer bytes --separator '\n\n' --json
complains 'prepare: '
json "d['train'] == {'tokens': $bytes - 6000, 'documents': 3000, 'shards': 1}"
json "d['valid']['shards'] == 0 and d['token_bytes'] == 2 and not d['was_complete']"
run 0 prepare "$text/a.txt" -o "$work/sum" --tokenizer bytes --separator '\n\n' --json
json "d['was_complete'] and d['kept_shards'] == 1"

# checking, and damage
run 0 prepare --check "$work/one" --quiet
quiet
says 'as it was written'
cp "$work/one/train_000000.bin" "$work/kept"
printf 'x' | dd of="$work/one/train_000000.bin" bs=1 seek=2000 conv=notrunc 2>/dev/null
run 1 prepare --check "$work/one" --quiet
complains 'train_000000.bin'
run 0 prepare "$text" -o "$work/one" --tokenizer bytes --separator '\n\n' --valid 0.1 --quiet
cmp "$work/kept" "$work/one/train_000000.bin" || fail "the damaged shard was not made again"

# killed at any moment, it goes on and ends with the same bytes
i=0
while [ $i -lt 40 ]; do cat "$text/a.txt"; i=$((i + 1)); done >"$work/long.txt"
long="prepare $work/long.txt --tokenizer bytes --separator \n\n --shard-tokens 300000 --quiet"
run 0 $long -o "$work/whole"
for delay in 0.01 0.03 0.05 0.1 0.2; do
    "$mneme" $long -o "$work/killed" >/dev/null 2>&1 &
    victim=$!
    sleep $delay
    kill -9 $victim 2>/dev/null || true
    wait $victim 2>/dev/null || true
done
run 0 $long -o "$work/killed"
diff -r "$work/whole" "$work/killed" || fail "a killed run ends with other bytes"

# characters: one token per distinct character
printf 'hello world' >"$work/c.txt"
run 0 prepare "$work/c.txt" -o "$work/c" --tokenizer chars --valid 0.3 --quiet
says '^train: 7 tokens, 1 document, 1 shard$'
says '^valid: 4 tokens, 1 document, 1 shard$'
grep -q '"vocab_size": 8' "$work/c/index.json" || fail "not 8 characters"

# progress: plain lines when piped, without colours
run 0 prepare "$work/long.txt" -o "$work/bar" --tokenizer bytes
complains '^prepare: .* in 0:'
if grep -q "$(printf '\033')" "$work/err"; then fail "escape sequences in a pipe"; fi

# mistakes
run 2 prepare
complains 'name the files'
run 2 prepare "$text" --tokenizer bytes
complains '-o'
run 2 prepare "$text" -o "$work/x"
complains 'tokenizer'
run 2 prepare "$text" -o "$work/x" --tokenizer bytes --valid 1
complains 'valid'
run 2 prepare "$text" -o "$work/x" --tokenizer bytes --separator '\q'
complains 'separator'
run 2 prepare "$text" -o "$work/x" --tokenizer bytes --format bin
complains 'jsonl'
run 2 prepare "$text" -o "$work/x" --tokenizer bytes --jobs 0
complains 'jobs'
run 2 prepare "$text" -o
complains 'needs a value'
run 1 prepare "$work/absent" -o "$work/x" --tokenizer bytes --quiet
complains 'absent: no such file'
run 1 prepare "$text" -o "$work/x" --tokenizer "$work/absent.json" --quiet
complains 'absent.json'
run 1 prepare "$text" -o "$work/one" --tokenizer bytes --quiet
complains 'another separator'
run 1 prepare "$text" -o "$work/x" --tokenizer bytes --document-end '<|none|>' --quiet
complains 'none|>'
printf '{"text": 1}\n{"txt": "b"}\n' >"$work/bad.jsonl"
run 1 prepare "$work/bad.jsonl" -o "$work/y" --tokenizer bytes --quiet
complains 'bad.jsonl: line 1: '
run 1 prepare "$text" -o "$text/a.txt" --tokenizer bytes --quiet
complains 'a.txt'
run 1 prepare --check "$work/absent" --quiet
complains 'absent'
