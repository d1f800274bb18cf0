#!/bin/sh
# The vector target of 64-bit ARM on another machine: its kernels are compiled as in a release, the program around
# them without optimising (MN_QUICK); under qemu it checks every golden file and the vector layer. Skipped where compiler, libraries or qemu are missing.
#   neon.sh SOURCE_DIR BUILD_DIR
set -eu
source=$1
build=$2/aarch64
skip() {
    echo "skipped: $1 (cmake/Aarch64.cmake says what to install)"
    exit 77
}
[ "$(uname -m)" != aarch64 ] || { echo "skipped: this machine is one, its golden test covers it"; exit 77; }
command -v aarch64-linux-gnu-gcc >/dev/null || skip "no compiler for 64-bit ARM"
qemu=$(command -v qemu-aarch64-static || command -v qemu-aarch64) || skip "no qemu for programs of 64-bit ARM"
for library in jansson libpcre2-8 cmocka; do
    PKG_CONFIG_LIBDIR=/usr/lib/aarch64-linux-gnu/pkgconfig pkg-config --exists $library || skip "no $library for 64-bit ARM"
done

cmake -S "$source" --preset aarch64 -B "$build" -DMN_WERROR=ON -DMN_QUICK=ON >/dev/null
cmake --build "$build" -j "$(nproc)" --target mneme_cli test_vec -- --no-print-directory --quiet
# No -L: the loader has to be the one of the libraries' own libc (libc6:arm64). With the compiler's loader and
# that libc, two versions in one process, the first pthread_create never returns.
run=$qemu
timeout 120 $run "$build/mneme" info | grep -q '^ *neon  *chosen' || { echo "neon is not what this program chooses, or it did not answer"; exit 1; }
timeout 300 $run "$build/test_vec"
timeout 1500 $run "$build/mneme" check --quiet --target neon "$source"/tests/golden/*.safetensors \
    "$source"/tests/golden/programs/*.safetensors
