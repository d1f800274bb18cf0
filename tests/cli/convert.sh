#!/bin/sh
# labels: sanitize
# mneme convert: types and families, there and back bit for bit; what differs is refused by name.
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
convert() {
    from=$1
    to=$2
    shift 2
    run 0 convert "$work/$from" "$work/$to" --quiet "$@"
    quiet
}

# attention: fla's transformer, llama, and our own keys
make llama '"layers": "attention", "num_hidden_layers": 2, "num_heads": 4, "num_kv_heads": 2'
convert llama ours --family mneme
grep -q '"model_type": "mneme"' "$work/ours/config.json" || fail "no mneme configuration"
convert ours hf --family llama
grep -q '"model_type": "llama"' "$work/hf/config.json" || fail "no llama configuration"
grep -q LlamaForCausalLM "$work/hf/config.json" || fail "no class"
convert hf fla --family transformer
grep -q '"model_type": "transformer"' "$work/fla/config.json" || fail "no fla configuration"
convert fla again --family mneme
look equal "$work/ours" "$work/again"
for folder in ours hf fla again; do look logits "$mneme" "$work/llama" "$work/$folder" "$work"; done
python3 -c "
import sys
sys.argv = ['', 'equal', '$work/ours', '$work/ours']
exec(open('$source/tests/cli/support/models.py').read())
assert 'model.layers.0.self_attn.q_proj.weight' in tensors('$work/hf')
assert 'model.layers.0.attn.q_proj.weight' in tensors('$work/fla')" || fail "names"

# the others that have a family
make gdn '"layers": "gdn", "num_hidden_layers": 2, "num_heads": 2, "head_dim": 8'
convert gdn gdn2 --family mneme
convert gdn2 gdn3 --family gated_deltanet
look logits "$mneme" "$work/gdn" "$work/gdn3" "$work"
make mamba '"layers": "mamba1", "num_hidden_layers": 2, "mlp": "none", "tie_word_embeddings": true'
convert mamba mamba2 --family mamba
look logits "$mneme" "$work/mamba" "$work/mamba2" "$work"

# types: bf16 and f16 round, going on from them is exact
convert ours half --dtype f16
look near "$mneme" "$work/ours" "$work/half" "$work" 0.01
convert half wide --dtype f32
convert wide half2 --dtype f16
look equal "$work/half" "$work/half2"
look logits "$mneme" "$work/half" "$work/wide" "$work"
convert ours brain --dtype bf16
grep -q bfloat16 "$work/brain/config.json" || fail "the configuration does not say bfloat16"
convert brain brain2 --family llama
convert brain2 brain3 --family mneme
look equal "$work/brain" "$work/brain3"
run 0 info "$work/brain" --json
json "set(d['weights']['numbers']) == {'BF16'}"

# what goes along
echo '{"eos_token_id": 3}' >"$work/llama/generation_config.json"
echo '{{ messages }}' >"$work/llama/chat_template.jinja"
convert llama along --dtype bf16
cmp "$work/llama/generation_config.json" "$work/along/generation_config.json" || fail "generation"
cmp "$work/llama/chat_template.jinja" "$work/along/chat_template.jinja" || fail "chat template"
cmp "$work/llama/tokenizer.json" "$work/along/tokenizer.json" || fail "tokenizer"

# a run's checkpoint has a seal, and so has what is made of it
awk 'BEGIN { for (i = 0; i < 300; i++) printf "%d is not %d\n", i, i * i }' >"$work/text.txt"
run 0 train "$work/text.txt" --from "$work/gdn" --out "$work/run" --steps 1 --quiet \
    --set train.batch=2 --set train.context=32
convert run sealed --dtype bf16
[ -f "$work/sealed/done" ] || fail "no seal"
run 0 generate --model "$work/sealed" hello --tokens 3 --quiet --verify
printf x | dd of="$work/sealed/model.safetensors" bs=1 seek=3000 conv=notrunc 2>/dev/null
run 1 generate --model "$work/sealed" hello --tokens 3 --quiet --verify

# a model that no memory holds is not begun
mkdir "$work/huge"
echo '{"layers": "gdn", "hidden_size": 16384, "vocab_size": 256000, "num_hidden_layers": 400}' \
    >"$work/huge/config.json"
run 1 generate --model "$work/huge" hello --tokens 1
complains 'GB of memory and .* GB are available; free some, or set MN_MEMORY=any'
run 0 info "$work/huge"
says 'no such file'

# what is refused
run 2 convert "$work/gdn" "$work/x" --family llama
complains 'no llama model computes what this one does'
run 2 convert "$work/gdn" "$work/x" --family lama
complains 'no such model_type'
run 2 convert "$work/gdn" "$work/x" --dtype int4
complains 'there are f32, f16, bf16'
run 2 convert "$work/gdn" "$work/gdn2"
complains 'there is a model already'
run 2 convert "$work/nowhere" "$work/x"
complains nowhere
run 2 convert "$work/gdn"
complains 'name the model'
[ ! -e "$work/x" ] || fail "a mistake leaves a folder"
run 0 convert "$work/gdn" "$work/gdn2" --overwrite --quiet
run 0 convert --help
says '^usage: mneme convert'
