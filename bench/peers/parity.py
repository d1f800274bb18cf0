"""Logits of a trained model against a plain PyTorch program that knows only the published names.

    python bench/peers/parity.py MNEME MODEL [TEXT]

MODEL is a folder of model_type gated_deltanet, gla or transformer, as flash-linear-attention names
them. Every token is computed by the recurrence as it is written, in double precision; the largest
difference to `mneme eval --logits` (float32) is printed, relative to the largest logit, and has to
be below 1e-4. Needs torch, numpy and safetensors.
"""
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

torch.set_default_dtype(torch.float64)


def rms(x, w, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * w


def short_conv(x, w):  # (T,C), (C,1,W): the last tap is the current token
    taps = w.shape[-1]
    padded = torch.cat([torch.zeros(taps - 1, x.shape[1]), x])
    return F.silu(sum(padded[i:i + len(x)] * w[:, 0, i] for i in range(taps)))


def unit(x):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gated_deltanet(x, p, c):
    T, H = len(x), c["num_heads"]
    q, k, v = (short_conv(x @ p[n + "_proj.weight"].T, p[n + "_conv1d.weight"]) for n in "qkv")
    q, k, v = (t.view(T, H, -1) for t in (q, k, v))
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    g = -p["A_log"].exp() * F.softplus(x @ p["a_proj.weight"].T + p["dt_bias"])
    beta = torch.sigmoid(x @ p["b_proj.weight"].T)
    S, out = torch.zeros(H, q.shape[-1], v.shape[-1]), []
    for t in range(T):
        S = S * g[t].exp()[:, None, None]
        u = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", S, k[t]))
        S = S + torch.einsum("hk,hv->hkv", k[t], u)
        out.append(torch.einsum("hkv,hk->hv", S, q[t]))
    o = rms(torch.stack(out), p["o_norm.weight"], c["norm_eps"])
    o = o * F.silu((x @ p["g_proj.weight"].T).view(T, H, -1))
    return o.reshape(T, -1) @ p["o_proj.weight"].T


def gla(x, p, c):
    T, H = len(x), c["num_heads"]
    q, k, v = ((x @ p[n + "_proj.weight"].T).view(T, H, -1) for n in "qkv")
    low = x @ p["gk_proj.0.weight"].T
    g = F.logsigmoid(low @ p["gk_proj.1.weight"].T + p["gk_proj.1.bias"]).view(T, H, -1) / 16
    S, out = torch.zeros(H, q.shape[-1], v.shape[-1]), []
    for t in range(T):
        S = S * g[t].exp()[:, :, None] + torch.einsum("hk,hv->hkv", k[t], v[t])
        out.append(torch.einsum("hkv,hk->hv", S, q[t] * q.shape[-1] ** -0.5))
    o = rms(torch.stack(out), p["g_norm_swish_gate.weight"], c["norm_eps"])
    o = o * F.silu((x @ p["g_proj.weight"].T).view(T, H, -1))
    return o.reshape(T, -1) @ p["o_proj.weight"].T


def transformer(x, p, c):
    T, H = len(x), c["num_heads"]
    q, k, v = ((x @ p[n + "_proj.weight"].T).view(T, H, -1) for n in "qkv")
    K = q.shape[-1]
    angle = torch.arange(T)[:, None] * c.get("rope_theta", 10000.0) ** (-torch.arange(0, K, 2) / K)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def turn(y):
        a, b = y.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    z = torch.einsum("thk,shk->hts", turn(q), turn(k)) * K ** -0.5
    z = z.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("hts,shv->thv", z.softmax(-1), v).reshape(T, -1) @ p["o_proj.weight"].T


MIXERS = {"gated_deltanet": gated_deltanet, "gla": gla, "transformer": transformer}


def logits(folder, ids):
    c = json.loads((folder / "config.json").read_text())
    w = {n: t.double() for n, t in load_file(folder / "model.safetensors").items()}
    x = w["model.embeddings.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        p = {n[len(at) + 5:]: t for n, t in w.items() if n.startswith(at + "attn.")}
        x = x + MIXERS[c["model_type"]](rms(x, w[at + "attn_norm.weight"], c["norm_eps"]), p, c)
        h = rms(x, w[at + "mlp_norm.weight"], c["norm_eps"])
        h = F.silu(h @ w[at + "mlp.gate_proj.weight"].T) * (h @ w[at + "mlp.up_proj.weight"].T)
        x = x + h @ w[at + "mlp.down_proj.weight"].T
    head = w.get("lm_head.weight", w["model.embeddings.weight"])
    return rms(x, w["model.norm.weight"], c["norm_eps"]) @ head.T


def main():
    mneme, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    ids = torch.randint(0, vocabulary, (200,), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as made:
        tokens, out = pathlib.Path(made, "ids.json"), pathlib.Path(made, "logits.safetensors")
        tokens.write_text(json.dumps(ids.tolist()))
        subprocess.run([mneme, "eval", "--model", folder, "--tokens", tokens, "--logits", out],
                       check=True, stdout=subprocess.DEVNULL)
        ours = next(iter(load_file(out).values())).double()
    want = logits(folder, ids)
    error = ((ours.view_as(want) - want).abs().max() / want.abs().max()).item()
    print(f"{folder}: largest difference {error:.2e} of the largest logit")
    sys.exit(error > 1e-4)


if __name__ == "__main__":
    main()
