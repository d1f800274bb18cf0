#!/bin/sh
# Layer check: a folder of src includes only from folders to its left, or from itself.
#   base < {kernels runtime io} < {ops data} < {optim mixers tasks} < model < {train eval infer} <
#   experiments < {server cli}
set -eu
cd "$1/src"
rank() {
    case $1 in
    base) echo 0 ;;
    kernels | runtime | io) echo 1 ;;
    ops | data) echo 2 ;;
    optim | mixers | tasks) echo 3 ;;
    model) echo 4 ;;
    train | eval | infer) echo 5 ;;
    experiments) echo 6 ;;
    server | cli) echo 7 ;;
    *) echo unknown ;;
    esac
}
bad=0
count=0
for file in $(find . -name '*.[ch]' -o -name '*.def' -o -name '*.cu' -o -name '*.cuh' | sed 's|^\./||'); do
    own=${file%%/*}
    for path in $(sed -n 's/^ *# *include "\([^"]*\)".*/\1/p' "$file"); do
        case $path in mneme.h) continue ;; esac
        count=$((count + 1))
        from=${path%%/*}
        if [ "$(rank "$from")" = unknown ]; then
            echo "$file: includes \"$path\", name files from src/"
            bad=1
        elif [ "$own" != "$from" ] && [ "$(rank "$from")" -ge "$(rank "$own")" ]; then
            echo "$file: $own may not include from $from (\"$path\")"
            bad=1
        fi
    done
done
[ "$count" -gt 0 ] || { echo "no includes found"; exit 1; }
[ "$bad" = 0 ] && echo "$count includes, all to the left"
exit "$bad"
