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

run 0 check --quiet --target cuda "$golden"/*.safetensors
says '^[1-9][0-9]* passed, 0 failed$'
run 0 check --quiet --target cuda:0 --dtype bf16 "$golden"/*.safetensors
says '^[1-9][0-9]* passed, 0 failed$'
run 77 check --target cuda:4000 "$golden/rope_half.safetensors"
complains 'cuda:4000'
run 0 bench ops --device cuda --quick --runs 2 --json
json 'd["dtype"] == "bf16" and d["machine"]["gpu_copy_bytes_per_s"] > 1e9'
json 'all(0 < c["min_s"] <= c["median_s"] and c["share"] > 0 for c in d["cases"])'
