#!/bin/sh
# Sweeps over machines: shards of one folder take every job once, those of a sweep that was killed too, and the command
# without --shard gathers all of them.
#   sweep.sh MNEME SOURCE_DIR
set -eu
mneme=$1
. "$2/tests/support/temporary.sh"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
cd "$folder"
fail() {
    echo "sweep: $*" >&2
    exit 1
}
cat > grid.json <<'END'
{"job": {"task": {"name": "mqar", "setting": "64-4", "train": 64, "test": 16}, "model": {"layers": "gdn", "hidden_size": 32, "num_hidden_layers": 1},
         "train": {"steps": 8, "batch": 4}, "evaluate": {"every": 8, "metric": "example"}},
 "grid": {"train.lr": [0.001, 0.002, 0.003], "seed": [0, 1, 2]}}
END
timeout 600 "$mneme" sweep grid.json -o whole --jobs 1 --quiet > whole.txt 2>&1 || { cat whole.txt; fail "one sweep failed"; }
for i in 0 1 2; do
    timeout 600 "$mneme" sweep grid.json -o out --jobs 1 --quiet --shard $i/3 > "shard$i.txt" 2>&1 &
    eval "pid$i=$!"
done
for i in 0 1 2; do eval "wait \$pid$i" || { cat "shard$i.txt"; fail "shard $i failed"; }; done
[ "$(cat out/results-?-of-3.jsonl | wc -l)" = 9 ] || fail "$(cat out/results-?-of-3.jsonl | wc -l) records of 9 jobs"
[ "$(cat out/results-?-of-3.jsonl | sed 's/.*"key":"\([^"]*\)".*/\1/' | sort -u | wc -l)" = 9 ] || fail "a job was run twice"
timeout 600 "$mneme" sweep grid.json -o out --jobs 1 --quiet || fail "gathering failed"
keys() {
    sed 's/.*"key":"\([^"]*\)".*/\1/' "$1" | sort
}
[ "$(keys out/results.jsonl)" = "$(keys whole/results.jsonl)" ] || fail "other jobs were gathered"

# a sweep that is killed within a job: another runs that job, too
sed 's/"steps": 8/"steps": 300/; s/, "seed": \[0, 1, 2\]//' grid.json > long.json
timeout 600 "$mneme" sweep long.json -o killed --jobs 1 --quiet --shard 0/2 > killed.txt 2>&1 &
run=$!
tries=0
while ! ls killed/leases/*.lease > /dev/null 2>&1 && [ $tries -lt 3000 ]; do sleep 0.1; tries=$((tries + 1)); done
lease=$(basename "$(ls killed/leases/*.lease)" .lease)
kill -9 "$(pgrep -P $run | head -n 1)"
wait $run || true
[ -e "killed/leases/$lease.lease" ] || fail "the job ended before the kill"
timeout 600 "$mneme" sweep long.json -o killed --jobs 1 --quiet --shard 1/2 > other.txt 2>&1 || { cat other.txt; fail "the other shard failed"; }
grep -q "\"key\":\"$lease\"" killed/results-1-of-2.jsonl || fail "nobody ran the job of the sweep that was killed"
[ "$(cat killed/results-?-of-2.jsonl | wc -l)" = 3 ] || fail "$(cat killed/results-?-of-2.jsonl | wc -l) records of 3 jobs"
echo "sweep: in order"
