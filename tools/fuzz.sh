#!/bin/sh
# Runs the fuzz target of each parser for FUZZ_SECONDS, starting from the seeds in tests/fuzz/corpus; as many
# at a time as there are cores.
set -eu
seconds=${FUZZ_SECONDS:-30}
if [ "${1-}" = --one ]; then    # one program: called below
    program=$2
    name=$(basename "$program")
    work=build/fuzz/work_$name
    mkdir -p "$work"
    status=0
    "$program" -max_total_time="$seconds" -timeout=30 -rss_limit_mb=2048 -verbosity=0 \
        -print_final_stats=1 "$work" "tests/fuzz/corpus/${name#fuzz_}" >"$work.log" 2>&1 || status=$?
    echo "fuzz: $name for $seconds s"
    tail -8 "$work.log"
    [ "$status" = 0 ] || { echo "fuzz: $name found something, see $work.log" >&2; exit 1; }
    exit 0
fi
sh tools/setup.sh --tools
cmake --preset fuzz >/dev/null
cmake --build build/fuzz -j "$(nproc)" --target fuzz_targets
for program in build/fuzz/fuzz_*; do
    if [ -f "$program" ] && [ -x "$program" ]; then echo "$program"; fi
done | xargs -P "$(nproc)" -n 1 sh tools/fuzz.sh --one
