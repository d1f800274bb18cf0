#!/bin/sh
# mneme reproduce and mneme sweep: the collision numbers, a tiny trained experiment, going on after a
# stop, the report from results.json alone, and what is refused.
set -eu
. "$2/tests/cli/support/expect.sh"
cd "$work"
case $mneme in /*) ;; *) mneme=$OLDPWD/$mneme ;; esac

run 0 reproduce --help
says '^usage: mneme reproduce'
run 0 reproduce --list
says '^collision  *which write rule'
says 'Kalman Linear Attention, Figure 5a'
run 0 reproduce --list --json
json 'len(d["experiments"]) >= 10 and all(e["cost"]["smoke"] for e in d["experiments"])'

# every experiment stands in the table of what came out and in that of the papers' tables
for name in $("$mneme" reproduce --list --json | sed -n 's/^ *"name": "\(.*\)",*$/\1/p'); do
    for page in reproducing papers; do
        grep -q "$name" "$source/docs/guide/$page.md" || fail "$name is not in docs/guide/$page.md"
    done
done

# every printed number of the collision experiment, to the digits printed
run 0 reproduce collision --out collision --quiet --jobs 2
quiet
grep -q '^70 of 70 printed numbers come out to the digits printed' collision/report.md ||
    fail "not all numbers of the collision experiment"
[ "$(wc -l <collision/runs.csv)" = 71 ] || fail "runs.csv has not 70 runs"
[ -s collision/retrieval.csv ] || fail "no series"

# a trained one
tiny="--jobs 2 --steps 6 --set task.test=16 --set evaluate.batch=16 --quiet"
# shellcheck disable=SC2086
run 0 reproduce mad-noise --out noise --seeds 2 $tiny
quiet
for file in report.md results.json results.jsonl runs.csv table-1.csv; do
    [ -s "noise/$file" ] || fail "no $file"
done
grep -q '| kla, no process noise | recall | .* | 100 | .* | Table 6 |' noise/report.md ||
    fail "no number of the paper"
grep -q '^8 of 8 runs' noise/report.md || fail "not eight runs"
if command -v gnuplot >/dev/null; then
    grep -q '</svg>' noise/table-1.svg || fail "no SVG"
    [ "$(head -c 4 noise/table-1.png | tail -c 3)" = PNG ] || fail "no PNG"
    grep -q '(table-1.svg)' noise/report.md || fail "the report shows no figure"
fi

# the report again, from results.json alone
mkdir alone
cp noise/results.json alone
run 0 reproduce mad-noise --report alone
says '^alone/report.md$'
for file in report.md runs.csv table-1.csv; do
    cmp "noise/$file" "alone/$file" || fail "$file is another one"
done
run 1 reproduce mad --report alone
complains 'is of experiment "mad-noise"'

# again: nothing is left to run
lines=$(wc -l <noise/results.jsonl)
# shellcheck disable=SC2086
run 0 reproduce mad-noise --out noise --seeds 2 $tiny
[ "$(wc -l <noise/results.jsonl)" = "$lines" ] || fail "a job ran twice"
cmp noise/report.md alone/report.md || fail "the report is another one"

# one more seed: only its jobs run
# shellcheck disable=SC2086
run 0 reproduce mad-noise --out noise --seeds 3 $tiny
[ "$(wc -l <noise/results.jsonl)" = $((lines + 4)) ] || fail "not four more jobs"

# the command that gives these numbers, where they were run and by what
grep -q '^    mneme reproduce mad-noise --preset smoke --seeds 2 --steps 6 --set task.test=16' alone/report.md ||
    fail "no command in the report"
grep -q '^They ran on cpu, by commit [0-9a-f]' alone/report.md || grep -q 'by commit unknown' alone/report.md ||
    fail "no commit in the report"

# what would run and what it would cost, and nothing runs
# shellcheck disable=SC2086
run 0 reproduce mad-noise --out noise --seeds 4 --dry-run $tiny
says '^recall, kla  *4  *3  *6  *[0-9]*\.[0-9]*  *[0-9]*$'
says '^all, one process after the other  *[0-9]*$'
run 0 reproduce mqar-update --preset gpu --out none --dry-run --json --only model=gdn
json 'd["seconds_left"] is None and [(r["row"], r["runs"], r["done"]) for r in d["rows"]] == [("gdn, pilot", 3, 0), ("gdn", 3, 0)]'
json 'd["rows"][0]["steps_left"] == 3 * 1600 and d["rows"][1]["steps_left"] == 3 * 62560'
run 0 reproduce stack-depth --preset gpu --out none --dry-run --only depth=4 --only depth=12
says '^ou, 12  *2  *0'
[ "$(wc -l <"$work/out")" = 6 ] || fail "names that are numbers choose other runs"
[ "$(wc -l <noise/results.jsonl)" = $((lines + 4)) ] || fail "a dry run ran"
[ ! -e none ] || fail "a folder for a dry run"

# records of two machines, put together: the report without a run
mkdir pieces
head -n 5 noise/results.jsonl >pieces/results.jsonl
tail -n 5 noise/results.jsonl >>pieces/results.jsonl
# shellcheck disable=SC2086
run 0 reproduce mad-noise --out pieces --seeds 3 --collect $tiny
quiet
grep -q '^10 of 12 runs' pieces/report.md || fail "not what the pieces have"
[ "$(wc -l <pieces/results.jsonl)" = 10 ] || fail "collecting ran something"
run 2 reproduce mad-noise --out none --collect
complains '--collect needs the folder'

# sizes that an option changed are not those of the paper, whatever the preset
mkdir cut
run 0 reproduce mad-noise --preset full --out cut --collect --quiet --steps 3
grep -q 'smaller than published' cut/report.md || fail "a run that was cut is called full"
run 0 reproduce mad-noise --preset full --out cut --collect --quiet
grep -q 'sizes as published' cut/report.md || fail "a full one is not called full"

# a part of an experiment, and the rest in the same folder
# shellcheck disable=SC2086
run 0 reproduce mad-noise --out part --only "model=kla, no process noise" --only seed=0 --only task=copy $tiny
grep -q '^1 of 1 runs' part/report.md || fail "not one run"
# shellcheck disable=SC2086
run 0 reproduce mad-noise --out part --minutes 9 $tiny
grep -q '^4 of 4 runs' part/report.md || fail "not the rest"
[ "$(wc -l <part/results.jsonl)" = 4 ] || fail "a part ran twice"
run 1 reproduce mad-noise --out none --only model=klo
complains 'no run has all that --only asks for'
run 1 reproduce mad-noise --out none --only seed=0 --only seed=7
complains 'seed=7: no run has this'
run 1 reproduce mad-noise --out none --only model
complains 'give AXIS=LABEL'
run 2 reproduce mad-noise --minutes 0
complains 'minutes'
[ ! -e none ] || fail "a folder for nothing"

# without gnuplot a sentence
mkdir empty
path=$PATH
PATH=$work/empty
run 0 reproduce collision --out bare --quiet
PATH=$path
grep -q 'There are no figures: gnuplot is not installed' bare/report.md || fail "no sentence"

# what needs no training, and what looks inside trained models
run 0 reproduce forgetting --out forgetting --quiet --jobs 2
quiet
grep -q '^12 of 12 runs' forgetting/report.md || fail "not twelve runs"
tiny_maps="--steps 4 --set task.test=8 --set evaluate.batch=8 --set task.train=64 --quiet"
# shellcheck disable=SC2086
run 0 reproduce kla-maps --out maps $tiny_maps
quiet
[ "$(head -n 1 maps/maps-1.csv)" = "channel,output_at,value_of,weight" ] || fail "no map"
json_file() { python3 -c "import json,sys; d=json.load(open('$1')); assert $2" || fail "$1: $2"; }
if command -v python3 >/dev/null; then
    json_file maps/results.json 'all(r["result"]["maps"]["digits"] > 4 for r in d["runs"])'
fi
if command -v gnuplot >/dev/null; then
    rm maps/maps-1.svg
    run 0 plot maps
    says '^maps/maps-1.svg$'
    grep -q '</svg>' maps/maps-1.svg || fail "no picture of a map"
fi
run 0 reproduce ccq-alignment --out alignment --steps 2 --set task.test=4 --quiet
quiet
head -n 1 alignment/alignment-1.csv | grep -q '^layer,needle,whole,rest,gap' || fail "no gaps"
run 1 reproduce mad --checkpoint alignment
complains 'is for ccq-alignment'
run 1 reproduce ccq-alignment --checkpoint nowhere --out other-alignment
complains 'nowhere: there is no model.safetensors'

# mneme sweep
cat >jobs.json <<'END'
{"job": {"task": {"name": "mad-recall", "options": {"length": 16}, "train": 64, "test": 16},
         "model": {"hidden_size": 16, "num_hidden_layers": 1},
         "train": {"steps": 4, "batch": 16, "min_lr": 0}},
 "grid": {"model": {"gdn": {"model": {"layers": "gdn"}}, "bad": {"model": {"layers": "linear",
          "num_heads": 3}}}, "seed": [0, 1]}}
END
run 0 sweep --help
says '^usage: mneme sweep'
run 0 sweep jobs.json --dry-run
[ "$(wc -l <"$work/out")" = 4 ] || fail "not four jobs"
run 0 sweep jobs.json --dry-run --only model=gdn --only seed=1
[ "$(wc -l <"$work/out")" = 1 ] || fail "not one job"
says 'gdn seed=1'
run 1 sweep jobs.json --dry-run --only model=kla
complains 'no run has all that --only asks for'
run 1 sweep jobs.json --dry-run --only gdn
complains '[-]-only gdn: give AXIS=LABEL'
run 1 sweep jobs.json --jobs 2
complains '^2/4  gdn seed=[01]: score 0\.[0-9]*, '
complains '^failed: bad seed=0: .*head'
complains '2 of 4 jobs failed; jobs/results.jsonl says why'
[ "$(wc -l <jobs/results.jsonl)" = 4 ] || fail "not four records"
run 0 sweep jobs.json --set model.num_heads=2 -o other
says '^other/results.jsonl, runs.csv and summary.csv '
says 'standard error over seeds'
says '^best: '
[ "$(head -n 1 other/summary.csv | tr -cd , | wc -c)" -ge 8 ] || fail "no columns in summary.csv"
run 0 plot other --text --key score
says '(last .*)$'
[ "$(awk '{ if (length($0) > n) n = length($0) } END { print n }' "$work/out")" -le 80 ] || fail "over 80 columns"
run 1 plot other --text --x nothing
complains 'the axes of this sweep are step'

# a kept model, asked again: the numbers of its sweep
cat >kept.json <<'END'
{"job": {"task": {"name": "mad-recall", "options": {"length": 16}, "train": 64, "test": 24}, "keep": true,
         "model": {"hidden_size": 16, "num_hidden_layers": 1, "layers": "gdn"}, "evaluate": {"batch": 8},
         "train": {"steps": 60, "batch": 16, "lr": 0.02, "min_lr": 0, "warmup": 0}}}
END
run 0 sweep kept.json --jobs 1 --quiet
run 0 eval --model kept/models/* --task mad-recall --set length=16 --rows 24
says '^mad-recall: 24 samples, [0-9]* answers; loss '
says '^samples all right  *[01]\.[0-9]* +- 0\.[0-9]*$'
run 0 eval --model kept/models/* --task mad-recall --set length=16 --rows 24 --json
if command -v python3 >/dev/null; then
    json "all(abs(d['task'][k] - json.loads(open('$work/kept/results.jsonl').read())['result'][k]) < 1e-6
              for k in ('loss', 'token', 'example', 'sequence', 'macro'))"
    json "d['task']['token'] > 0.1 and d['task']['samples'] == 24"
fi
run 1 eval --model kept/models/* --task mad-recall --set vocab=64
complains 'the model knows 16'
run 1 eval --model kept/models/* --task mad-recal
complains 'did you mean'

# text of one's own as data, with the models kept
i=0
while [ $i -lt 200 ]; do
    echo "line $i says a thing, and another thing $((i * 7 % 13))."
    i=$((i + 1))
done >text.txt
cat >texts.json <<'END'
{"job": {"data": {"train": "text.txt"}, "model": {"hidden_size": 16, "num_hidden_layers": 1}, "keep": true,
         "train": {"steps": 6, "batch": 2, "context": 16, "eval_every": 3, "eval_batches": 4}},
 "grid": {"model": {"gdn": {"model": {"layers": "gdn"}}, "attention": {"model": {"layers": "attention"}}}, "seed": [0, 1]}}
END
run 0 sweep texts.json --jobs 2 -o texts/of/mine
says '^best: .*, loss [0-9.]* . [0-9.]* over 2 seeds'
[ "$(ls texts/of/mine/models | wc -l)" = 4 ] || fail "not four models kept"
run 0 generate --model "texts/of/mine/models/$(ls texts/of/mine/models | head -n 1)" line --tokens 3 --quiet
run 0 plot texts/of/mine --text
says 'gdn  loss  (last '
run 1 sweep texts.json --set data.train=absent.txt -o none

# models of text, asked for needles and by length: text of its own, a folder and a file of the user's
few="--jobs 2 --steps 2 --set model.hidden_size=16 --set model.num_hidden_layers=1 --set model.num_heads=1
     --set train.batch=1 --set train.eval_batches=1 --set ask.rows=2 --quiet"
# shellcheck disable=SC2086
run 0 reproduce needles --out needles $few
quiet
grep -q '^3 of 3 runs' needles/report.md || fail "not three runs"
grep -q '^| gdn+ccq | 2x | .* | Table 3, CCQ-Gated DeltaNet 500M, S-NIAH-1 8K |' needles/report.md ||
    fail "no number of the paper"
grep -q '^Nothing of this was asked' needles/report.md || fail "tables that were not asked"
mkdir needles-alone
cp needles/results.json needles-alone
run 0 reproduce needles --report needles-alone
cmp needles/report.md needles-alone/report.md || fail "the report is another one"
cp needles/report.md before.md
# shellcheck disable=SC2086
run 0 reproduce needles --out needles --collect $few
cmp needles/report.md before.md || fail "collecting gives another report"
[ "$(wc -l <needles/results.jsonl)" = 3 ] || fail "a job ran twice"
run 1 reproduce needles --preset gpu --dry-run
complains 'this preset trains on text of yours: --data FILE'
run 1 reproduce needles --preset gpu --data nowhere --dry-run
complains 'nowhere: there is no such file or folder'
run 1 reproduce needles --data needles --dry-run
complains 'needles: is neither a folder of mneme prepare'
run 1 reproduce mad --data text.txt --dry-run
complains '--data is for experiments that train on text'
i=0
while [ $i -lt 12 ]; do
    i=$((i + 1))
    cat text.txt
done >long.txt
mkdir corpus
run 0 tokenizer train text.txt --vocab-size 400 -o corpus/tokenizer.json --quiet
run 0 prepare text.txt -o corpus/train --tokenizer corpus/tokenizer.json --quiet
run 0 prepare long.txt -o corpus/valid --tokenizer corpus/tokenizer.json --quiet
cp text.txt corpus/valid.txt
few="$few --set train.dtype=f32 --set train.accumulate=1 --set train.context=64 --only seed=0"
# shellcheck disable=SC2086
run 0 reproduce needles --preset gpu --data corpus --out trained --only model=gla+ccq --set keep=true --set ask.tokens=41000 $few
grep -q '^1 of 1 runs' trained/report.md || fail "not one run"
grep -q ' --data corpus' trained/report.md || fail "not the command that gives these numbers"
run 0 eval --model trained/models/* --data corpus/valid --split train --lengths 1024,20480 --max-tokens 41000 --json
if command -v python3 >/dev/null; then
    run_of() { json "all(abs(d$1 - json.loads(open('$work/trained/results.jsonl').read())['result']$2) < 1e-6 for _ in [0])"; }
    run_of "['perplexity'][0]['loss']" "['perplexity']['1x']['loss']"
    run_of "['perplexity'][1]['loss']" "['perplexity']['20x']['loss']"
    run 0 eval --model trained/models/* --task s-niah-2 --set budget=1024 --set essays=corpus/valid.txt --rows 2 --json
    run_of "['task']['loss']" "['tasks']['s-niah-2']['1x']['loss']"
fi
# shellcheck disable=SC2086
run 0 reproduce needles --data long.txt --out bytes --only model=gdn $few
grep -q '^1 of 1 runs' bytes/report.md || fail "not one run of bytes"

run 2 reproduce
complains 'name an experiment'
run 1 reproduce madd
complains 'did you mean "mad"'
run 2 reproduce mad --preset tiny
complains 'smoke, cpu, gpu or full'
run 1 reproduce mad --out x --set train.lrr=1
complains 'did you mean "lr"'
[ ! -e x ] || fail "a folder for a run that cannot be"
run 1 sweep nowhere.json
complains 'nowhere.json: no such file'
for bad in "--jobs 0" "--seeds x" "--steps" "--nonsense"; do
    # shellcheck disable=SC2086
    run 2 reproduce mad $bad
    complains "${bad%% *}"
done
