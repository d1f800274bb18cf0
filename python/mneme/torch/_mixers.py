"""The forward pass of every layer, after the equations of src/layers/*.c, from torch's products and
the operators of the library."""


import torch
import torch.nn.functional as F

from ._call import call, torch_operators

GELU = "tanh"


class Pass:
    """One pass over one layer: what it starts from and leaves behind."""

    def __init__(self, layer, state, keeps, belief, cu_seqlens):
        self.layer, self.options, self.sizes = layer, layer.options, layer.sizes
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

    def norm_gate(self, x, gate, norm, act="silu"):
        weight, eps = norm.weight, self.layer.norm_eps
        if gate is None:
            return self.run("rms_norm", {"x": x, "w": weight}, {"eps": eps})
        return self.run("rms_norm_gated", {"x": x, "z": gate, "w": weight},
                        {"eps": eps, "act": act})

    def rope(self, x, base=10000.0):
        return self.run("rope", {"x": x}, {"base": base, "pos0": self.position})

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


_CACHES = ("attention", "relu_attention", "hypermlp", "hyperglu")


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


def delta(p, x):
    layer, J = p.layer, p.size("J")
    times = J // p.size("H")
    k = _delta_key(p, x, "k_proj", "k_conv1d", "k_conv")
    q = p.ccq(x, _delta_key(p, x, "q_proj", "q_conv1d", "q_conv"), k)
    q, k = repeat(q, times), repeat(k, times)
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
        d = x.shape[-1]
        i, j = torch.triu_indices(d, d, 1, device=x.device)
        return torch.cat([torch.ones_like(x[..., :1]), x * d ** -0.25, x * x * (2 * d) ** -0.5,
                          x[..., i] * x[..., j] * d ** -0.5], -1)
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

def attention(p, x):
    layer, o = p.layer, p.options

    def heads_of(name, n, turns):
        y = p.heads(getattr(layer, name)(x), n)
        return p.rope(y, o["rope_theta"]) if turns else y

    q = heads_of("q_proj", p.size("H"), o["use_rope"])
    k = p.append(heads_of("k_proj", p.size("J"), o["use_rope"]), "k")
    v = p.append(heads_of("v_proj", p.size("J"), False), "v")
    y = p.run(layer.kind, {"q": q, "k": k, "v": v}, {"scale": p.size("K") ** -0.5})
    return layer.o_proj(y.flatten(2))


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
    o = p.run("mesa", {"q": q, "k": k, "v": p.heads(layer.v_proj(x), H),
                       "g": F.logsigmoid(wide(layer.a_proj(x))), "beta": layer.b_proj(x).sigmoid(),
                       "lam": lam}, {"scale": 1.0},
              [("hkk0", "hkk", "hkk"), ("hkv0", "hkv", "hkv")])
    return layer.o_proj(p.norm_gate(o, p.gate(x), layer.o_norm).flatten(2))


# ---- mamba --------------------------------------------------------------------------------------

def mamba2(p, x):
    layer, o, H, G, K, inner = (p.layer, p.options, p.size("H"), p.size("G"), p.size("K"),
                                p.size("I"))
    z, mixed, d = layer.in_proj(x).split([inner, inner + 2 * G * K, H], -1)
    mixed = p.conv(mixed, layer.conv1d, "silu", "conv")
    u, b, c = mixed.split([inner, G * K, G * K], -1)
    u = p.heads(u, H)
    b, c = (repeat(p.heads(y, G), H // G) for y in (b, c))
    c = p.ccq(x, c, b)
    d = F.softplus(wide(d) + wide(layer.dt_bias))
    y = p.run("additive", {"q": c, "k": b, "v": u * d.unsqueeze(-1), "g": -d * wide(layer.A_log).exp()},
              {"scale": 1.0}, [("state0", "state", "memory")])
    y = (y + u * layer.D.view(H, -1)).flatten(2).to(x.dtype)
    if o["rmsnorm"]:
        order = "norm_first" if o["norm_before_gate"] else "gate_first"
        y = p.run("rms_norm_gated", {"x": y, "z": z.contiguous(), "w": layer.norm.weight},
                  {"eps": layer.norm_eps, "order": order, "groups": G})
    else:
        y = y * F.silu(z)
    return layer.out_proj(y)


def mamba1(p, x):
    layer, V, K, R = p.layer, p.size("V"), p.size("K"), p.size("R")
    u, z = layer.in_proj(x).split(V, -1)
    u = p.conv(u, layer.conv1d, "silu", "conv")
    r, b, c = layer.x_proj(u).split([R, K, K], -1)
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
    "mesa": mesa, "mamba1": mamba1, "mamba2": mamba2, "mlstm": mlstm, "longhorn": longhorn,
    "longhorn_column": longhorn, "hypermlp": hyper, "hyperglu": hyper,
}
