#!/bin/sh
# clang-tidy over C files that were changed, not just moved, by the checks of .clang-tidy.
#   tools/tidy.sh BUILD_DIR [BASE|all]
# BUILD_DIR holds compile_commands.json. BASE is the commit to compare with; without it that is where the
# branch left the default branch of its remote, or on that branch the commit before this one, which a shallow
# clone asks its remote for; where neither is to be had, and with the word "all", every C file of src and
# examples is looked at.
set -eu
[ $# -ge 1 ] || { sed -n '2,7s/^# *//p' "$0" >&2; exit 2; }
build=$1
[ -f "$build/compile_commands.json" ] || { echo "tidy: no $build/compile_commands.json; configure first" >&2; exit 1; }
command -v clang-tidy >/dev/null || { echo "tidy: clang-tidy is not installed (tools/setup.sh --tools)" >&2; exit 1; }
commit() { git rev-parse --quiet --verify "$1^{commit}"; }
base=${2-}
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
# shellcheck disable=SC2086
echo $checked | tr ' ' '\n' | xargs -P "$(nproc)" -n 1 clang-tidy --quiet -p "$build" 2>/dev/null
echo "tidy: $(echo "$checked" | wc -w) files $since without a finding"
