"""The forward pass of every layer, after the equations of src/layers/*.c, from torch's products and
the operators of the library."""

import math

import torch
import torch.nn.functional as F

from ._call import call, host_integers, torch_operators

GELU = "tanh"


class Pass:
    """One pass over one layer: what it starts from and leaves behind."""

    def __init__(self, layer, state, keeps, belief, cu_seqlens, shared=None, bound=None):
        self.layer, self.options, self.sizes = layer, layer.options, layer.sizes
        self.shared = {} if shared is None else shared    # of all layers of a model, in one pass
        self.bound = bound                                # least gates as log odds (hgrn2)
        self.start, self.keeps, self.left = state or {}, keeps, {}
        self.position = self.start.get("position", 0)
        self.belief, self.variance, self.cu_seqlens = belief, None, cu_seqlens
        if cu_seqlens is not None and (state or keeps) and layer.kind in _CACHES:
            raise NotImplementedError(f"{layer.kind}: packed sequences with a cache are not built")

    def final(self, T):
        return {**self.left, "position": self.position + T}

    def size(self, letter):
        return self.sizes.get(letter, 0)

    def has(self, name):
        return hasattr(self.layer, name)

    def heads(self, x, n):
        return x.unflatten(-1, (n, -1))

    def run(self, name, inputs, numbers=None, states=(), extra=()):
        """An operator. `states`: (input, result, piece); `extra`: more results wanted. Gives the
        first result, then those."""
        top = torch_operators[name]
        op = top.op
        numbers = numbers or {}
        given = dict(inputs)
        for first, _, piece in states:
            given[first] = self.start.get(piece)
        wanted = 1
        for i, field in enumerate(op.outputs):
            if field.name in extra or (self.keeps and any(field.name == s[1] for s in states)):
                wanted |= 1 << i
        params = tuple(p.value(name, numbers.get(p.name, p.default)) for p in op.params)
        results = call(top, [given.get(f.name) for f in op.inputs], params,
                       self.cu_seqlens if takes_sequences(op) else None, None, wanted)
        by_name = {f.name: y for f, y in zip(op.outputs, results)}
        if self.keeps:
            for _, result, piece in states:
                self.left[piece] = by_name[result]
        if extra:
            return results[0], *(by_name[name] for name in extra)
        return results[0]

    # ---- pieces that several share

    def conv(self, x, module, act, piece):
        """Causal convolution [B, T, C] by weight (C, 1, W), act "none" or "silu"."""
        return self.run("conv", {"x": x, "w": module.weight.squeeze(1),
                                 "bias": getattr(module, "bias", None)}, {"act": act},
                        [("tail0", "tail", piece)])

    def project_conv(self, x, weight, conv, without, piece):
        y = getattr(self.layer, weight)(x)
        if self.options.get("use_short_conv"):
            return self.conv(y, getattr(self.layer, conv), "silu", piece)
        return without(y) if without else y

    def unit(self, x, kind, eps):
        return self.run("l2_norm", {"x": x}, {"kind": kind, "eps": eps})

    def project_unit(self, x, weight, conv, kind, eps, piece):
        y = self.project_conv(x, weight, conv, F.silu, piece)
        return self.unit(self.heads(y, self.size("H")), kind, eps)

    def rms(self, x, weight, eps):
        return self.run("rms_norm", {"x": x, "w": weight}, {"eps": eps})

    def norm_gate(self, x, gate, norm, act="silu"):
        weight, eps = norm.weight, self.options.get("o_norm_eps") or self.layer.norm_eps
        if gate is None:
            return self.rms(x, weight, eps)
        return self.run("rms_norm_gated", {"x": x, "z": gate, "w": weight},
                        {"eps": eps, "act": act})

    def rope(self, x, base=10000.0, kind="half"):
        return self.run("rope", {"x": x}, {"base": base, "pos0": self.position, "kind": kind})

    def places(self, x):
        """Where the tokens of x [B, T, ...] stand in their sequences, [T]."""
        at = torch.arange(x.shape[1], device=x.device)
        if self.cu_seqlens is not None:
            offsets = host_integers(self.cu_seqlens)
            starts = offsets[:-1].repeat_interleave(offsets.diff())
            at = at - starts.to(x.device)
        return at + self.position

    def shift(self, x, piece):
        """x of the token before, 0 before the first of a sequence."""
        first = self.start.get(piece)    # [N, 1, D]
        if self.cu_seqlens is None:
            first = torch.zeros_like(x[:, :1]) if first is None else first.to(x.dtype)
            before = torch.cat([first, x[:, :-1]], 1)
            last = x[:, -1:]
        else:
            offsets = host_integers(self.cu_seqlens)
            there = offsets.diff() > 0
            starts, ends = offsets[:-1][there].to(x.device), offsets[1:][there].to(x.device) - 1
            first = x.new_zeros(len(there), 1, x.shape[-1]) if first is None else first.to(x.dtype)
            rows = first[there.to(x.device)].transpose(0, 1)
            before = torch.cat([x[:, :1], x[:, :-1]], 1).index_copy(1, starts, rows)
            last = first.index_copy(0, there.nonzero().flatten().to(x.device),
                                    x[0, ends].unsqueeze(1))
        if self.keeps:
            self.left[piece] = last
        return before

    def append(self, x, piece):
        """What a cache holds with x behind it."""
        before = self.start.get(piece)
        if before is not None:
            x = torch.cat([before, x], 1)
        if self.keeps:
            self.left[piece] = x
        return x

    def ccq(self, x, q, k):
        """The curvature-conditioned query, where the layer is +ccq; q, k [B, T, H, K]."""
        if not self.layer.ccq:
            return q
        gamma = self.layer.ccq_gamma(x).sigmoid()
        return self.run("curvature", {"q": q, "k": self.unit(k, "max", 1e-12), "gamma": gamma},
                        {"n0": self.position}, [("kk0", "kk", "ccq_kk"), ("ks0", "ks", "ccq_ks")])

    def tell(self, variance):
        if self.belief:
            self.variance = variance.flatten(2).mean(-1)

    def gate(self, x, name="g_proj"):
        """The output gate in value heads, None where the layer has none."""
        if not self.has(name):
            return None
        module = getattr(self.layer, name)
        y = chained(module, x)
        return self.heads(y, self.size("J") or self.size("H"))


_CACHES = ("attention", "relu_attention", "diff_attention", "mla", "hypermlp", "hyperglu")


def takes_sequences(op):
    return any("T" in axes or "L" in axes for f in op.inputs for axes in f.axes)


def chained(module, x):
    """A linear map, or two in a row called 0 and 1."""
    if isinstance(module, torch.nn.Linear):
        return module(x)
    for part in module.children():
        x = part(x)
    return x


def repeat(x, times):
    return x if times == 1 else x.repeat_interleave(times, 2)


def wide(x):
    """At least float32: what says how fast a memory fades is not rounded."""
    return x if x.dtype is torch.float64 else x.float()


def over_sum(x, eps):
    return x / (x.sum(-1, keepdim=True) + eps)


# ---- delta, gdn, kda, gdn2 ----------------------------------------------------------------------

def _delta_key(p, x, weight, conv, piece):
    o, kind = p.options, p.layer.kind
    plain = kind == "delta" and o["qk_activation"] != "silu"
    unit = kind != "delta" or o["qk_norm"] == "l2"
    k = getattr(p.layer, weight)(x)
    if o["use_short_conv"]:
        k = p.conv(k, getattr(p.layer, conv), "none" if plain else "silu", piece)
    elif not plain:
        k = F.silu(k)
    if plain and o["qk_activation"] == "relu":
        k = F.relu(k)
    if plain and o["qk_activation"] == "elu":
        k = F.elu(k) + 1
    k = p.heads(k, p.size("H"))
    return p.unit(k, "root", 1e-6) if unit else over_sum(k, 0.0)


def _delta_decay(p, x):
    layer, J = p.layer, p.size("J")
    if layer.kind == "delta":
        return None
    rate = wide(layer.A_log).exp()
    if layer.kind == "gdn":
        return -rate * F.softplus(wide(layer.a_proj(x)) + wide(layer.dt_bias))
    raw = p.heads(wide(chained(layer.f_proj, x)), J) + wide(layer.dt_bias).view(J, -1)
    bound = p.options.get("lower_bound") or 0.0
    if bound:
        return bound * torch.sigmoid(raw * rate[:, None])
    return -rate[:, None] * F.softplus(raw)


def _shared_projections(p, x):
    """q, k and v side by side, the output gate, and the raw decay and strength."""
    layer, H, J, K = p.layer, p.size("H"), p.size("J"), p.size("K")
    if p.options["projections"] == "qkv":
        return (layer.in_proj_qkv(x), layer.in_proj_z(x), layer.in_proj_a(x), layer.in_proj_b(x))
    n = J // H
    V = n * p.size("V")
    parts = p.heads(layer.in_proj_qkvz(x), H).split([K, K, V, V], -1)
    b, a = p.heads(layer.in_proj_ba(x), H).split([n, n], -1)
    q, k, v, z = (y.flatten(2) for y in parts)
    return torch.cat([q, k, v], -1), z, a.flatten(2), b.flatten(2)


def _delta_shared(p, x):
    layer, H, J = p.layer, p.size("H"), p.size("J")
    qkv, z, a, b = _shared_projections(p, x)
    keys = H * p.size("K")
    q, k, v = p.conv(qkv, layer.conv1d, "silu", "qkv_conv").split(
        [keys, keys, J * p.size("V")], -1)
    q, k = (p.unit(p.heads(y, H), "root", 1e-6) for y in (q, k))
    q = p.ccq(x, q, k)
    g = -wide(layer.A_log).exp() * F.softplus(wide(a) + wide(layer.dt_bias))
    beta = b.sigmoid() * (2.0 if p.options["allow_neg_eigval"] else 1.0)
    o = p.run("delta_net", {"q": q, "k": k, "v": p.heads(v, J), "g": g, "beta": beta},
              {"scale": p.size("K") ** -0.5}, [("state0", "state", "memory")])
    return layer.out_proj(p.norm_gate(o, p.heads(z, J), layer.o_norm).flatten(2))


def delta(p, x):
    layer, J = p.layer, p.size("J")
    if p.options.get("projections", "separate") != "separate":
        return _delta_shared(p, x)
    k = _delta_key(p, x, "k_proj", "k_conv1d", "k_conv")
    q = p.ccq(x, _delta_key(p, x, "q_proj", "q_conv1d", "q_conv"), k)
    v = p.heads(p.project_conv(x, "v_proj", "v_conv1d", F.silu, "v_conv"), J)
    double = 2.0 if p.options.get("allow_neg_eigval") else 1.0

    def opened(name):
        return getattr(layer, name)(x).sigmoid() * double

    inputs = {"q": q, "k": k, "v": v, "g": _delta_decay(p, x)}
    if layer.kind == "gdn2":
        inputs.update(erase=p.heads(opened("b_proj"), J), write=p.heads(opened("w_proj"), J))
    else:
        inputs["beta"] = opened("b_proj") if p.has("b_proj") else torch.ones_like(v[..., 0])
    o = p.run("gdn2" if layer.kind == "gdn2" else "delta_net", inputs,
              {"scale": p.size("K") ** -0.5}, [("state0", "state", "memory")])
    act = "sigmoid" if layer.kind in ("kda", "gdn2") else "silu"
    o = p.norm_gate(o, p.gate(x), layer.o_norm, act)
    return layer.o_proj(o.flatten(2))


# ---- linear, gla, retnet ------------------------------------------------------------------------

def _map_layer(p, x, which, part):
    if p.options.get("tie_feature_map_qk"):
        which = "q"
    return getattr(getattr(p.layer, "feature_map_" + which), part)(x)


def taylor(x):
    """Features whose products are 1 + s + s^2 / 2, s that of the vectors over the root of width."""
    d = x.shape[-1]
    i, j = torch.triu_indices(d, d, 1, device=x.device)
    return torch.cat([torch.ones_like(x[..., :1]), x * d ** -0.25, x * x * (2 * d) ** -0.5,
                      x[..., i] * x[..., j] * d ** -0.5], -1)


def _dpfp(x):
    r = torch.cat([F.relu(x), -F.relu(x)], -1)
    return torch.cat([r * torch.roll(r, j + 1, -1) for j in range(4)], -1)


def _features(p, x, which):
    name = p.options.get("feature_map")
    if name == "elementwise_product":
        return _map_layer(p, x, which, "layer1") * _map_layer(p, x, which, "layer2")
    if name == "hedgehog":
        y = _map_layer(p, x, which, "layer")
        return torch.softmax(torch.cat([2 * y, -2 * y], -1), -1)
    if name == "t2r":
        return F.relu(_map_layer(p, x, which, "layer"))
    if name == "taylor":
        return taylor(x)
    plain = {"dpfp": _dpfp, "elu": lambda y: F.elu(y) + 1, "relu": F.relu, "swish": F.silu,
             "silu": F.silu, "sigmoid": torch.sigmoid}
    return plain.get(name, lambda y: y)(x)


def _linear_key(p, x, which, heads):
    k = p.project_conv(x, which + "_proj", which + "_conv1d", None, which + "_conv")
    k = _features(p, p.heads(k, heads), which)
    if p.options.get("norm_" + which):
        k = over_sum(k, 1e-4)
    return p.rope(k) if p.layer.kind == "retnet" else k


def _linear_decay(p, x):
    if p.layer.kind == "gla":
        g = F.logsigmoid(wide(chained(p.layer.gk_proj, x))) / 16
        low = p.options.get("clamp_min") or 0.0
        if low < 0:
            g = g.clamp_min(low)
        return repeat(p.heads(g, p.size("G")), p.size("H") // p.size("G"))
    if p.layer.kind == "retnet":
        heads = torch.arange(p.size("H"), dtype=torch.float64, device=x.device)
        g = torch.log1p(-torch.exp2(-5.0 - heads))
        return g if x.dtype is torch.float64 else g.float()
    return None


def linear(p, x):
    layer, H, G = p.layer, p.size("H"), p.size("G")
    q = _linear_key(p, x, "q", H)
    k = repeat(_linear_key(p, x, "k", G), H // G)
    v = repeat(p.heads(p.project_conv(x, "v_proj", "v_conv1d", None, "v_conv"), G), H // G)
    q = p.ccq(x, q, k)
    by_map = p.options.get("feature_map") == "taylor"    # which has the scale already
    scale = {"scale": 1.0 if by_map else q.shape[-1] ** -0.5}
    o = p.run("additive", {"q": q, "k": k, "v": v, "g": _linear_decay(p, x)}, scale,
              [("state0", "state", "memory")])
    if p.options.get("norm_feature_map"):
        below = p.run("additive", {"q": q, "k": k, "v": torch.ones_like(k[..., :1])}, scale,
                      [("state0", "state", "key_sum")])
        o = o / (below + 1e-10)
    norm = next(getattr(layer, name) for name in ("g_norm_swish_gate", "g_norm", "norm")
                if p.has(name))
    gate = p.heads(layer.g_proj(x), H) if p.has("g_proj") else None
    return layer.o_proj(p.norm_gate(o, gate, norm).flatten(2))


# ---- attention ----------------------------------------------------------------------------------

def _frequencies(o, R):
    """Radians a token of each pair of R channels: rope_type linear or llama3 (attention.c)."""
    w = o["rope_theta"] ** (-2.0 * torch.arange(R // 2, dtype=torch.float64) / R)
    if o["rope_type"] == "linear":
        return w / o["rope_factor"]
    turns = o["rope_original_context"] * w / (2.0 * math.pi)
    low, high = o["rope_low_freq_factor"], o["rope_high_freq_factor"]
    s = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return s * w + (1.0 - s) * w / o["rope_factor"]


def _turned_by_table(p, x):
    w = _frequencies(p.options, x.shape[-1]).to(x.device)
    angle = (p.places(x).double()[:, None] * w)[:, None, :]
    c, s = angle.cos(), angle.sin()
    c, s = torch.cat([c, c], -1).to(x.dtype), torch.cat([-s, s], -1).to(x.dtype)
    return x * c + torch.roll(x, x.shape[-1] // 2, -1) * s


def _turned(p, x):
    """Rotary positions in the first partial_rotary_factor channels of a head."""
    o, K = p.options, x.shape[-1]
    R = int(o.get("partial_rotary_factor", 1.0) * K)
    part, rest = (x, None) if R == K else x.split([R, K - R], -1)
    part = (p.rope(part.contiguous(), o["rope_theta"]) if o.get("rope_type", "default") == "default"
            else _turned_by_table(p, part))
    return part if rest is None else torch.cat([part, rest], -1)


def _attention_norm(p, x, name):
    norm = getattr(p.layer, name, None)
    if norm is None:
        return x
    weight = norm.weight + 1.0 if p.options.get("norm_plus_one") else norm.weight
    return p.rms(x, weight, p.options.get("qk_norm_eps") or p.layer.norm_eps)


def _attention_heads(p, y, n, norm, turns):
    """Projected queries, keys or values in heads, normed and turned."""
    if norm and p.options.get("qk_norm_whole"):
        y = _attention_norm(p, y, norm)
    y = p.heads(y, n)
    if norm and not p.options.get("qk_norm_whole"):
        y = _attention_norm(p, y, norm)
    return _turned(p, y) if turns else y


def _attention_fused(p, x):
    H, J, K = p.size("H"), p.size("J"), p.size("K")
    y = p.layer.qkv_proj(x)
    if p.options["fused_qkv"] == "heads":
        q, k, v = p.heads(y, H).split([K, K, K], -1)
    else:
        q, k, v = (p.heads(z, n) for z, n in zip(y.split([H * K, J * K, J * K], -1), (H, J, J)))
    turns = p.options["use_rope"]
    return (_turned(p, q), _turned(p, k), v, None) if turns else (q, k, v, None)


def _attention_inputs(p, x):
    """q, k, v and the gate of what is read, None where there is none."""
    layer, o, H, J = p.layer, p.options, p.size("H"), p.size("J")
    if o.get("fused_qkv", "separate") != "separate":
        return _attention_fused(p, x)
    turns, gate = o["use_rope"], None
    if o.get("use_output_gate"):
        q, gate = p.heads(layer.q_proj(x), H).chunk(2, -1)
        q = _attention_norm(p, q.contiguous(), "q_norm")
        q = _turned(p, q) if turns else q
    else:
        q = _attention_heads(p, layer.q_proj(x), H, "q_norm", turns)
    k = _attention_heads(p, layer.k_proj(x), J, "k_norm", turns)
    return q, k, p.heads(layer.v_proj(x), J), gate


def attention(p, x):
    layer, o = p.layer, p.options
    x = x * o["input_multiplier"] if o.get("input_multiplier", 1.0) != 1.0 else x
    q, k, v, gate = _attention_inputs(p, x)
    scale = o.get("attention_scale") or p.size("K") ** -0.5
    numbers = {"scale": scale * o.get("key_multiplier", 1.0)}
    if layer.kind == "attention":
        numbers["window"] = o["window_size"] or 0
    y = p.run(layer.kind, {"q": q, "k": p.append(k, "k"), "v": p.append(v, "v")}, numbers)
    y = y * gate.sigmoid() if gate is not None else y
    return layer.o_proj(y.flatten(2)) * o.get("output_multiplier", 1.0)


def _mla_query(p, x):
    layer, P, K = p.layer, p.size("P"), p.size("K")
    if p.size("Q"):
        down, norm, up = (getattr(layer.q_proj, i) for i in "012")
        q = up(p.rms(down(x), norm.weight, p.options["latent_norm_eps"]))
    else:
        q = layer.q_proj(x)
    q = p.heads(q, p.size("H"))
    if not p.options["use_rope"]:
        return q
    plain, turns = q.split([K - P, P], -1)
    return torch.cat([plain, _mla_turned(p, turns)], -1)


def _mla_turned(p, x):
    o = p.options
    return p.rope(x.contiguous(), o["rope_theta"], "pairs" if o["rope_pairs"] else "half") \
        if o["use_rope"] else x


def mla(p, x):
    layer, o, H, P, V = p.layer, p.options, p.size("H"), p.size("P"), p.size("V")
    if o["fused_latent"]:
        c, r = layer.kv_a(x).split([p.size("R"), P], -1)
    else:
        c, r = getattr(layer.kv_proj, "0")(x), layer.k_rope(x)
    norm, up = getattr(layer.kv_proj, "1"), getattr(layer.kv_proj, "2")
    c = p.heads(up(p.rms(c.contiguous(), norm.weight, o["latent_norm_eps"])), H)
    k, v = c.split([p.size("E") - V, V], -1)
    r = _mla_turned(p, p.heads(r, 1))
    k = torch.cat([k, r.expand(-1, -1, H, -1)], -1)
    y = p.run("attention", {"q": _mla_query(p, x), "k": p.append(k, "k"), "v": p.append(v, "v")},
              {"scale": p.size("K") ** -0.5, "window": o["window_size"] or 0})
    if p.has("g_proj"):
        y = y * layer.g_proj(x).sigmoid().unsqueeze(-1)
    return layer.o_proj(y.flatten(2))


def _diff_lambda(p, x):
    """What the second map is multiplied by, and where that starts."""
    layer = p.layer
    if p.has("lambda_proj"):
        return layer.lambda_proj(x).sigmoid().unsqueeze(-1), 0.0
    start = 0.8 - 0.6 * math.exp(-0.3 * layer.index)
    first = (wide(layer.lambda_q1) * wide(layer.lambda_k1)).sum().exp()
    second = (wide(layer.lambda_q2) * wide(layer.lambda_k2)).sum().exp()
    return first - second + start, start


def diff_attention(p, x):
    layer, o, H, G, J = p.layer, p.options, p.size("H"), p.size("G"), p.size("J")

    def turned(y):
        return p.rope(y, o["rope_theta"], "pairs") if o["use_rope"] else y

    q, k = turned(p.heads(layer.q_proj(x), 2 * H)), turned(p.heads(layer.k_proj(x), G))
    v = p.heads(layer.v_proj(x), J)
    v = repeat(v, 2) if o["diff_lambda"] == "layer" else v
    y = p.run("attention", {"q": q, "k": p.append(k, "k"), "v": p.append(v, "v")},
              {"scale": p.size("K") ** -0.5})
    first, second = y.unflatten(2, (H, 2)).unbind(3)
    part, start = _diff_lambda(p, x)
    y = first - (part * second).to(first.dtype)
    if p.has("subln"):
        y = p.rms(y, layer.subln.weight, 1e-5) * (1.0 - start)
    return layer.out_proj(y.flatten(2))


# ---- rwkv7, comba -------------------------------------------------------------------------------

_MEMORY = [("state0", "state", "memory")]


def _lora(module, x, act=None):
    y = getattr(module.lora, "0")(x)
    return getattr(module.lora, "2")(act(y) if act else y)


def _first_value(p, v, x):
    """Values on their way to those of the model's first layer of this kind."""
    first = p.shared.setdefault("first_value", v)
    if first is v or not p.has("v_lora"):
        return v
    return v + (first - v) * _lora(p.layer.v_lora, x).sigmoid()


def rwkv7(p, x):
    layer, H, K, V = p.layer, p.size("H"), p.size("K"), p.size("V")
    d = p.shift(x, "time_shift") - x

    def mixed(name):
        return x + d * getattr(layer, name)

    r, k = p.heads(layer.r_proj(mixed("x_r")), H), layer.k_proj(mixed("x_k"))
    g = -math.exp(-0.5) * wide(_lora(layer.w_lora, mixed("x_w"), torch.tanh)).sigmoid()
    values = mixed("x_v")
    v = p.heads(_first_value(p, layer.v_proj(values), values), H)
    rate = _lora(layer.a_lora, mixed("x_a")).sigmoid()
    root = p.options["fuse_norm"]
    kk = p.unit(p.heads(k * layer.k_k, H), "root" if root else "max", 1e-6 if root else 1e-12)
    k = p.heads(k * (1.0 + (rate - 1.0) * layer.k_a), H)
    o = p.run("dplr", {"q": p.ccq(x, r, k), "k": k, "v": v, "a": -kk, "b": kk * p.heads(rate, H),
                       "g": p.heads(g, H)}, {"scale": 1.0}, _MEMORY)
    o = F.layer_norm(o, (V,), eps=K * layer.norm_eps)
    o = o * layer.g_norm.weight.view(H, V) + layer.g_norm.bias.view(H, V)
    o = o + (r * k * layer.r_k).sum(-1, keepdim=True) * v
    return layer.o_proj(o.flatten(2) * _lora(layer.g_lora, mixed("x_g"), torch.sigmoid))


def comba(p, x):
    layer, H, J = p.layer, p.size("H"), p.size("J")
    q, k = (p.heads(p.project_conv(x, n + "_proj", n + "_conv1d", F.silu, n + "_conv"), H)
            for n in "qk")
    v = p.heads(p.project_conv(x, "v_proj", "v_conv1d", F.silu, "v_conv"), J)
    read = k * layer.decay.sigmoid().unsqueeze(-1) if p.has("decay") else k
    q = q - read * layer.D.unsqueeze(-1) if p.has("D") else q
    q, k, read = (p.unit(y.contiguous(), "root", 1e-6) for y in (q, k, read))
    q = p.ccq(x, q, k)
    q, k, read = (repeat(y, J // H) for y in (q, k, read))
    k = k * layer.b_proj(x).sigmoid().unsqueeze(-1)
    g = -wide(layer.A_log).exp() * F.softplus(wide(layer.a_proj(x)) + wide(layer.dt_bias))
    o = p.run("dplr", {"q": q, "k": k, "v": v, "a": read, "b": -k,
                       "g": g.unsqueeze(-1).expand(k.shape)},
              {"scale": p.size("K") ** -0.5}, _MEMORY)
    return layer.o_proj(p.norm_gate(o, p.gate(x), layer.o_norm, "sigmoid").flatten(2))


def deltaproduct(p, x):
    layer, H, steps = p.layer, p.size("H"), p.size("N")
    q, k, v = (p.heads(p.project_conv(x, n + "_proj", n + "_conv1d", F.silu, n + "_conv"),
                       H if n == "q" else steps * H) for n in "qkv")
    g = None
    if p.options["use_forget_gate"]:
        g = -wide(layer.A_log).exp() * F.softplus(wide(layer.a_proj(x)) + wide(layer.dt_bias))
    beta = layer.b_proj(x).sigmoid() * (2.0 if p.options["allow_neg_eigval"] else 1.0)
    o = p.run("delta_product", {"q": p.unit(q, "root", 1e-6), "k": p.unit(k, "root", 1e-6),
                                "v": v, "beta": beta, "g": g},
              {"scale": p.size("K") ** -0.5}, _MEMORY)
    return layer.o_proj(p.norm_gate(o, p.gate(x), layer.o_norm).flatten(2))


# ---- hgrn2, gsa, lightning, rg_lru, short_conv --------------------------------------------------

def _maybe_conv(p, x, name):
    y = getattr(p.layer, name + "_proj")(x)
    return p.conv(y, getattr(p.layer, name + "_conv1d"), "none", name + "_conv") \
        if p.options["use_short_conv"] else y


def hgrn2(p, x):
    layer, H = p.layer, p.size("H")
    q = p.heads(F.silu(_maybe_conv(p, x, "q")), H)
    odds = wide(_maybe_conv(p, x, "f"))    # log odds of the gate
    if p.bound is not None and p.options["use_lower_bound"]:
        odds = odds + F.softplus(F.softplus(-odds) + p.bound)
    k = p.heads(torch.sigmoid(-odds).to(x.dtype), H)
    v = p.heads(_maybe_conv(p, x, "i"), H)
    o = p.run("additive", {"q": p.ccq(x, q, k), "k": k, "v": v, "g": p.heads(F.logsigmoid(odds), H)},
              {"scale": p.size("K") ** -0.5}, _MEMORY)
    return layer.o_proj(p.rms(o.flatten(2), layer.g_norm.weight, 1e-5))


def gsa(p, x):
    layer, H, G, M = p.layer, p.size("H"), p.size("G"), p.size("M")
    act = F.relu if p.options["feature_map"] == "relu" else F.silu
    q = p.heads(act(_maybe_conv(p, x, "q")), H)
    k = repeat(p.heads(act(_maybe_conv(p, x, "k")), G), H // G)
    v = repeat(p.heads(F.silu(_maybe_conv(p, x, "v")), G), H // G)
    g = F.logsigmoid(wide(layer.f_proj(x))) / p.options["gate_logit_normalizer"]
    g = repeat(p.heads(g, G), H // G)
    s = (1.0 - g.exp()).to(x.dtype)
    q = p.ccq(x, q, k)
    # the first memory fades by slot: each slot is a head whose value has width 1
    scores = p.run("additive", {"q": q, "k": k, "v": s.flatten(2).unsqueeze(-1),
                                "g": g.flatten(2)}, {"scale": 1.0},
                   [("state0", "state", "slot_keys")]).view(*q.shape[:3], M)
    o = p.run("additive", {"q": torch.softmax(scores, -1).to(v.dtype), "k": s, "v": v, "g": g},
              {"scale": 1.0}, [("state0", "state", "slot_values")])
    return layer.o_proj(p.rms(F.silu(o.flatten(2)), layer.g_norm.weight, 1e-5))


def lightning(p, x):
    layer, H, K = p.layer, p.size("H"), p.size("K")
    q, k, v = p.heads(F.silu(layer.qkv_proj(x)), H).split([K, K, K], -1)
    g = -F.relu(wide(layer.slope_rate.detach()).flatten())
    o = p.run("additive", {"q": q, "k": k, "v": v, "g": g}, {"scale": 1.0}, _MEMORY)
    o = p.rms(o.flatten(2), layer.norm.weight, 1e-6)
    return layer.out_proj(layer.output_gate(x).sigmoid() * o)


def rg_lru(p, x):
    layer, H = p.layer, p.size("H")
    u = p.conv(layer.linear_x(x), layer.conv_1d, "none", "conv")

    def gate(name):
        weight, bias = (getattr(layer.rg_lru, f"{name}_gate_{part}") for part in ("weight", "bias"))
        return (torch.einsum("bthi,hio->btho", p.heads(u, H), weight) + bias).flatten(2)

    h = p.run("lru", {"x": u, "gx": gate("input"), "ga": gate("recurrent"),
                      "a_param": layer.rg_lru.recurrent_param}, {}, [("h0", "h", "memory")])
    return layer.linear_out(F.gelu(layer.linear_y(x), approximate=GELU) * h)


def short_conv(p, x):
    b, c, u = p.layer.in_proj(x).chunk(3, -1)
    return p.layer.out_proj(c * p.conv(b * u, p.layer.conv, "none", "conv"))


def no_mixer(p, x):
    return x


# ---- kla ----------------------------------------------------------------------------------------

def _kla_key(p, k):
    if p.options["use_qk_norm"]:
        k = p.unit(k.contiguous(), "max", 1e-12)
    bound = p.options["clip_value"] or 0.0
    return k.clamp(-bound, bound) if bound else k


def _kla_dynamics(p):
    layer, how, bound = p.layer, p.options["process_noise"], p.options["clip_value"] or 0.0
    noise = layer.process_noise if p.has("process_noise") else torch.full_like(
        layer.delta, 1e-7 if how == "zero" else 0.01)
    if bound:
        noise = noise.clamp_max(bound)
    a, q = p.run("kla_discretise", {"delta": layer.delta, "lambda_log": layer.lambda_log,
                                    "process_noise": noise},
                 {"mode": p.options["discretisation"]}, extra=("pbar",))
    return a, q * 1e-5 if how == "zero" else q


def kla(p, x):
    layer, o, V, K = p.layer, p.options, p.size("V"), p.size("K")
    z, gate = layer.in_proj(x), None
    if o["use_gate"]:
        z, gate = z.split(V, -1)
    z = p.conv(z, layer.conv, "silu", "conv") if o["conv_size"] else F.silu(z)

    def width(option, letter):
        return {"full": V, "conv": 0}.get(option, p.size(letter))

    codes = [width(o["value_rank"], "R"), width(o["var_rank"], "Q"), K, K]
    v, prec, k, q = layer.sensor_proj(z).split(codes, -1)
    v = z if codes[0] == 0 else layer.value_expand(v) if p.has("value_expand") else v
    prec = layer.var_expand(prec) if p.has("var_expand") else prec
    variance = F.softplus(prec) + o["obs_var_min"]
    if o["obs_var_max"]:
        variance = variance.clamp_max(o["obs_var_max"])
    k, q = _kla_key(p, k), _kla_key(p, q)
    if layer.ccq:
        q = p.ccq(x, q.unsqueeze(2), k.unsqueeze(2)).squeeze(2)
    a, noise = _kla_dynamics(p)
    y = p.run("moebius", {"v": v, "prec": variance.reciprocal(), "k": k, "q": q, "a": a,
                          "p": noise}, {"from_prior": o["decode_from_prior"]},
              [("lam0", "lam", "precision"), ("eta0", "eta", "information")],
              ("yvar",) if p.belief else ())
    if p.belief:
        y, yvar = y
        p.tell(yvar.unsqueeze(2))
    if p.has("lambda_skip"):
        y = y + z * layer.lambda_skip
    return layer.out_proj(y * F.silu(gate) if gate is not None else y)


# ---- palimpsa -----------------------------------------------------------------------------------

_CELLS = [("mu0", "mu", "mean"), ("imp0", "imp", "importance")]


def _palimpsa_run(p, name, inputs):
    log = p.layer.Ip_log if p.options["learn_prior"] else p.layer.Ip_log.detach()
    inputs["ip"] = wide(log).exp()
    o = p.run(name, inputs, {"scale": p.size("K") ** -0.5}, _CELLS,
              ("ovar",) if p.belief else ())
    if p.belief:
        o, variance = o
        p.tell(variance)
    return o


def _palimpsa_code(p, x, q, k, v):
    layer, H = p.layer, p.size("H")
    write = layer.bs_proj(x).sigmoid().unsqueeze(-1)
    dt = F.softplus(wide(layer.dt_proj(x)) + wide(layer.dt_bias))
    rate = wide(layer.A_log).exp()
    if p.options["metaplasticity"]:
        strength = write * F.softplus(layer.b_scale).unsqueeze(-1)
        b = p.heads(layer.b_proj(layer.b_rank_proj(x)), H).sigmoid() * strength
        o = _palimpsa_run(p, "palimpsa_code", {"q": q, "k": k, "v": v * write, "b": b, "dt": dt,
                                               "decay_rate": rate})
    else:
        o = p.run("additive", {"q": q, "k": k, "v": v * write, "g": -dt * rate},
                  {"scale": p.size("K") ** -0.5}, [("state0", "state", "mean")])
    return o + v * layer.D.unsqueeze(-1) if p.options["use_residual"] else o


def _palimpsa_paper(p, x, q, k, v):
    layer = p.layer
    gamma = layer.gamma_proj(x).sigmoid()
    beta = p.heads(layer.beta_proj(x), p.size("H")).sigmoid() * gamma.unsqueeze(-1)
    return _palimpsa_run(p, "palimpsa_paper",
                         {"q": q, "k": k, "v": v, "beta": beta, "gamma": gamma,
                          "n_mem": layer.logN.exp() * p.options["n_init"]})


def palimpsa(p, x):
    layer, H = p.layer, p.size("H")
    k = p.project_unit(x, "k_proj", "k_conv1d", "max", 1e-12, "k_conv")
    q = p.ccq(x, p.project_unit(x, "q_proj", "q_conv1d", "max", 1e-12, "q_conv"), k)
    v = p.heads(p.project_conv(x, "v_proj", "v_conv1d", F.silu, "v_conv"), H)
    memory = _palimpsa_code if layer.kind == "palimpsa_code" else _palimpsa_paper
    o = p.norm_gate(memory(p, x, q, k, v), p.gate(x), layer.o_norm)
    return layer.o_proj(o.flatten(2))


# ---- bayes --------------------------------------------------------------------------------------

def bayes(p, x):
    layer, H = p.layer, p.size("H")
    k = p.project_unit(x, "k_proj", "k_conv1d", "root", 1e-6, "k_conv")
    q = p.ccq(x, p.project_unit(x, "q_proj", "q_conv1d", "root", 1e-6, "q_conv"), k)
    v = p.heads(p.project_conv(x, "v_proj", "v_conv1d", F.silu, "v_conv"), H)
    if p.has("a_proj"):
        la = -wide(layer.A_log).exp() * F.softplus(wide(layer.a_proj(x)) + wide(layer.dt_bias))
        la = la.unsqueeze(-1).expand(k.shape)
    else:
        la = torch.zeros_like(k)
    inputs = {"q": q, "k": k, "v": v, "la": la,
              "l2": F.softplus(wide(layer.l_proj(x))) + 1e-6,
              "r2": p.heads(F.softplus(wide(layer.r_proj(x))) + 1e-6, H)}
    if layer.kind == "bayes_rotation":
        angle = layer.A_angle.view(H, -1)
        inputs["theta"] = (p.heads(layer.angle_proj(x), H) + angle if p.has("angle_proj")
                           else angle.expand(k.shape))
    prior = wide(layer.p0_log).exp() if p.has("p0_log") else k.new_ones(
        H, dtype=torch.float64 if k.dtype is torch.float64 else torch.float32)
    inputs["p0"] = 3.0 * prior
    o = p.run("bayes", inputs, {"scale": 1.0}, [("M0", "M", "mean"), ("P0", "P", "covariance")],
              ("qvar",) if p.belief else ())
    if p.belief:
        o, variance = o
        p.tell(variance)
    return layer.o_proj(p.norm_gate(o, p.gate(x), layer.o_norm).flatten(2))


# ---- mesa ---------------------------------------------------------------------------------------

def mesa(p, x):
    layer, H = p.layer, p.size("H")

    def key_of(weight, conv, piece):
        y = p.conv(getattr(layer, weight)(x), getattr(layer, conv), "silu", piece)
        return p.unit(p.heads(y, H), "root", 1e-6)

    k = key_of("k_proj", "k_conv1d", "k_conv")
    q = p.ccq(x, key_of("q_proj", "q_conv1d", "q_conv"), k)
    lam = F.softplus(layer.lambda_params.view(H, -1)) + p.options["lambda_lower_bound"]
    infers = not torch.is_grad_enabled() and x.is_cpu    # as mesa.c: so many steps to the solution
    steps = p.options["cg_steps"] or 0 if infers else 0
    o = p.run("mesa", {"q": q, "k": k, "v": p.heads(layer.v_proj(x), H),
                       "g": F.logsigmoid(wide(layer.a_proj(x))), "beta": layer.b_proj(x).sigmoid(),
                       "lam": lam}, {"scale": 1.0, "steps": steps},
              [("hkk0", "hkk", "hkk"), ("hkv0", "hkv", "hkv")])
    return layer.o_proj(p.norm_gate(o, p.gate(x), layer.o_norm).flatten(2))


# ---- mamba --------------------------------------------------------------------------------------

def _multiplied(p, y):
    """The parts of the projection times their multipliers."""
    o, inner, keys = p.options, p.size("I"), p.size("G") * p.size("K")
    by = [o[n + "_multiplier"] for n in ("z", "x", "b", "c", "dt")]
    if all(m == 1.0 for m in by):
        return y
    sizes = torch.tensor([inner, inner, keys, keys, p.size("H")], device=y.device)
    return y * torch.tensor(by, dtype=y.dtype, device=y.device).repeat_interleave(sizes)


def _levels(p, x, q, k, v, g, weights):
    """Blocks of tokens, nearer ones smaller: level n > 0 takes tokens whose bit n - 1 is clear, is
    emptied where a position is a multiple of 2^n, and is read where the bit is set."""
    at = p.places(x).unsqueeze(-1)
    own = (q * k).sum(-1)
    own = own.repeat_interleave(v.shape[2] // own.shape[2], 2) * weights[..., 0]
    y = v * own.unsqueeze(-1)
    for n in range(1, weights.shape[-1]):
        read = (at >> (n - 1) & 1).to(v.dtype)
        if not p.keeps and not read.any():
            break
        empties = -64.0 * (at % 2 ** n == 0).to(g.dtype)
        level = p.run("additive", {"q": q, "k": k, "v": v * (1 - read).unsqueeze(-1),
                                   "g": g + empties}, {"scale": 1.0},
                      [("state0", "state", f"level{n}")])
        y = y + level * (weights[..., n] * read).unsqueeze(-1)
    return y


def mamba2(p, x):
    layer, o, H, G, K, inner = (p.layer, p.options, p.size("H"), p.size("G"), p.size("K"),
                                p.size("I"))
    levels = p.size("S") if hasattr(layer, "L") else 0
    by_input, by_output = o.get("input_multiplier", 1.0), o.get("output_multiplier", 1.0)
    x = x * by_input if by_input != 1.0 else x
    y = layer.in_proj(x) if levels else _multiplied(p, layer.in_proj(x))
    z, mixed, d, l = y.split([inner, inner + 2 * G * K, H, H * levels], -1)
    mixed = p.conv(mixed, layer.conv1d, "silu", "conv")
    u, b, c = mixed.split([inner, G * K, G * K], -1)
    u, b, c = p.heads(u, H), p.heads(b, G), p.heads(c, G)
    if layer.ccq:
        b = repeat(b, H // G)
        c = p.ccq(x, repeat(c, H // G), b)
    d = F.softplus(wide(d) + wide(layer.dt_bias))
    d = d.clamp_min(o["dt_least"]) if o["dt_least"] else d
    d = d.clamp_max(o["dt_most"]) if o["dt_most"] else d
    v, g = (u * d.unsqueeze(-1)).to(u.dtype), -d * wide(layer.A_log).exp()
    if levels:
        weights = F.softplus(p.heads(l, H) * layer.L.view(H, levels))
        y = _levels(p, x, c, b, v, g, weights)
    else:
        y = p.run("additive", {"q": c, "k": b, "v": v, "g": g}, {"scale": 1.0},
                  [("state0", "state", "memory")])
    y = (y + u * layer.D.view(H, -1)).flatten(2).to(x.dtype)
    if o["rmsnorm"]:
        order = "norm_first" if o["norm_before_gate"] else "gate_first"
        y = p.run("rms_norm_gated", {"x": y, "z": z.contiguous(), "w": layer.norm.weight},
                  {"eps": layer.norm_eps, "order": order, "groups": G})
    else:
        y = y * F.silu(z)
    y = layer.out_proj(y)
    return y * by_output if by_output != 1.0 else y


def mamba1(p, x):
    layer, V, K, R = p.layer, p.size("V"), p.size("K"), p.size("R")
    u, z = layer.in_proj(x).split(V, -1)
    u = p.conv(u, layer.conv1d, "silu", "conv")
    r, b, c = layer.x_proj(u).split([R, K, K], -1)
    if p.options["bcdt_norms"]:
        r, b, c = (p.rms(y.contiguous(), norm.weight, layer.norm_eps) for y, norm in (
            (r, layer.dt_norm), (b, layer.b_norm), (c, layer.c_norm)))
    if layer.ccq:
        c = p.ccq(x, c.unsqueeze(2), b.contiguous().unsqueeze(2)).squeeze(2)
    y = p.run("scan", {"u": u, "dt": F.linear(r, layer.dt_proj.weight),
                       "A": -wide(layer.A_log).exp(), "Bm": b, "Cm": c, "D": layer.D, "z": z,
                       "dt_bias": layer.dt_proj.bias}, {"softplus": True},
              [("h0", "h", "memory")])
    return layer.out_proj(y)


# ---- mlstm --------------------------------------------------------------------------------------

def mlstm(p, x):
    layer, H, cap = p.layer, p.size("H"), p.options["gate_soft_cap"] or 0.0

    def capped(module):
        gate = wide(module(x))
        return cap * torch.tanh(gate / cap) if cap else gate

    q, k, v = (p.heads(p.project_conv(x, n + "_proj", n + "_conv1d", None, n + "_conv"), H)
               for n in "qkv")
    o = p.run("mlstm", {"q": p.ccq(x, q, k), "k": k, "v": v, "ipre": capped(layer.i_proj),
                        "fpre": capped(layer.f_proj)}, {"scale": p.size("K") ** -0.5},
              [("C0", "C", "memory"), ("n0", "n", "normaliser"), ("m0", "m", "unit")])
    return layer.o_proj(p.norm_gate(o, p.gate(x), layer.o_norm, "sigmoid").flatten(2))


# ---- longhorn -----------------------------------------------------------------------------------

def longhorn(p, x):
    layer, H, inner, HK = p.layer, p.size("H"), p.size("I"), p.size("H") * p.size("K")
    u, z = layer.in_proj(x).split(inner, -1)
    u = p.conv(u, layer.conv1d, "silu", "conv")
    r, k, q = layer.x_proj(u).split([p.size("R"), HK, HK], -1)
    k = p.heads(k, H)
    q = p.ccq(x, p.heads(q, H), k)
    beta = p.heads(layer.dt_head(r).sigmoid(), H)
    o = p.run("longhorn_column" if layer.kind == "longhorn_column" else "longhorn_diag",
              {"q": q, "k": k, "v": p.heads(u, H), "beta": beta}, {"scale": 1.0},
              [("state0", "state", "memory")])
    return layer.out_proj((o.flatten(2) + u * layer.D) * F.silu(z))


# ---- hypermlp, hyperglu -------------------------------------------------------------------------

def hyper(p, x):
    layer, o, H, Q = p.layer, p.options, p.size("H"), p.size("Q")

    def opened(name, n):
        return p.heads(getattr(layer, name)(x).sigmoid(), n) if p.has(name) else None

    def convolved(name):
        return p.conv(x, getattr(layer, name).conv, "none", name) if p.has(name) else x

    def turned(y):
        return p.rope(y, o["rope_theta"]) if o["use_rope"] else y

    k = p.append(turned(p.heads(layer.k(convolved("conv1")), Q)), "k")
    v = p.append(p.heads(layer.v(convolved("conv2")), H), "v")
    q, left = turned(p.heads(layer.q(x), Q)), opened("left_gate", Q)
    inputs = {"q": q if left is None else q * left, "k": k, "v": v, "gv": opened("right_gate", H)}
    for mix, control, n, i in (("op", "control1", Q, 1), ("op2", "control2", H, 2)):
        if p.has(control):
            inputs[f"c{i}"] = opened(control, n)
            for part in ("U", "Vt", "d"):
                inputs[f"{part}{i}"] = getattr(getattr(layer, mix).mix, part)
    y = p.run("hyper", inputs, {"kind": "glu" if layer.kind == "hyperglu" else "relu",
                                "norm": o["attn_norm"], "layout": o["layout"]})
    return layer.c_proj(y.flatten(2))


FORWARD = {
    "delta": delta, "gdn": delta, "kda": delta, "gdn2": delta, "linear": linear, "gla": linear,
    "retnet": linear, "attention": attention, "relu_attention": attention, "kla": kla,
    "palimpsa_code": palimpsa, "palimpsa_paper": palimpsa, "bayes": bayes, "bayes_rotation": bayes,
    "mesa": mesa, "mamba1": mamba1, "mamba2": mamba2, "log_linear_mamba2": mamba2,
    "mlstm": mlstm, "longhorn": longhorn, "longhorn_column": longhorn, "hypermlp": hyper,
    "hyperglu": hyper, "mla": mla,
    "diff_attention": diff_attention, "rwkv7": rwkv7, "comba": comba,
    "gated_deltaproduct": deltaproduct, "hgrn2": hgrn2, "gsa": gsa, "lightning": lightning,
    "rg_lru": rg_lru, "short_conv": short_conv, "none": no_mixer,
}
