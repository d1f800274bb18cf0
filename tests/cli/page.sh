#!/bin/sh
# The page of mneme serve in a headless Chromium. The checks are in support/page.py.
set -eu
mneme=$1 source=$2 make_model=$3
command -v python3 >/dev/null || { echo "SKIPPED: no python3 here"; exit 77; }
command -v chromium >/dev/null || command -v chromium-browser >/dev/null ||
    { echo "SKIPPED: no chromium here"; exit 77; }
. "$2/tests/support/temporary.sh"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/model"
"$make_model" "$folder/model" '{"layers": "kla, gdn, bayes", "hidden_size": 32, "vocab_size": 260,
    "max_position_embeddings": 512}'
if "$mneme" serve "$folder/none" --port 0 2>&1 | grep -q "no HTTP"; then
    echo "SKIPPED: built without libmicrohttpd"
    exit 77
fi
python3 "$source/tests/cli/support/page.py" "$mneme" "$folder/model"
