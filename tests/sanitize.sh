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
# racecheck (2025.3) follows arrivals at mbarriers, also from one barrier to the next, but takes each
# for that lane's alone: where warps or groups of them meet first (__syncwarp, bar.sync) and one
# lane arrives for all, or where they hand over by bar.arrive and bar.sync, it reports what is
# ordered. So all who have themselves read or written what they hand over arrive.
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
