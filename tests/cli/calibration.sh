#!/bin/sh
# mneme eval --calibration and generate --abstain: tables and documents of a text and of a task,
# calibrators that are one model's, and what is said below a confidence.
set -eu
. "$2/tests/cli/support/expect.sh"
LC_ALL=C
export LC_ALL

run 0 demo --steps 12 --seed 3 --out "$work/d" --quiet
says '^questions that cannot be answered yet, told from others by bayes$'
says '^  AUROC [01]\.[0-9]* by entropy'
says 'where is the [a-z]*?.* doubt [01]\.[0-9]'
m="$work/d/bayes"

# a text: half of the windows fit, half are reported
run 0 eval --model "$m" --calibration --text "$work/d/stories.txt" --lengths 64 --rows 16 --quiet \
    --save-calibration "$m/calibration.json"
says '^1024 answers, [01]\.[0-9]* of them wrong'
for row in entropy confidence variance prior direction logdet noise gated chosen all both; do
    says "^$row  *[01]\.[0-9]*  *[01]\.[0-9]*$"
done
says '^expected calibration error [01]\.[0-9]*$'
run 0 eval --model "$m" --calibration --text "$work/d/stories.txt" --lengths 64 --rows 16 --json
json "set(d['calibration']['auroc']) == set(d['calibration']['aurc'])"
json "all(0 <= x <= 1 for x in d['calibration']['auroc'].values())"
json "sum(b['n'] for b in d['calibration']['calibration']['bins']) == d['calibration']['asked'] == 1024"
json "d['calibration']['calibrator'] == json.load(open('$m/calibration.json'))"

# a model without beliefs has its entropy
run 0 eval --model "$work/d/attention" --calibration --text "$work/d/stories.txt" --lengths 64 \
    --rows 16 --json --save-calibration "$work/other.json"
json "set(d['calibration']['auroc']) == {'entropy', 'confidence'}"

# a task
run 0 eval --model "$m" --calibration --task stories --set length=96 --rows 16 --quiet
says ' of them wrong; loss '

# below a confidence nothing is said, and at 0 everything is
q="anna puts the lamp in the mill. where is the lamp?"
run 0 generate --model "$m" --abstain 1 --tokens 3 --quiet "$q"
says '^I do not know$'
run 0 generate --model "$m" --abstain 1 --tokens 3 --json "$q"
json "d['continuations'][0]['text'] == 'I do not know'"
json "d['continuations'][0]['stopped'] == 'abstained' and 0 <= d['continuations'][0]['confidence'] < 1"
run 0 generate --model "$m" --abstain 1e-9 --tokens 3 --json "$q"
json "d['continuations'][0]['stopped'] == 'length' and len(d['continuations'][0]['tokens']) == 3"
run 0 generate --model "$m" --abstain 1e-9 --calibration "$work/other.json" --tokens 1 --quiet "$q"

# mistakes are named
run 1 generate --model "$work/d/attention" --abstain 0.5 --tokens 1 --quiet "$q"
complains 'calibration.json'
run 1 generate --model "$work/d/attention" --abstain 0.5 --calibration "$m/calibration.json" \
    --tokens 1 --quiet "$q"
complains "another model's"
run 2 generate --model "$m" --abstain 2 "$q"
run 2 generate --model "$m" --calibration "$m/calibration.json" "$q"
run 2 eval --model "$m" --text "$work/d/stories.txt" --save-calibration "$work/c.json"
complains 'needs --calibration'
run 2 eval --model "$m" --calibration
