#!/bin/sh
# Runs the fuzz target of each parser for FUZZ_SECONDS, starting from the seeds in tests/fuzz/corpus.
set -eu
seconds=${FUZZ_SECONDS:-30}
sh tools/setup.sh --tools
cmake --preset fuzz >/dev/null
cmake --build build/fuzz -j "$(nproc)"
for program in build/fuzz/fuzz_*; do
    [ -x "$program" ] || continue
    name=$(basename "$program")
    work=build/fuzz/work_$name
    mkdir -p "$work"
    echo "fuzz: $name for $seconds s"
    status=0
    "$program" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -verbosity=0 \
        -print_final_stats=1 "$work" "tests/fuzz/corpus/${name#fuzz_}" >"$work.log" 2>&1 || status=$?
    tail -8 "$work.log"
    [ "$status" = 0 ] || { echo "fuzz: $name found something, see $work.log" >&2; exit "$status"; }
done
