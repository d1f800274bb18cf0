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

# a model, by its headers
make_model=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$make_model" "$work" '{"layers": "gdn, attention", "hidden_size": 32, "vocab_size": 256, "intermediate_size": 16,
    "mixers": {"gdn": {"num_heads": 2, "head_dim": 8}, "attention": {"num_heads": 4, "num_kv_heads": 2}}}' bytes
text=$("$mneme" info "$work")
echo "$text" | grep -q '^  layers  *2: gdn, attention$' || fail "no layers of a model"
json=$("$mneme" info "$work" --json --context 100 --batch 2)
if command -v python3 >/dev/null; then
    echo "$json" | python3 -c '
import json, os, sys
d = json.load(sys.stdin)
gdn, attention = d["layers"]
# (H K V + taps of q, k and v) floats; J heads of keys and values a token
assert gdn["state_bytes"] == 4 * (2 * 8 * 16 + 3 * (16 + 16 + 32)), gdn
assert attention["bytes_per_token"] == 4 * 2 * 2 * 8 and attention["state_bytes"] == 0, attention
assert d["weights"]["numbers"] == {"F32": d["parameters"]["total"]} and not d["weights"]["not_read"]
assert d["parameters"]["total"] - d["parameters"]["without_embeddings"] == 2 * 256 * 32
assert d["run"]["states"] == 2 * (gdn["state_bytes"] + 100 * attention["bytes_per_token"])
assert d["train"]["optimizer"] == 8 * d["parameters"]["total"] and d["train"]["activations"] > 0
' || fail "the sizes of a model"
fi
if "$mneme" info "$work/nowhere" 2>/dev/null; then fail "a folder that is not there succeeds"; fi
