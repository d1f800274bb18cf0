#!/usr/bin/env python3
"""What bf16 itself costs additive and the delta rule over chunks, beside the rule of `mneme check --dtype bf16`.

The chunked formula is evaluated in float64, and in float64 with every factor of a product rounded to bf16, as kernels
for tensor cores must: decayed queries and keys, scores, the inverse of the UT transform, residuals, states. Prints for
o, dq, dk, dv over the files given: the error's rms as a share of what the rule allows, its largest deviation as a share
of 2 u of its row's scale, and as a share of u of the scale + sqrt(2 ln n) of the measured rms (tests/golden/README.md).

    python3 tools/golden/make.py additive_vector delta_kda --set K=32 --set V=48 --set T=71 --seed 1 --out /tmp/g
    python3 tools/golden/rounded.py /tmp/g/*.safetensors
"""
import sys

sys.dont_write_bytecode = True

import numpy as np  # noqa: E402

from core import goldenfile  # noqa: E402

CHUNK, BLOCK, UNIT = 64, 16, 2.0 ** -8


def to_bf16(x):
    """The nearest numbers of 8 significant bits."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(np.rint(np.ldexp(mantissa, 8)), exponent - 8)


def blocks(length):
    """Pairs of blocks of 16 tokens, s not after t, with the token whose decay is their origin; -1: the front."""
    for t in range(0, length, BLOCK):
        for s in range(0, t + 1, BLOCK):
            end = min(s + BLOCK, length)
            yield slice(t, min(t + BLOCK, length)), slice(s, end), t - 1 if s < t else (s + end - 1) // 2


def origin(G, at):
    return G[at] if at >= 0 else 0.0 * G[0]


def scores(q, k, G, low):
    """q_t.k_s exp(G_t - G_s) for s <= t."""
    P = np.zeros((len(q), len(q)))
    for t, s, at in blocks(len(q)):
        P[t, s] = low(q[t] * np.exp(G[t] - origin(G, at))) @ low(k[s] * np.exp(origin(G, at) - G[s])).T
    return np.tril(P)


def gather(a, y, G, low, rows):
    """sum over s of a_ts y_s exp(G_t - G_s), or over t for the columns."""
    out = np.zeros_like(y)
    for t, s, at in blocks(len(y)):
        up, down = np.exp(G[t] - origin(G, at)), np.exp(origin(G, at) - G[s])
        if rows:
            out[t] += up * (a[t, s] @ low(y[s] * down))
        else:
            out[s] += down * (a[t, s].T @ low(y[t] * up))
    return out


def forward(x, S, low):
    """Outputs of one head, and of every chunk what its gradients need."""
    o, kept = np.zeros_like(x["v"]), []
    for first in range(0, len(o), CHUNK):
        at = slice(first, first + CHUNK)
        q, k, v, beta, G = x["q"][at], x["k"][at], x["v"][at], x["beta"][at], np.cumsum(x["g"][at], 0)
        front, late = low(S), low(k * np.exp(G[-1] - G))
        P = low(x["scale"] * scores(q, k, G, low) * beta)
        T, R = None, v
        if x["delta"]:
            T = low(np.linalg.inv(np.eye(len(q)) + np.tril(scores(k, k, G, low), -1) * beta))
            R = low(T @ low(v - low(k * np.exp(G)) @ front))
        o[at] = x["scale"] * low(q * np.exp(G)) @ front + P @ R
        S = np.exp(G[-1])[:, None] * S + late.T @ (low(beta[:, None] * R) if x["delta"] else R)
        kept.append((at, G, front, late, P, T, R))
    return o, kept


def backward(x, kept, D, low):
    """dq, dk and dv of one head."""
    dq, dk, dv = np.zeros_like(x["q"]), np.zeros_like(x["k"]), np.zeros_like(x["v"])
    for at, G, front, late, P, T, R in reversed(kept):
        q, k, beta, do = x["q"][at], x["k"][at], x["beta"][at], x["do"][at]
        behind, fall = low(D), np.exp(G)
        dX = beta[:, None] * (late @ behind) + P.T @ do
        D = np.exp(G[-1])[:, None] * D + low(x["scale"] * q * fall).T @ do
        p = low(np.tril(do @ R.T) * x["scale"] * beta)
        dq[at] = x["scale"] * fall * (do @ front.T) + gather(p, k, G, low, True)
        dk[at] = beta[:, None] * np.exp(G[-1] - G) * (R @ behind.T) + gather(p, q, G, low, False)
        if x["delta"]:
            dX = T.T @ low(dX)
            dA = low(-np.tril(low(dX) @ R.T, -1) * beta)
            dk[at] += gather(dA, k, G, low, True) + gather(dA, k, G, low, False) - fall * (low(dX) @ front.T)
            D -= low(k * fall).T @ low(dX)
        dv[at] = dX
    return dq, dk, dv


def head_of(metadata, tensors, b, h):
    """Inputs of one value head, rounded to bf16; a decay per head or token becomes one per channel."""
    T, H = tensors["v"].shape[1:3]
    j = h * tensors["q"].shape[2] // H
    x = {"q": tensors["q"][b, :, j], "k": tensors["k"][b, :, j], "v": tensors["v"][b, :, h], "do": tensors["do"][b, :, h]}
    g, beta = tensors.get("g"), tensors.get("beta")
    x["g"] = np.zeros(T) if g is None else np.full(T, g[h]) if g.ndim == 1 else g[b, :, h]
    x["beta"] = np.ones(T) if beta is None else beta[b, :, h]
    x = {name: to_bf16(each) for name, each in x.items()}
    if x["g"].ndim == 1:
        x["g"] = x["g"][:, None] * np.ones(x["q"].shape[1])
    return x | {"scale": float(metadata["scale"]), "delta": beta is not None}


def evaluate(metadata, tensors, low):
    found = []
    for b in range(tensors["v"].shape[0]):
        for h in range(tensors["v"].shape[2]):
            x = head_of(metadata, tensors, b, h)
            size = (x["q"].shape[1], x["v"].shape[1])
            start = tensors["state0"][b, h] if "state0" in tensors else np.zeros(size)
            end = tensors["dstate"][b, h] if "dstate" in tensors else np.zeros(size)
            o, kept = forward(x, start, low)
            found.append([low(y) for y in (o, *backward(x, kept, end, low))])
    return [np.stack(each) for each in zip(*found)]


def shares(got, want):
    """Of the rule: rms, largest deviation, largest by the law."""
    off, rms = np.abs(got - want), np.sqrt((want ** 2).mean())
    scale = np.maximum(np.abs(want).max(-1, keepdims=True), rms)
    row = np.maximum(np.sqrt((want ** 2).mean(-1, keepdims=True)), rms)
    error = np.sqrt((off ** 2).mean()) / rms
    law = UNIT * scale + np.sqrt(2.0 * np.log(want.size)) * error * row
    return error * np.sqrt(3.0) / (2.0 * UNIT), (off / scale).max() / (2.0 * UNIT), (off / law).max()


def main():
    table = {}
    for path in sys.argv[1:]:
        metadata, tensors = goldenfile.read(path)
        if "cu_seqlens" in tensors or not {"q", "k", "v", "do"} <= set(tensors) or "e" in tensors:
            continue
        rounded, exact = evaluate(metadata, tensors, to_bf16), evaluate(metadata, tensors, lambda x: x)
        for name, x, r in zip(("o", "dq", "dk", "dv"), rounded, exact):
            if name == "o" and not np.allclose(r.reshape(-1), evaluate_order(tensors["o"]), rtol=0.1, atol=0.1 * np.abs(r).max()):
                sys.exit(f"{path}: the chunked formula is not that of the file")
            table.setdefault((metadata["case"], name), []).append(shares(x, r))
    print("%-28s %-3s %5s %8s %10s %7s" % ("case", "of", "files", "rms", "largest", "by law"))
    for (case, name), found in table.items():
        print("%-28s %-3s %5d %8.2f %10.2f %7.2f" % (case, name, len(found), *np.max(found, 0)))


def evaluate_order(o):
    """Stored outputs (B,T,H,V) in the order of heads that `evaluate` has."""
    return np.moveaxis(o, 2, 1).reshape(-1)


if __name__ == "__main__":
    main()
