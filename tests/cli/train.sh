#!/bin/sh
# mneme train: from text to a model; what it refuses; stopped, killed and resumed to the same bits;
# damaged checkpoints, other data, numbers that overflow, and disks that are full.
set -eu
. "$2/tests/cli/support/expect.sh"

text=$work/text.txt
i=0
while [ $i -lt 300 ]; do
    printf 'line %d says a thing, and another thing %d.\n\n' $i $((i * 7 % 13))
    i=$((i + 1))
done >"$text"
small="--set data.train=$text --set model.layers=gdn --set model.hidden_size=16 --threads 1
    --set train.batch=2 --set train.context=16 --set train.eval_batches=4 --quiet"
new="train $small --set train.steps=40 --set train.checkpoint_every=10 --set train.eval_every=20"

# the bytes of all files but the logs, which hold times
same_run() {
    for name in model.safetensors optimizer.safetensors progress.json config.json tokenizer.json; do
        cmp -s "$1/last/$name" "$2/last/$name" || fail "$3: $name differs"
    done
    cmp -s "$1/best/model.safetensors" "$2/best/model.safetensors" || fail "$3: best differs"
}

# metrics.jsonl without the fields that are times
losses() { sed -e 's/"seconds":[^,]*,//' -e 's/,"tokens_per_second":[^,]*//' "$1/metrics.jsonl"; }

# what would be done
run 0 train $small --dry-run --set out="$work/dry"
complains 'memory .* MiB predicted'
complains 'held out, chars'
[ ! -e "$work/dry" ] || fail "--dry-run made the folder"
# ... of a model that would take gigabytes, within little memory
if [ "$(uname)" = Linux ] && command -v python3 >/dev/null 2>&1 && [ -z "${MNEME_SANITIZED-}" ]; then
    python3 -c 'import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stderr=subprocess.DEVNULL).returncode
most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
sys.exit(code or most > 300)' "$mneme" train "$text" --size 180m --dry-run --threads 1 ||
        fail "--dry-run of 180m parameters takes more than 300 MiB"
fi

# from text to a model, all of it through a file and changes
cat >"$work/config.json" <<END
{"model": {"layers": "attention", "hidden_size": 16}, "data": {"train": "$text"},
 "train": {"steps": 40, "batch": 2, "context": 16, "eval_every": 20, "checkpoint_every": 10}}
END
run 0 train "$work/config.json" --set model.layers=gdn --set train.eval_batches=4 --threads 1 \
    --set out="$work/whole"
says 'best on held-out data'
says 'mneme generate --model'
complains 'training: 40 steps in .* loss [0-9.]* valid [0-9.]*$'
for name in last/config.json last/tokenizer.json best/model.safetensors train.json metrics.jsonl; do
    [ -s "$work/whole/$name" ] || fail "no $name"
done
memory=$(sed -n 's/.*memory \([0-9]*\) MiB (predicted \([0-9]*\))/\1 -le \2/p' "$work/out")
[ $memory ] || fail "more memory than predicted: not $memory"
[ "$(grep -c '"loss"' "$work/whole/metrics.jsonl")" = 4 ] || fail "not 4 lines of losses"
[ "$(grep -c '"valid_loss"' "$work/whole/metrics.jsonl")" = 2 ] || fail "not 2 evaluations"
run 0 $new --set out="$work/json" --json
json "d['steps'] == 40 and d['loss'] > 0 and d['valid_loss'] > 0 and d['parameters'] > 0"
same_run "$work/whole" "$work/json" "the same run twice"

# a text and nothing else: what is chosen is said, the run is named after the text
(cd "$work" && "$mneme" train text.txt --steps=20 --threads 1 >out 2>err) || fail "train text.txt"
command="mneme train text.txt"
complains '^chosen .* of text'
complains '[0-9] x gdn, width'
says 'nats a character'
says '  mneme generate --model runs/text '
[ -s "$work/runs/text/last/model.safetensors" ] || fail "no runs/text"
grep -q '"commit"' "$work/runs/text/settings.json" || fail "settings without commit"
grep -q '"weight_decay"' "$work/runs/text/settings.json" || fail "settings without defaults"
# it goes on from any folder, by options alone
(cd / && "$mneme" train --resume "$work/runs/text" --steps 30 --threads 1 --quiet >"$work/out" 2>"$work/err") ||
    fail "resumed from another folder"
says 'nats a character'
says "^the model is in $work/runs/text/best (lowest held-out loss) and $work/runs/text/last\$"
# the loss that is said is the mean of the last ten steps
run 0 train "$text" --layers gdn --size 30k --steps 25 --context 16 --batch 2 --set train.log_every=1 --threads 1 \
    --out "$work/ten-last" --quiet
said=$(sed -n 's/^loss \([0-9.]*\), .*/\1/p' "$work/out")
sed -n 's/.*"loss":\([0-9.]*\),.*/\1/p' "$work/ten-last/metrics.jsonl" | tail -n 10 |
    awk -v said="$said" '{ sum += $1 } END { d = sum / NR - said; exit !(NR == 10 && d * d < 1e-8) }' ||
    fail "the loss that is said is not that of the last ten steps"
# the same once more takes another name, and a run is a model wherever one is wanted
(cd "$work" && "$mneme" train text.txt --dry-run 2>err) || fail "train text.txt --dry-run"
complains 'to runs/text-2$'
run 0 generate --model "$work/runs/text" line --tokens 5 --quiet
run 0 eval --model "$work/runs/text" --text "$text" --max-tokens 200 --lengths 32 --quiet
# its weights on another text: the loss begins where it ended
sed 's/thing/matter/g' "$text" >"$work/other.txt"
run 0 train "$work/other.txt" --from "$work/runs/text" --steps 1 --lr 1e-9 --set train.min_lr=1e-9 --threads 1 \
    --out "$work/deep/er/from" --json --quiet
json "d['loss'] < 3.0"
run 0 train "$work/other.txt" --layers "attention, gdn" --size 300k --dry-run --threads 1
complains ' x attention, gdn, width'
# a size below what the smallest width and two layers have gives these, not a default
run 0 train "$text" --layers kla --size 20k --dry-run --threads 1
complains '2 x kla, width 32,'
# a model whose places end is not given longer rows than it has places
run 0 train "$text" --layers "attention, gdn" --size 30k --context 24 --steps 1 --batch 2 --threads 1 --quiet \
    --out "$work/short"
run 0 train "$work/other.txt" --from "$work/short" --steps 1 --threads 1 --quiet --out "$work/short-2"
run 2 train "$text" --size 10q
complains 'size needs a number of parameters'
run 2 train --resume "$work/runs/text" --size 10m
complains 'a run has its model'
run 1 train "$text" --set warmup=3 --dry-run
complains 'unknown key "warmup", did you mean "train.warmup"'
run 1 train "$text" --tokenizer byte --dry-run
complains 'byte: no such file; a tokenizer is bytes, chars, or'
run 1 train "$text" --layers kla --set model.num_heads=2 --dry-run
complains 'unknown key "num_heads"'
! grep -q num_beams "$work/err" || fail "a key that nothing here depends on is suggested"
run 2 train "$text" --steps some
complains 'steps needs a whole number'
printf '{"text": "a\\u0000b"}\n' >"$work/zero.jsonl"
run 1 train "$work/zero.jsonl"
complains 'line 1.*u0000, a zero byte'
run 1 train "$work/absent.txt"
complains 'absent.txt: No such file'

# on a narrow terminal the bar is cut, the loss is not
if command -v python3 >/dev/null 2>&1; then
    python3 - "$mneme" "$text" "$work/narrow" <<'END' || fail "the bar on a narrow terminal"
import fcntl, os, pty, struct, sys, termios
os.environ.update(TERM="xterm", NO_COLOR="1")
child, terminal = pty.fork()
if child == 0:
    os.execv(sys.argv[1], ["mneme", "train", sys.argv[2], "--steps", "4000", "--threads", "1", "--layers", "gdn",
                           "--set", "model.hidden_size=16", "--set", "model.num_hidden_layers=1", "--batch", "2",
                           "--context", "16", "--out", sys.argv[3]])
fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
seen = b""
while True:
    try:
        piece = os.read(terminal, 4096)
    except OSError:
        break
    if not piece:
        break
    seen += piece
status = os.waitpid(child, 0)[1]
bars = [bar.split(b"\r")[0].split(b"\n")[0] for bar in seen.split(b"\r\x1b[K")[1:]]
bars = [bar for bar in bars if bar.startswith(b"training:") and b" in " not in bar]
late = [bar for bar in bars if b"left" in bar]
assert status == 0, seen
assert all(len(bar) < 60 for bar in late), late
assert late and all(b"loss" in bar for bar in late), bars
END
fi

# mistakes name what was meant
run 2 train
complains 'configuration'
run 2 train --stes x
complains 'is no option'
run 2 train --set
complains 'needs a value'
run 2 train "$work/config.json" --resume "$work/whole"
complains 'a run has its own'
run 2 train --resume "$work/whole" --overwrite
complains 'one of them'
run 2 train $small --threads 0
complains 'threads needs a whole number from 1 to 4096, not "0"'
run 1 train $small --set train.stpes=5 --set out="$work/x"
complains 'stpes.*did you mean "steps"'
run 1 train $small --set model.hiden_size=5 --set out="$work/x"
complains 'did you mean "hidden_size"'
run 1 train $small --set modle.layers=gdn --set out="$work/x"
complains 'did you mean "model"'
run 1 train $small --set train.steps --set out="$work/x"
complains 'section.key=value'
run 1 train $small --set train.steps.x=3 --set train.steps=5 --set train.steps.y=3
complains 'no object'
run 1 train $small --set data.train="$work/absent.txt" --set out="$work/x"
complains 'absent.txt: no such file'
run 1 train "$work/absent.json"
complains 'absent.json: no such file'
printf '{"model": ' >"$work/broken.json"
run 1 train "$work/broken.json"
complains 'broken.json'
run 1 train $small --set model.layers=gdm --set out="$work/x"
complains 'gdn'
[ ! -e "$work/x" ] || fail "a mistake made a folder"

# a folder that holds a run, a file, a folder that may not be written
run 1 $new --set out="$work/whole"
complains 'holds a run; --resume'
cp -r "$work/whole" "$work/over"
run 0 $new --set out="$work/over" --overwrite --set model.hidden_size=32 --set train.steps=20
grep -q '"hidden_size": 32' "$work/over/last/config.json" || fail "--overwrite kept the old model"
[ "$(ls "$work/over/checkpoints")" = step-00000020 ] || fail "--overwrite left old checkpoints"
[ "$(ls "$work/over" | grep -c tfevents)" = 1 ] || fail "--overwrite left old event files"
run 1 $new --set out="$text"
complains 'is a file'
run 1 $new --set out="$text/run"
complains 'cannot make the folder'
if [ "$(id -u)" != 0 ]; then
    mkdir "$work/closed"
    chmod 555 "$work/closed"
    run 1 $new --set out="$work/closed"
    complains 'closed'
    run 1 $new --set out="$work/closed/run"
    complains 'closed/run: cannot make the folder'
    chmod 755 "$work/closed"
else
    run 1 $new --set out=/proc/mneme
    complains '/proc/mneme: cannot make the folder'
fi

# a finished run goes on with more steps: to the bits of one that had them from the start
run 0 train --resume "$work/whole" --quiet
says 'has all its 40 steps'
long="--set train.schedule=constant --set train.keep_every=10"
run 0 $new $long --set train.steps=60 --set out="$work/sixty"
run 0 $new $long --set out="$work/more"
run 0 train --resume "$work/more" --set train.steps=60 --quiet --threads 1
same_run "$work/sixty" "$work/more" "40 steps and 20 more"
losses "$work/sixty" >"$work/a"
losses "$work/more" >"$work/b"
cmp -s "$work/a" "$work/b" || fail "metrics of a resumed run differ"
run 0 train --resume "$work/more" --quiet
says 'has all its 60 steps'
sed -n 's/.*"seconds":\([0-9.e-]*\).*/\1/p' "$work/more/metrics.jsonl" >"$work/a"
sort -g "$work/a" | cmp -s - "$work/a" || fail "seconds go back after resuming"

# from a checkpoint, from a link; by another path
run 0 train --resume "$work/more/checkpoints/step-00000020" --quiet --threads 1
same_run "$work/sixty" "$work/more" "resumed from step 20"
losses "$work/more" >"$work/b"
losses "$work/sixty" | cmp -s - "$work/b" || fail "metrics doubled"
run 0 train --resume "$work/more/best" --quiet --threads 1
same_run "$work/sixty" "$work/more" "resumed from best"
(cd "$work/more" && "$mneme" train --resume last --set train.steps=61 --quiet >/dev/null 2>&1) ||
    fail "resume last inside the run"
[ -e "$work/more/checkpoints/step-00000061" ] || fail "no step 61"
mv "$work/more" "$work/moved"
run 1 train --resume "$work/moved" --set out="$work/elsewhere" --quiet
complains 'stays in its folder'
run 0 train --resume "$work/moved" --set train.steps=62 --quiet --threads 1
[ -e "$work/moved/last/done" ] && [ ! -e "$work/more" ] || fail "a moved run goes on elsewhere"
run 1 $new --set out=
complains 'out is empty'
run 1 train --resume "$work/text.txt"
complains 'is no folder of a run'
run 1 train --resume "$work/absent"
complains 'absent: No such file'

# Ctrl-C and kill: a checkpoint, status 130, and the same bits later
step_of() { basename "$(readlink "$1/last")" | sed 's/step-0*//'; }
endless="$new $long --set train.steps=100000 --set train.checkpoint_every=100000
    --set train.eval_every=0 --set train.log_every=1"
for signal in INT TERM; do
    run_folder=$work/stop$signal
    "$mneme" $endless --set out="$run_folder" >"$work/out" 2>"$work/err" &
    victim=$!
    n=0
    until [ "$(cat "$run_folder/metrics.jsonl" 2>/dev/null | wc -l)" -gt 3 ] || [ $n -gt 2400 ]; do
        sleep 0.05
        n=$((n + 1))
    done
    kill -$signal $victim
    status=0
    wait $victim || status=$?
    command="stopped by $signal"
    [ $status = 130 ] || fail "exit status $status after $signal, expected 130"
    complains 'stopped; mneme train --resume .* goes on'
    steps=$(step_of "$run_folder")
    [ "$(tail -1 "$run_folder/metrics.jsonl" | sed 's/{"step":\([0-9]*\).*/\1/')" = "$steps" ] ||
        fail "the checkpoint is not of the last step"
done
end=$((steps + 10))
run 0 train --resume "$run_folder" --set train.steps=$end --quiet --threads 1
run 0 $new $long --set train.checkpoint_every=100000 --set train.eval_every=0 \
    --set train.steps=$end --set train.log_every=1 --set out="$work/unstopped"
same_run "$work/unstopped" "$run_folder" "stopped and resumed"

# killed at any moment: never more than the steps since the last checkpoint are lost, which is
# whole, and the end has the same bits
killed="$new --set train.steps=120 --set train.checkpoint_every=12 --set train.log_every=1
    --set train.eval_every=12"
run 0 $killed --set out="$work/straight"
"$mneme" $killed --set out="$work/killed" >"$work/out" 2>"$work/err" &
kills=0
for delay in 0.02 0.05 0.11 0.17 0.23 0.08 0.31 0.14 0.26 0.4; do
    victim=$!
    sleep $delay
    kill -9 $victim 2>/dev/null && kills=$((kills + 1))
    wait $victim 2>/dev/null || true
    if [ -e "$work/killed/last" ]; then
        logged=$(tail -1 "$work/killed/metrics.jsonl" | sed 's/{"step":\([0-9]*\).*/\1/')
        kept=$(step_of "$work/killed")
        case $logged in *[!0-9]* | '') logged=$kept ;; esac    # the last line is half written
        [ $((logged - kept)) -le 12 ] || fail "killed at step $logged, $kept is the checkpoint"
        [ -s "$work/killed/last/done" ] || fail "last is no whole checkpoint"
    fi
    [ -s "$work/killed/train.json" ] || break
    "$mneme" train --resume "$work/killed" --quiet --threads 1 >"$work/out" 2>"$work/err" &
done
wait $! || true
if [ -s "$work/killed/train.json" ]; then run 0 train --resume "$work/killed" --quiet --threads 1
else run 0 $killed --set out="$work/killed"
fi
same_run "$work/straight" "$work/killed" "killed $kills times"
losses "$work/straight" >"$work/a"
losses "$work/killed" | cmp -s - "$work/a" || fail "metrics of a killed run differ or are doubled"
[ -z "$(ls -A "$work/killed/checkpoints" | grep '^\.')" ] || fail "half a checkpoint is left"

# damage: the file is named, nothing is written, another checkpoint can be named
run 0 $new $long --set train.steps=20 --set out="$work/ten"
for name in config.json model.safetensors optimizer.safetensors progress.json tokenizer.json done; do
    for way in empty cut zero missing; do
        rm -rf "$work/bad"
        cp -r "$work/ten" "$work/bad"
        file=$work/bad/checkpoints/step-00000020/$name
        size=$(wc -c <"$file")
        case $way in
        empty) : >"$file" ;;
        cut) head -c $((size / 2)) "$work/ten/last/$name" >"$file" ;;
        zero) head -c "$size" /dev/zero >"$file" ;;
        missing) rm "$file" ;;
        esac
        run 1 train --resume "$work/bad" --set train.steps=30 --quiet --threads 1
        complains "$name\|no complete checkpoint"
        cmp -s "$work/ten/metrics.jsonl" "$work/bad/metrics.jsonl" || fail "metrics were cut"
    done
done
run 0 train --resume "$work/bad/checkpoints/step-00000010" --quiet --threads 1
same_run "$work/ten" "$work/bad" "from the checkpoint before the damaged one"
printf '{"step": 1' >>"$work/bad/metrics.jsonl"    # as if killed in the middle of a line
run 0 train --resume "$work/bad" --set train.steps=21 --quiet --threads 1
printf 'no json\n' >"$work/bad/metrics.jsonl"
run 1 train --resume "$work/bad" --set train.steps=22 --quiet --threads 1
complains 'metrics.jsonl'

# another model, other data, data that shrinks or goes away
again="train --resume $work/ten --set train.steps=30 --quiet --threads 1"
run 1 $again --set model.hidden_size=32
complains 'differs from the configuration.s in hidden_size'
run 1 $again --set data.tokenizer=bytes
complains 'other data, or with another tokenizer'
run 1 $again --set train.seed=2
complains 'train.seed 1337, not 2'
mv "$text" "$work/kept.txt"
run 1 $again
complains 'text.txt: no such file'
head -c 5000 "$work/kept.txt" >"$text"
run 1 $again
complains 'other data'
mv "$work/kept.txt" "$text"
run 0 $again
[ "$(step_of "$work/ten")" = 30 ] || fail "refusals spoilt the run"

# tokens without a vocabulary, or with ids beyond it
run 1 train $small --set data.tokenizer="$work/whole/last/tokenizer.json" --set model.vocab_size=3 \
    --set out="$work/x"
complains 'vocab_size is 3'
python3 -c 'import array, sys
array.array("H", [1, 2, 3, 500] * 200).tofile(open(sys.argv[1], "wb"))' "$work/ids.bin" 2>/dev/null &&
{
    run 1 train $small --set data.train="$work/ids.bin" --set out="$work/x"
    complains 'vocab_size'
    run 1 train $small --set data.train="$work/ids.bin" --set model.vocab_size=500 --set out="$work/x"
    complains 'ids.bin.*500'
    run 0 train $small --set data.train="$work/ids.bin" --set model.vocab_size=501 \
        --set train.steps=2 --set out="$work/ids"
    [ ! -e "$work/ids/last/tokenizer.json" ] || fail "a tokenizer from nowhere"
}

# what mneme prepare held out is what is validated on
run 0 prepare "$text" -o "$work/prepared" --tokenizer chars --separator '\n\n' --valid 0.2 --quiet
run 0 train $small --set data.train="$work/prepared" --set train.steps=2 --set out="$work/prep"
run 0 train $small --set data.train="$work/prepared" --dry-run
complains "$(sed -n 's/.*"tokens": \([0-9]*\).*/\1/p' "$work/prepared/index.json" | sed -n 2p) held out"

# a run without validation, one with its own validation file, a batch larger than the data
run 0 train $small --set train.steps=2 --set data.valid_part=0 --set out="$work/novalid"
says '^loss [0-9.]*;'
[ ! -e "$work/novalid/best" ] || fail "a best model without validation"
run 0 train $small --set train.steps=2 --set data.valid="$text" --set out="$work/valid"
says 'best on held-out data'
run 1 train $small --set train.steps=2 --set data.valid_part=0.0005 --set out="$work/x"
complains 'data.valid_part'
run 1 train --set data.valid="$text" --set model.layers=gdn --set model.hidden_size=16 --quiet
complains 'data.train.* no file'
head -c 300 "$text" >"$work/tiny.txt"
run 0 train $small --set train.steps=2 --set data.train="$work/tiny.txt" --set train.batch=1000 \
    --set out="$work/tiny"

# patience: at a learning rate of 0 nothing gets better after the first evaluation
run 0 train $small --set train.lr=0 --set train.min_lr=0 --set train.steps=1000 \
    --set train.eval_every=3 --set train.patience=2 --set train.checkpoint_every=0 \
    --set out="$work/patient"
[ "$(step_of "$work/patient")" = 9 ] || fail "patience ended at step $(step_of "$work/patient")"
[ "$(basename "$(readlink "$work/patient/best")")" = step-00000003 ] || fail "best is not step 3"
run 0 train --resume "$work/patient" --quiet
says 'no patience left'
run 0 train --resume "$work/patient" --set train.patience=3 --quiet --threads 1
[ "$(step_of "$work/patient")" = 12 ] || fail "more patience ended at another step than 12"

# numbers that overflow: named, status 1, checkpoints as they were
run 1 $new --set train.lr=1e6 --set train.clip=0 --set train.warmup=0 --set train.checkpoint_every=1 \
    --set train.weight_decay=0 --set train.lr=1e30 --set out="$work/nan"
complains 'step [0-9]*.*: the loss is .*lower train.lr'
complains 'parameter [a-z_.0-9]* is not finite\|batch [0-9]*'
[ -s "$work/nan/last/done" ] || fail "no checkpoint from before the overflow"

# a file that may not grow: named, status 1, and the checkpoint before is as it was
run 0 $new $long --set train.steps=10 --set out="$work/full"
status=0
(ulimit -f 16 && exec "$mneme" train --resume "$work/full" --set train.steps=20 --quiet --threads 1) \
    >"$work/out" 2>"$work/err" || status=$?
command="train with ulimit -f 16"
[ $status = 1 ] || fail "exit status $status at the limit of a file's size, expected 1"
complains '[a-z]*.safetensors: cannot write: File too large; the checkpoints before it are'
[ -z "$(ls -A "$work/full/checkpoints" | grep '^\.')" ] || fail "half a checkpoint is left"
run 0 train --resume "$work/full" --set train.steps=20 --quiet --threads 1
run 0 $new $long --set train.steps=20 --set out="$work/notfull"
same_run "$work/notfull" "$work/full" "after a file that could not grow"

# the same on a full disk
mkdir "$work/disk"
if mount -t tmpfs -o size=300k tmpfs "$work/disk" 2>/dev/null; then
    trap 'umount "$work/disk"; rm -rf "$work"' EXIT
    run 1 $new $long --set train.steps=100 --set out="$work/disk/run"
    complains 'run/.*: No space left on device'
    mount -o remount,size=3m "$work/disk"
    run 0 train --resume "$work/disk/run" --set train.steps=100 --quiet --threads 1
    run 0 $new $long --set train.steps=100 --set out="$work/dry"
    same_run "$work/dry" "$work/disk/run" "after a full disk"
else
    echo "skipped: a full disk (mount is not permitted here)"
fi

# two processes do not train one run
"$mneme" $endless --set out="$work/both" >/dev/null 2>&1 &
victim=$!
n=0
until [ -s "$work/both/metrics.jsonl" ] || [ $n -gt 2400 ]; do sleep 0.05; n=$((n + 1)); done
run 1 train --resume "$work/both" --quiet --threads 1
complains 'another process trains this run'
kill -9 $victim
wait $victim 2>/dev/null || true
