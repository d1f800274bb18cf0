#!/bin/sh
# Folders of layers that no other software has come with a Python file: transformers loads them by it and
# gives mneme's logits. MNEME_PYTHON names a python that has torch and transformers (python3).
set -eu
. "$2/tests/cli/support/expect.sh"
make_model=$3
python=${MNEME_PYTHON:-python3}
sizes='"hidden_size": 32, "vocab_size": 97, "intermediate_size": 40, "max_position_embeddings": 64'
folders=
model() {
    mkdir "$work/$1"
    "$make_model" "$work/$1" "{\"layers\": \"$2\", $sizes${3:+, $3}}" none
    grep -q '"auto_map"' "$work/$1/config.json" || fail "$1: no auto_map"
    cmp -s "$source/src/model/folder/modeling_mneme.py" "$work/$1/modeling_mneme.py" || fail "$1: no file"
    folders="$folders $work/$1"
}
model bayes "bayes" '"num_heads": 2'
model bayes_wide "bayes, gdn" '"mixers": {"bayes": {"num_heads": 2, "head_dim": 6, "expand_v": 2,
    "noise_groups": 3, "use_short_conv": false, "learn_prior": true}}'
model bayes_still "bayes+ccq" '"noise_groups": 1, "transition": "identity", "use_gate": false'
model rotation "bayes_rotation" '"num_heads": 2, "input_angle": true'
model palimpsa "palimpsa" '"num_heads": 2'
model palimpsa_plain "palimpsa" '"num_heads": 2, "metaplasticity": false, "use_residual": false'
model palimpsa_paper "palimpsa_paper+ccq" '"num_heads": 2'
model kla "attention, kla" '"num_heads": 4'
model kla_plus "kla+ccq" '"d_state": 4, "value_rank": "conv", "var_rank": "dt", "discretisation": "zoh",
    "skip": "vector", "decode_from_prior": true, "clip_value": 2.0'
model kla_fixed "kla" '"d_state": 4, "value_rank": 8, "process_noise": "fixed", "use_gate": false,
    "conv_size": 0, "skip": "none", "obs_var_max": 3.0'
model ccq_gdn "gdn+ccq" '"num_heads": 2, "num_v_heads": 4, "head_dim": 8, "allow_neg_eigval": true'
model ccq_gla "gla+ccq" '"num_heads": 2, "use_short_conv": true'
model ccq_mamba "mamba2+ccq, relu_attention" '"state_size": 8, "head_dim": 16, "n_groups": 2,
    "mlp": "gelu", "mlp_bias": true, "norm": "layer"'
model hyperglu "hyperglu"
model hypermlp "hypermlp" '"attn_norm": "l2", "layout": "position", "use_rope": true'
model hyper_small "hyperglu, hypermlp" '"op1_rank": 0, "op2_rank": 0, "use_kv_conv": false,
    "use_qk_gate": false, "use_vo_gate": false, "attn_norm": "none"'
model blocks "bayes, attention" '"norms_after": "attention", "residual_multiplier": 0.7,
    "embedding_multiplier": 2.0, "logit_softcap": 5.0, "tie_word_embeddings": true,
    "mixers": {"attention": {"num_heads": 4, "num_kv_heads": 2, "qk_rms_norm": true, "qkv_bias": true,
    "partial_rotary_factor": 0.5, "use_output_gate": true, "window_size": 7}}'
model experts "bayes" '"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "norm_topk_prob": true, "shared_expert_intermediate_size": 16, "shared_expert_gate": true'
model parallel "kla" '"parallel_residual": true, "learned_positions": 64'

# grafts and conversions have it too; what the file has not is written without
run 0 graft "$work/ccq_mamba" "$work/grafted" --layers 0 --to bayes --quiet
grep -q '"auto_map"' "$work/grafted/config.json" || fail "a graft has none"
folders="$folders $work/grafted"
mkdir "$work/rwkv"
"$make_model" "$work/rwkv" "{\"layers\": \"kla, mesa\", $sizes}" none
if grep -q auto_map "$work/rwkv/config.json"; then fail "mesa is not in the file"; fi

# and those that are converted are what transformers' own classes take
class() {
    name=$1
    family=$2
    shift 2
    mkdir "$work/$name"
    "$make_model" "$work/$name" "{$1, \"num_hidden_layers\": 2, $sizes}" none
    run 0 convert "$work/$name" "$work/$family" --family "$family" --quiet
    folders="$folders $work/$family"
}
class a llama '"layers": "attention", "num_heads": 4, "num_kv_heads": 2'
class b qwen3 '"layers": "attention", "num_heads": 4, "num_kv_heads": 2, "qk_rms_norm": true'
class c mamba '"layers": "mamba1", "mlp": "none", "tie_word_embeddings": true'
class d mamba2 '"layers": "mamba2", "mlp": "none", "tie_word_embeddings": true, "mixers": {"mamba2": {
    "state_size": 8, "head_dim": 16}}'

status=0
# shellcheck disable=SC2086
"$python" "$source/tests/cli/support/auto_map.py" "$mneme" "$work" $folders >"$work/out" \
    2>"$work/err" || status=$?
cat "$work/out"
[ "$status" = 0 ] || [ "$status" = 77 ] || fail "transformers gives other logits"
exit "$status"
