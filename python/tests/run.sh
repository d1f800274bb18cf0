#!/bin/sh
# Tests of the Python package over a built library: run.sh SOURCE LIBRARY [PROGRAM]. PYTHON names the
# interpreter (default: python3). Those of mneme.torch run where PyTorch is.
set -eu
python=${PYTHON:-python3}
if [ -z "${PYTHON-}" ] && ! python3 -c 'import numpy, pytest' 2>/dev/null; then
    [ ! -x /usr/bin/python3 ] || python=/usr/bin/python3    # that of the system's packages
fi
for module in numpy pytest; do
    if ! "$python" -c "import $module" 2>/dev/null; then
        echo "skipped: $python has no $module (pip install numpy pytest)"
        exit 77
    fi
done
cd "$1/python"
MNEME_LIBRARY=$2 MNEME_PROGRAM=${3-} PYTHONPATH=$1/python PYTHONDONTWRITEBYTECODE=1 \
    exec "$python" -m pytest -q -p no:cacheprovider tests
