#!/bin/sh
# clang-format (14, the version the style file is for) over the files named, or over what git says has
# changed. Look at the result: it puts each designated initialiser on a line of its own, and tables read
# better as they were. What must hold is checked by tests/format.sh.
set -eu
files=$*
[ -n "$files" ] || files=$(git diff --name-only HEAD -- '*.c' '*.h' '*.cpp')
[ -n "$files" ] || { echo "format: nothing has changed"; exit 0; }
clang-format -i $files
