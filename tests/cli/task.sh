#!/bin/sh
# mneme task: the list, descriptions, and samples that do not depend on what was asked before.
set -eu
. "$2/tests/cli/support/expect.sh"

# the list: every task with a sentence, and each one describes itself
run 0 task
quiet
says '^  mad-recall  *[a-z]'
tasks=$(awk '{ print $1 }' "$work/out")
[ "$(echo "$tasks" | wc -l)" = 28 ] || fail "not 28 tasks: $tasks"
[ "$(echo "$tasks" | sort | uniq -d)" = "" ] || fail "tasks listed twice"
for task in $tasks; do
    run 0 task "$task"
    quiet
    says "^$task - "
    says '^metric '
    says '^options$'
    run 0 task "$task" --json
    json "d['name'] == '$task' and d['options'] and all(o['about'] for o in d['options'])"
done
run 0 task --json
json "len(d['tasks']) == 28 and sum(s['suite'] == 'mad' for t in d['tasks'] for s in t['settings']) == 66"

# samples: lines and one document hold the same, whatever the number asked for
run 0 task mad-recall --dump 3 --seed 5 --split test
quiet
[ "$(wc -l <"$work/out")" = 3 ] || fail "not 3 lines"
sed -n 3p "$work/out" >"$work/third"
run 0 task mad-recall --dump 1 --first 2 --seed 5 --split test
cmp "$work/out" "$work/third" || fail "a sample depends on those before it"
run 0 task mad-recall --dump 3 --seed 5 --split test --json
json "d['task'] == 'mad-recall' and d['vocab'] == 16 and d['length'] == 127 and d['seed'] == 5"
json "[len(s['input']) for s in d['samples']] == [127] * 3 == [len(s['target']) for s in d['samples']]"
json "all(t == -100 or 8 <= t < 16 for s in d['samples'] for t in s['target'])"
cp "$work/out" "$work/before"
run 0 task mad-recall --dump 3 --seed 6 --split test --json
if cmp -s "$work/before" "$work/out"; then fail "the seed is not heard"; fi
run 0 task mad-recall --dump 2 --split train --set vocab=32 --set length=64 --json
json "d['vocab'] == 32 and all(-100 not in s['target'] and len(s['input']) == 63 for s in d['samples'])"
run 0 task mad-noisy --dump 1 --setting vocab-80 --json
json "d['vocab'] == 80"
run 0 task mqar --dump 1 --setting 256-16 --set pairs=8 --json
json "sum(t != -100 for t in d['samples'][0]['target']) == 8 and d['length'] == 256"
run 0 task a5 --dump 2 --set steps=4 --json
json "all(s['input'][0] == 61 and len(s['target']) == 5 for s in d['samples'])"

# vectors
run 0 task collision --dump 2 --json
json "d['features'] == 33 and all(len(x) == 33 for s in d['samples'] for x in s['input'])"
json "all(len(s['input']) == len(s['target']) for s in d['samples'])"
run 0 task crowding --dump 1 --set writes=16 --json
json "all(abs(sum(v * v for v in x[1:65]) - 1) < 1e-5 for x in d['samples'][0]['input'])"

# text
i=0
while [ $i -lt 300 ]; do
    printf 'This is sentence %d of the essays, and it is not long. Another "one" follows!\n' $i
    i=$((i + 1))
done >"$work/essays.txt"
run 0 task niah-multiquery --dump 2 --set "essays=$work/essays.txt" --json
quiet
json "all(len(s['answers']) == 4 and s['answer'] == ', '.join(s['answers']) for s in d['samples'])"
json "all(a in s['prompt'] for s in d['samples'] for a in s['answers'])"
json "all(bytes(s['input'][:s['prompt_tokens']]).decode() == s['prompt'] for s in d['samples'])"
json "all(bytes(t for t in s['target'] if t >= 0).decode() == ' ' + s['answer'] for s in d['samples'])"
run 0 task s-niah-1 --dump 1 --set budget=1024 --json
json "d['samples'][0]['prompt'].startswith('A special magic number is hidden within')"
run 0 task mad-compress --speed
says 'tokens a second'

# beyond the end of a split of finite size
run 0 task a5 --set steps=3 --split test --dump 1 --first 21599
quiet
run 0 task a5 --set steps=3 --split test --dump 2 --first 21599
complains '21600 samples: those from 21600 on are the first ones again'

# mistakes
run 1 task mad-recal
complains 'did you mean "mad-recall"'
run 1 task mad-recall --dump 1 --set vocb=3
complains 'did you mean "vocab"'
run 1 task mad-recall --dump 1 --set length=7
complains 'length is 7; it must be even'
run 1 task mad-recall --dump 1 --set vocab=many
complains 'vocab'
run 1 task mad-recall --setting baselin
complains 'no setting "baselin"'
run 1 task niah-single-2 --dump 1
complains 'essays=FOLDER'
run 2 task mad-recall --dump 0
complains 'dump'
run 2 task mad-recall --dump
complains 'needs a value'
run 2 task mad-recall --split dev
complains 'train, valid or test'
run 2 task mad-recall --seed x
complains 'seed'
run 2 task mad-recall --set vocab
complains 'KEY=VALUE'
run 2 task --dump 3
complains 'name a task'
run 2 task mad-recall mad-copy
complains 'mad-copy'
