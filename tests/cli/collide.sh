#!/bin/sh
# mneme collide: the paper's numbers in the table, files where they are asked for, bad options fail.
set -eu
mneme=$1
. "$2/tests/support/temporary.sh"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

fail() {
    echo "collide: $*" >&2
    exit 1
}

text=$("$mneme" collide)
has() {
    echo "$text" | grep -q -- "$1" || fail "the text lacks: $1"
}
has "^  bayes  *0.731  *0.723  *+0.446  *never"
has "^  reset  *0.731  *0.351  *-0.297  *54"
has "^  delta  *as reset"
has "^  hypermlp  *cannot"
has "belong to overlap 0.99"

"$mneme" collide --json | grep -q '"same_as": "linear"' || fail "the JSON lacks same_as"
"$mneme" collide --rho 0.3 | grep -q "^  bayes .*+0.462" || fail "--rho is not heard"
"$mneme" collide --flood 0 --boost 0 >/dev/null || fail "no boost and no flood"
"$mneme" collide --csv "$folder/csv" >/dev/null
for name in retrieval gain variance_a variance_b overlap prior theory; do
    [ -s "$folder/csv/$name.csv" ] || fail "--csv wrote no $name.csv"
done
[ "$(wc -l < "$folder/csv/retrieval.csv")" -eq 113 ] || fail "retrieval.csv has not 112 lines"

if command -v gnuplot >/dev/null; then
    "$mneme" collide --figures "$folder/figures" >/dev/null
    for name in recall dynamics; do
        [ -s "$folder/figures/$name.svg" ] || fail "no $name.svg"
        [ -s "$folder/figures/$name.png" ] || fail "no $name.png"
    done
fi
mkdir "$folder/empty"
if PATH=$folder/empty "$mneme" collide --figures "$folder/none" >/dev/null 2>"$folder/message"; then
    fail "figures without gnuplot succeed"
fi
grep -q "gnuplot is not installed" "$folder/message" || fail "no word about gnuplot"
[ -s "$folder/none/recall.gp" ] || fail "no script is left without gnuplot"

"$mneme" collide --help | grep -q usage || fail "no help"
for bad in "--rho 1" "--rho x" "--flood -1" "--boost 1.5" "--gamma 2" "--csv" "--nonsense"; do
    # shellcheck disable=SC2086
    if "$mneme" collide $bad >/dev/null 2>&1; then fail "\"$bad\" succeeds"; fi
done
