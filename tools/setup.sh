#!/bin/sh
# Installs what mneme is built and tested with, from the packages of Debian or Ubuntu, and says what.
# Does nothing when everything is there.
set -eu

packages="gcc:gcc cmake:cmake make:make pkg-config:pkg-config gnuplot:gnuplot-nox"
libraries="jansson:libjansson-dev openblas:libopenblas-dev cmocka:libcmocka-dev libpcre2-8:libpcre2-dev
libmicrohttpd:libmicrohttpd-dev libedit:libedit-dev"
missing=

for pair in $packages; do
    command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair#*:}"
done
for pair in $libraries; do
    pkg-config --exists "${pair%%:*}" 2>/dev/null || missing="$missing ${pair#*:}"
done
[ "${1-}" = --tools ] && {
    command -v clang >/dev/null 2>&1 || missing="$missing clang"
    [ -n "$(ls /usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.fuzzer* 2>/dev/null)" ] ||
        missing="$missing libclang-rt-14-dev"
    for tool in clang-format clang-tidy ccache git; do
        command -v $tool >/dev/null 2>&1 || missing="$missing $tool"
    done
    for module in numpy pytest; do    # golden vectors are made anew, the Python package is tested
        python3 -c "import $module" 2>/dev/null || /usr/bin/python3 -c "import $module" 2>/dev/null ||
            missing="$missing python3-$module"
    done
}
[ -z "$missing" ] && exit 0

if ! command -v apt-get >/dev/null 2>&1; then
    echo "mneme needs these packages (Debian names):$missing" >&2
    echo "install them with your package manager and run this again" >&2
    exit 1
fi
as_root=
[ "$(id -u)" = 0 ] || as_root=sudo
echo "installing:$missing"
$as_root apt-get update -qq
DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends $missing
