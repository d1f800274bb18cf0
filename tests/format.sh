#!/bin/sh
# Format check: what the style fixes and a script can see: at most 100 columns (rows of tables may be wider),
# no tab, no blank at the end of a line, no carriage return, indentation by fours (continuations and
# comments line up where they like), braces on the same line, one blank line at most, functions of at
# most 100 lines, files of at most 900
# (CUDA: 1700, a kernel that is one pass is one file).
#   format.sh SOURCE_DIR
set -eu
cd "$1"
list=$(find src include tests examples bench python/src -name '*.[ch]' -o -name '*.cpp' -o -name '*.def' -o -name '*.cu' -o -name '*.cuh' | sort)
[ -n "$list" ] || { echo "no files found"; exit 1; }
# shellcheck disable=SC2086
LC_ALL=C.UTF-8 awk '
function most(path) { return path ~ /\.cuh?$/ ? 1700 : 900 }
function complain(what) { printf "%s:%d: %s\n", FILENAME, FNR, what; bad++ }
FNR == 1 {
    if (file != "" && lines > most(file)) { printf "%s: %d lines, %d are the most\n", file, lines, most(file); bad++ }
    file = FILENAME; blank = 0; opened = 0; n_files++
}
{
    lines = FNR
    if (length($0) > 100 && FILENAME !~ /\.def$/) complain(length($0) " columns, 100 are the most")
    if ($0 ~ /\t/) complain("a tab")
    if ($0 ~ /[ \r]$/) complain("blanks or a carriage return at the end of the line")
    if ($0 ~ /^[ ]*\{$/ && FILENAME !~ /\.def$/) complain("an opening brace on a line of its own")
    if ($0 ~ /(^|[^a-z_])(if|for|while|switch)\(/) complain("no blank between keyword and parenthesis")
    blank = $0 == "" ? blank + 1 : 0
    if (blank == 2) complain("two blank lines")
    if ($0 ~ /^[a-zA-Z].*\) \{$/) opened = FNR
    if ($0 == "}") {
        if (opened && FNR - opened > 100) complain("a function of " FNR - opened " lines, 100 are the most")
        opened = 0
    }
}
END {
    if (lines > most(file)) { printf "%s: %d lines, %d are the most\n", file, lines, most(file); bad++ }
    if (bad) { printf "%d complaints\n", bad; exit 1 }
    printf "%d files in form\n", n_files
}' $list
