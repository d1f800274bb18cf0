#!/bin/sh
# The generator of golden vectors agrees with the files that exist, and the library with files it
# has made anew, of other numbers: by tools/golden, which shares no code with the library.
set -eu
. "$2/tests/cli/support/expect.sh"
python=
for each in python3 /usr/bin/python3; do
    [ -n "$python" ] || ! "$each" -c 'import numpy' 2>/dev/null || python=$each
done
if [ -z "$python" ]; then
    echo "skipped: the generator needs python3 with numpy"
    exit 77
fi
golden=$source/tests/golden
tools=$source/tools/golden

# tool STATUS SCRIPT ARGUMENT...: as run does with the program
tool() {
    expected=$1
    shift
    command="$*"
    status=0
    "$python" "$tools/$@" >"$work/out" 2>"$work/err" || status=$?
    [ "$status" = "$expected" ] || fail "$command: exit status $status, expected $expected"
}

tool 0 check.py --quiet "$golden"/*.safetensors "$golden"/programs/*.safetensors
says "^[0-9]* files, [0-9]* results, 0 files failed"

# three files from their own inputs: the same bytes of inputs, results within rounding
tool 0 make.py --out "$work/again" --from "$golden/additive_vector_packed_state0.safetensors" \
    "$golden/bayes_rotation_var.safetensors" "$golden/hyperglu_core.safetensors"
"$python" - "$tools" "$golden" "$work/again" <<'PYTHON'
import os
import sys
sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
from core import goldenfile
for name in sorted(os.listdir(sys.argv[3])):
    have, x = goldenfile.read(os.path.join(sys.argv[3], name))
    want, r = goldenfile.read(os.path.join(sys.argv[2], name))
    assert list(x) == list(r), (name, list(x), list(r))
    for tensor in r:
        off = abs(x[tensor] - r[tensor]).max(initial=0)
        assert off <= 1e-12 * abs(r[tensor]).max(initial=0), (name, tensor, off)
    for key in want:
        assert key.startswith("tol") or have[key] == want[key], (name, key)
PYTHON

# new numbers: a file of many operators, another seed
tool 0 make.py --seed 5 --out "$work/fresh" additive_vector delta_kda bayes_diag_groups palimpsa_state0 \
    kla_state0 ccq_gated_deltanet_state0 mesa_state0 mlstm_state0 selective_scan attention_gqa_rope \
    hyperglu_core conv1d rms_norm_gated_gate_first longhorn_column gsa_gqa_state0 hgrn2 \
    window_attention_qk_norm linear_norm_state0
run 0 check --quiet "$work"/fresh/*.safetensors
says "[0-9] passed, 0 failed"

# other shapes, and words for what does not exist
tool 0 make.py --set K=5 --set T=71 --out "$work/odd" additive_scalar
run 0 check --quiet "$work"/odd/*.safetensors
says "[0-9] passed, 0 failed"
tool 1 make.py --out "$work/none" no_such_row
complains "no operator or case is called no_such_row"
tool 1 make.py --set Q=3 --out "$work/none" additive_scalar
complains "additive has no Q; it has B, T, H, K, V"
head -c 100 "$golden/mesa.safetensors" >"$work/cut.safetensors"
tool 1 check.py "$work/cut.safetensors"
says "the header is longer than the file"

# the chunked formulas that say what bf16 costs are those of the files; rounding keeps within the rule's rms
"$python" "$tools/make.py" additive_vector delta_kda --set K=32 --set V=48 --set T=71 --seed 1 --out "$work/wide" >/dev/null
tool 0 rounded.py "$work/wide"/*.safetensors
[ "$(awk '$3 == 1 && $4 < 1 && $6 < 1.2 { n++ } END { print n }' "$work/out")" = 8 ] || fail "rounding costs more than the rule allows"
