#!/bin/sh
# kills.sh MNEME SOURCE ROUNDS - train, sweep, prepare and reproduce are killed at any moment, again
# and again, and go on until they end: what they leave must have the bytes of a run nobody disturbed.
# Each round kills each of the four up to seven times.
set -eu
mneme=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
rounds=${3:-1}
. "$2/tests/support/temporary.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
n_kills=0
bad=0

fail() {
    printf 'kills: %s\n' "$1"
    bad=1
}

# Runs a command and kills it after so many seconds; 0 if it ended well by itself.
kill_after() {
    wait_for=$1
    shift
    "$@" >log 2>&1 </dev/null &
    pid=$!
    sleep "$wait_for"
    if kill -9 "$pid" 2>/dev/null; then n_kills=$((n_kills + 1)); fi
    wait "$pid" 2>/dev/null
}

# Kills a command at seven growing moments and then lets it end. $1: what it is; the rest: command.
harass() {
    what=$1
    shift
    for step in 1 2 3 4 5 6 7; do
        moment=$(awk -v r="$round" -v s="$step" 'BEGIN { print 0.01 + 0.035 * s + 0.007 * (r % 5) }')
        if kill_after "$moment" "$@"; then return 0; fi
    done
    ("$@") >log 2>&1 </dev/null || fail "$what does not end after kills: $(tail -n 1 log)"
}

same() {    # what, one file, other file
    if ! cmp -s "$2" "$3"; then fail "$1: $3 is not what an undisturbed run gives"; fi
}

awk 'BEGIN { for (i = 0; i < 3000; i++) printf "line %d of a text that says %d\n", i, i * 7919 % 1009 }' >t.txt
printf '%s' '{"model": {"layers": "gdn", "num_hidden_layers": 1, "hidden_size": 16, "num_heads": 2,
 "head_dim": 8}, "data": {"train": "t.txt", "tokenizer": "bytes"}, "train": {"steps": 60, "batch": 2,
 "context": 32, "eval_every": 20, "checkpoint_every": 5, "warmup": 1, "eval_batches": 2,
 "tensorboard": false}}' >c.json

train() {
    if [ -d "$1/checkpoints" ] && ls "$1"/checkpoints/step-* >/dev/null 2>&1; then
        exec "$mneme" train --resume "$1"
    else
        rm -rf "$1"
        exec "$mneme" train c.json --out "$1"
    fi
}
prepare() {
    exec "$mneme" prepare t.txt --tokenizer bytes --out "$1" --shard-tokens 20000 --valid 0.1
}
sweep() {
    exec "$mneme" sweep s.json -o "$1" --jobs 2
}
reproduce() {
    exec "$mneme" reproduce mqar-update --out "$1" --seeds 1 --steps 2 --jobs 2
}

# Records of jobs without the time they took, in an order of their own.
records() {
    sed -E 's/"seconds":[-+.0-9e]*,//' "$1/results.jsonl" | sort -u
}

printf '%s' '{"job": {"task": {"name": "mqar", "setting": "64-4", "train": 64, "test": 16},
 "model": {"hidden_size": 16, "num_hidden_layers": 1, "layers": "gdn"}, "train": {"steps": 6,
 "batch": 4}, "evaluate": {"every": 3, "metric": "example"}}, "grid": {"train.lr": [0.001, 0.003],
 "seed": [0, 1]}}' >s.json

"$mneme" train c.json --out whole >log 2>&1 || fail "train: $(tail -n 1 log)"
(prepare whole.prepared) >log 2>&1 || fail "prepare: $(tail -n 1 log)"
(sweep whole.sweep) >log 2>&1 || fail "sweep: $(tail -n 1 log)"
(reproduce whole.reproduced) >log 2>&1 || fail "reproduce: $(tail -n 1 log)"
records whole.sweep >whole.records
records whole.reproduced >whole.reproduced.records
for round in $(seq "$rounds"); do
    rm -rf cut cut.prepared
    harass train train cut
    for file in model.safetensors optimizer.safetensors config.json; do
        same train "whole/last/$file" "cut/last/$file"
    done
    harass prepare prepare cut.prepared
    for file in whole.prepared/*; do same prepare "$file" "cut.prepared/${file##*/}"; done
    rm -rf cut.sweep cut.reproduced
    harass sweep sweep cut.sweep
    records cut.sweep >cut.records
    same sweep whole.records cut.records
    [ "$round" -le "${reproduced:-1}" ] || continue
    harass reproduce reproduce cut.reproduced
    records cut.reproduced >cut.records
    same reproduce whole.reproduced.records cut.records
done
printf '%s kills\n' "$n_kills"
exit "$bad"
