#!/bin/sh
# CUDA headers: at most 10 that a single file includes (such a header is part of that file unless it is a
# stage of its own), and no type name twice outside a namespace.
#   cuda_headers.sh SOURCE_DIR [--list]
set -eu
cd "$1"
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
twice=$(git grep -hE '^(typedef )?(struct|enum|union)( __align__\([0-9]+\)| alignas\([0-9]+\))? [A-Za-z_]+ \{' -- 'src/kernels/cuda/*.cuh' 'src/kernels/cuda/*.cu' \
    'src/kernels/cuda/*.h' | sed -E 's/^(typedef )?(struct|enum|union)( __align__\([0-9]+\)| alignas\([0-9]+\))? ([A-Za-z_]+) \{.*/\4/' | sort | uniq -d)
if [ -n "$twice" ]; then
    echo "cuda_headers: types of one name in several files: $(echo $twice)" >&2
    bad=1
fi
[ "$bad" = 0 ] && echo "cuda_headers: $count with a single includer, no type name twice"
exit "$bad"
