#!/bin/sh
# Layer check: a folder of src includes only from folders to its left, or from itself.
#   base < {kernels runtime io} < tokenizer < {ops data template} < {tape decode optim ranks} < definition < {layers tasks} <
#   model < {train eval infer} < experiments < server < cli
# tape and decode still know each other: a deferred operation is a node of the tape.
set -eu
cd "$1/src"
rank() {
    case $1 in
    base) echo 0 ;;
    kernels | runtime | io) echo 1 ;;
    tokenizer) echo 2 ;;
    ops | data | template) echo 3 ;;
    tape | decode | optim | ranks) echo 4 ;;
    definition) echo 5 ;;
    layers | tasks) echo 6 ;;
    model) echo 7 ;;
    train | eval | infer) echo 8 ;;
    experiments) echo 9 ;;
    server) echo 10 ;;
    cli) echo 11 ;;
    *) echo unknown ;;
    esac
}
bad=0
count=0
for file in $(find . -name '*.[ch]' -o -name '*.def' -o -name '*.cu' -o -name '*.cuh' | sed 's|^\./||'); do
    own=${file%%/*}
    for path in $(sed -n 's/^ *# *include "\([^"]*\)".*/\1/p' "$file"); do
        case $path in mneme.h | layers/all.def) continue ;; esac    # the rows of layers are data for all
        count=$((count + 1))
        from=${path%%/*}
        if [ "$(rank "$from")" = unknown ]; then
            echo "$file: includes \"$path\", name files from src/"
            bad=1
        elif [ "$own/$from" = tape/decode ] || [ "$own/$from" = decode/tape ]; then
            continue
        elif [ "$own" != "$from" ] && [ "$(rank "$from")" -ge "$(rank "$own")" ]; then
            echo "$file: $own may not include from $from (\"$path\")"
            bad=1
        fi
    done
done
[ "$count" -gt 0 ] || { echo "no includes found"; exit 1; }
[ "$bad" = 0 ] && echo "$count includes, all to the left"
exit "$bad"
