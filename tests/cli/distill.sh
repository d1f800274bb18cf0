#!/bin/sh
# mneme train with a teacher: a layer of a gdn is replaced and learns from it, layer by layer and by its
# predictions; what is not to learn stays bit for bit, and a run that stops goes on with the same bits.
set -eu
. "$2/tests/cli/support/expect.sh"
if ! command -v python3 >/dev/null 2>&1; then
    echo "skipped: comparing needs python3"
    exit 0
fi
cd "$work"
i=0
while [ $i -lt 120 ]; do
    echo "the cat $i sat on the mat and saw $((i * 7 % 13)) birds fly over the old stone wall."
    i=$((i + 1))
done >book.txt
common="--quiet --threads 1 --set train.batch=4 --set train.context=32 --set train.eval_every=0
    --set train.log_every=1 --set data.tokenizer=bytes
    --set train.warmup=2 --set train.lr=0.01 --set train.min_lr=0.001 --set train.tensorboard=false"
# shellcheck disable=SC2086
run 0 train book.txt $common --layers 'gdn*2' --out teacher --set model.hidden_size=32 \
    --set model.num_hidden_layers=2 --set model.num_heads=2 --set train.steps=30
run 0 graft teacher/last student --layers 1 --to bayes --quiet

# losses FOLDER: the first and the last five of its metrics
losses() {
    python3 - "$1/metrics.jsonl" <<'END'
import json, sys
x = [r["loss"] for r in map(json.loads, open(sys.argv[1])) if "loss" in r]
print(sum(x[:5]) / 5, sum(x[-5:]) / 5)
END
}
falls() {
    losses "$1" | awk -v by="$2" '{ exit !($2 < by * $1) }' || fail "$1: losses $(losses "$1")"
}
learn="--set train.teacher=teacher/last --set train.trainable=mixers --set train.weight_decay=0"
# shellcheck disable=SC2086
run 0 train book.txt $common $learn --from student --out a --set train.steps=24
falls a 0.8
# shellcheck disable=SC2086
run 0 train book.txt $common $learn --from a/last --out b --set train.distill=model \
    --set train.steps=24 --set train.distill_turn=12
falls b 0.95
python3 - student a/last b/last <<'END' || fail "what should stay, or learn"
import json, struct, sys
def read(folder):
    data = open(folder + "/model.safetensors", "rb").read()
    n = struct.unpack("<Q", data[:8])[0]
    head = json.loads(data[8:8 + n])
    return {k: data[8 + n + v["data_offsets"][0]:8 + n + v["data_offsets"][1]]
            for k, v in head.items() if k != "__metadata__"}
start, a, b = map(read, sys.argv[1:])
for name in start:
    mixer = name.startswith("model.layers.1.attn.")
    mlp = name in ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.down_proj.weight")
    assert mixer or start[name] == a[name], name
    assert mixer or mlp or a[name] == b[name], name
    assert not mlp or a[name] != b[name], name
assert any(start[n] != a[n] for n in start)
END

# gone on with from the middle of each
for what in layers model; do
    more="--set train.distill=$what --set train.distill_turn=4 --set train.steps=8
        --set train.checkpoint_every=3 --set train.keep_every=3"
    # shellcheck disable=SC2086
    run 0 train book.txt $common $learn $more --from student --out "$what"
    cp -R "$what/last/" "whole-$what"
    here=$(pwd)    # from another folder: the teacher is named from the root
    (cd / && "$mneme" train --resume "$here/$what/checkpoints/step-00000003" --quiet --threads 1) >"$work/out" \
        2>"$work/err" || fail "$what: does not go on from another folder"
    cmp "$what/last/model.safetensors" "whole-$what/model.safetensors" >"$work/err" 2>&1 ||
        fail "$what: resumed from step 3"
done

# the control: the same mask without a teacher
# shellcheck disable=SC2086
run 0 train book.txt $common --from teacher/last --out control --set train.trainable=mixers \
    --set train.distill_layers=1 --set train.steps=4
# shellcheck disable=SC2086
run 1 train book.txt $common --from student --out no --set train.teacher=missing
complains 'missing'
# shellcheck disable=SC2086
run 1 train book.txt $common --from student --out no --set train.teacher=teacher/last \
    --set train.distill=words
complains 'none of layers, model'
# shellcheck disable=SC2086
run 1 train book.txt $common --from student --out no --set train.trainable='*.none'
complains 'no parameter is called'
