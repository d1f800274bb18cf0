#!/bin/sh
# mneme quantize: folders that eval, generate and serve read, perplexity close to that of float32, and
# sentences for what cannot be.
set -eu
. "$2/tests/cli/support/expect.sh"
make_model=$3

awk 'BEGIN { for (i = 0; i < 3000; i++) { n = i * 7919 % 1000
    printf "%d and %d are %d, %s.\n", n % 31, n % 17, n % 31 + n % 17, n % 3 ? "so it is" : "no doubt" } }' \
    >"$work/text.txt"
run 0 train "$work/text.txt" --layers gdn --steps 200 --batch 8 --context 64 --out "$work/run" --quiet \
    --set model.hidden_size=64 --set model.num_hidden_layers=2

run 0 quantize "$work/run" "$work/m8" --bits 8
says '^model.embeddings.weight  *8 bits  error 0.00[0-9]*  '
says '^model.layers.1.mlp.down_proj.weight  *8 bits '
run 0 quantize "$work/run" "$work/m4" --group 32 --bits 4 --json
json "d['bits'] == 4 and d['bytes_after'] < 0.3 * d['bytes_before']"
json "{t['bits'] for t in d['tensors']} == {4, 8, 32}"
json "all(t['bits'] == 8 for t in d['tensors'] if 'embeddings' in t['name'] or 'head' in t['name'])"
json "all(t['bits'] == 32 for t in d['tensors'] if 'norm' in t['name'] or 'conv' in t['name'])"
run 0 quantize "$work/run" "$work/m4c" --bits 4 --calibrate "$work/text.txt" --tokens 4000 --length 64 --quiet
says '/m4c: [0-9]* tensors in 4 bits or 8, '

# perplexity: the bounds that quantised models are held to
perplexity() {
    run 0 eval --model "$work/$1" --text "$work/text.txt" --lengths 64 --max-tokens 20000 --json --quiet
    cp "$work/out" "$work/$2.json"
}
perplexity run f32
for m in m8 m4 m4c; do perplexity $m $m; done
if command -v python3 >/dev/null 2>&1; then
    python3 - "$work" <<'P' || fail "a quantised model is too far from float32"
import json, sys
def p(name):
    return json.load(open(sys.argv[1] + '/' + name + '.json'))['perplexity'][0]['perplexity']
base = p('f32')
for name, most in ('m8', 1.01), ('m4', 1.03), ('m4c', 1.03):
    print(name, p(name) / base)
    assert base / most < p(name) < base * most, (name, p(name), base)
P
fi

# the same text however many threads, and however the prompt is cut
run 0 generate --model "$work/m4" "7 and 9 are" --tokens 40 --seed 3 --threads 1
cp "$work/out" "$work/first"
run 0 generate --model "$work/m4" "7 and 9 are" --tokens 40 --seed 3 --threads 2 --prefill-chunk 3
cmp -s "$work/out" "$work/first" || fail "threads or chunks change what a quantised model says"
run 0 generate --model "$work/m8" "7 and 9 are" --tokens 40 --temperature 0

# served: the greedy text of generate, over HTTP
if command -v python3 >/dev/null 2>&1; then
    run 0 generate --model "$work/m8" "7 and 9 are" --tokens 12 --temperature 0
    cp "$work/out" "$work/greedy"
    "$mneme" serve "$work/m8" --port 0 --drain 0 >"$work/url" 2>"$work/serve.err" &
    server=$!
    for _ in $(seq 240); do
        [ -s "$work/url" ] || sleep 0.5
    done
    if ! grep -q "no HTTP" "$work/serve.err"; then
        python3 - "$work" <<'P' || { kill "$server"; fail "a quantised model is not served"; }
import json, sys, urllib.request
work = sys.argv[1]
url = open(work + '/url').read().split()[0]
body = json.dumps({'prompt': '7 and 9 are', 'max_tokens': 12, 'temperature': 0}).encode()
request = urllib.request.Request(url + '/v1/completions', body, {'Content-Type': 'application/json'})
text = json.load(urllib.request.urlopen(request, timeout=60))['choices'][0]['text']
want = open(work + '/greedy').read().rstrip('\n')
assert text.strip() and want.endswith(text.rstrip('\n')), (text, want)
P
    fi
    kill "$server" 2>/dev/null || true
    wait "$server" || true
fi

# what cannot be
run 1 eval --model "$work/m8" --text "$work/text.txt" --lengths 64 --dtype f64 --quiet
complains 'float32'
run 1 quantize "$work/m8" "$work/again" --bits 4
complains 'has weights of 8 bits already'
run 1 quantize "$work/run" "$work/m8" --bits 8
complains 'there is a model already'
run 2 quantize "$work/run" "$work/new" --bits 6
complains '--bits needs 8 or 4'
run 2 quantize "$work/run" "$work/new" --group 48
complains '--group needs 32, 64, 128 or 256'
run 2 quantize "$work/run"
complains 'the one to write'
run 1 train "$work/text.txt" --from "$work/m8" --context 64 --steps 2 --out "$work/new" --quiet
complains 'quantised'
sed 's/"bits": 4/"bits": 5/' "$work/m4/config.json" >"$work/config.json"
cp "$work/config.json" "$work/m4/config.json"
run 1 eval --model "$work/m4" --text "$work/text.txt" --quiet
complains 'must be 8 or 4'
sed 's/"bits": 5/"bits": 4/; s/"group_size": 32/"group_size": 64/' "$work/config.json" >"$work/m4/config.json"
run 1 eval --model "$work/m4" --text "$work/text.txt" --quiet
complains "as the configuration's quantization makes it"
