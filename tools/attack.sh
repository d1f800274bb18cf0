#!/bin/sh
# attack.sh - the attack suite at full length (make attack): for the release build and under address
# and undefined-behaviour sanitizers, ATTACK_INPUTS mutated inputs over all parsers (20,000), every
# value of every option, every wrong call, and ATTACK_ROUNDS (5) rounds of kills, 20 or so each.
# ATTACK_PRESETS names the presets (release debug).
set -eu
inputs=${ATTACK_INPUTS:-20000}
rounds=${ATTACK_ROUNDS:-5}
jobs=$(nproc 2>/dev/null || echo 2)
bad=0
ASAN_OPTIONS=allocator_may_return_null=1${ASAN_OPTIONS:+:$ASAN_OPTIONS}
UBSAN_OPTIONS=halt_on_error=1:abort_on_error=1${UBSAN_OPTIONS:+:$UBSAN_OPTIONS}
export ASAN_OPTIONS UBSAN_OPTIONS
n_parsers=$(ls tests/fuzz/fuzz_*.c | wc -l)
each=$(((inputs + n_parsers - 1) / n_parsers))
for preset in ${ATTACK_PRESETS:-release debug}; do
    build=build/$preset
    targets="mneme_cli attack_options attack_calls attack_api"
    for source in tests/fuzz/fuzz_*.c; do
        name=${source##*/fuzz_}
        targets="$targets attack_${name%.c}"
    done
    cmake --preset "$preset" >/dev/null
    # shellcheck disable=SC2086
    cmake --build "$build" -j "$jobs" --target $targets >/dev/null
    echo "$preset:"
    for source in tests/fuzz/fuzz_*.c; do
        name=${source##*/fuzz_}
        name=${name%.c}
        "$build/attack_$name" "$each" "tests/fuzz/corpus/$name" || bad=1
    done
    "$build/attack_options" || bad=1
    "$build/attack_calls" || bad=1
    "$build/attack_api" || bad=1
    reproduced=$rounds sh tests/attack/kills.sh "$build/mneme" . "$rounds" || bad=1
done
exit "$bad"
