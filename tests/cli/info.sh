#!/bin/sh
# mneme info: every layer of layers/*.def is listed, the JSON holds the tables, bad options fail.
set -eu
mneme=$1
source=$2

fail() {
    echo "info: $*" >&2
    exit 1
}

text=$("$mneme" info)
json=$("$mneme" info --json)
for row in $(sed -n 's/^MIXER( *\([a-z0-9_]*\),.*/\1/p' "$source"/src/layers/*.def); do
    echo "$text" | grep -q "^  $row " || fail "the text lacks $row"
    echo "$json" | grep -q "\"name\": \"$row\"" || fail "the JSON lacks $row"
done
for op in $(sed -n 's/^OP( *\([a-z0-9_]*\),.*/\1/p' "$source"/src/ops/rows/*.def "$source"/src/ops/rows/nn/*.def); do
    echo "$json" | grep -q "\"op\": \"$op\"" || fail "the JSON lacks operator $op"
done
for key in version build target targets kernels mixers transition belief read variance state; do
    echo "$json" | grep -q "\"$key\":" || fail "the JSON lacks $key"
done
if command -v python3 >/dev/null; then
    echo "$json" | python3 -m json.tool >/dev/null || fail "the JSON does not parse"
fi
"$mneme" info --target ref --json | grep -q '"target": "ref"' || fail "--target ref is not heard"
"$mneme" info --help | grep -q usage || fail "no help"
if "$mneme" info --target nowhere 2>/dev/null; then fail "an unknown target succeeds"; fi
if "$mneme" info --nonsense 2>/dev/null; then fail "an unknown option succeeds"; fi
