#!/bin/sh
# labels: sanitize
# mneme graft: layers that are not chosen stay bit for bit, the new ones load, what both have is kept,
# and putting a layer in its own place changes nothing.
set -eu
. "$2/tests/cli/support/expect.sh"
make_model=$3
if ! command -v python3 >/dev/null 2>&1; then
    echo "skipped: comparing needs python3"
    exit 0
fi
look() { python3 "$source/tests/cli/support/models.py" "$@" 2>"$work/err" || fail "models.py $*"; }
sizes='"hidden_size": 32, "vocab_size": 256, "intermediate_size": 32, "max_position_embeddings": 64'
make() {
    mkdir "$work/$1"
    "$make_model" "$work/$1" "{$2, $sizes}" bytes
}
make gdn '"layers": "gdn*4", "num_heads": 2, "head_dim": 8, "num_hidden_layers": 4'
make mixed '"layers": "attention, gdn, attention, mamba2", "mixers": {"attention": {"num_heads": 4,
    "num_kv_heads": 2}, "mamba2": {"state_size": 8, "head_dim": 16}}'
rows=0
# graft FROM TO OPTIONS...: works, loads, and gives finite logits
graft() {
    from=$1
    to=$2
    shift 2
    run 0 graft "$work/$from" "$work/$to" --quiet "$@"
    quiet
    cp "$work/out" "$work/report"
    look finite "$mneme" "$work/$to" "$work"
    cp "$work/report" "$work/out"
    rows=$((rows + 1))
}

# gdn -> bayes: all that both have is kept; the rest of the model stays
graft gdn bayes --layers 1,3 --to bayes
says '^layers 1 gdn -> bayes, 3 gdn -> bayes$'
says '^  kept  *q_proj.weight  *2 x 512$'
says '^  kept  *o_norm.weight '
says '^  made  *r_proj.weight '
says '^  dropped  *b_proj.weight  *2 x 64$'
look stays "$work/gdn" "$work/bayes" 1 3
grep -q '"layers": "gdn, bayes, gdn, bayes"' "$work/bayes/config.json" || fail "the configuration"
run 0 graft "$work/gdn" "$work/json" --layers 1,3 --to bayes --json --quiet
json "[p['kept'] for p in d['parameters'] if p['name'] == 'q_proj.weight'] == [512, 512]"
look equal "$work/bayes" "$work/json"
run 0 graft "$work/gdn" "$work/seed" --layers 1,3 --to bayes --seed 2 --quiet
if cmp -s "$work/bayes/model.safetensors" "$work/seed/model.safetensors"; then
    fail "the seed does not count"
fi

# a layer in its own place, one after the other, and there and back
graft gdn same --layers all --to gdn
look equal "$work/gdn" "$work/same"
look logits "$mneme" "$work/gdn" "$work/same" "$work"
graft bayes back --layers bayes --to gdn
look stays "$work/gdn" "$work/back" 1 3
says '^  made  *b_proj.weight '

# ccq over what is there
graft gdn ccq --layers 0-1 --add ccq
look equal "$work/gdn" "$work/ccq"
says '^  made  *ccq_gamma.weight '
graft mixed ccq2 --layers gdn --to gdn+ccq
look stays "$work/mixed" "$work/ccq2" 1

# attention -> kla: the values of a key-value head go to all heads that it serves
graft mixed kla --layers attention --to kla
look stays "$work/mixed" "$work/kla" 0 2
says '^  kept in part  *in_proj.weight  *2 x 2048, of which 1024$'
says '^  kept  *out_proj.weight '
graft mixed gla --layers 0 --to gla
says '^  kept  *v_proj.weight '
graft mixed bayes2 --layers 2 --to bayes
says '^  kept, repeated  *k_proj.weight '

# mamba2 -> palimpsa: its one group of keys for every head, its decay
graft mixed palimpsa --layers mamba2 --to palimpsa
look stays "$work/mixed" "$work/palimpsa" 3
says '^  kept, repeated  *k_proj.weight '
says '^  kept  *dt_proj.weight '
says '^  kept  *A_log '
graft mixed options --layers 1 --to bayes --options '{"noise_groups": 1, "learn_prior": true}'
says '^  made  *p0_log '

# the paper's layers are of a model of 24
mkdir "$work/deep"
"$make_model" "$work/deep" '{"layers": "gdn*24", "num_hidden_layers": 24, "hidden_size": 8,
    "vocab_size": 256, "num_heads": 1, "head_dim": 4}' bytes
graft deep preset --preset bayesian-layer
says '^layers 5 gdn -> bayes, 11 gdn -> bayes, 17 gdn -> bayes, 23 gdn -> bayes$'

# training goes on from one
awk 'BEGIN { for (i = 0; i < 300; i++) printf "%d is not %d\n", i, i * i }' >"$work/text.txt"
run 0 train "$work/text.txt" --from "$work/kla" --out "$work/run" --steps 2 --quiet \
    --set train.batch=2 --set train.context=32
run 0 info "$work/run"
says '^  layers  *4: kla, gdn, kla, mamba2$'

# mistakes
run 2 graft "$work/gdn" "$work/bayes" --layers 1 --to kla
complains 'there is a model already'
run 2 graft "$work/gdn" "$work/gdn" --layers 1 --to kla --overwrite
complains 'write to another folder'
run 2 graft "$work/gdn" "$work/x" --layers 4 --to kla
complains 'there are layers 0 to 3'
run 2 graft "$work/gdn" "$work/x" --layers attention --to kla
complains 'no layer is that; the model.s are gdn'
run 2 graft "$work/gdn" "$work/x" --layers 1 --to bays
complains 'bayes'
run 2 graft "$work/gdn" "$work/x" --layers 1
complains 'say what they become'
run 2 graft "$work/gdn" "$work/x" --preset bayesian-layer
complains 'for models of 24 layers'
run 2 graft "$work/gdn" "$work/x" --layers 1 --to bayes --options '{"heads": 1}'
complains 'heads'
run 2 graft "$work/gdn"
complains 'name the model'
[ ! -e "$work/x" ] || fail "a mistake leaves a folder"
run 0 graft --help
says '^usage: mneme graft'
echo "graft: $rows models"
