#!/bin/sh
# llm.c's GPT on this processor: sh bench/peers/llmc.sh LLMC_SOURCE [threads [steps [batch [context ...]]]]
# LLMC_SOURCE is a checkout of karpathy/llm.c; nothing in it is changed. Flags are those of its Makefile.
# Without sizes: 6 layers, width 384, 6 heads, vocabulary 65, context 256, batch 4.
set -eu
[ $# -ge 1 ] || { echo "usage: $0 LLMC_SOURCE [threads [steps [batch [context [layers [width [heads [vocabulary]]]]]]]]" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
source=$(cd "$1" && pwd)
shift
threads=${1:-$(nproc)}
[ $# -eq 0 ] || shift
[ -f "$source/train_gpt2.c" ] || { echo "$source holds no train_gpt2.c" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags="-Ofast -march=native -fopenmp -DOMP"
# shellcheck disable=SC2086
${CC:-gcc} $flags -w -I"$source" "$here/llmc.c" -o "$work/llmc_bench" -lm
echo "llm.c on $threads threads, $(${CC:-gcc} --version | sed -n 1p), $flags"
OMP_NUM_THREADS=$threads "$work/llmc_bench" "$work/model.bin" "$@"
