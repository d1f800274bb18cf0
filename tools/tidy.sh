#!/bin/sh
# clang-tidy over the C files that changed since a commit (the one before this) and were not just moved, by
# the checks of .clang-tidy.
#   tools/tidy.sh BUILD_DIR [BASE]      BUILD_DIR holds compile_commands.json; BASE is any commit
set -eu
[ $# -ge 1 ] || { sed -n '2,4s/^# *//p' "$0" >&2; exit 2; }
build=$1
base=${2:-HEAD~1}
[ -f "$build/compile_commands.json" ] || { echo "tidy: no $build/compile_commands.json; configure first" >&2; exit 1; }
command -v clang-tidy >/dev/null || { echo "tidy: clang-tidy is not installed (tools/setup.sh --tools)" >&2; exit 1; }
git rev-parse --quiet --verify "$base^{commit}" >/dev/null || { echo "tidy: no commit $base, nothing to compare with"; exit 0; }
files=$(git diff --name-only -M --diff-filter=AM "$base" -- 'src/*.c' 'examples/*.c')
checked=
for file in $files; do
    # Files of a build without CUDA only; fuzz targets are compiled by their own preset.
    if grep -q "/$file\"" "$build/compile_commands.json"; then checked="$checked $file"; fi
done
[ -n "$checked" ] || { echo "tidy: no C file changed since $base"; exit 0; }
# shellcheck disable=SC2086
echo $checked | tr ' ' '\n' | xargs -P "$(nproc)" -n 4 clang-tidy --quiet -p "$build" 2>/dev/null
echo "tidy: $(echo "$checked" | wc -w) files without a finding"
