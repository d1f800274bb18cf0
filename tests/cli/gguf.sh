#!/bin/sh
# mneme convert --to gguf: every tensor of models that llama.cpp has, read back by its own gguf package, and its logits
# beside mneme's. MNEME_PYTHON names a python that has gguf, numpy and llama_cpp (llama-cpp-python); MNEME_CHECKPOINTS a folder
# with models of other software.
set -eu
. "$2/tests/cli/support/expect.sh"
make_model=$3
python=${MNEME_PYTHON:-python3}
folders=${MNEME_CHECKPOINTS:-$source/../shared/checkpoints}
sizes='"hidden_size": 32, "vocab_size": 300, "intermediate_size": 32, "max_position_embeddings": 64'
skipped=
check() {
    status=0
    "$python" "$source/tests/cli/support/gguf_check.py" "$@" >"$work/out" 2>"$work/err" || status=$?
    cat "$work/out"
    if [ "$status" = 77 ]; then
        skipped=77
    else
        [ "$status" = 0 ] || fail "$*"
    fi
}
# logits FOLDER FILE [BOUND]: those of llama.cpp, where it is there
logits() {
    status=0
    "$python" "$source/tests/cli/support/gguf_logits.py" "$mneme" "$1" "$2" "$work" ${3:-} \
        >"$work/out" 2>"$work/err" || status=$?
    cat "$work/out"
    [ "$status" = 77 ] || [ "$status" = 0 ] || fail "$*"
}

# a model of one's own, as the family that computes the same
mkdir "$work/own"
"$make_model" "$work/own" "{\"layers\": \"attention\", \"num_heads\": 4, \"num_kv_heads\": 2,
    \"num_hidden_layers\": 2, $sizes}" bytes
run 0 convert "$work/own" "$work/llama" --family llama --quiet
run 0 convert "$work/llama" "$work/llama.gguf" --to gguf --quiet
[ "$(head -c 4 "$work/llama.gguf")" = GGUF ] || fail "no GGUF file"
check "$work/llama" "$work/llama.gguf"
logits "$work/llama" "$work/llama.gguf"
# with a tokenizer that has merges
awk 'BEGIN { for (i = 0; i < 900; i++) printf "the %d of %d is not %d\n", i, i % 7, i * i }' \
    >"$work/text.txt"
run 0 tokenizer train "$work/text.txt" --vocab-size 280 -o "$work/llama/tokenizer.json" --quiet
run 0 convert "$work/llama" "$work/merges.gguf" --to gguf --quiet
check "$work/llama" "$work/merges.gguf"
for type in f16 bf16 q8_0; do
    run 0 convert "$work/llama" "$work/$type.gguf" --to gguf --dtype $type --quiet
    check "$work/llama" "$work/$type.gguf" $type
    case $type in    # weights and, in llama.cpp, activations have 11 and 8 bits; q8_0 moves so small
    f16) logits "$work/llama" "$work/$type.gguf" 1e-2 ;;    # a model by more than an error would
    bf16) logits "$work/llama" "$work/$type.gguf" 8e-2 ;;
    esac
done
# a hybrid with experts
mkdir "$work/mixed"
"$make_model" "$work/mixed" '{"layers": "gdn, gdn, gdn, attention", "num_hidden_layers": 4, "hidden_size": 32,
    "vocab_size": 64, "intermediate_size": 48, "norm_plus_one": true, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": true,
    "shared_expert_intermediate_size": 16, "shared_expert_gate": true, "mixers": {"gdn": {"num_heads": 2,
    "num_v_heads": 4, "head_dim": 8, "v_head_dim": 8, "projections": "qkvz"}, "attention": {"num_heads": 4,
    "num_kv_heads": 2, "head_dim": 16, "use_output_gate": true, "qk_rms_norm": true,
    "norm_plus_one": true, "partial_rotary_factor": 0.25}}}' none
run 0 convert "$work/mixed" "$work/qwen" --family qwen3_next --quiet
run 0 convert "$work/qwen" "$work/qwen.gguf" --to gguf --quiet
check "$work/qwen" "$work/qwen.gguf"
logits "$work/qwen" "$work/qwen.gguf"
mkdir "$work/kimi"
"$make_model" "$work/kimi" '{"model_type": "kimi_linear", "hidden_size": 32, "vocab_size": 64,
    "num_hidden_layers": 4, "intermediate_size": 48, "rms_norm_eps": 1e-6, "kv_lora_rank": 16,
    "q_lora_rank": null, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_attention_heads": 2,
    "num_key_value_heads": 2, "linear_num_heads": 2, "linear_head_dim": 8, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "num_experts": 4,
    "num_experts_per_token": 2, "moe_intermediate_size": 16, "num_shared_experts": 1,
    "moe_renormalize": true, "num_expert_group": 1, "topk_group": 1, "routed_scaling_factor": 2.4,
    "tie_word_embeddings": false}' none
run 0 convert "$work/kimi" "$work/kimi.gguf" --to gguf --quiet
check "$work/kimi" "$work/kimi.gguf"
logits "$work/kimi" "$work/kimi.gguf"
mkdir "$work/rwkv"
"$make_model" "$work/rwkv" '{"layers": "rwkv7", "num_hidden_layers": 2, "hidden_size": 128, "vocab_size": 64,
    "head_dim": 64, "norm": "layer", "norm_first": true, "norm_eps": 1e-5, "mlp": "rwkv7",
    "fuse_norm": true}' none
run 0 convert "$work/rwkv" "$work/rwkv7" --family rwkv7 --quiet
run 0 convert "$work/rwkv7" "$work/rwkv7.gguf" --to gguf --quiet
check "$work/rwkv7" "$work/rwkv7.gguf"
logits "$work/rwkv7" "$work/rwkv7.gguf"

# without that step: what computes the same is found
run 0 convert "$work/own" "$work/own.gguf" --to gguf --quiet
says ' as llama$'
logits "$work/own" "$work/own.gguf"
mkdir "$work/gdn"
"$make_model" "$work/gdn" "{\"layers\": \"gdn\", $sizes}" bytes
run 2 convert "$work/gdn" "$work/gdn.gguf" --to gguf --quiet
complains 'is none that is written as GGUF'
run 2 convert "$work/llama" "$work/llama.gguf" --to gguf --quiet
complains 'there is a file already'
run 2 convert "$work/llama" "$work/x" --to onnx
complains 'only gguf is written'
run 2 convert "$work/llama" "$work/x.gguf" --to gguf --dtype q2
complains 'there are f32, f16, bf16, q8_0'

if [ -d "$folders/hf-qwen3-fp16" ]; then
    run 2 convert "$folders/hf-qwen3-fp16" "$work/x.gguf" --to gguf
    complains "llama.cpp's qwen3 has no bias behind attention"
fi
for name in hf-llama hf-llama-rope3-bias hf-qwen3 hf-gpt2 hf-gpt_neox hf-mamba hf-mamba2 \
    hf-mamba2-bf16 hf-jamba hf-bamba hf-granitemoehybrid hf-falcon_h1 hf-nemotron_h hf-lfm2 hf-kimi_linear fla-rwkv7; do
    [ -d "$folders/$name" ] || continue
    run 0 convert "$folders/$name" "$work/$name.gguf" --to gguf --quiet
    check "$folders/$name" "$work/$name.gguf"
    # GELU is by tanh and from a table in half precision there; heads of RWKV-7 are 64 wide
    case $name in
    hf-gpt2 | hf-gpt_neox) logits "$folders/$name" "$work/$name.gguf" 1e-3 ;;
    fla-rwkv7) ;;
    hf-mamba2-bf16) logits "$folders/$name" "$work/$name.gguf" 8e-2 ;;
    *) logits "$folders/$name" "$work/$name.gguf" ;;
    esac
done
exit ${skipped:-0}
