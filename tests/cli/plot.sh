#!/bin/sh
# mneme plot: draws runs with gnuplot and as text, says what is missing.
set -eu
. "$2/tests/cli/support/expect.sh"
LC_ALL=C
export LC_ALL

# A run of N steps whose loss falls from 4 with the given rate.
make_run() {
    mkdir -p "$1"
    awk -v n="$2" -v rate="$3" 'BEGIN {
        for (s = 1; s <= n; s++) {
            loss = 1 + 3 * exp(-rate * s) + 0.05 * sin(37 * s)
            printf "{\"step\":%d,\"loss\":%.6f,\"tokens\":%d,\"seconds\":%.3f,", s, loss, s * 4096, s / 10
            printf "\"lr\":0.001,\"grad_norm\":null}\n"
            if (s % 50 == 0) printf "{\"step\":%d,\"valid_loss\":%.6f}\n", s, loss + 0.1
        }
    }' >"$1/metrics.jsonl"
}
make_run "$work/first_run" 400 0.01
make_run "$work/it's second" 300 0.03
first=$work/first_run
second="$work/it's second"

# text: highest and lowest mean on the left, the range of x below, each curve by its letter
run 0 plot "$first" --text --smooth 1 --key loss
quiet
says '^ *3\.9[0-9]* |a'
says '^ *[01]\.[0-9]* |  *.*a$'
says '^  *1  *step  *400$'
says '^  *a  first_run  loss  (last 1\.[0-9]*)$'
[ "$(grep -c '|' "$work/out")" = 17 ] || fail "not 17 rows"
run 0 plot "$first/" "$second" --text
says '^  *d  it.s second  valid_loss  (last'
run 0 plot "$first" --text --x tokens --key valid_loss
says '^  *204.8  *tokens (thousands)  *1638.4$'
run 0 plot "$first/metrics.jsonl" --text --x seconds --key loss,lr --log
[ "$(grep -c '|' "$work/out")" = 34 ] || fail "not two panels"
says '^  *0.1  *seconds  *40$'
LC_ALL=C.UTF-8
run 0 plot "$first" --text --key loss
LC_ALL=C
says "^ *[0-9.]* |.*$(printf '\342')"

# what is still being written counts as far as it is whole
printf '{"step":401,"lo' >>"$first/metrics.jsonl"
run 0 plot "$first" --text --key loss
says 'step  *400$'

# the mean over N points
mkdir "$work/saw"
awk 'BEGIN { for (s = 1; s <= 40; s++) printf "{\"step\":%d,\"loss\":%d}\n", s, s % 2 }' \
    >"$work/saw/metrics.jsonl"
run 0 plot "$work/saw" --text --smooth 2
says '(last 0.5)'
run 0 plot "$work/saw" --text --smooth 11    # 40 points are not more than 44
says '(last 0)'

if command -v gnuplot >/dev/null; then
    run 0 plot "$first" "$second" -o "$work/figure.svg" --png
    quiet
    says '^wrote .*figure.svg'
    grep -q '</svg>' "$work/figure.svg" || fail "no SVG"
    grep -q 'first_run' "$work/figure.svg" || fail "the legend lacks a run"
    [ "$(head -c 4 "$work/figure.png" | tail -c 3)" = PNG ] || fail "no PNG"
    run 0 plot "$first" -o "$work/alone.png" --x tokens --log --key loss,valid_loss,lr
    quiet
    [ "$(head -c 4 "$work/alone.png" | tail -c 3)" = PNG ] || fail "no PNG alone"
    [ ! -e "$work/alone.svg" ] || fail "an SVG nobody asked for"
    [ -z "$(find "$work" -name '*.gp')" ] || fail "a script is left behind"
    for of in a1.gdn a2.gdn b1.kla; do     # one colour a layer where several are shown, dashes within
        make_run "$work/${of%.*}" 60 0.02
        printf '{"model": {"layers": "%s"}}' "${of#*.}" >"$work/${of%.*}/settings.json"
    done
    count() { grep -o "stroke='rgb([^']*)'" "$1" | tr -d ' ' | sort -u | wc -l; }
    run 0 plot "$work/a1" "$work/b1" --key loss --smooth 1 -o "$work/two.svg"
    run 0 plot "$work/a1" "$work/a2" "$work/b1" --key loss --smooth 1 -o "$work/three.svg"
    [ "$(count "$work/two.svg")" = "$(count "$work/three.svg")" ] || fail "a run more of one layer has another colour"
    run 0 plot "$work/a1" "$work/a2" --key loss --smooth 1 -o "$work/one.svg"
    [ "$(count "$work/one.svg")" = "$(count "$work/two.svg")" ] || fail "two runs of one layer look the same"
    program=$(cd "$(dirname "$mneme")" && pwd)/$(basename "$mneme")
    (cd "$first" && "$program" plot . >"$work/out" 2>"$work/err") || fail "plot ."
    grep -q 'first_run' "$first/plot.svg" || fail "the folder has no name"
    run 0 plot "$first" -o "$work/absent/above/figure.svg"
    grep -q '</svg>' "$work/absent/above/figure.svg" || fail "no figure in a new folder"
    touch "$work/file"
    run 1 plot "$first" -o "$work/file/figure.svg"
    complains 'file: is a file where a folder is needed'
fi
# Names are data: none of these is run, and none breaks the script.
evil="$work/a'
system 'touch owned'
set label \"\`touch owned\`\" x"
key="lo'
system('touch owned')
"
if command -v gnuplot >/dev/null; then
    mkdir "$evil"
    sed "s/\"loss\"/\"lo'\\\\nsystem('touch owned')\\\\n\"/" "$first/metrics.jsonl" \
        >"$evil/metrics.jsonl"
    (cd "$work" && "$program" plot "$evil" --key "$key" -o "|touch owned;x.svg" >out 2>err) ||
        fail "a run with an odd name is not drawn: $(cat "$work/err")"
    [ ! -e "$work/owned" ] || fail "a name was run"
    [ -s "$work/|touch owned;x.svg" ] || fail "no figure under an odd name"
    echo mine >"$work/mine.svg.gp"
    run 1 plot "$first" -o "$work/mine.svg"
    complains 'mine.svg.gp: is in the way'
    [ "$(cat "$work/mine.svg.gp")" = mine ] || fail "a file of somebody else is gone"
fi
mkdir "$work/empty"
path=$PATH
PATH=$work/empty
run 1 plot "$first" -o "$work/none.svg"
PATH=$path
complains 'gnuplot is not installed'
complains '[-]-text draws without gnuplot'
[ -s "$work/none.svg.gp" ] || fail "no script is left without gnuplot"

run 1 plot "$work/nowhere"
complains 'nowhere.*no such file'
run 1 plot "$work/empty"
complains 'empty: holds no metrics.jsonl: is it the folder of a run'
: >"$work/empty/metrics.jsonl"
run 1 plot "$work/empty" --text
complains 'holds no metrics yet'
run 1 plot "$first" "$second" --text --key loss,lrr
complains 'no run has numbers for "lrr", did you mean "lr"'
run 1 plot "$first" --text --key grad_norm
complains 'no numbers for grad_norm; there are step, loss, tokens'
run 1 plot "$work/saw" --text --x tokens
complains 'no "tokens" to draw along'
echo 'loss 3' >"$work/empty/metrics.jsonl"
run 1 plot "$work/empty" --text
complains 'metrics.jsonl: line 1'

run 2 plot
complains 'at least one run'
for bad in "--x miles" "--smooth 0" "--smooth x" "--key loss,,lr" "--key loss,loss" "--key" "-o"; do
    # shellcheck disable=SC2086
    run 2 plot "$first" $bad
    complains "${bad%% *} needs"
    case $bad in *" "*) complains "not \"${bad#* }\"" ;; esac
done
