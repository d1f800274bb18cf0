#!/bin/sh
# clang-tidy over C files that were changed, not just moved, by the checks of .clang-tidy.
#   tools/tidy.sh BUILD_DIR [BASE|all|open]
# BUILD_DIR holds compile_commands.json. BASE is the commit to compare with; without it that is where the
# branch left the default branch of its remote, or on that branch the commit before this one, which a shallow
# clone asks its remote for; where neither is to be had, and with the word "all", every C file of src and
# examples is looked at. Findings fail, but for those in files of tools/tidy.open, which lists what is not
# clean yet; "open" looks at all files and writes that list anew.
set -eu
[ $# -ge 1 ] || { sed -n '2,9s/^# *//p' "$0" >&2; exit 2; }
build=$1
[ -f "$build/compile_commands.json" ] || { echo "tidy: no $build/compile_commands.json; configure first" >&2; exit 1; }
command -v clang-tidy >/dev/null || { echo "tidy: clang-tidy is not installed (tools/setup.sh --tools)" >&2; exit 1; }
commit() { git rev-parse --quiet --verify "$1^{commit}"; }
base=${2-}
word=$base
[ "$word" != open ] || base=all
if [ -z "$base" ]; then
    for branch in origin/HEAD origin/main; do
        if [ -z "$base" ] && commit $branch >/dev/null; then base=$(git merge-base HEAD $branch || true); fi
    done
    [ "$base" != "$(commit HEAD)" ] || base=
    if [ -z "$base" ] && ! commit HEAD~1 >/dev/null && [ "$(git rev-parse --is-shallow-repository)" = true ]; then
        git fetch --quiet --deepen=1 2>/dev/null || true
    fi
    [ -n "$base" ] || base=$(commit HEAD~1 || echo all)
fi
if [ "$base" = all ]; then
    since="in the project"
    files=$(git ls-files -- 'src/*.c' 'examples/*.c')
else
    since="changed since $base"
    commit "$base" >/dev/null || { echo "tidy: no commit $base to compare with; \"all\" looks at every file" >&2; exit 1; }
    files=$(git diff --name-only -M --diff-filter=AM "$base" -- 'src/*.c' 'examples/*.c')
fi
checked=
for file in $files; do
    # Files of a build without CUDA only; fuzz targets are compiled by their own preset.
    if grep -q "/$file\"" "$build/compile_commands.json"; then checked="$checked $file"; fi
done
[ -n "$checked" ] || { echo "tidy: no C file $since"; exit 0; }
# One file a process: from the second file on, clang 14's analyzer takes every va_list for uninitialised.
# Findings in files that tools/tidy.open lists are told; in all others they are a failure.
failed=$(mktemp)
trap 'rm -f "$failed"' EXIT
# shellcheck disable=SC2016
echo "$checked" | tr ' ' '\n' | sed '/^$/d' | xargs -r -P "$(nproc)" -n 1 sh -c \
    'clang-tidy --quiet -p "$0" "$2" 2>/dev/null || echo "$2" >>"$1"' "$build" "$failed"
sort -o "$failed" "$failed"
if [ "$word" = open ]; then
    cp "$failed" tools/tidy.open
    echo "tidy: tools/tidy.open lists $(wc -l <"$failed") of $(echo "$checked" | wc -w) files"
    exit 0
fi
new=$(grep -vxF -f tools/tidy.open "$failed" || true)
[ -z "$new" ] || { printf 'tidy: findings in files that had none:\n%s\n' "$new"; exit 1; }
echo "tidy: $(echo "$checked" | wc -w) files $since, findings in $(wc -l <"$failed"), all of them in tools/tidy.open"
