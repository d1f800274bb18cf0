#!/bin/sh
# Nothing is lost without a word: output that cannot be written, files that may not grow, sealed
# folders that were damaged, numbers of configurations out of their range.
set -eu
. "$2/tests/cli/support/expect.sh"
mneme=$(cd "$(dirname "$mneme")" && pwd)/$(basename "$mneme")
cd "$work"

# ---- output ----------------------------------------------------------------------------------
if [ -w /dev/full ]; then
    for verb in $("$mneme" --help | sed -n 's/^  \([a-z]*\) .*/\1/p'); do
        if "$mneme" "$verb" --help >/dev/full 2>err; then fail "$verb --help loses its output"; fi
        grep -q 'cannot write' err || fail "$verb --help does not say what it lost"
    done
    for command in --help --version info "info --json" "task mqar --dump 2 --seed 1 --json"; do
        # shellcheck disable=SC2086
        if "$mneme" $command >/dev/full 2>err; then fail "$command loses its output"; fi
    done
fi

# ---- a small run -----------------------------------------------------------------------------
yes 'a line of a text to learn from' | head -n 200 >text.txt
config() {    # members of "model"
    printf '{"model": {"layers": "gdn", "num_hidden_layers": 1, "hidden_size": 16, "num_heads": 2%s},
    "data": {"train": "text.txt", "tokenizer": "bytes"}, "train": {"steps": 2, "batch": 2,
    "context": 16, "warmup": 1, "eval_batches": 1}}' "$1" >config.json
}
config ""
run 0 train config.json --out run

# ---- files that may not grow -----------------------------------------------------------------
status=0
(ulimit -f 8; "$mneme" train config.json --out small >out 2>err) || status=$?
[ "$status" = 1 ] || fail "a file that may not grow ends train with $status"
grep -q 'cannot write\|File too large' err || fail "train does not say that a file may not grow"
status=0
(ulimit -f 1; "$mneme" prepare text.txt --tokenizer bytes -o small.prepared >out 2>err) || status=$?
[ "$status" = 1 ] || fail "a file that may not grow ends prepare with $status"

# ---- seals -----------------------------------------------------------------------------------
run 0 generate --model run/last --tokens 2 --quiet --verify hello
damaged() {    # what was done; a quick look must see it
    run 1 generate --model bad --tokens 2 --quiet hello
    run 1 eval --model bad --text text.txt --quiet
    rm -rf bad
    cp -rL run/last bad
}
cp -rL run/last bad
printf x >>bad/model.safetensors
damaged "one byte more"
printf x | dd of=bad/config.json bs=1 seek=3 conv=notrunc 2>/dev/null
damaged "another byte in a head"
sed -i '/"model.safetensors"/,/}/d' bad/done
damaged "no entry"
rm bad/tokenizer.json
damaged "a file is gone"
size=$(wc -c <bad/model.safetensors)
if [ "$size" -gt 70000 ]; then
    printf x | dd of=bad/model.safetensors bs=1 seek=$((size - 8)) conv=notrunc 2>/dev/null
    run 1 generate --model bad --tokens 2 --quiet --verify hello
    complains 'is not as it was written'
fi
rm bad/done
run 1 generate --model bad --tokens 2 --quiet --verify hello
complains 'has no seal'

# ---- numbers ---------------------------------------------------------------------------------
for member in '"hidden_ratio": 0' '"num_heads": 4611686018427387904' '"num_hidden_layers": -3' \
    '"hidden_ratio": -1' '"logit_softcap": -1' '"initializer_range": -1' '"head_dim": -1' \
    '"conv_size": -2' '"intermediate_size": -5' '"expand_v": -1'; do
    config ", $member"
    sed -i 's/"num_hidden_layers": 1, \(.*"num_hidden_layers"\)/\1/; s/"num_heads": 2, \(.*"num_heads"\)/\1/' config.json
    run 1 train config.json --out never
    complains 'must lie between'
done
for members in '"layers": "kla", "value_rank": -9223372036854775808' \
    '"layers": "attention", "rope_theta": -1' '"layers": "kla", "obs_var_min": -1'; do
    printf '{"model": {"num_hidden_layers": 1, "hidden_size": 16, %s}, "data": {"train": "text.txt",
    "tokenizer": "bytes"}}' "$members" >config.json
    run 1 train config.json --out never
    complains 'must lie between'
done

# ---- keys ------------------------------------------------------------------------------------
printf '{"model": {"layers": "gdn", "num_hidden_layers": 2, "hidden_size": 16, "attn": {"layers": [1],
"num_heads": 2, "windows": 8}}, "data": {"train": "text.txt", "tokenizer": "bytes"}}' >config.json
run 1 train config.json --out never
complains 'windows'
printf '{"model": {"layers": "gla", "num_hidden_layers": 1, "hidden_size": 16, "use_gv": true},
"data": {"train": "text.txt", "tokenizer": "bytes"}}' >config.json
run 1 train config.json --out never
complains 'use_gv: only false is built'
