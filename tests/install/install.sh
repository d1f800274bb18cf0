#!/bin/sh
# Installs into a folder of its own, builds the example against it with pkg-config and with CMake, runs
# both, and checks that the shared library shows mn_ names only.
#   install.sh SOURCE_DIR BUILD_DIR
set -eu
source=$1
build=$2
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

cmake --install "$build" --prefix "$place/usr" >/dev/null
library=$(find "$place/usr" -name 'libmneme.so' | head -1)
[ -n "$library" ] || { echo "no libmneme.so was installed"; exit 1; }
libdir=$(dirname "$library")

stray=$(nm -D --defined-only "$library" | awk '{ print $NF }' | grep -v '^mn_' | grep -v '^_' || true)
[ -z "$stray" ] || { echo "the library shows names that are not its own:"; echo "$stray"; exit 1; }

export PKG_CONFIG_PATH="$libdir/pkgconfig"
[ "$(pkg-config --modversion mneme)" = "$("$place/usr/bin/mneme" --version | cut -d' ' -f2)" ]
cc -O2 -Wall "$source/examples/recall/recall.c" $(pkg-config --cflags --libs mneme) -lm \
    -o "$place/by_pkg_config"
LD_LIBRARY_PATH="$libdir" "$place/by_pkg_config"

cmake -S "$source/examples/recall" -B "$place/build" -DCMAKE_PREFIX_PATH="$place/usr" >/dev/null
cmake --build "$place/build" >/dev/null
"$place/build/recall"
