#!/bin/sh
# CUDA kernels on the CPU, by the interpreter of PTX (tests/ptx): the golden files in both types, and of every operator
# a few of the cases that a GPU is given. Asynchronous copies and products happen at once, and in the jobs that are
# called late as late as they may.
#   interpreted.sh BUILD              all jobs, as many at a time as there are cores
#   interpreted.sh BUILD JOB WORD...  one of them
# BUILD is the folder of a build with MN_CUDA_INTERPRETED=ON, with its target tests_interpreted.
set -euf
build=$(cd "$1" && pwd)
own=$(cd "$(dirname "$0")" && pwd)/interpreted.sh
shift
cd "$(dirname "$own")/golden"

# The longest begin first. I/N: the Ith of N shares of each operator's cases; causality tries every value of a case,
# so it has the first case of the operators that take seconds.
jobs() {
    echo "cuda * 5/97"
    echo "bits * 0/1000"
    echo "late-cuda * 6/197"
    for op in delta additive gdn2 longhorn_diag lru scan conv rms_norm rope; do echo "causal $op 0/1000"; done
    for type in f32 bf16; do echo "golden $type"; done
    echo "late-golden bf16"
}

run() {
    kind=$1
    shift
    case $kind in
    late-*)
        export PTX_LATE=1 PTX_SEED=1
        run "${kind#late-}" "$@"
        ;;
    golden)
        set +f
        "$build/mneme" check --target cuda --dtype "$1" --quiet *.safetensors
        ;;
    cuda) "$build/test_cuda" "$@" ;;
    *) "$build/test_cuda_$kind" "$@" ;;
    esac
}

if [ $# -gt 0 ]; then
    began=$(date +%s)
    if said=$(run "$@" 2>&1); then
        echo "passed in $(($(date +%s) - began)) s: $*"
    else
        echo "$said" | grep -vE '^\[ +(RUN|OK) ' | head -n 40    # behind the first nothing is launched
        echo "failed: $*"
        exit 1
    fi
else
    jobs | xargs -P "$(nproc)" -I JOB sh -fc "exec sh '$own' '$build' JOB"
fi
