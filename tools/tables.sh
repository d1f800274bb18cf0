#!/bin/sh
# Writes the tables that documents take from the program between their marks, "<!-- table: NAME -->" and
# "<!-- end of table -->": what `mneme info --table NAME` prints.
#   tools/tables.sh MNEME FILE_OR_FOLDER...     with CHECK=1 in the environment: only tells what is stale
set -eu
[ $# -ge 2 ] || { sed -n '2,4s/^# *//p' "$0" >&2; exit 2; }
mneme=$1
shift
stale=0
for page in $(find "$@" -name '*.md'); do
    grep -q '^<!-- table: ' "$page" || continue
    fresh=$(mktemp)
    awk -v mneme="$mneme" '
        /^<!-- end of table -->$/ { inside = 0 }
        !inside { print }
        /^<!-- table: [a-z]+ -->$/ {
            inside = 1
            system("\"" mneme "\" info --table " $3)
        }' "$page" >"$fresh"
    if cmp -s "$fresh" "$page"; then
        :
    elif [ "${CHECK-}" = 1 ]; then
        echo "$page: its tables are not what mneme info --table says; run tools/tables.sh" >&2
        stale=1
    else
        cp "$fresh" "$page"
        echo "$page"
    fi
    rm -f "$fresh"
done
exit "$stale"
