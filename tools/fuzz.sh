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
    "$program" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -verbosity=0 \
        -print_final_stats=1 "$work" "tests/fuzz/corpus/${name#fuzz_}" 2>&1 | tail -8
done
