#!/bin/sh
# Loss curves of small models trained in bf16 and in float32 on a GPU against float32 on the CPU: the
# mean loss of every 20 steps may differ by at most 0.5 %.
#   bench/bf16.sh MNEME OUT [LAYERS...]
# The text is made here: sentences over a few hundred words, the same each time. 200 steps.
set -eu
[ $# -ge 2 ] || { echo "usage: bench/bf16.sh MNEME OUT [LAYERS...]" >&2; exit 2; }
mneme=$1
out=$2
shift 2
[ $# -gt 0 ] || set -- gdn kla
mkdir -p "$out"
awk 'BEGIN {
    seed = 12345
    for (line = 0; line < 6000; line++) {
        n = 4 + next_number(9)
        text = ""
        for (i = 0; i < n; i++) {
            word = ""
            root = next_number(300)
            for (k = 0; k < 2 + root % 3; k++) {
                word = word substr("bdfgklmnprstvz", 1 + (root * (k + 3)) % 14, 1) \
                       substr("aeiou", 1 + (root + k * 7) % 5, 1)
            }
            text = text (i ? " " : "") word
        }
        print text "."
    }
}
function next_number(below) {
    seed = (seed * 16807) % 2147483647
    return seed % below
}' >"$out/text.txt"

train() {    # FOLDER LAYERS options...
    folder=$1
    layers=$2
    shift 2
    "$mneme" train --set data.train="$out/text.txt" --set model.layers="$layers" \
        --set model.hidden_size=128 --set model.num_hidden_layers=4 --set train.context=128 \
        --set train.batch=16 --set train.steps=200 --set train.warmup=20 --set train.lr=0.002 \
        --set train.log_every=1 --set train.eval_every=0 --set train.tensorboard=false \
        --set train.checkpoint_every=0 --set out="$folder" --overwrite --quiet "$@" >/dev/null
}

losses() {
    sed -n 's/.*"loss":\([0-9.eE+-]*\).*/\1/p' "$1/metrics.jsonl"
}

compare() {    # NAME A B MOST
    losses "$2" >"$out/a.txt"
    losses "$3" >"$out/b.txt"
    paste "$out/a.txt" "$out/b.txt" | awk -v name="$1" -v most="$4" '
        { a += $1; b += $2; n++ }
        n == 20 {
            d = (b - a) / a
            if (d < 0) d = -d
            if (d > worst) worst = d
            last_a = a / n; last_b = b / n; a = b = n = 0; rows++
        }
        END {
            good = rows == 10 && worst <= most
            printf "%-28s %.4f and %.4f at the end, off by %.3f %% at most (%.2f %% allowed): %s\n",
                name, last_a, last_b, 100 * worst, 100 * most, good ? "passed" : "FAILED"
            exit !good
        }'
}

failed=0
for layers in "$@"; do
    train "$out/cpu" "$layers"
    train "$out/f32" "$layers" --device cuda
    train "$out/bf16" "$layers" --device cuda --dtype bf16
    compare "$layers in float32" "$out/cpu" "$out/f32" 0.005 || failed=1
    compare "$layers in bf16" "$out/cpu" "$out/bf16" 0.005 || failed=1
done
exit $failed
