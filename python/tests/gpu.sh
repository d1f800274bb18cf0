#!/bin/sh
# Tests and figures of mneme.torch on a GPU, in one command: gpu.sh [FOLDER for logs, FLA]
#
# The package is the one that PYTHON (default python3) imports: an installed wheel with CUDA kernels, or
# this source tree with MNEME_LIBRARY naming a libmneme built with MN_CUDA. FLA is a copy of
# flash-linear-attention whose own tests are run too; they and the training comparison are left out, with
# a reason, where it or its package is missing. Exit status 1 when anything failed.
set -u
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
logs=${1:-$(mktemp -d)}
fla=${2:-}
mkdir -p "$logs"
failed=
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1

step() {    # step NAME COMMAND...: 77 is a skip, whose reason is the last line
    name=$1
    shift
    start=$(date +%s)
    "$@" >"$logs/$name.log" 2>&1
    code=$?
    case $code in
    0) word=passed ;;
    77) word=skipped ;;
    *) word=FAILED failed="$failed $name" ;;
    esac
    echo "== $name: $word ($(($(date +%s) - start)) s)"
    if [ $code -ne 0 ] && [ $code -ne 77 ]; then grep -E '^(FAILED|ERROR)' "$logs/$name.log" | head -40; fi
    tail -n "${LINES_SHOWN:-1}" "$logs/$name.log"
}

if ! "$python" -c "import torch, mneme.torch.ops" 2>"$logs/import.log"; then
    tail -n 1 "$logs/import.log"
    exit 1
fi
"$python" -c "
import torch, mneme
from mneme import _library
print('torch', torch.__version__, 'on', torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU')
print('libmneme', mneme.version(), _library.library()._name)"

cd "$here" || exit 1
workers=
if "$python" -c "import xdist" 2>/dev/null; then workers="-n 4"; fi
step operators "$python" -m pytest -q -p no:cacheprovider $workers -rs test_torch_cuda.py
LINES_SHOWN=8 step overhead "$python" "$root/bench/python_overhead.py" --device cuda
LINES_SHOWN=12 step training "$python" "$root/bench/peers/patched_fla.py"
if [ -n "$fla" ]; then
    LINES_SHOWN=3 step fla_tests "$python" "$root/bench/peers/fla_tests.py" "$fla"
else
    echo "== fla_tests: skipped (no copy of flash-linear-attention was named)"
fi
echo "logs: $logs"
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
