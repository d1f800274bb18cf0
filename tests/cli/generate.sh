#!/bin/sh
# labels: sanitize
# mneme generate: the same seed gives the same text in one go, in pieces through files, with any
# chunk; stops, forks, belief and conversations do what they say; mistakes are named.
set -eu
. "$2/tests/cli/support/expect.sh"
make_model=$3
unset NO_COLOR COLORTERM || true
letters='abcdefghijklmnopqrstuvwxyz .é'
sizes='"hidden_size": 16, "vocab_size": 40, "intermediate_size": 16, "max_position_embeddings": 64'
mkdir "$work/model" "$work/plain" "$work/bytes"
"$make_model" "$work/model" "{\"layers\": \"bayes, attention\", $sizes}" "$letters"
"$make_model" "$work/plain" "{\"layers\": \"gdn, hyperglu\", $sizes}" "$letters"
"$make_model" "$work/bytes" '{"layers": "gdn", "hidden_size": 16, "vocab_size": 256}' bytes
m=$work/model

# one go, and in pieces through a file
run 0 generate --model "$m" "hello" --tokens 30 --seed 3
complains '^5 tokens read at .*/s, 30 written at .*/s$'
cp "$work/out" "$work/whole"
[ "$(tr -d '\n' <"$work/whole" | LC_ALL=C.UTF-8 wc -m)" = 30 ] || fail "not 30 characters"
run 0 generate --model "$m" "hello" --tokens 30 --seed 3 --quiet --prefill-chunk 2 --threads 1
quiet
cmp -s "$work/out" "$work/whole" || fail "another chunk gives another text"
run 0 generate --model "$m" "hello" --tokens 30 --seed 4
if cmp -s "$work/out" "$work/whole"; then fail "the seed does not count"; fi
run 0 generate --model "$m" "hello" --tokens 12 --seed 3 --save-state "$work/state"
tr -d '\n' <"$work/out" >"$work/pieces"
run 0 generate --model "$m" --load-state "$work/state" --tokens 18 --seed 3
tr -d '\n' <"$work/out" >>"$work/pieces"
echo >>"$work/pieces"
cmp -s "$work/pieces" "$work/whole" || fail "in pieces the text is another"
run 0 generate --model "$m" "hel" --tokens 0 --save-state "$work/hel"
run 0 generate --model "$m" "lo" --load-state "$work/hel" --tokens 30 --seed 3
cmp -s "$work/out" "$work/whole" || fail "a prompt behind a state"

# where prompts come from
printf hello >"$work/prompt"
for way in "--file $work/prompt" "-" ""; do
    # shellcheck disable=SC2086
    "$mneme" generate --model "$m" $way --tokens 30 --seed 3 --quiet <"$work/prompt" >"$work/out"
    cmp -s "$work/out" "$work/whole" || fail "prompt by \"$way\""
done
run 0 generate --model "$m" --tokens 5 --echo --quiet -- hello
says '^hello.....$'
run 0 generate --model "$work/bytes" "é" --tokens 40 --temperature 5
quiet_utf8=$(iconv -f UTF-8 -t UTF-8 <"$work/out" | wc -c)
[ "$quiet_utf8" -gt 0 ] || fail "no text"

# stops: the text up to it, and nothing of it; greedy and cuts
third=$(LC_ALL=C.UTF-8 sed 's/^..\(.\).*/\1/' "$work/whole")
run 0 generate --model "$m" "hello" --tokens 30 --seed 3 --json --stop "$third" --stop zzzzz
json "d['continuations'][0]['stopped'] == 'stop'"
json "'$third' not in d['continuations'][0]['text'] and len(d['continuations'][0]['text']) <= 2"
run 0 generate --model "$m" "hello" --tokens 9 --temperature 0
cp "$work/out" "$work/greedy"
run 0 generate --model "$m" "hello" --tokens 9 --top-k 1 --seed 99
cmp -s "$work/out" "$work/greedy" || fail "--top-k 1 is not greedy"
run 0 generate --model "$m" "hello" --tokens 9 --top-p 1e-9 --min-p 0.5 --seed 5
cmp -s "$work/out" "$work/greedy" || fail "a small --top-p is not greedy"

# forks: the first is what one alone writes, the others differ
run 0 generate --model "$m" "hello" --tokens 30 --seed 3 --fork 3 --quiet
says '^--- 3 of 3$'
[ "$(sed -n 2p "$work/out")" = "$(cat "$work/whole")" ] || fail "the first fork is another text"
run 0 generate --model "$m" "hello" --tokens 30 --seed 3 --fork 3 --json
json "len(d['continuations']) == 3 and len({c['text'] for c in d['continuations']}) == 3"
json "d['prompt_tokens'] == 5 and all(len(c['tokens']) == 30 for c in d['continuations'])"
json "all(c['stopped'] == 'length' for c in d['continuations']) and d['state_bytes'] > 0"

# belief: lines when piped, with the prompt; in JSON for what was written
run 0 generate --model "$m" "hello" --tokens 4 --belief --quiet
[ "$(wc -l <"$work/out")" = 9 ] || fail "not nine lines"
says "^h$(printf '\t')[0-9.e-]*$"
run 0 generate --model "$m" "hello" --tokens 4 --belief --json
json "len(d['continuations'][0]['variance']) == 4 and min(d['continuations'][0]['variance']) > 0"
run 1 generate --model "$work/plain" "hello" --belief
complains 'no layer of .* tells a variance'
complains 'gdn'
if command -v script >/dev/null 2>&1; then
    script -qec "$mneme generate --model $m hello --tokens 4 --belief" /dev/null >"$work/out"
    says 'certain .* uncertain'
    says "$(printf '\033')\[38;5;16;48;5;[0-9]*mh$(printf '\033')\[0m"
    NO_COLOR=1 script -qec "$mneme generate --model $m hello --tokens 4 --belief" /dev/null \
        >"$work/out"
    says "^h$(printf '\t')"
fi

# a conversation is the same text line by line
printf 'hello\n/save %s\n/fork 2\n\n/set temperature 0\n/reset\nhello\n/load %s\n\n/frk\n/quit\nx\n' \
    "$work/talk" "$work/talk" >"$work/lines"
"$mneme" generate --model "$m" --interactive --tokens 9 --seed 3 <"$work/lines" >"$work/out" \
    2>"$work/err" || fail "a conversation failed"
command="mneme generate --interactive"
[ "$(sed -n 1p "$work/out")" = "$(LC_ALL=C.UTF-8 cut -c 1-9 "$work/whole")" ] ||
    [ "$(sed -n 1p "$work/out")" = "$(LC_ALL=C.UTF-8 sed 's/^\(.........\).*/\1/' "$work/whole")" ] ||
    fail "the first line"
says '^wrote .*talk: 14 tokens in [0-9]* bytes$'
says '^14 tokens read$'
[ "$(sed -n 4p "$work/out")" = "$(sed -n 7p "$work/out")" ] || fail "/fork moved the session"
[ "$(sed -n 8p "$work/out")" = "$(cat "$work/greedy")" ] || fail "/set or /reset"
complains 'there is no /frk, did you mean /fork'
[ "$(wc -l <"$work/out")" = 10 ] || fail "lines after /quit"

# mistakes
run 1 generate --model "$work/nowhere" hello
complains 'nowhere'
run 1 generate --model "$m" 'HELLO'
complains 'character U+0048'
run 1 generate --model "$work/plain" "$(printf '%070d' 0 | tr 0 a)"
complains '64'
run 1 generate --model "$work/plain" --load-state "$work/state"
complains 'another model'
run 1 generate --model "$m" --load-state "$work/prompt"
complains 'prompt'
run 1 generate --model "$m" hello --tokens 1 --save-state "$work/lines/state"
complains 'lines: is a file where a folder is needed'
run 1 generate --model "$m" ""
complains 'prompt is empty'
rm "$work/plain/tokenizer.json"
run 1 generate --model "$work/plain" hello
complains 'tokenizer.json'
run 2 generate hello
complains 'model'
for bad in "--tokens x" "--temperature -1" "--top-p 2" "--seed x" "--fork 0" "--threads 0" "--stop" \
    "--model" "one two" "--file a b" "--interactive --json" "--fork 2 --save-state s" \
    "--prefill-chunk 0"; do
    # shellcheck disable=SC2086
    run 2 generate --model "$m" $bad
    complains "mneme generate: "
done
