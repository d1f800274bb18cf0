#!/bin/sh
# compute-sanitizer over the golden set on a GPU, in float32 and bf16, in processes side by side, and
# a line per tool and operator of what it found. Logs go to FOLDER.
#   tests/sanitize.sh MNEME FOLDER [GOLDEN_FOLDER]
# Exit status 0: everything ran to its end without a finding. In the environment:
#   TOOLS     "racecheck memcheck" unless given; initcheck and synccheck serve, too
#   ONLY      a pattern of golden files: "delta_*"
#   JOBS      processes at a time (one per core); each takes up to three files of an operator
#   EACH      seconds after which a process is ended, and called unfinished (600)
#   PROGRAMS  test programs to run under memcheck besides: "build/test_tape build/test_cuda"
# racecheck finds what is none in the kernels of curvature (mn_curve_*) and, for memories of 128 rows
# and more, of delta's walks (mn_delta_walk_*, mn_delta_apart_*): a warp that has written or read
# shared memory meets (__syncwarp) before one of its lanes arrives at an mbarrier for all, and the
# tool counts such an arrival for that lane alone. All pairs that it names are of this kind, which
# tests/race_probe.cu shows alone.
set -eu
[ $# -ge 2 ] || { sed -n '2,10s/^# *//p' "$0" >&2; exit 2; }
mneme=$(realpath "$1")
mkdir -p "$2"
logs=$(realpath "$2")
golden=$(realpath "${3:-$(dirname "$0")/golden}")
rm -f "$logs"/*.log "$logs"/*.state "$logs/jobs"

# Lines "TOOL OPERATOR NUMBER COMMAND", what takes long first.
for program in ${PROGRAMS:-}; do
    echo "memcheck $(basename "$program") 0 $(realpath "$program")"
done >"$logs/jobs"
for tool in ${TOOLS:-racecheck memcheck}; do
    for dtype in f32 bf16; do
        for file in "$golden"/${ONLY:-*}.safetensors; do
            name=$(basename "$file" .safetensors)
            echo "${name%%_*} $file"
        done | awk -v head="$mneme check --quiet --target cuda --dtype $dtype" -v tool="$tool" \
            -v dtype="$dtype" '
            function put() { if (n) print tool, word, dtype number++, head files; n = 0; files = "" }
            $1 != word || n == 3 { put() }
            { word = $1; files = files " " $2; n++ }
            END { put() }'
    done
done >>"$logs/jobs"

# One line: its log, and its end in a word.
cat >"$logs/one.sh" <<'ONE'
at=$logs/$1-$2-$3
tool=$1
shift 3
status=0
timeout "$EACH" compute-sanitizer --tool "$tool" --error-exitcode 99 "$@" >"$at.log" 2>&1 || status=$?
grep -q 'SUMMARY: [1-9]' "$at.log" && status=99
case $status in
0) echo clean ;;
77) echo skipped ;;
99) echo found ;;
124) echo unfinished ;;
*) echo failed ;;
esac >"$at.state"
ONE
export logs
export EACH="${EACH:-600}"
xargs -P "${JOBS:-$(nproc)}" -L 1 sh "$logs/one.sh" <"$logs/jobs"

bad=0
cut -d ' ' -f 1,2 "$logs/jobs" | sort -u >"$logs/names"
while read -r tool name; do
    line=$(cat "$logs/$tool-$name"-*.state | sort | uniq -c | sed 's/^ *//' | tr '\n' ' ')
    printf '%-10s %-16s %s\n' "$tool" "$name" "$line"
    case $line in *found* | *unfinished* | *failed* | *skipped*) bad=1 ;; esac
done <"$logs/names"
[ $bad = 0 ] || grep -l -v clean "$logs"/*.state | sed 's/\.state$/.log/; s/^/see /'
exit $bad
