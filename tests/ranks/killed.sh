#!/bin/sh
# kill -9 of one rank in the middle of a long step over sequences in parts, where the others may be inside an operator for
# seconds and hear nothing: all have ended within ten seconds, with a sentence that names the rank.
#   killed.sh MNEME SOURCE_DIR
set -eu
mneme=$1
. "$2/tests/support/temporary.sh"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
cd "$folder"
fail() {
    echo "killed: $*" >&2
    exit 1
}
awk 'BEGIN { srand(3); for (i = 0; i < 80000; i++) printf "%s ", substr("thecatsatonamatandabirdsang", 1 + int(24 * rand()), 3) }' > book.txt
# hundredths of a second that a process has computed; none where it is gone
computed() {
    sed 's/.*) //' "/proc/$1/stat" 2> /dev/null | awk '{ print $12 }'
}
# strike LAYERS VICTIM HOW: kills rank VICTIM when it has computed for two seconds, in its first steps
strike() {
    rm -rf dead
    timeout 300 "$mneme" train --ranks 2 --threads 1 --quiet --set data.train=book.txt --set "model.layers=$1" --set model.hidden_size=128 \
        --set model.num_hidden_layers=2 --set train.batch=2 --set train.context=16384 --set train.sequence_ranks=2 \
        --set "train.sequence_states=$3" --set train.eval_every=0 --set train.tensorboard=false --set out=dead > dead.txt 2>&1 &
    run=$!
    tries=0 launcher='' victim=''
    while [ $tries -lt 1200 ]; do
        [ -n "$launcher" ] || launcher=$(pgrep -P $run -f train | head -n 1) || launcher=''
        [ -z "$launcher" ] || [ -n "$victim" ] || victim=$(pgrep -P "$launcher" | sed -n "$(($2 + 1))p")
        if [ -n "$victim" ]; then
            spent=$(computed "$victim")
            [ "${spent:-0}" -lt 200 ] || break
        fi
        kill -0 $run 2> /dev/null || { cat dead.txt; fail "$1 ended by itself"; }
        sleep 0.1
        tries=$((tries + 1))
    done
    [ -n "$victim" ] && [ $tries -lt 1200 ] || { cat dead.txt; fail "no rank $2 that computes"; }
    ranks=$(pgrep -P "$launcher")
    started=$(date +%s)
    kill -9 "$victim"
    status=0
    wait $run || status=$?
    took=$(($(date +%s) - started))
    [ "$status" -ne 0 ] && [ "$status" -ne 124 ] || fail "$1: a run without rank $2 ended with $status"
    [ $took -le 10 ] || fail "$1: the others took $took seconds to end without rank $2"
    for rank in $ranks; do
        [ ! -d "/proc/$rank" ] || fail "$1: process $rank lives on without rank $2"
    done
    grep -q "rank $2 was ended by signal 9" dead.txt || { cat dead.txt; fail "$1: nobody says that rank $2 died"; }
    echo "killed: $1, $3, rank $2: all ended after $took s"
}
strike kla 0 maps
strike kla 1 maps
strike kla 1 pipeline
strike bayes 0 auto
strike bayes 1 auto
echo "killed: in order"
