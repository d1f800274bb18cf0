#!/bin/sh
# mneme bench ops: lists, measures, prints one JSON document, refuses mistakes.
set -eu
. "$2/tests/cli/support/expect.sh"

run 0 bench ops --list
quiet
[ "$(wc -l <"$work/out")" -gt 80 ] || fail "too few cases"
[ "$(sort "$work/out" | uniq -d)" = "" ] || fail "cases listed twice"

run 0 bench ops --list --only additive.none
count=$(wc -l <"$work/out")
run 0 bench ops --quick --runs 2 --threads 2 --only additive.none
quiet
says '^additive.none.64  *2 .* GFLOP/s '
says "^$count cases; 0 of 0 asked"

# one case of each ceiling
for case in additive.token.64:sgemm rms_norm:copy step.delta.64:stream step.attention:read \
    threads.additive:threads importance.64.128:divide; do
    run 0 bench ops --quick --runs 2 --json --only "${case%:*}"
    quiet
    json 'd["bench"] == "ops" and d["quick"] and d["machine"]["threads"] >= 1'
    json "d['cases'][0]['name'] == '${case%:*}' and d['cases'][0]['ceiling']['name'] == '${case#*:}'"
    json 'all(c["runs"] == 2 and 0 < c["min_s"] <= c["median_s"] for c in d["cases"])'
    json 'all(c["bytes"] > 0 and c["work_flop"] > 0 and c["sizes"]["B"] > 0 for c in d["cases"])'
    json 'all(c["share"] is None or c["share"] > 0 for c in d["cases"])'
done
run 0 bench ops --quick --runs 1 --json --only step.additive.none
json '[c["sizes"] for c in d["cases"]] == [{"B": 8, "T": 1, "H": 4, "J": 4, "K": 128, "V": 128}]'
json 'd["cases"][0]["bytes"] == 2 * 4 * 8 * 4 * 128 * 128'    # the state, in and out

# decoding with quantised weights beside float32
run 0 bench infer --quick --json
quiet
json "[c['weights'] for c in d['cases']] == ['f32', '8 bits', '4 bits']"
json "d['cases'][0]['bytes'] > 3 * d['cases'][1]['bytes'] > 3 * d['cases'][2]['bytes']"
json "all(c['tokens_per_second'] > 0 for c in d['cases'])"

run 2 bench
run 2 bench trains
complains 'trains'
run 2 bench ops --only nothing.like.it
complains 'nothing.like.it'
for number in 0 -1 x 1e9 99999999999999999999 ''; do
    run 2 bench ops --quick --only rope --runs "$number"
    complains 'runs'
done
run 2 bench ops --runs
complains 'runs'
run 2 bench ops --quick --only rope --target abacus
complains 'abacus'
