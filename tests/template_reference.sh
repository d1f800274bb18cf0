#!/bin/sh
# Generated templates beside the jinja2 package; skipped where that is missing. MNEME_PYTHON names a Python that has it,
# TEMPLATES how many (2000), SEED which (1).
set -eu
python=${MNEME_PYTHON:-python3}
command -v "$python" >/dev/null 2>&1 || { echo "no python3: skipped"; exit 77; }
exec "$python" "$(dirname "$0")/template_reference.py" "$1" "${TEMPLATES:-2000}" "${SEED:-1}"
