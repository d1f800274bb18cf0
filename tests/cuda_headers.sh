#!/bin/sh
# CUDA headers: at most 10 that a single file includes (such a header is part of that file unless it is a
# stage of its own), and no type name twice outside a namespace.
#   cuda_headers.sh SOURCE_DIR [--list]
set -eu
cd "$1"
git rev-parse --git-dir >/dev/null 2>&1 || { echo "no git checkout: skipped"; exit 77; }
bad=0
single=$(for header in $(git ls-files 'src/kernels/cuda/*.cuh' 'src/kernels/cuda/*.h'); do
    users=$(git grep -lF "#include \"${header#src/}\"" -- src | wc -l)
    [ "$users" = 1 ] && echo "$header $(git grep -lF "#include \"${header#src/}\"" -- src)"
done || true)
count=$(printf '%s' "$single" | grep -c . || true)
[ "${2-}" = --list ] && printf '%s\n' "$single"
if [ "$count" -gt 10 ]; then
    echo "cuda_headers: $count headers have a single includer, 10 are the most (--list names them)" >&2
    bad=1
fi
# Headers that C reads too have no namespace; every other file of a folder is in the folder's own.
outside=$(for file in $(git ls-files 'src/kernels/cuda/*.cuh' 'src/kernels/cuda/*.cu' 'src/kernels/cuda/*.h'); do
    grep -qE '^namespace mneme(::[a-z0-9_]+)* \{' "$file" || echo "$file"
done)
for file in $outside; do
    case $file in *.cu | *.cuh) echo "cuda_headers: $file is in no namespace" >&2; bad=1 ;; esac
done
for file in $(git grep -lE '^namespace mneme' -- src/kernels/cuda); do
    folder=${file#src/kernels/cuda/}
    own="mneme::${folder%%/*}"
    [ "${folder%%/*}" = prim ] && own=mneme
    grep -qE "^namespace $own(::[a-z_]+)? \{" "$file" || { echo "cuda_headers: $file is not in $own" >&2; bad=1; }
done
twice=$(for file in $outside; do
    grep -hE '^(typedef )?(struct|enum|union) [A-Za-z_]+ \{' "$file" || true
done | sed -E 's/^(typedef )?(struct|enum|union) ([A-Za-z_]+) \{.*/\3/' | sort | uniq -d)
if [ -n "$twice" ]; then
    echo "cuda_headers: types of one name in several files outside a namespace: $(echo $twice)" >&2
    bad=1
fi
[ "$bad" = 0 ] && echo "cuda_headers: $count with a single includer, no type name twice"
exit "$bad"
