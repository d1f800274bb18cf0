#!/bin/sh
# A mixer without a new recurrence costs two files and one line: a toy layer is added to a copy of the
# project, which is built; it must pass the tests of all layers, train, resume, decode, take part in the
# collision experiment, and stand in mneme info, in the help and in the tables of the documents.
#   add_mixer.sh SOURCE_DIR [BUILD_DIR]      objects of that build that no new line reaches are taken from it
set -eu
source=$(cd "$1" && pwd)
build=${2:+$(cd "$2" && pwd)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
    echo "add_mixer: $*" >&2
    exit 1
}

mkdir "$work/copy"
cd "$source"
for place in CMakeLists.txt cmake include src python tests docs tools bench examples README.md; do cp -R "$place" "$work/copy/"; done
cd "$work/copy"
cp tests/add_mixer/toy.c tests/add_mixer/toy.def src/layers/
sed -i 's|^#include "layers/linear.def"$|&\n#include "layers/toy.def"|' src/layers/all.def
[ "$(diff -r "$source/src" src | grep -c '^Only in')" = 2 ] || fail "more than two files are new"
[ "$(diff -r "$source/src" src | grep -c '^[<>]')" = 1 ] || fail "more than one line is new"

set -- -DMN_CUDA=OFF -DMN_PYTHON=OFF
if [ -n "$build" ]; then
    (cd src && diff -rq "$source/src" . | sed -n 's|^Files .* and \./\(.*\) differ$|\1|p') >"$work/changed"
    echo generated/ >>"$work/changed"
    for option in CMAKE_C_COMPILER_LAUNCHER MN_WERROR MN_NATIVE MN_PORTABLE MN_PRECOMPILE; do
        set -- "$@" "$(sed -n "s/^\($option\):[A-Z]*=/-D\1=/p" "$build/CMakeCache.txt")"
    done
else
    set -- "$@" -DMN_PORTABLE=ON
fi
cmake -S . -B build/add_mixer -DCMAKE_BUILD_TYPE=Release "$@" >"$work/log" 2>&1 || fail "cmake: $(tail -20 "$work/log")"
[ -z "$build" ] || sh tests/add_mixer/reuse.sh "$source" "$build" "$PWD" "$PWD/build/add_mixer" "$work/changed" \
    'mneme_*' test_layers test_mixers
cmake --build build/add_mixer -j "$(nproc)" --target mneme_cli test_layers test_mixers >"$work/log" 2>&1 ||
    fail "build: $(grep -E 'error|undefined' "$work/log" | head -20)"
for test in test_layers test_mixers; do
    "build/add_mixer/$test" >"$work/log" 2>&1 || fail "$test: $(grep -v '\[ *OK' "$work/log" | tail -20)"
done

mneme=$PWD/build/add_mixer/mneme
"$mneme" info | grep -q '^  toy  .*additive' || fail "mneme info does not list toy"
"$mneme" info --table layers | grep -q '^| toy ' || fail "the table of layers lacks toy"
sh tools/tables.sh "$mneme" docs README.md
grep -q '^| toy ' docs/math/axes.md || fail "the documents' table lacks toy"
"$mneme" collide --json 2>/dev/null | grep -q '"toy"' || fail "toy takes no part in the collision experiment"
"$mneme" bench train --list 2>/dev/null | grep -q 'small.toy' || fail "no training step of toy is timed"

for n in 1 2 3 4 5 6 7 8; do echo "the quick brown fox jumps over the lazy dog, and the dog sleeps on."; done >text.txt
"$mneme" train --set data.train=text.txt --set model.layers=toy --set model.hidden_size=16 --set model.num_hidden_layers=1 \
    --set train.steps=6 --set train.batch=2 --set train.context=32 --set out=run >"$work/log" 2>&1 || fail "train: $(tail -5 "$work/log")"
"$mneme" generate --model run/last "the quick" --tokens 8 --temperature 0 >"$work/text" 2>"$work/log" || fail "generate: $(tail -5 "$work/log")"
[ -s "$work/text" ] || fail "toy writes nothing"
echo "add_mixer: two files and one line; toy is tested, trains, decodes and is documented"
