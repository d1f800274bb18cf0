#!/bin/sh
# One long sequence over ranks of this machine, its states composed by maps and passed on as a pipeline, in turns: tokens a second,
# the median over all turns of the steps behind the first.
#   bench/sequence.sh MNEME [RANKS] [TURNS] [CONTEXT]
set -eu
[ $# -ge 1 ] || { echo "usage: bench/sequence.sh MNEME [RANKS] [TURNS] [CONTEXT]" >&2; exit 2; }
mneme=$1
ranks=${2:-2}
turns=${3:-3}
context=${4:-16384}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
awk 'BEGIN { srand(3); for (i = 0; i < 120000; i++) printf "%s ", substr("thecatsatonamatandabirdsang", 1 + int(24 * rand()), 3) }' > "$folder/book.txt"
# run LAYERS DEPTH RECOMPUTE HOW RANKS
run() {
    rm -rf "$folder/run"
    "$mneme" train --quiet --threads 1 --ranks "$5" --set "data.train=$folder/book.txt" --set "model.layers=$1" --set "model.num_hidden_layers=$2" \
        --set model.hidden_size=128 --set model.mlp=none --set train.batch=1 --set "train.context=$context" --set train.steps=4 \
        --set train.log_every=1 --set train.eval_every=0 --set train.eval_batches=1 --set train.tensorboard=false --set "train.recompute=$3" \
        --set "train.sequence_ranks=$5" --set "train.sequence_states=$4" --set "out=$folder/run" > /dev/null
    sed -n 's/.*"tokens_per_second":\([^,]*\).*/\1/p' "$folder/run/metrics.jsonl" | tail -n +2 >> "$folder/$1-$2-$3-$4-$5"
}
median() {
    sort -g "$1" | awk '{ x[NR] = $1 } END { printf "%.0f", NR % 2 ? x[(NR + 1) / 2] : (x[NR / 2] + x[NR / 2 + 1]) / 2 }'
}
printf '%-8s %6s %10s %12s %12s %12s\n' layers depth recompute 'one rank' maps pipeline
for case in kla/1/none kla/4/none kla/4/layer gdn/1/none gdn/4/none gdn/4/layer; do
    layers=${case%%/*} rest=${case#*/}
    depth=${rest%/*} recompute=${rest#*/}
    turn=0
    while [ $turn -lt "$turns" ]; do
        run "$layers" "$depth" "$recompute" auto 1
        run "$layers" "$depth" "$recompute" maps "$ranks"
        run "$layers" "$depth" "$recompute" pipeline "$ranks"
        turn=$((turn + 1))
    done
    at=$folder/$layers-$depth-$recompute
    printf '%-8s %6s %10s %12s %12s %12s\n' "$layers" "$depth" "$recompute" "$(median "$at-auto-1")" "$(median "$at-maps-$ranks")" \
        "$(median "$at-pipeline-$ranks")"
done
