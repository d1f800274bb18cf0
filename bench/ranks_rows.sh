#!/bin/sh
# Every row of the table of layers on 1, 2, 3, 4 and 8 ranks: batches shared out (parameters and losses have the bits of one process) and one
# sequence in parts (losses and norms within 1e-4 of one process), started by every launcher that is here.
#   bench/ranks_rows.sh MNEME OUT [LAUNCHERS] [ROWS]
# LAUNCHERS, by default all that are installed: openmpi mpich ranks (`--ranks`). ROWS: names of layers, by default all. Each comparison is a line
# of OUT/rows.txt: row, launcher, ranks, kind, result. Exit status 1 where one differs or fails.
set -eu
[ $# -ge 2 ] || { echo "usage: bench/ranks_rows.sh MNEME OUT [LAUNCHERS] [ROWS]" >&2; exit 2; }
mneme=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
mkdir -p "$2"
out=$(cd "$2" && pwd)
launchers=${3:-openmpi mpich ranks}
rows=${4:-$("$mneme" info --json | python3 -c "import json, sys; print(*(row['name'] for row in json.load(sys.stdin)['mixers']))") gla+ccq gdn+ccq}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
cd "$folder"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl_base_warn_component_unused=0
awk 'BEGIN { srand(3); for (i = 0; i < 4000; i++) printf "%s ", substr("thecatsatonamatandabirdsang", 1 + int(24 * rand()), 3) }' > book.txt
: > "$out/rows.txt"
bad=0

start() { # LAUNCHER RANKS: what stands in front, and what is said to mneme
    front='' behind=''
    case $1 in
    openmpi) front="mpirun.openmpi --oversubscribe --bind-to none -n $2" behind="--transport mpi" ;;
    mpich) front="mpirun.mpich -n $2" behind="--transport mpi" ;;
    ranks) behind="--ranks $2" ;;
    esac
}
# train LAUNCHER RANKS ROW OUT [settings]: one process for the launcher "none"
train() {
    start "$1" "$2"
    row=$3 to=$4
    shift 4
    rm -rf "$to"
    # shellcheck disable=SC2086
    timeout 300 $front "$mneme" train $behind --threads 1 --quiet --set data.train=book.txt --set "model.layers=$row" --set model.hidden_size=64 \
        --set model.num_hidden_layers=2 --set train.steps=2 --set train.log_every=1 --set train.warmup=0 --set train.tensorboard=false \
        --set train.eval_batches=1 --set "out=$to" "$@" > "$to.txt" 2>&1
}
numbers() { sed -n 's/.*"loss":\([^,]*\),"lr":[^,]*,"grad_norm":\([^,]*\).*/\1 \2/p' "$1/metrics.jsonl"; }
same() { cmp -s "$1/last/model.safetensors" "$2/last/model.safetensors" && [ "$(numbers "$1")" = "$(numbers "$2")" ]; }
near() {
    [ "$(numbers "$1" | wc -l)" = 2 ] && [ "$(numbers "$2" | wc -l)" = 2 ] || return 1
    numbers "$1" > a
    numbers "$2" | paste -d ' ' a - | awk '{ for (i = 1; i <= 2; i++) { d = $i - $(i + 2); if (d < 0) d = -d; if (!(d <= 1e-4 * $i)) bad = 1 } } END { exit bad }'
}
tell() { # ROW LAUNCHER RANKS KIND RESULT
    printf '%s %s %s %s %s\n' "$1" "$2" "$3" "$4" "$5" >> "$out/rows.txt"
    case $5 in same | within) ;; *) bad=1 && printf '%s %s %s %s %s\n' "$1" "$2" "$3" "$4" "$5" ;; esac
}
data="--set train.batch=1 --set train.accumulate=8 --set train.context=32"
parts="--set train.batch=1 --set train.accumulate=1 --set train.context=96"
for row in $rows; do
    # shellcheck disable=SC2086
    if ! train none 1 "$row" one $data || ! train none 1 "$row" whole $parts; then
        tail -n 1 one.txt
        tell "$row" none 1 alone failed
        continue
    fi
    for launcher in $launchers; do
        case $launcher in openmpi | mpich) command -v mpirun.$launcher > /dev/null || continue ;; esac
        for n in 1 2 3 4 8; do
            # shellcheck disable=SC2086
            if ! train "$launcher" $n "$row" many $data; then result=failed && tail -n 3 many.txt; elif same one many; then result=same; else result=DIFFERS; fi
            tell "$row" "$launcher" $n batches $result
            # shellcheck disable=SC2086
            if ! train "$launcher" $n "$row" many $parts --set train.sequence_ranks=$n; then
                result=failed && tail -n 3 many.txt
            elif near whole many; then result=within; else result=DIFFERS; fi
            tell "$row" "$launcher" $n sequence $result
        done
    done
done
echo "$(grep -c ' same$' "$out/rows.txt") with the same bits, $(grep -c ' within$' "$out/rows.txt") within rounding, of $(wc -l < "$out/rows.txt")"
exit $bad
