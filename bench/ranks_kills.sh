#!/bin/sh
# kill -9 of any rank at any moment: runs of 2 to 4 ranks that share batches, cut sequences or shard parameters, and write a checkpoint every step, lose a
# rank after a time drawn between nothing and SPAN seconds. All processes have to end within 10 seconds, and the last checkpoint, where there is one, has to
# be taken up by one rank less.
#   bench/ranks_kills.sh MNEME [KILLS] [SEED] [SPAN]
set -eu
[ $# -ge 1 ] || { echo "usage: bench/ranks_kills.sh MNEME [KILLS] [SEED] [SPAN]" >&2; exit 2; }
mneme=$1 kills=${2:-40} seed=${3:-1} span=${4:-4}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
cd "$folder"
awk 'BEGIN { srand(3); for (i = 0; i < 20000; i++) printf "%s ", substr("thecatsatonamatandabirdsang", 1 + int(24 * rand()), 3) }' > book.txt
fail() {
    echo "kill $i ($what, $ranks ranks, rank $victim after $after s): $*" >&2
    tail -n 5 dead.txt >&2
    exit 1
}
# train RANKS [settings]: takes the place of the shell that runs it
train() {
    n=$1
    shift
    exec "$mneme" train --ranks "$n" --threads 1 --quiet --set data.train=book.txt --set model.layers=gdn,kla --set model.hidden_size=64 \
        --set model.num_hidden_layers=2 --set train.batch=2 --set train.context=96 --set train.accumulate=4 --set train.steps=100000 \
        --set train.checkpoint_every=1 --set train.eval_every=0 --set train.eval_batches=1 --set train.tensorboard=false --set out=dead "$@"
}
i=0 worst=0 resumed=0 early=0
while [ $i -lt "$kills" ]; do
    i=$((i + 1))
    # shellcheck disable=SC2046
    set -- $(awk -v s=$((seed * 1000 + i)) -v span="$span" 'BEGIN { srand(s); rand(); n = 2 + int(3 * rand()); printf "%d %d %d %.2f", n, int(n * rand()), int(3 * rand()), span * rand() }')
    ranks=$1 victim=$2 after=$4
    case $3 in
    0) what=batches settings="--set train.shard=optimizer" ;;
    1) what=sequence settings="--set train.sequence_ranks=$ranks" ;;
    2) what=parameters settings="--set train.shard=parameters" ;;
    esac
    rm -rf dead dead.txt
    # shellcheck disable=SC2086
    train "$ranks" $settings > dead.txt 2>&1 &
    run=$!
    sleep "$after"
    tries=0 pid=
    while [ -z "$pid" ] && [ $tries -lt 600 ]; do    # the ranks may not have been started yet
        pid=$(pgrep -P $run | sed -n "$((victim + 1))p")
        [ -n "$pid" ] || sleep 0.05
        kill -0 $run 2> /dev/null || fail "it ended by itself"
        tries=$((tries + 1))
    done
    [ -n "$pid" ] || fail "no rank to kill"
    others=$(pgrep -P $run)
    from=$(date +%s%N)
    kill -9 "$pid"
    status=0
    wait $run || status=$?
    took=$(awk -v a="$from" -v b="$(date +%s%N)" 'BEGIN { printf "%.1f", (b - a) * 1e-9 }')
    [ $status -ne 0 ] || fail "a run without a rank ended well"
    for other in $others; do [ ! -d "/proc/$other" ] || fail "process $other lives on"; done
    [ "$(awk -v t="$took" 'BEGIN { print (t <= 10) }')" = 1 ] || fail "the others ended after $took s"
    grep -q "rank $victim" dead.txt || fail "nobody names rank $victim"
    worst=$(awk -v a="$worst" -v b="$took" 'BEGIN { print (a + 0 > b + 0 ? a : b) }')
    if [ -e dead/last ]; then
        step=$(readlink dead/last | sed 's/.*step-0*//')
        "$mneme" train --resume dead --ranks $((ranks - 1)) --threads 1 --quiet --set "train.steps=$((step + 1))" --set train.sequence_ranks=1 \
            > again.txt 2>&1 || { tail -n 3 again.txt; fail "the checkpoint of step $step is not taken up"; }
        resumed=$((resumed + 1))
    else
        early=$((early + 1))
    fi
done
echo "$kills kills (seed $seed): all ended within $worst s; $resumed runs went on from their last checkpoint with one rank less, $early had none yet"
