#!/bin/sh
# mneme demo: a run of seconds shows the floor, the table and a sample, leaves models that generate
# and eval read, and gives the same numbers again.
set -eu
. "$2/tests/cli/support/expect.sh"
LC_ALL=C
export LC_ALL

run 0 demo --steps 12 --seed 3 --out "$work/a/b" --quiet
if command -v gnuplot >/dev/null 2>&1; then
    quiet
    for figure in loss.svg loss.png recall.svg recall.png; do
        [ -s "$work/a/b/$figure" ] || fail "no $figure"
    done
fi
says '^floor  *[0-9]\.[0-9]* bits per token'
says '^  *bayes  *attention$'
says '^parameters  *[0-9]*  *[0-9]*$'
says '^  above the floor, [0-9.]*  *[0-9]\.[0-9]*  *[0-9]\.[0-9]*$'
says '^  all ([0-9]*)  *[0-9.]* .* [0-9.]*  *[0-9.]* .* [0-9.]*  *[0-9]\.[0-9]*$'
for group in '1-8 tokens ago' '65+ tokens ago' '1 updates' '3+ updates'; do says "^  $group ([0-9]"; done
says 'how to read it'
says '^  floors  *two, both exact'
says '^  memory  *each move'
says '^  variance  *how unsure bayes'
says 'continued by bayes'
says '[a-z]([0-9]\.[0-9]*)'
for file in loss.csv recall.csv results.json stories.txt bayes/config.json bayes/metrics.jsonl \
    bayes/model.safetensors attention/tokenizer.json; do
    [ -s "$work/a/b/$file" ] || fail "no $file"
done
cp "$work/a/b/results.json" "$work/first.json"

# the numbers again: over the same folder, and as a document
run 0 demo --steps 12 --seed 3 --out "$work/a/b" --json --quiet
grep -v '"seconds"' "$work/out" >"$work/again"
grep -v '"seconds"' "$work/first.json" >"$work/first"
cmp -s "$work/again" "$work/first" || fail "the same seed gives other numbers"
json "[m['name'] for m in d['models']] == ['bayes', 'attention']"
json "all(m['bits'] > m['floor'] > 0.5 and m['steps'] == 12 for m in d['models'])"
json "all(abs(m['bits'] - m['floor'] - m['above_floor']) < 1e-9 for m in d['models'])"
json "all(g['right'] <= g['asked'] and g['asked'] > 0 for m in d['models'] for g in m['questions'])"
json "all(sum(g['asked'] for g in m['questions'][1:6]) == m['questions'][0]['asked'] ==
    sum(g['asked'] for g in m['questions'][6:]) for m in d['models'])"
json "len({m['tokens'] for m in d['models']}) == 1 and len(d['sample']['words']) > d['sample']['given']"
run 0 demo --steps 12 --seed 4 --out "$work/a/b" --json --quiet
grep -v '"seconds"' "$work/out" >"$work/again"
if cmp -s "$work/again" "$work/first"; then fail "the seed does not count"; fi

# alone, with all threads of the machine, a model gets the same numbers as beside another
run 0 demo --steps 12 --seed 3 --layers attention --out "$work/g" --json --quiet
json "[d['models'][0][k] == json.load(open('$work/first.json'))['models'][1][k]
    for k in ('bits', 'above_floor', 'curve', 'questions')] == [True] * 4"

# the models are models, and what eval finds on the stories is what the demo found, but for windows
run 0 generate --model "$work/a/b/bayes" "anna puts the lamp in the" --tokens 5 --belief --quiet
[ "$(wc -l <"$work/out")" -ge 7 ] || fail "no tokens with variances"
run 0 eval --model "$work/a/b/attention" --text "$work/a/b/stories.txt" --json --quiet
run 0 plot "$work/a/b/bayes" "$work/a/b/attention" --text

# other models; a budget that no machine keeps cuts the steps to one, the same for all
run 0 demo --layers gdn/attention,kla,bayes*1 --steps 3 --set model.hidden_size=16 --json --quiet \
    --out "$work/c"
json "[m['layers'] for m in d['models']] == ['gdn, attention', 'kla*2', 'bayes*1']"
json "d['sample']['model'] == 'kla' and d['models'][0]['questions'][0]['variance'] is None"
[ -s "$work/c/gdn-attention/config.json" ] || fail "no model folder"
run 0 demo --steps 1000000 --seconds 1 --set train.batch=1 --set train.context=64 \
    --out "$work/d" --json
complains '1000000 steps'
json "all(1 <= m['steps'] < 1000000 for m in d['models'])"

# without gnuplot all but the figures
mkdir "$work/bin"
path=$PATH
PATH=$work/bin
run 0 demo --steps 2 --out "$work/e" --quiet
PATH=$path
complains 'gnuplot is not installed'
[ -s "$work/e/results.json" ] || fail "no results"

# mistakes
run 2 demo --steps 0
complains '--steps'
run 2 demo --sometimes
complains 'no option'
run 1 demo --layers bayes,,gdn --out "$work/f"
complains 'between commas'
run 1 demo --layers bayes,bayes --out "$work/f"
complains 'twice'
run 1 demo --layers bays --out "$work/f"
complains 'bays'
run 1 demo --out "$work/first.json/x"
complains 'first.json'
run 0 demo --help
says '--layers'

# three models: the variances have a table of their own, and no line is longer than a wide terminal's
run 0 demo --steps 3 --seed 3 --layers bayes,attention,gdn --out "$work/three" --quiet
says '^variance read  *bayes  *attention  *gdn$'
grep -v "$work" "$work/out" | awk 'length($0) > 104 { print; bad = 1 } END { exit bad }' >"$work/err" || fail "lines are too long"
