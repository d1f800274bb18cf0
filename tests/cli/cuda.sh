#!/bin/sh
# mneme on a GPU: golden vectors in float32 and bf16, the same bits twice, the bench. What a machine
# without a GPU answers is tested first, everywhere; the rest is skipped there with a sentence.
set -eu
. "$2/tests/cli/support/expect.sh"
golden=$source/tests/golden

run 0 info --json
json 'isinstance(d["cuda"]["built"], bool) and isinstance(d["cuda"]["devices"], list)'
json 'bool(d["cuda"]["devices"]) != bool(d["cuda"]["why"])'
run 2 check --target cuda --dtype f64 "$golden/rope_half.safetensors"
complains 'f64'
run 2 check --target cuda:x "$golden/rope_half.safetensors"
complains 'cuda:x'
run 2 bench ops --device abacus
complains 'abacus'
run 2 bench ops --dtype bf16
complains 'bf16'
run 0 bench ops --device cuda --list
says '^rms_norm'
run 0 bench train --device cuda --list
says '^gdn'

# training: bf16 and devices that are none are refused before anything is written
text=$work/text.txt
i=0
while [ $i -lt 400 ]; do
    printf 'line %d says a thing, and another thing %d.\n\n' $i $((i * 7 % 13))
    i=$((i + 1))
done >"$text"
small="--set data.train=$text --set model.layers=gdn --set model.hidden_size=32 --set train.context=32
    --set train.steps=12 --set train.checkpoint_every=6 --set train.eval_batches=4 --quiet"
run 1 train $small --dtype bf16 --set out="$work/refused"
complains 'bf16 runs on GPUs only'
run 1 train $small --device abacus --set out="$work/refused"
complains 'abacus'
run 1 train $small --dtype f16 --set out="$work/refused"
complains 'f16'
[ ! -e "$work/refused" ] || fail "a refused run left a folder"

status=0
"$mneme" check --quiet --target cuda "$golden/rope_half.safetensors" >"$work/out" 2>"$work/err" ||
    status=$?
if [ "$status" = 77 ]; then
    grep -q -e 'no CUDA' -e 'NVIDIA driver' -e 'no GPU' "$work/err" || fail "no reason given"
    reason=$(cat "$work/err")
    run 2 bench ops --device cuda
    complains 'CUDA\|driver\|GPU'
    echo "skipped: $reason"
    exit 77
fi

# a run on the GPU, stopped and resumed to the same bits, then read on both sides
run 0 train $small --device cuda --dtype bf16 --set out="$work/whole"
run 0 train $small --device cuda --dtype bf16 --set train.steps=6 --set train.schedule=constant \
    --set out="$work/part"
run 0 train $small --device cuda --dtype bf16 --set train.schedule=constant --set out="$work/other"
run 0 train --resume "$work/part" --device cuda --set train.steps=12 --quiet
cmp -s "$work/part/last/model.safetensors" "$work/other/last/model.safetensors" ||
    fail "a resumed run has other bits"
run 0 generate --model "$work/whole/last" line --tokens 8 --temperature 0 --device cuda --quiet
cp "$work/out" "$work/there"
run 0 generate --model "$work/whole/last" line --tokens 8 --temperature 0 --quiet
cmp -s "$work/out" "$work/there" || fail "the GPU writes another text"
run 0 eval --model "$work/whole/last" --text "$text" --lengths 32 --device cuda --dtype bf16 --json
json '0 < d["perplexity"][0]["loss"] < 5'

run 0 check --quiet --target cuda "$golden"/*.safetensors
says '^[1-9][0-9]* passed, 0 failed$'
run 0 check --quiet --target cuda:0 --dtype bf16 "$golden"/*.safetensors
says '^[1-9][0-9]* passed, 0 failed$'
run 77 check --target cuda:4000 "$golden/rope_half.safetensors"
complains 'cuda:4000'
run 0 bench ops --device cuda --quick --runs 2 --json
json 'd["dtype"] == "bf16" and d["machine"]["gpu_copy_bytes_per_s"] > 1e9'
json 'all(0 < c["min_s"] <= c["median_s"] and c["share"] > 0 for c in d["cases"])'
