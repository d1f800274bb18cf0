#!/bin/sh
# Sequence parallel: for every kind of layer a run whose sequences are cut over 2 and 4 ranks has the losses and norms
# of one rank within rounding; with data parallel beside it; what cannot be cut is refused.
#   sequence.sh MNEME SOURCE_DIR
set -eu
mneme=$1
. "$2/tests/support/temporary.sh"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
cd "$folder"
fail() {
    echo "sequence: $*" >&2
    exit 1
}
awk 'BEGIN { srand(3); for (i = 0; i < 3000; i++) printf "%s ", substr("thecatsatonamatandabirdsang", 1 + int(24 * rand()), 3) }' > book.txt
# train RANKS SEQUENCE_RANKS LAYERS OUT [settings]
train() {
    ranks=$1 parts=$2 layers=$3 out=$4
    shift 4
    rm -rf "$out"
    timeout 600 "$mneme" train --ranks "$ranks" --threads 1 --quiet --set data.train=book.txt --set "model.layers=$layers" \
        --set model.hidden_size=32 --set model.num_hidden_layers=1 --set train.steps=2 --set train.batch=2 \
        --set train.accumulate=2 --set train.context=32 --set train.log_every=1 --set train.warmup=0 \
        --set train.tensorboard=false --set train.eval_batches=1 --set "train.sequence_ranks=$parts" --set "out=$out" "$@" \
        > "$out.txt" 2>&1 || { cat "$out.txt"; fail "$layers on $ranks ranks failed"; }
}
numbers() {
    sed -n 's/.*"loss":\([^,]*\),"lr":[^,]*,"grad_norm":\([^,]*\).*/\1 \2/p' "$1/metrics.jsonl"
}
# float32 sums in another order: relative differences of some 2^-24 times the square root of the terms; after one
# update of Adam, which divides by the size of a gradient, still far below 1e-4
near() {
    numbers one > a
    numbers "$1" > b
    [ "$(wc -l < a)" = 2 ] || fail "no losses in one"
    paste -d ' ' a b | awk -v what="$2" '
        { for (i = 1; i <= 2; i++) { d = $i - $(i + 2); if (d < 0) d = -d; if (!(d <= 1e-4 * $i)) { print what ": " $0; bad = 1 } } }
        END { exit bad }' || fail "$2 differs"
}
kinds=$("$mneme" info --json | tr ',{' '\n\n' | sed -n 's/.*"name": *"\([a-z0-9_]*\)".*/\1/p' | sort -u)
n=0
for layers in linear retnet mamba2 gla mamba1 mlstm longhorn longhorn_column delta gdn kda gdn2 mesa palimpsa kla bayes attention \
    relu_attention hypermlp hyperglu gla+ccq gdn+ccq; do
    echo "$kinds" | grep -qx "${layers%+ccq}" || continue
    train 1 1 "$layers" one
    train 2 2 "$layers" two
    near two "$layers on 2 ranks"
    train 4 4 "$layers" four
    near four "$layers on 4 ranks"
    n=$((n + 1))
done
[ $n -ge 15 ] || fail "only $n kinds of layers were found"
for layers in kla gdn palimpsa; do
    train 1 1 "$layers" one --set train.context=96
    for states in maps pipeline; do
        train 3 3 "$layers" three --set train.context=96 --set "train.sequence_states=$states"
        near three "$layers on 3 ranks by $states"
        train 4 4 "$layers" four --set train.context=96 --set "train.sequence_states=$states" --set train.recompute=layer
        near four "$layers on 4 ranks by $states, computing again"
    done
done
# packed documents, of which some begin in a part, some end there and some go through
mkdir documents
awk '{ for (i = 1; i + 40 < NF; i += n) { n = 1 + (i * 7) % 19; for (j = i; j < i + n; j++) printf "%s ", $j; printf "\n" } }' book.txt > lines.txt
awk '{ file = sprintf("documents/%04d.txt", NR); print > file; close(file) } NR == 60 { exit }' lines.txt
packed="--set data.train=documents --set data.cutting=documents --set train.context=48"
for layers in linear gdn mlstm longhorn mesa palimpsa kla bayes attention hyperglu gla+ccq; do
    # shellcheck disable=SC2086
    {
        train 1 1 "$layers" one $packed
        train 2 2 "$layers" two $packed
        near two "$layers, packed, on 2 ranks"
        train 4 4 "$layers" four $packed --set train.sequence_states=maps --set train.recompute=layer
        near four "$layers, packed, on 4 ranks by maps"
    }
done
# shellcheck disable=SC2086
train 4 2 gdn both $packed
# shellcheck disable=SC2086
train 1 1 gdn one $packed
near both "gdn, packed, on 2 x 2 ranks"
train 1 1 gdn one
train 4 2 gdn both
near both "gdn on 2 x 2 ranks"
train 4 2 gdn sharded --set train.shard=gradients
near sharded "gdn on 2 x 2 ranks with shards of gradients"
train 2 2 gdn again --set train.recompute=layer
near again "gdn on 2 ranks, computing again"
# a dry run says how states cross
way() {
    "$mneme" train --dry-run --set data.train=book.txt --set "model.layers=$1" --set "model.num_hidden_layers=$2" --set model.hidden_size=32 \
        --set train.context=32 --set train.sequence_ranks=2 --set "train.sequence_states=$3" --set out=dry > dry.txt 2>&1 || { cat dry.txt; fail "a dry run failed"; }
    grep -q "sequences over 2 ranks (train.sequence_states=$3):.* $4" dry.txt || { cat dry.txt; fail "a dry run does not say: $4"; }
}
way kla 1 auto "moebius by maps"
way kla 3 auto "moebius by pipeline"
way kla 3 maps "moebius by maps"
way attention 1 auto "attention by keys"
way gdn 2 pipeline "delta_net by pipeline"
way bayes 1 maps "bayes by pipeline"
if timeout 600 "$mneme" train --ranks 2 --quiet --set data.train=book.txt --set model.layers=kla --set model.hidden_size=32 \
    --set train.context=32 --set train.sequence_ranks=2 --set train.sequence_states=both --set out=wrong > wrong2.txt 2>&1; then
    fail "states crossed ranks in a way that is none"
fi
grep -q "is none of auto, maps, pipeline" wrong2.txt || fail "no word on how states can cross ranks"
echo "sequence: $n kinds of layers in order"
