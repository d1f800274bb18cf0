#!/bin/sh
# Steps on 1, 2, 4 .. ranks of this machine, measured beside the cost model of `mneme train --dry-run --ranks`: tokens a second,
# seconds of compute, messages and waiting of rank 0 (means over the steps behind the first two), and that the parameters are the same.
#   bench/ranks.sh MNEME [MOST_RANKS]
set -eu
[ $# -ge 1 ] || { echo "usage: bench/ranks.sh MNEME [MOST_RANKS]" >&2; exit 2; }
mneme=$1
most=${2:-4}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
awk 'BEGIN { srand(3); for (i = 0; i < 20000; i++) printf "%s ", substr("thecatsatonamatandabirdsang", 1 + int(24 * rand()), 3) }' > "$folder/book.txt"
set -- --threads 1 --set "data.train=$folder/book.txt" --set model.layers=gdn --set model.hidden_size=128 --set model.num_hidden_layers=4 \
    --set train.steps=6 --set train.batch=2 --set train.accumulate=8 --set train.context=128 --set train.log_every=1 \
    --set train.eval_every=0 --set train.eval_batches=1 --set train.tensorboard=false
ranks=1
rate=
printf '%6s %12s %12s %10s %10s %10s\n' ranks tokens/s predicted 'compute s' 'messages s' 'waiting s'
while [ "$ranks" -le "$most" ]; do
    "$mneme" train "$@" --quiet --ranks "$ranks" --set "out=$folder/$ranks" > /dev/null
    measured=$(sed -n 's/.*"tokens_per_second":\([^,]*\).*/\1/p' "$folder/$ranks/metrics.jsonl" | tail -n 4 | awk '{ s += $1 } END { print s / NR }')
    if [ -z "$rate" ]; then    # the model is given the rate of one rank as measured
        flops=$("$mneme" train "$@" --dry-run --json --set "out=$folder/dry" 2> /dev/null | sed -n 's/.*"flops_per_token": *\([0-9.e+]*\).*/\1/p')
        rate=$(awk -v f="$flops" -v m="$measured" 'BEGIN { print f * m * 1e-12 }')
    fi
    predicted=$("$mneme" train "$@" --dry-run --ranks "$ranks" --rate "$rate" --set "out=$folder/dry" 2> /dev/null | awk -v n="$ranks" '$1 == n { print $6 }')
    times=$(sed -n 's/.*"compute_seconds":\([^,]*\),"communicate_seconds":\([^,]*\),"wait_seconds":\([^,]*\).*/\1 \2 \3/p' "$folder/$ranks/metrics.jsonl" |
        tail -n 4 | awk '{ a += $1; b += $2; c += $3 } END { if (NR) printf "%.4f %.4f %.4f", a / NR, b / NR, c / NR; else printf "- - -" }')
    # shellcheck disable=SC2086
    printf '%6s %12.0f %12s %10s %10s %10s\n' "$ranks" "$measured" "${predicted:--}" $times
    cmp "$folder/1/last/model.safetensors" "$folder/$ranks/last/model.safetensors"
    ranks=$((2 * ranks))
done
echo "the same parameters on all"
