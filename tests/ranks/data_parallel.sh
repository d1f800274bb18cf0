#!/bin/sh
# Data parallel: any number of ranks gives the bits of one, with optimiser states or gradients shared out; a
# checkpoint goes on with any number; a rank that is killed stops all; Ctrl-C keeps a checkpoint.
#   data_parallel.sh MNEME SOURCE_DIR
set -eu
mneme=$1
. "$2/tests/support/temporary.sh"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
cd "$folder"
fail() {
    echo "data_parallel: $*" >&2
    exit 1
}
awk 'BEGIN { srand(3); for (i = 0; i < 9000; i++) printf "%s ", substr("thecatsatonamatandabirdsang", 1 + int(24 * rand()), 3) }' > book.txt

# train RANKS OUT LAYERS [settings...]
train() {
    ranks=$1 out=$2 layers=$3
    shift 3
    timeout 600 "$mneme" train --ranks "$ranks" --threads 1 --quiet --set data.train=book.txt \
        --set "model.layers=$layers" --set model.hidden_size=64 --set model.num_hidden_layers=2 \
        --set train.steps=4 --set train.batch=2 --set train.accumulate=8 --set train.context=32 \
        --set train.log_every=1 --set train.warmup=2 --set train.checkpoint_every=2 --set train.keep_every=2 \
        --set train.tensorboard=false --set "out=$out" "$@" > "$out.txt" 2>&1 || { cat "$out.txt"; fail "$out failed"; }
}
# losses, learning rates and norms of a run, without what is measured
numbers() {
    sed -n 's/.*\("loss":[^,]*,"lr":[^,]*,"grad_norm":[^,]*\).*/\1/p; s/.*\("valid_loss":[^,}]*\).*/\1/p' "$1/metrics.jsonl"
}
same() {
    cmp "$1/last/model.safetensors" "$2/last/model.safetensors" || fail "$1 and $2 have other parameters"
    [ "$(numbers "$1")" = "$(numbers "$2")" ] || fail "$1 and $2 logged other numbers"
}

# bits
for case in "gdn, attention|" "kla|model.tie_word_embeddings=true" "linear|data.cutting=windows|train.recompute=layer" \
    "palimpsa|train.accumulate=7"; do
    layers=${case%%|*}
    sets=$(echo "${case#*|}" | tr '|' '\n' | sed '/^$/d; s/^/--set /')
    rm -rf one two three four eight sharded asked?
    # shellcheck disable=SC2086
    {
        train 1 one "$layers" $sets
        train 2 two "$layers" $sets
        train 3 three "$layers" $sets
        train 4 four "$layers" $sets
        train 4 sharded "$layers" $sets --set train.shard=gradients
        train 2 asked2 "$layers" $sets --set train.shard=parameters --set train.sample_every=3
        train 3 asked3 "$layers" $sets --set train.shard=parameters
        train 4 asked4 "$layers" $sets --set train.shard=parameters --set train.recompute=layer
    }
    [ "$(numbers one | wc -l)" -ge 4 ] || fail "one logged too little"
    for run in two three four sharded asked2 asked3 asked4; do same one "$run"; done
done
rm -rf eight && train 8 eight "gdn, attention" && rm -rf one && train 1 one "gdn, attention" && same one eight
echo "1, 2, 3, 4 and 8 ranks: the same bits"

# resuming with other numbers of ranks, and with the same one
rm -rf four and
train 4 four "gdn, attention" --set train.steps=4
for ranks in 1 2 3 4; do
    rm -rf again && cp -r four again
    timeout 600 "$mneme" train --resume again/checkpoints/step-00000002 --ranks $ranks --threads 1 --quiet > again.txt 2>&1 ||
        { cat again.txt; fail "resuming with $ranks ranks failed"; }
    same four again
done
echo "a checkpoint of 4 ranks goes on with 1, 2, 3 and 4"

# a rank that is killed stops all within seconds, and the last checkpoint is whole
long="--set train.steps=100000 --set train.checkpoint_every=5 --set train.eval_every=0"
# shellcheck disable=SC2086
for victim in 0 1 2 3; do
    rm -rf dead
    timeout 600 "$mneme" train --ranks 4 --threads 1 --quiet --set data.train=book.txt --set model.layers=gdn \
        --set model.hidden_size=64 --set model.num_hidden_layers=2 --set train.batch=2 --set train.accumulate=4 \
        --set train.context=32 --set train.tensorboard=false --set out=dead $long > dead.txt 2>&1 &
    run=$!
    tries=0
    while [ ! -e dead/last ] && [ $tries -lt 3000 ]; do sleep 0.1; tries=$((tries + 1)); done
    [ -e dead/last ] || fail "no checkpoint before the kill"
    launcher=$(pgrep -P $run -f train | head -n 1)
    [ -n "$launcher" ] || fail "no launcher under timeout"
    pid=$(pgrep -P "$launcher" | sed -n "$((victim + 1))p")
    started=$(date +%s)
    kill -9 "$pid"
    status=0
    wait $run || status=$?
    [ "$status" -ne 0 ] || fail "a run without rank $victim ended well"
    [ $(($(date +%s) - started)) -le 12 ] || fail "the ranks took too long to stop without rank $victim"
    grep -q "rank $victim was ended by signal 9" dead.txt || { cat dead.txt; fail "nobody says that rank $victim died"; }
    grep -q "rank $victim of 4 is gone" dead.txt || { cat dead.txt; fail "no rank says that rank $victim is gone"; }
    timeout 600 "$mneme" train --resume dead --ranks 2 --threads 1 --quiet --set train.steps=$(($(basename "$(readlink dead/last)" | sed 's/step-0*//') + 2)) \
        > resumed.txt 2>&1 || { cat resumed.txt; fail "the checkpoint is broken after rank $victim died"; }
done
echo "kill -9 of any rank: all stop, the last checkpoint goes on"

# stopping
rm -rf stopped
# shellcheck disable=SC2086
timeout 600 "$mneme" train --ranks 2 --threads 1 --quiet --set data.train=book.txt --set model.layers=gdn --set model.hidden_size=64 \
    --set train.batch=2 --set train.accumulate=4 --set train.context=32 --set train.tensorboard=false --set out=stopped $long \
    > stopped.txt 2>&1 &
run=$!
tries=0
while [ ! -e stopped/last ] && [ $tries -lt 3000 ]; do sleep 0.1; tries=$((tries + 1)); done
kill -INT "$(pgrep -P $run -f train | head -n 1)"
status=0
wait $run || status=$?
[ "$status" = 130 ] || { cat stopped.txt; fail "stopped with status $status"; }
grep -q "stopped.*--resume" stopped.txt || fail "no word on how to go on"

# mistakes are sentences
check() {
    message=$1
    shift
    if timeout 600 "$mneme" train --quiet --set data.train=book.txt --set model.layers=gdn --set model.hidden_size=64 --set out=wrong "$@" > wrong.txt 2>&1; then
        fail "went through: $*"
    fi
    grep -q "$message" wrong.txt || { cat wrong.txt; fail "does not say: $message"; }
}
check "a step of 1 batches cannot be shared by 2 ranks" --ranks 2
check "is none of optimizer, gradients, parameters" --ranks 2 --set train.shard=all --set train.accumulate=2
check "does not divide the 2 ranks" --ranks 2 --set train.sequence_ranks=3
check "is one GPU, and every rank needs one of its own" --ranks 2 --device cuda:0 --set train.accumulate=2
check "take auto, tcp or mpi" --ranks 2 --transport smoke
echo "data parallel: in order"
