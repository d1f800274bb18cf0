#!/bin/sh
# mneme serve: what clients of OpenAI's API expect, the same text in any company and from the cache,
# stored states, and clients that mean no good. The checks are in support/serve.py.
# labels: sanitize threads
set -eu
mneme=$1 source=$2 make_model=$3
command -v python3 >/dev/null || { echo "SKIPPED: no python3 here"; exit 77; }
. "$2/tests/support/temporary.sh"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/model"
"$make_model" "$folder/model" '{"layers": "kla, gdn, attention, bayes", "hidden_size": 32,
    "vocab_size": 260, "max_position_embeddings": 512}'
if "$mneme" serve "$folder/model" --port 99999 2>/dev/null; then
    echo "a port of 99999 was taken"
    exit 1
fi
if "$mneme" serve "$folder/none" --port 0 2> "$folder/error"; then
    echo "a folder that is not there was served"
    exit 1
fi
if ! grep -q none "$folder/error"; then
    cat "$folder/error"
    exit 1
fi
"$mneme" serve --help | grep -q "usage: mneme serve"
timeout 300 "$mneme" serve "$folder/model" --port 0 --drain 0 > "$folder/first" 2> "$folder/error" &
first=$!
for _ in 1 2 3 4 5 6 7 8 9 10; do
    [ -s "$folder/first" ] || [ -s "$folder/error" ] || sleep 0.5
done
kill "$first" 2>/dev/null || true
wait "$first" || true
if grep -q "no HTTP" "$folder/error"; then
    echo "SKIPPED: built without libmicrohttpd"
    exit 77
fi
python3 "$source/tests/cli/support/serve.py" "$mneme" "$folder/model" "$folder"
