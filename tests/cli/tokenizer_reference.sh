#!/bin/sh
# Each kind of tokenizer beside the tokenizers package over random strings; skipped where that is missing.
# MNEME_PYTHON names a Python that has it, STRINGS how many (2000; 10000 for a release).
set -eu
python=${MNEME_PYTHON:-python3}
command -v "$python" >/dev/null 2>&1 || { echo "no python3: skipped"; exit 77; }
"$python" -c 'import tokenizers' 2>/dev/null || { echo "the tokenizers package is not here: skipped"; exit 77; }
exec "$python" "$2/tests/tokenizer_reference.py" "$1" "${STRINGS:-2000}"
