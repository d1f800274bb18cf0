#!/bin/sh
# compile_commands.json of a build folder with its CUDA files added, on standard output: CMake lists what
# it compiles itself, which are the C files.
#   tools/compile_commands.sh BUILD_DIR >compile_commands.json
set -eu
[ $# = 1 ] || { sed -n '2,4s/^# *//p' "$0" >&2; exit 2; }
sed '$d' "$1/compile_commands.json"
if [ -f "$1/cuda_commands.json" ]; then
    echo ","
    cat "$1/cuda_commands.json"
fi
echo "]"
