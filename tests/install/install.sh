#!/bin/sh
# Installs a build into an empty folder, moves that folder, and builds the examples against it the
# two ways users do: sh install.sh SOURCE_DIR BUILD_DIR
set -eu
source=$1
build=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
    echo "install: $*" >&2
    exit 1
}

cmake --install "$build" --prefix "$work/first" >"$work/install.log" || fail "cmake --install failed"
mv "$work/first" "$work/prefix"    # what is installed may not depend on where it was put
prefix=$work/prefix
library=$(find "$prefix" -name libmneme.so)
[ -n "$library" ] || fail "no libmneme.so under $prefix"
libdir=$(dirname "$library")

# names: everything public, nothing else
nm -D --defined-only "$library" | awk '$2 != "A" { sub(/@.*/, "", $NF); print $NF }' | sort >"$work/exported"
[ "$(uname)" != Linux ] || nm -D --defined-only "$library" | grep -q ' mn_version@@MNEME_' ||
    fail "symbols have no version"
readelf -d "$prefix/bin/mneme" | grep -q 'RPATH.*ORIGIN' || fail "the program has no run path of its own place"
if grep -v '^mn_' "$work/exported"; then fail "these symbols are not ours to export"; fi
sed -n 's/^MN_API .*\(mn_[a-z_]*\)(.*/\1/p' "$prefix/include/mneme.h" >"$work/declared"
for op in $(sed -n '/#define MN_OPS(OP)/,/[^\\]$/p' "$prefix/include/mneme.h" |
    grep -o 'OP([a-z_0-9]*)' | sed 's/OP(\(.*\))/\1/'); do
    echo "mn_op_$op"
    echo "mn_op_${op}_backward"
done >>"$work/declared"
[ "$(wc -l <"$work/declared")" -gt 60 ] || fail "too few declarations found in mneme.h"
sort "$work/declared" | comm -23 - "$work/exported" >"$work/missing"
[ -s "$work/missing" ] && fail "declared but not exported: $(tr '\n' ' ' <"$work/missing")"
sort "$work/declared" | comm -13 - "$work/exported" >"$work/extra"
[ -s "$work/extra" ] && fail "exported but not declared: $(tr '\n' ' ' <"$work/extra")"

# the example says the same however it was built
check_recall() {
    LD_LIBRARY_PATH=$libdir "$1" >"$work/recall.out" || fail "$1 failed: $(cat "$work/recall.out")"
    grep -q '^recall  Japan    Kyoto' "$work/recall.out" || fail "$1 did not recall Kyoto"
    [ "$(sed -n '$p' "$work/recall.out" | awk '{ print $3 }')" = Tokyo ] ||
        fail "$1 did not recall what was stored last"
}

mkdir "$work/model"
"$build/make_model" "$work/model" '{"layers": "gdn, bayes", "hidden_size": 16, "vocab_size": 256}' bytes
check_session() {
    LD_LIBRARY_PATH=$libdir "$1" "$work/model" "some words to read" >"$work/session.out" ||
        fail "$1 failed: $(cat "$work/session.out")"
    grep -q '^layer 1: variance ' "$work/session.out" || fail "$1 tells no variance"
    grep -q '^18 tokens read, ' "$work/session.out" || fail "$1 did not read the prompt"
    [ "$(tail -n 1 "$work/session.out")" = "the same again" ] || fail "$1 is not repeatable"
}

export PKG_CONFIG_PATH="$libdir/pkgconfig"
[ "$(pkg-config --modversion mneme)" = "$("$prefix/bin/mneme" --version | cut -d' ' -f2)" ] ||
    fail "mneme.pc and mneme --version disagree"
${CC:-cc} -std=c11 -Wall -Wextra -Werror "$source/examples/recall.c" \
    $(pkg-config --cflags --libs mneme) -lm -o "$work/recall" || fail "pkg-config build"
check_recall "$work/recall"
${CC:-cc} -std=c11 -Wall -Wextra -Werror "$source/examples/session.c" \
    $(pkg-config --cflags --libs mneme) -o "$work/session" || fail "pkg-config build of session"
check_session "$work/session"

${CC:-cc} -std=c11 -Wall -Wextra -Werror "$source/examples/train.c" \
    $(pkg-config --cflags --libs mneme) -o "$work/train" || fail "pkg-config build of train"
check_train() {
    rm -rf "$work/run"
    LD_LIBRARY_PATH=$libdir "$1" "$work/run/of/c" >"$work/train.out" || fail "$1 failed: $(cat "$work/train.out")"
    grep -q 'the same bits$' "$work/train.out" || fail "$1 does not resume bit for bit: $(cat "$work/train.out")"
    LD_LIBRARY_PATH=$libdir "$prefix/bin/mneme" eval --help >/dev/null || fail "the installed program does not run"
    [ -f "$work/run/of/c/last/model.safetensors" ] || fail "$1 left no model"
}
check_train "$work/train"

cmake -S "$source/examples" -B "$work/examples" -DCMAKE_PREFIX_PATH="$prefix" >"$work/cmake.log" 2>&1 ||
    fail "find_package: $(cat "$work/cmake.log")"
cmake --build "$work/examples" >>"$work/cmake.log" 2>&1 || fail "cmake build: $(cat "$work/cmake.log")"
check_recall "$work/examples/recall"
check_session "$work/examples/session"
check_train "$work/examples/train"

if command -v c++ >/dev/null 2>&1; then
    printf '#include <mneme.h>\nint main() { return mn_version()[0] == 0; }\n' >"$work/plus.cpp"
    c++ -Wall -Wextra -Werror "$work/plus.cpp" $(pkg-config --cflags --libs mneme) -o "$work/plus" ||
        fail "mneme.h is not C++"
    LD_LIBRARY_PATH=$libdir "$work/plus" || fail "the C++ program failed"
fi
echo "install: $(wc -l <"$work/exported") symbols, pkg-config and find_package build and run"
