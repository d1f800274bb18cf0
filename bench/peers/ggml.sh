#!/bin/sh
# mneme next to ggml: sh bench/peers/ggml.sh GGML_SOURCE [runs [threads [OP]]]
# OP: gla, gdn or kda alone. One thread is timed by the CPU time of the process.
# GGML_SOURCE is a checkout of ggml; nothing in it is changed. MNEME_BUILD is mneme's build folder.
set -eu
[ $# -ge 1 ] || { echo "usage: $0 GGML_SOURCE [runs [threads [OP]]]" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
source=$(cd "$1" && pwd)
shift
root=$(cd "$here/../.." && pwd)
mneme=${MNEME_BUILD:-$root/build/release}
work=$mneme/peers
mkdir -p "$work"
[ -f "$source/include/ggml.h" ] || { echo "$source holds no include/ggml.h" >&2; exit 2; }
[ -f "$mneme/libmneme.so" ] || { echo "$mneme holds no libmneme.so: run make first" >&2; exit 2; }

cmake -S "$source" -B "$work/ggml" -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS_RELEASE=-O3 \
    -DCMAKE_CXX_FLAGS_RELEASE=-O3 -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DGGML_BUILD_TESTS=OFF \
    -DGGML_BUILD_EXAMPLES=OFF >"$work/ggml.log" 2>&1 || { cat "$work/ggml.log" >&2; exit 1; }
cmake --build "$work/ggml" -j "$(nproc)" >>"$work/ggml.log" 2>&1 || { tail -20 "$work/ggml.log" >&2; exit 1; }
${CC:-cc} -O2 -std=c11 -D_DEFAULT_SOURCE -Wall -Wextra -I"$root/include" -I"$source/include" \
    -c "$here/ggml.c" -o "$work/ggml.o"
${CXX:-c++} "$work/ggml.o" -o "$work/ggml_bench" "$work/ggml/src/libggml.a" \
    "$work/ggml/src/libggml-cpu.a" "$work/ggml/src/libggml-base.a" -fopenmp \
    -L"$mneme" -lmneme -Wl,-rpath,"$mneme" -lpthread -ldl -lm
version=$(sed -n 's/^set(GGML_VERSION_[A-Z]* \([0-9]*\)).*/\1/p' "$source/CMakeLists.txt" | paste -sd.)
echo "ggml $version against $("$mneme/mneme" --version), $(${CC:-cc} --version | sed -n 1p), -O3 native"
"$work/ggml_bench" "$@"
