#!/bin/sh
# labels: sanitize
# mneme eval: perplexity of texts and files of tokens agree, choices and logits come out, mistakes
# are named.
set -eu
. "$2/tests/cli/support/expect.sh"
make_model=$3
m=$work/model
mkdir "$m"
"$make_model" "$m" '{"layers": "kla, attention", "hidden_size": 16, "vocab_size": 256,
    "intermediate_size": 16}' bytes
awk 'BEGIN { for (i = 0; i < 400; i++) printf "%d is not %d\n", i, i * i }' >"$work/text.txt"
size=$(wc -c <"$work/text.txt")

run 0 eval --model "$m" --text "$work/text.txt" --lengths 16,200 --quiet
quiet
says '^ *length *windows *tokens *loss *+- *perplexity *tokens/s$'
says "^ *16 *$((size / 16)) *$((size / 16 * 15)) "
says "^ *200 *$((size / 200)) *$((size / 200 * 199)) "
run 0 eval --model "$m" --text "$work/text.txt" --lengths 16,200 --json
complains 'perplexity at 16'
cp "$work/out" "$work/first.json"
json "[p['length'] for p in d['perplexity']] == [16, 200]"
json "all(abs(p['perplexity'] / __import__('math').exp(p['loss']) - 1) < 1e-9
    and p['loss_error'] > 0 for p in d['perplexity'])"
run 0 eval --model "$m" --text "$work/text.txt" --lengths 16 --max-tokens 100 --json --quiet
json "d['perplexity'][0]['windows'] == 6 and d['perplexity'][0]['tokens'] == 90"
run 0 eval --model "$m" --text "$work/text.txt" --lengths 16 --json --quiet --dtype f64 --threads 1
json "abs(d['perplexity'][0]['loss'] -
    json.load(open('$work/first.json'))['perplexity'][0]['loss']) < 1e-4"

# the same tokens as a file of token ids, and as logits
if command -v python3 >/dev/null 2>&1; then
    python3 -c "
import struct
t = open('$work/text.txt', 'rb').read()[:64]
open('$work/t.bin', 'wb').write(struct.pack('<64H', *t))
open('$work/t.json', 'w').write(str(list(t)))"
    run 0 eval --model "$m" --data "$work/t.bin" --lengths 64 --json --quiet
    cp "$work/out" "$work/bin.json"
    run 0 eval --model "$m" --tokens "$work/t.bin" --logits "$work/a.safetensors"
    says 'logits of 64 tokens, 256 each'
    run 0 eval --model "$m" --tokens "$work/t.json" --logits "$work/b.safetensors" --quiet --json
    json "d['logits_tokens'] == 64"
    cmp -s "$work/a.safetensors" "$work/b.safetensors" || fail "a list gives other logits"
    python3 - "$work" <<'P' || fail "the loss is not that of the logits"
import json, math, struct, sys
work = sys.argv[1]
data = open(work + '/a.safetensors', 'rb').read()
n = struct.unpack('<Q', data[:8])[0]
head = json.loads(data[8:8 + n])
def numbers(name, code):
    a, b = head[name]['data_offsets']
    return struct.unpack('<%d%s' % ((b - a) // 4, code), data[8 + n + a:8 + n + b])
assert head['logits']['shape'] == [64, 256] and head['variance']['shape'] == [1, 64]
logits, tokens = numbers('logits', 'f'), numbers('tokens', 'i')
loss = 0.0
for t in range(1, 64):
    row = logits[(t - 1) * 256:t * 256]
    top = max(row)
    loss += top + math.log(sum(math.exp(x - top) for x in row)) - row[tokens[t]]
got = json.load(open(work + '/bin.json'))['perplexity'][0]['loss']
assert abs(loss / 63 - got) < 1e-5, (loss / 63, got)
P
fi

cat >"$work/q.jsonl" <<'J'
{"context": "one", "choices": ["two", "three"], "answer": 0}
{"ctx": "one two", "endings": ["three", "four", "five"], "label": "2"}
J
run 0 eval --model "$m" --choices "$work/q.jsonl" --quiet
quiet
says '^2 questions: accuracy [01].*, chance 0.4167'
run 0 eval --model "$m" --choices "$work/q.jsonl" --text "$work/text.txt" --json --quiet
json "d['choices']['questions'] == 2 and 0 <= d['choices']['acc'] <= 1 and d['perplexity']"
run 0 eval --model "$m" --choices "$work/q.jsonl" --max-questions 1 --json --quiet
json "d['choices']['questions'] == 1 and d['choices']['acc_stderr'] is None"

# mistakes
run 1 eval --model "$work/nowhere" --text "$work/text.txt"
complains 'nowhere'
run 1 eval --model "$m" --text "$work/absent.txt"
complains 'absent.txt'
run 1 eval --model "$m" --text "$work/text.txt" --lengths 16,100000 --json
complains 'no window of 100000'
[ ! -s "$work/out" ] || fail "half a result"
printf 'nothing' >"$work/bad.jsonl"
run 1 eval --model "$m" --choices "$work/bad.jsonl"
complains 'bad.jsonl line 1'
printf '1 2 256' >"$work/ids"
run 1 eval --model "$m" --tokens "$work/ids" --logits "$work/c.safetensors"
complains 'id 256 at 2'
printf '1 2' >"$work/ids"
run 1 eval --model "$m" --tokens "$work/ids" --logits "$work/ids/c.safetensors"
complains 'ids: is a file where a folder is needed'
rm "$m/tokenizer.json"
run 0 eval --model "$m" --tokens "$work/ids" --logits "$work/c.safetensors"
run 1 eval --model "$m" --text "$work/text.txt"
complains 'tokenizer.json'
run 2 eval --model "$m"
complains 'what is to be measured'
run 2 eval --text "$work/text.txt"
complains 'model'
for bad in "--lengths 1" "--lengths 16," "--lengths x" "--max-tokens 0" "--text" "--tokens $work/ids" \
    "--dtype f16 --text x" "--threads none" "--max-questions"; do
    # shellcheck disable=SC2086
    run 2 eval --model "$m" $bad
    complains "mneme eval: "
done
