"""gguf_check.py FOLDER FILE [TYPE] - reads a GGUF file by llama.cpp's gguf package and compares every tensor with the
folder's, bit for bit where nothing is computed; names are those of the package's own table. Exit status 77 and the
reason where numpy or gguf is not there."""
import json
import os
import struct
import sys

try:
    import gguf
    import numpy as np
except ImportError as error:
    print("skipped: %s" % error)
    sys.exit(77)

folder, path = sys.argv[1:3]
as_type = sys.argv[3] if len(sys.argv) > 3 else None
with open(os.path.join(folder, "config.json")) as file:
    config = json.load(file)
family = config["model_type"]
ARCHS = {"gpt_neox": "gptneox", "bamba": "granitehybrid", "granitemoehybrid": "granitehybrid",
         "falcon_h1": "falcon-h1", "qwen3_next": "qwen3next",
         "kimi_linear": "kimi-linear"}
arch = ARCHS.get(family, family)
number = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch]
layers = (config.get("num_hidden_layers") or config.get("n_layer") or
          len(config["layers_block_type"]))
names = gguf.get_tensor_name_map(number, layers)


def read(folder):
    """All tensors of a folder, whether in one file or in shards."""
    out = {}
    for name in sorted(os.listdir(folder)):
        if name.startswith("model") and name.endswith(".safetensors"):
            out.update(read_file(os.path.join(folder, name)))
    return out


def read_file(path):
    with open(path, "rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        head, data = json.loads(file.read(size)), file.read()
    head.pop("__metadata__", None)
    out = {}
    for name, at in head.items():
        raw = np.frombuffer(data[at["data_offsets"][0]:at["data_offsets"][1]], np.uint8)
        if at["dtype"] == "BF16":
            x = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            x = raw.view({"F32": np.float32, "F16": np.float16}[at["dtype"]]).astype(np.float32)
        out[name] = x.reshape(at["shape"]), at["dtype"]
    return out


heads = config.get("num_attention_heads", config.get("n_head"))
kv_heads = config.get("num_key_value_heads") or heads


def in_pairs(x, n):
    """Rotary halves of each head as neighbours; Bamba's heads turn in their first half."""
    heads_of = x.reshape(n, x.shape[0] // n, -1)
    turning = heads_of.shape[1] // (2 if family == "bamba" else 1)
    first, rest = heads_of[:, :turning], heads_of[:, turning:]
    first = first.reshape(n, 2, turning // 2, -1).swapaxes(1, 2).reshape(first.shape)
    return np.concatenate([first, rest], axis=1).reshape(x.shape)


def rwkv7(name, x):
    """As published by flash-linear-attention: low ranks as they are, six shifts as one."""
    parts = name.split(".")
    shifts = ["x_" + which for which in "rwkvag"]
    if parts[-1] in shifts and parts[-2] == "attn":
        base = ".".join(parts[:-1])
        if parts[-1] != "x_r":
            return []
        return [("blk.%s.time_mix_lerp_fused.weight" % parts[2],
                 np.stack([everything["%s.%s" % (base, s)][0].reshape(1, 1, -1) for s in shifts]), True)]
    given = name.replace("ffn_norm", "ln2").replace("attn_norm", "ATTN_NORM").replace(
        "ffn.", "feed_forward.").replace("attn.", "attention.").replace(
        "ATTN_NORM", "attention_norm").replace("_lora.lora.0.weight", "1").replace(
        "_lora.lora.2.weight", "2").replace("_lora.lora.2.bias", "0").replace("g_norm", "ln_x")
    new = names.get_name(given, try_suffixes=(".weight", ".bias"))
    assert new, name
    new = new if new.endswith((".weight", ".bias")) else new + ".weight"
    x = x.reshape(-1) if "r_k" in new else x.squeeze()
    out = [(new, x, True)]
    if ".0.time_mix_a" in new:
        out.append((new.replace("time_mix_a", "time_mix_v"), x, True))
    return out


def qwen3_next(name, x):
    """Norms with their one, the shared projection as q, k, v and as the gate, experts stacked."""
    c = config
    H, J = c["linear_num_key_heads"], c["linear_num_value_heads"]
    K, V = c["linear_key_head_dim"], c["linear_value_head_dim"]
    block = "blk.%s." % name.split(".")[2] if ".layers." in name else ""
    if name.endswith("in_proj_qkvz.weight"):
        n = J // H * V
        q, k, v, z = np.split(x.reshape(H, -1, x.shape[1]), [K, 2 * K, 2 * K + n], axis=1)
        flat = [part.reshape(-1, x.shape[1]) for part in (q, k, v, z)]
        return [(block + "attn_qkv.weight", np.concatenate(flat[:3]), True),
                (block + "attn_gate.weight", flat[3], True)]
    if ".experts." in name:
        which = name.split(".")[-2]
        if ".experts.0." not in name:
            return []
        stack = [everything[name.replace(".experts.0.", ".experts.%d." % i)][0]
                 for i in range(c["num_experts"])]
        return [(block + "ffn_%s_exps.weight" % which.split("_")[0], np.stack(stack), True)]
    given = name.replace(".dt_bias", ".dt_proj.bias")
    new = names.get_name(given, try_suffixes=(".weight", ".bias"))
    assert new, name
    if name.endswith("A_log"):
        return [(new, -np.exp(x.astype(np.float64)).astype(np.float32), False)]
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return [(new, x + np.float32(1), True)]
    return [(new, x.reshape(x.shape[0], x.shape[2]) if x.ndim == 3 else x, True)]


def kimi_linear(name, x):
    """What reads the latent as keys, the other way round, and values; convolutions with axes of one."""
    c = config
    block = "blk.%s." % name.split(".")[2] if ".layers." in name else ""
    if name.endswith("kv_b_proj.weight"):
        H, N, V = c["num_attention_heads"], c["qk_nope_head_dim"], c["v_head_dim"]
        k, v = np.split(x.reshape(H, N + V, -1), [N], axis=1)
        return [(block + "attn_k_b.weight", k.swapaxes(1, 2), True),
                (block + "attn_v_b.weight", v, True)]
    if ".experts." in name:
        which = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down",
                 "up_proj": "up"}[name.split(".")[-2]]
        if ".experts.0." not in name:
            return []
        stack = [everything[name.replace(".experts.0.", ".experts.%d." % i)][0]
                 for i in range(c["num_experts"])]
        return [(block + "ffn_%s_exps.weight" % which, np.stack(stack), True)]
    given = name.replace(".dt_bias", ".dt_proj.bias").replace("correction_bias", "correction.bias")
    new = names.get_name(given, try_suffixes=(".weight", ".bias"))
    if new is None:
        new = names.get_name(given.replace("block_sparse_moe", "mlp"), try_suffixes=(".weight", ".bias"))
    assert new, name
    if name.endswith("A_log"):
        return [(new, -np.exp(x.astype(np.float64)).astype(np.float32), False)]
    return [(new, x, True)]


def expected(name, x):
    """What the file has to hold: (name, numbers, whether they are the same bits)."""
    if family == "granitemoehybrid" and "shared_mlp.input_linear" in name:
        base = name.split("shared_mlp")[0].replace("model.layers", "blk").rstrip(".")
        half = x.shape[0] // 2
        return [(base + ".ffn_gate.weight", x[:half], True), (base + ".ffn_up.weight", x[half:], True)]
    if family == "granitemoehybrid" and "shared_mlp.output_linear" in name:
        base = name.split("shared_mlp")[0].replace("model.layers", "blk").rstrip(".")
        return [(base + ".ffn_down.weight", x, True)]
    exact, given = True, name
    if family == "rwkv7":
        return rwkv7(name, x)
    if family == "kimi_linear":
        return kimi_linear(name, x)
    if family == "qwen3_next":
        return qwen3_next(name, x)
    if family == "nemotron_h" and name.endswith(".dt_bias") or name.endswith(".dt_bias"):
        given = name.replace(".dt_bias", ".dt_proj.bias")
    if name.endswith("feed_forward.experts.0.gate_proj.weight"):
        given = name.replace(".experts.0", "")
    new = names.get_name(given, try_suffixes=(".weight", ".bias"))
    if new is None:
        return []
    if arch in ("llama", "granitehybrid") and ".q_proj." in name:
        x = in_pairs(x, heads)
    if arch in ("llama", "granitehybrid") and ".k_proj." in name:
        x = in_pairs(x, kv_heads)
    if arch == "gpt2" and x.ndim == 2 and "wte" not in name and "wpe" not in name:
        x = x.T
    if arch == "gptneox" and "query_key_value" in name:
        x = np.concatenate(list(x.reshape(heads, 3, -1, *x.shape[1:]).swapaxes(0, 1))).reshape(x.shape)
    if name.endswith("A_log"):
        x, exact = -np.exp(x.astype(np.float64)).astype(np.float32), False
    if x.ndim == 3:
        x = x.reshape(x.shape[0], x.shape[2])
    if arch == "falcon-h1":
        m, s = config["mlp_multipliers"], config["ssm_multipliers"]
        inside, attends = config["ssm_in_multiplier"], config["attention_in_multiplier"]
        d = config["mamba_d_ssm"]
        g = config["mamba_n_groups"] * config["mamba_d_state"]
        for part, factor in (("embed_tokens", config["embedding_multiplier"]),
                             ("lm_head", config["lm_head_multiplier"]), ("gate_proj", m[0]),
                             ("down_proj", m[1]), ("q_proj", attends), ("v_proj", attends),
                             ("k_proj", attends * config["key_multiplier"]),
                             ("o_proj", config["attention_out_multiplier"]),
                             ("mamba.out_proj", config["ssm_out_multiplier"])):
            if part in name:
                x, exact = x * factor, False
        if "mamba.in_proj" in name:
            sizes = [d, d, g, g, x.shape[0] - 2 * d - 2 * g]
            x, exact = x * np.repeat(np.array(s) * inside, sizes)[:, None], False
    return [(new, x, exact)]


have = {t.name: t for t in gguf.GGUFReader(path).tensors}
fields = gguf.GGUFReader(path).fields
assert fields["general.architecture"].contents() == arch
TYPES = {"F32": gguf.GGMLQuantizationType.F32, "F16": gguf.GGMLQuantizationType.F16,
         "BF16": gguf.GGMLQuantizationType.BF16, "q8_0": gguf.GGMLQuantizationType.Q8_0,
         "f16": gguf.GGMLQuantizationType.F16}
compared, exact_ones = set(), 0
everything = read(folder)
for name, (x, stored) in everything.items():
    for new, want, exact in expected(name, x):
        if new == "output.weight" and new not in have:
            continue
        t = have[new]
        compared.add(new)
        kind = t.tensor_type
        if kind == gguf.GGMLQuantizationType.Q8_0:
            q = gguf.quants.quantize(np.ascontiguousarray(want.astype(np.float32)), kind)
            assert np.array_equal(q.reshape(-1), np.asarray(t.data).reshape(-1)), new
            continue
        got = np.asarray(t.data)
        if kind == gguf.GGMLQuantizationType.BF16:
            got = (got.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        shape = [int(n) for n in reversed(t.shape.tolist())]
        got = got.astype(np.float32).reshape(shape)
        assert got.size == want.size, (new, shape, want.shape)
        want = want.reshape(shape)
        if kind != gguf.GGMLQuantizationType.F32 and as_type is None:
            assert kind == TYPES[stored], (new, kind)
        if kind == gguf.GGMLQuantizationType.F16:
            want = want.astype(np.float16).astype(np.float32)
        if kind == gguf.GGMLQuantizationType.BF16:
            bits = np.ascontiguousarray(want).view(np.uint32)
            want = ((bits + 0x7fff + (bits >> 16 & 1)) >> 16 << 16).view(np.float32)
        if exact:
            assert np.array_equal(got, want), new
            exact_ones += 1
        else:
            assert np.allclose(got, want, rtol=1e-6, atol=0), new
tokenizer = os.path.join(folder, "tokenizer.json")
if os.path.exists(tokenizer) and fields["tokenizer.ggml.model"].contents() == "gpt2":
    with open(tokenizer) as file:
        told = json.load(file)
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    for text, i in told["model"]["vocab"].items():
        assert tokens[i] == text or types[i] in (3, 4), text
    merges = [m if isinstance(m, str) else " ".join(m) for m in told["model"]["merges"]]
    assert not merges or fields["tokenizer.ggml.merges"].contents() == merges
    assert len(tokens) == config["vocab_size"]
    print("tokens: %d, %d merges, pre %s" % (len(tokens), len(merges),
                                            fields["tokenizer.ggml.pre"].contents()))
zeros = {n for n in have if n.endswith("ssm_conv1d.bias") and not np.asarray(have[n].data).any()}
left = set(have) - compared - {"rope_freqs.weight"} - zeros
assert not left, "tensors that no source has: %s" % sorted(left)
assert exact_ones >= len(have) // 4 or as_type == "q8_0"
print("%-24s %3d tensors, %d of them bit for bit" % (os.path.basename(folder), len(have), exact_ones))
