"""Models of mneme in plain PyTorch, one token after the other: what transformers loads from a folder that
mneme wrote, with trust_remote_code=True. Needs torch and transformers and nothing else.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

Each layer is its equations, in float32, with a state that goes from call to call. It is a reference and
slow; the mneme program and its Python package compute the same by kernels."""

import math
import re

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class MnemeConfig(PretrainedConfig):
    """config.json as it is: "layers", and options of each kind in "mixers"."""

    model_type = "mneme"

    def __init__(self, layers=None, mixers=None, vocab_size=0, hidden_size=0, num_hidden_layers=1,
                 mlp="swiglu", **rest):
        rest.pop("model_type", None)
        self.layers = layers or ("palimpsa" if "metaplasticity" in rest else "gdn")
        self.mixers = mixers or {}
        self.mlp = mlp
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        tied = rest.pop("tie_word_embeddings", False)
        super().__init__(tie_word_embeddings=tied, **rest)

    def names(self):
        """One name a layer: "gdn*3, bayes" fills num_hidden_layers."""
        found = []
        for name, times in re.findall(r"([a-z0-9_+]+)(?:\s*\*\s*(\d+))?", self.layers):
            found += [name] * int(times or 1)
        return [found[i % len(found)] for i in range(self.num_hidden_layers)]

    def block(self, key, value):
        return getattr(self, key, value)


# ---- pieces -------------------------------------------------------------------------------------

def unit(x, kind, eps):
    """Heads of length one: x / max(|x|, eps), or (kind 1) x / sqrt(|x|^2 + eps)."""
    if kind == 0:
        return x / x.norm(dim=-1, keepdim=True).clamp_min(eps)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def rms(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x, position, base, options=None):
    """Rotary positions of (B,T,H,R): the first half of a head turns with the second."""
    R = x.shape[-1]
    w = base ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)
    kind = (options or {}).get("rope_type", "default")
    if kind == "linear":
        w = w / options["rope_factor"]
    elif kind == "llama3":
        turns = options["rope_original_context"] * w / (2 * math.pi)
        low, high = options["rope_low_freq_factor"], options["rope_high_freq_factor"]
        s = ((turns - low) / (high - low)).clamp(0, 1)
        w = s * w + (1 - s) * w / options["rope_factor"]
    t = torch.arange(position, position + x.shape[1], dtype=torch.float64)
    angle = (t[:, None] * w).to(x.device)
    cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def steps(*tensors):
    """The tensors token by token; what is None stays so."""
    T = next(x for x in tensors if x is not None).shape[1]
    for t in range(T):
        yield [None if x is None else x[:, t] for x in tensors]


class Mixer(nn.Module):
    """What all layers share: parameters by their names in files, options, state."""

    sizes = ()

    def __init__(self, config, options, ccq, index):
        super().__init__()
        self.o = options
        self.width = config.hidden_size
        self.eps = self.o.get("o_norm_eps") or config.block("norm_eps", 1e-6)
        self.ccq = ccq
        self.index = index
        self.context = config.block("max_position_embeddings", 2048)
        self.make()
        if ccq:
            self.add("ccq_gamma.weight", self.ccq_heads(), self.width)
            self.add("ccq_gamma.bias", self.ccq_heads())

    def ccq_heads(self):
        return self.H

    def add(self, name, *shape):
        """A parameter called `name`, whose dots are modules."""
        *path, last = name.split(".")
        at = self
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at._modules[part]
        at.register_parameter(last, nn.Parameter(torch.zeros(shape)))

    def get(self, name):
        at = self
        for part in name.split("."):
            at = at._modules[part] if part in at._modules else at._parameters.get(part)
            if at is None:
                return None
        return at

    def heads(self, default_v=1.0):
        """H heads of width K, with values V wide, as options say them."""
        self.H = self.o["num_heads"]
        head = self.o["head_dim"]
        self.K = int(head * (self.o.get("expand_k") or 1.0))
        self.V = self.o.get("v_head_dim") or int(head * (self.o.get("expand_v") or default_v))

    def linear(self, x, name):
        return F.linear(x, self.get(name + ".weight"), self.get(name + ".bias"))

    def add_convs(self, rows):
        if self.o.get("use_short_conv"):
            for name, width in rows.items():
                self.add(name + "_conv1d.weight", width, 1, self.o["conv_size"])

    def convolve(self, x, weight, bias, state, piece, silu=True):
        """A causal convolution of each channel of (B,T,C); the last inputs are the state."""
        taps = weight.shape[-1]
        before = state.get(piece)
        if before is None:
            before = x.new_zeros(x.shape[0], taps - 1, x.shape[2])
        wide = torch.cat([before, x], 1)
        state[piece] = wide[:, wide.shape[1] - (taps - 1):]
        y = F.conv1d(wide.transpose(1, 2), weight, bias, groups=x.shape[2]).transpose(1, 2)
        return F.silu(y) if silu else y

    def project(self, x, which, state, without=F.silu):
        """x by q_proj, k_proj or v_proj, then its short convolution with SiLU, or `without`."""
        y = self.linear(x, which + "_proj")
        if self.o.get("use_short_conv"):
            return self.convolve(y, self.get(which + "_conv1d.weight"), None, state, which + "_conv")
        return without(y)

    def contract(self, x, q, k, state):
        """+ccq: the query without its part along the directions in which the keys vary."""
        if not self.ccq:
            return q
        gamma = torch.sigmoid(self.linear(x, "ccq_gamma"))
        k = unit(k, 0, 1e-12)
        B, T, H, K = q.shape
        R = state.get("kk", q.new_zeros(B, H, K, K))
        s = state.get("ks", q.new_zeros(B, H, K))
        n, out = state["position"], []
        for q_t, k_t, g_t in steps(q, k, gamma):
            n += 1
            R = R + k_t[..., :, None] * k_t[..., None, :]
            s = s + k_t
            along = (R @ q_t[..., None])[..., 0] - (s * q_t).sum(-1, keepdim=True) / n * s
            out.append(q_t - g_t[..., None] / n * along)
        state["kk"], state["ks"] = R, s
        return torch.stack(out, 1)

    def gated_norm(self, o, gate, name, act=F.silu):
        o = rms(o, self.get(name), self.eps)
        return o if gate is None else o * act(gate.unflatten(-1, o.shape[-2:]))

    def sum_read(self, q, k, v, g, scale, state, piece="memory"):
        """S = e^g S + k v'; o = scale S'q. g is (B,T,H), (B,T,H,K) or None."""
        B, T, H, K = k.shape
        S = state.get(piece, q.new_zeros(B, H, K, v.shape[-1]))
        out = []
        for q_t, k_t, v_t, g_t in steps(q, k, v, g):
            if g_t is not None:
                S = S * (g_t.exp()[..., None] if g_t.dim() == 3 else g_t.exp()[..., None, None])
            S = S + k_t[..., :, None] * v_t[..., None, :]
            out.append(scale * (q_t[..., None, :] @ S)[..., 0, :])
        state[piece] = S
        return torch.stack(out, 1)


# ---- layers -------------------------------------------------------------------------------------

class Attention(Mixer):
    """Softmax or ReLU attention: w = softmax(q.k / sqrt K), or relu(z / |z|)."""

    relu = False

    def make(self):
        o, self.H = self.o, self.o["num_heads"]
        self.K = o["head_dim"]
        self.J = o.get("num_kv_heads") or self.H
        self.gate, U = bool(o.get("use_output_gate")), o.get("input_width") or self.width
        rows = {"q": (2 if self.gate else 1) * self.H * self.K, "k": self.J * self.K,
                "v": self.J * self.K}
        self.fused = {"separate": 0, "blocks": 1, "heads": 2}[o.get("fused_qkv", "separate")]
        if self.fused:
            rows = {"qkv": (self.H + 2 * self.J) * self.K}
        for name, n in rows.items():
            self.add(name + "_proj.weight", n, U)
            if o.get("qkv_bias"):
                self.add(name + "_proj.bias", n)
        if o.get("qk_rms_norm") or o.get("qk_norm_whole"):
            whole = o.get("qk_norm_whole")
            self.add("q_norm.weight", self.H * self.K if whole else self.K)
            self.add("k_norm.weight", self.J * self.K if whole else self.K)
        self.add("o_proj.weight", self.width, self.H * self.K)
        if o.get("o_bias"):
            self.add("o_proj.bias", self.width)

    def turn(self, x, state):
        if not self.o["use_rope"]:
            return x
        R = int((self.o.get("partial_rotary_factor") or 1.0) * self.K)
        turned = rotate(x[..., :R], state["position"], self.o["rope_theta"], self.o)
        return torch.cat([turned, x[..., R:]], -1)

    def normed(self, x, which, heads):
        weight = self.get(which + "_norm.weight")
        if weight is None:
            return x.unflatten(-1, (heads, -1))
        weight = weight + 1 if self.o.get("norm_plus_one") else weight
        eps = self.o.get("qk_norm_eps") or self.eps
        if self.o.get("qk_norm_whole"):
            return rms(x, weight, eps).unflatten(-1, (heads, -1))
        return rms(x.unflatten(-1, (heads, -1)), weight, eps)

    def inputs(self, x):
        H, J, K = self.H, self.J, self.K
        if self.fused == 2:
            return (*self.linear(x, "qkv_proj").unflatten(-1, (H, 3 * K)).chunk(3, -1), None)
        if self.fused:
            q, k, v = self.linear(x, "qkv_proj").split([H * K, J * K, J * K], -1)
            return q.unflatten(-1, (H, K)), k.unflatten(-1, (J, K)), v.unflatten(-1, (J, K)), None
        q, gate = self.linear(x, "q_proj"), None
        if self.gate:
            q, gate = q.unflatten(-1, (H, 2 * K)).chunk(2, -1)
            q = q.flatten(-2)
        k, v = self.linear(x, "k_proj"), self.linear(x, "v_proj").unflatten(-1, (J, K))
        return self.normed(q, "q", H), self.normed(k, "k", J), v, gate

    def forward(self, x, state):
        o = self.o
        q, k, v, gate = self.inputs(x * (o.get("input_multiplier") or 1.0))
        q, k = self.turn(q, state), self.turn(k, state)
        k = state["k"] = torch.cat([state["k"], k], 1) if "k" in state else k
        v = state["v"] = torch.cat([state["v"], v], 1) if "v" in state else v
        times, T, L = self.H // self.J, q.shape[1], k.shape[1]
        k, v = k.repeat_interleave(times, 2), v.repeat_interleave(times, 2)
        scale = (o.get("attention_scale") or self.K ** -0.5) * (o.get("key_multiplier") or 1.0)
        z = torch.einsum("bthk,blhk->bhtl", q, k) * scale
        at, key = torch.arange(L - T, L, device=x.device)[:, None], torch.arange(L, device=x.device)
        hidden = key > at
        if o.get("window_size"):
            hidden = hidden | (key <= at - o["window_size"])
        if self.relu:
            z = z.masked_fill(hidden, 0.0)
            w = F.relu(z) / z.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        else:
            w = z.masked_fill(hidden, -math.inf).softmax(-1)
        y = torch.einsum("bhtl,blhk->bthk", w, v)
        if gate is not None:
            y = y * torch.sigmoid(gate)
        return self.linear(y.flatten(-2) * (o.get("output_multiplier") or 1.0), "o_proj")


class ReluAttention(Attention):
    relu = True


class Delta(Mixer):
    """Gated DeltaNet: S = e^g S; S += beta k (v - S'k)'; o = S'q / sqrt K."""

    def make(self):
        self.heads(2.0)
        o, self.J = self.o, self.o.get("num_v_heads") or self.o["num_heads"]
        HK, JV, self.layout = self.H * self.K, self.J * self.V, o.get("projections", "separate")
        if self.layout == "separate":
            for name, n in (("q", HK), ("k", HK), ("v", JV), ("a", self.J), ("b", self.J)):
                self.add(name + "_proj.weight", n, self.width)
            self.add_convs({"q": HK, "k": HK, "v": JV})
            if o["use_gate"]:
                self.add("g_proj.weight", JV, self.width)
            self.add("o_proj.weight", self.width, JV)
        else:
            rows = ({"qkv": 2 * HK + JV, "z": JV, "a": self.J, "b": self.J}
                    if self.layout == "qkv" else {"qkvz": 2 * HK + 2 * JV, "ba": 2 * self.J})
            for name, n in rows.items():
                self.add("in_proj_%s.weight" % name, n, self.width)
            self.add("conv1d.weight", 2 * HK + JV, 1, o["conv_size"])
            self.add("out_proj.weight", self.width, JV)
        self.add("A_log", self.J)
        self.add("dt_bias", self.J)
        self.add("o_norm.weight", self.V)

    def apart(self, x, state):
        HK, JV, n = self.H * self.K, self.J * self.V, self.J // self.H
        if self.layout == "qkv":
            qkv, gate, a, b = (self.linear(x, "in_proj_" + s) for s in ("qkv", "z", "a", "b"))
        else:
            wide = self.linear(x, "in_proj_qkvz").unflatten(-1, (self.H, -1))
            parts = wide.split([self.K, self.K, n * self.V, n * self.V], -1)
            qkv, gate = torch.cat([p.flatten(-2) for p in parts[:3]], -1), parts[3].flatten(-2)
            b, a = (p.flatten(-2) for p in
                    self.linear(x, "in_proj_ba").unflatten(-1, (self.H, -1)).split([n, n], -1))
        q, k, v = self.convolve(qkv, self.get("conv1d.weight"), None, state,
                            "qkv_conv").split([HK, HK, JV], -1)
        return q, k, v, a, b, gate

    def forward(self, x, state):
        o = self.o
        if self.layout == "separate":
            q, k, v = (self.project(x, which, state) for which in "qkv")
            a, b = self.linear(x, "a_proj"), self.linear(x, "b_proj")
            gate = self.linear(x, "g_proj") if o["use_gate"] else None
        else:
            q, k, v, a, b, gate = self.apart(x, state)
        q, k = (unit(y.unflatten(-1, (self.H, self.K)), 1, 1e-6) for y in (q, k))
        q, times = self.contract(x, q, k, state), self.J // self.H
        q, k = q.repeat_interleave(times, 2), k.repeat_interleave(times, 2)
        v = v.unflatten(-1, (self.J, self.V))
        beta = torch.sigmoid(b) * (2.0 if o.get("allow_neg_eigval") else 1.0)
        g = -self.get("A_log").exp() * F.softplus(a + self.get("dt_bias"))
        S = state.get("memory", x.new_zeros(x.shape[0], self.J, self.K, self.V))
        out = []
        for q_t, k_t, v_t, b_t, g_t in steps(q * self.K ** -0.5, k, v, beta, g):
            S = S * g_t.exp()[..., None, None]
            e = (v_t - (k_t[..., None, :] @ S)[..., 0, :]) * b_t[..., None]
            S = S + k_t[..., :, None] * e[..., None, :]
            out.append((q_t[..., None, :] @ S)[..., 0, :])
        state["memory"] = S
        y = self.gated_norm(torch.stack(out, 1), gate, "o_norm.weight").flatten(-2)
        return self.linear(y, "o_proj" if self.layout == "separate" else "out_proj")


class Gla(Mixer):
    """Gated linear attention: S = diag(e^g) S + k v'; o = S'q / sqrt K."""

    def make(self):
        o = self.o
        self.H, self.G = o["num_heads"], o.get("num_kv_heads") or o["num_heads"]
        head = self.width // self.H
        self.K, self.V = int(head * o["expand_k"]), int(head * o["expand_v"])
        HK, HV, GK, GV = self.H * self.K, self.H * self.V, self.G * self.K, self.G * self.V
        for name, n in (("q", HK), ("k", GK), ("v", GV)):
            self.add(name + "_proj.weight", n, self.width)
        self.add("gk_proj.0.weight", 16, self.width)
        self.add("gk_proj.1.weight", GK, 16)
        self.add("gk_proj.1.bias", GK)
        self.add_convs({"q": HK, "k": GK, "v": GV})
        self.norm_name = "g_norm.weight"
        if o["use_output_gate"]:
            self.add("g_proj.weight", HV, self.width)
            self.norm_name = "g_norm_swish_gate.weight" if o["fuse_norm"] else self.norm_name
        self.add(self.norm_name, self.V)
        self.add("o_proj.weight", self.width, HV)

    def forward(self, x, state):
        o, times = self.o, self.H // self.G
        maps = {"none": lambda y: y, "relu": F.relu, "swish": F.silu, "silu": F.silu,
                "sigmoid": torch.sigmoid}
        q, k, v = (self.project(x, which, state, lambda y: y) for which in "qkv")
        q = maps[o.get("feature_map") or "none"](q.unflatten(-1, (self.H, self.K)))
        k = maps[o.get("feature_map") or "none"](k.unflatten(-1, (self.G, self.K))).repeat_interleave(times, 2)
        v = v.unflatten(-1, (self.G, self.V)).repeat_interleave(times, 2)
        g = F.logsigmoid(self.linear(self.linear(x, "gk_proj.0"), "gk_proj.1")) / 16
        if o.get("clamp_min"):
            g = g.clamp_min(o["clamp_min"])
        g = g.unflatten(-1, (self.G, self.K)).repeat_interleave(times, 2)
        y = self.sum_read(self.contract(x, q, k, state), k, v, g, self.K ** -0.5, state)
        gate = self.linear(x, "g_proj") if o["use_output_gate"] else None
        return self.linear(self.gated_norm(y, gate, self.norm_name).flatten(-2), "o_proj")


class Mamba2(Mixer):
    """A state space: S = e^g S + b (d u)'; o = S'c + D u."""

    def make(self):
        o = self.o
        self.H, self.V, self.K, self.G = (o["num_heads"], o["head_dim"], o["state_size"],
                                          o["n_groups"])
        self.I, GK = self.H * self.V, self.G * self.K
        self.add("in_proj.weight", 2 * self.I + 2 * GK + self.H, self.width)
        self.add("conv1d.weight", self.I + 2 * GK, 1, o["conv_kernel"])
        self.add("A_log", self.H)
        self.add("D", self.I if o.get("D_has_hdim") else self.H)
        self.add("dt_bias", self.H)
        if o["rmsnorm"]:
            self.add("norm.weight", self.I)
        self.add("out_proj.weight", self.width, self.I)
        if o["use_conv_bias"]:
            self.add("conv1d.bias", self.I + 2 * GK)
        if o["use_bias"]:
            self.add("in_proj.bias", 2 * self.I + 2 * GK + self.H)
            self.add("out_proj.bias", self.width)

    def gated(self, y, z):
        if not self.o["rmsnorm"]:
            return y * F.silu(z)
        before = self.o.get("norm_before_gate")
        y = y if before else y * F.silu(z)
        groups = y.unflatten(-1, (self.G, -1))
        y = rms(groups, self.get("norm.weight").unflatten(0, (self.G, -1)), self.eps).flatten(-2)
        return y * F.silu(z) if before else y

    def forward(self, x, state):
        o, GK = self.o, self.G * self.K
        wide = self.linear(x * o.get("input_multiplier", 1.0), "in_proj")
        z, u, b, c, d = wide.split([self.I, self.I, GK, GK, self.H], -1)
        z, d = z * o.get("z_multiplier", 1.0), d * o.get("dt_multiplier", 1.0)
        ubc = torch.cat([u * o.get("x_multiplier", 1.0), b * o.get("b_multiplier", 1.0),
                         c * o.get("c_multiplier", 1.0)], -1)
        ubc = self.convolve(ubc, self.get("conv1d.weight"), self.get("conv1d.bias"), state, "conv")
        u, b, c = ubc.split([self.I, GK, GK], -1)
        u, times = u.unflatten(-1, (self.H, self.V)), self.H // self.G
        b, c = (y.unflatten(-1, (self.G, self.K)).repeat_interleave(times, 2) for y in (b, c))
        c = self.contract(x, c, b, state)
        d = F.softplus(d + self.get("dt_bias"))
        d = d.clamp(min=o.get("dt_least") or None, max=o.get("dt_most") or None) if (
            o.get("dt_least") or o.get("dt_most")) else d
        g = -d * self.get("A_log").exp()
        y = self.sum_read(c, b, u * d[..., None], g, 1.0, state)
        y = y + u * (self.get("D").view(self.H, -1))
        return self.linear(self.gated(y.flatten(-2), z) * o.get("output_multiplier", 1.0), "out_proj")


class Bayes(Mixer):
    """The Bayesian Layer: a mean M and a covariance P per head, filtered exactly.

    Pbar = A P A' + l2 N, u = Pbar k, w = u / (r2 + k'u), P = Pbar - w u', M = A M + w (v - (A M)'k)',
    o = M'q. bayes_rotation keeps two rows a channel, which also turn."""

    rotates = False

    def make(self):
        self.heads()
        o, self.G = self.o, self.o["noise_groups"]
        HK, HV, self.R = self.H * self.K, self.H * self.V, self.K * (2 if self.rotates else 1)
        rows = {"q": HK, "k": HK, "v": HV, "l": self.H, "r": self.H * self.G}
        if o["transition"] == "decay":
            rows["a"] = self.H
            self.add("A_log", self.H)
            self.add("dt_bias", self.H)
        if self.rotates:
            self.add("A_angle", self.H, self.K)
            if o["input_angle"]:
                self.add("angle_proj.weight", HK, self.width)
        if o["use_gate"]:
            rows["g"] = HV
        for name, n in rows.items():
            self.add(name + "_proj.weight", n, self.width)
        self.add("l_proj.bias", self.H)
        self.add("r_proj.bias", self.H * self.G)
        if o["learn_prior"]:
            self.add("p0_log", self.H)
        self.add_convs({"q": HK, "k": HK, "v": HV})
        self.add("o_norm.weight", self.V)
        self.add("o_proj.weight", self.width, HV)

    def move(self, X, rho, angle):
        """A X for rows of X (B,H,..,R,n)."""
        while rho.dim() < X.dim():
            rho = rho.unsqueeze(2) if rho.dim() < X.dim() - 1 else rho[..., None]
            if angle is not None:
                angle = angle.unsqueeze(2) if angle.dim() < X.dim() - 1 else angle[..., None]
        if angle is None:
            return X * rho
        a, b = X.unflatten(-2, (self.K, 2)).unbind(-2)
        cos, sin = rho * angle.cos(), rho * angle.sin()
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -2).flatten(-3, -2)

    def on_rows(self, x):
        """(.., K) on the rows of the state that keys touch."""
        return torch.stack([x, torch.zeros_like(x)], -1).flatten(-2) if self.rotates else x

    def start(self, x):
        p0 = x.new_full((self.H,), 3.0)
        if self.get("p0_log") is not None:
            p0 = 3.0 * self.get("p0_log").exp()
        eye = torch.eye(self.R, device=x.device, dtype=x.dtype)
        P = (p0[:, None, None, None] * eye).expand(x.shape[0], self.H, self.G, self.R, self.R)
        return x.new_zeros(x.shape[0], self.H, self.R, self.V), P

    def forward(self, x, state):
        o, H, G, K, V = self.o, self.H, self.G, self.K, self.V
        q, k = (unit(self.project(x, which, state).unflatten(-1, (H, K)), 1, 1e-6)
                for which in "qk")
        q = self.on_rows(self.contract(x, q, k, state))
        k, v = self.on_rows(k), self.project(x, "v", state).unflatten(-1, (H, V))
        la = k.new_zeros(*k.shape[:3])
        if o["transition"] == "decay":
            la = -self.get("A_log").exp() * F.softplus(self.linear(x, "a_proj") +
                                                       self.get("dt_bias"))
        angle = None
        if self.rotates:
            angle = self.get("A_angle").expand(*x.shape[:2], H, K)
            if o["input_angle"]:
                angle = angle + self.linear(x, "angle_proj").unflatten(-1, (H, K))
        l2 = F.softplus(self.linear(x, "l_proj")) + 1e-6
        r2 = (F.softplus(self.linear(x, "r_proj")) + 1e-6).unflatten(-1, (H, G))
        noise = torch.diag(self.on_rows(torch.ones(K, device=x.device, dtype=x.dtype)))
        M, P = state["M"] if "M" in state else None, state.get("P")
        if M is None:
            M, P = self.start(x)
        out = []
        for q_t, k_t, v_t, la_t, th_t, l_t, r_t in steps(q, k, v, la, angle, l2, r2):
            rho = la_t.exp()[..., None].expand(*la_t.shape, K)
            M, P = self.move(M, rho, th_t), self.move(P, rho, th_t)
            P = self.move(P.transpose(-1, -2), rho, th_t) + l_t[..., None, None, None] * noise
            u = (P @ k_t[:, :, None, :, None])[..., 0]
            w = u / (r_t + (u * k_t[:, :, None]).sum(-1))[..., None]
            P = P - w[..., :, None] * u[..., None, :]
            e = (v_t - (k_t[..., None, :] @ M)[..., 0, :]).unflatten(-1, (G, -1))
            M = M + (w[..., :, None] * e[..., None, :]).transpose(2, 3).flatten(-2)
            out.append((q_t[..., None, :] @ M)[..., 0, :])
        state["M"], state["P"] = M, P
        gate = self.linear(x, "g_proj") if o["use_gate"] else None
        return self.linear(self.gated_norm(torch.stack(out, 1), gate, "o_norm.weight").flatten(-2),
                           "o_proj")


class BayesRotation(Bayes):
    rotates = True


class Palimpsa(Mixer):
    """A mean and an importance per cell: I = a I + (1 - a) ip + k^2 b', mu = (a I mu + k w') / I."""

    paper = False

    def make(self):
        self.heads()
        o, H = self.o, self.H
        HK, HV = H * self.K, H * self.V
        rows = {"q": HK, "k": HK, "v": HV}
        if self.paper:
            rows.update(gamma=H, beta=HV)
            self.add("logN", H)
        else:
            rows.update(dt=H, bs=H, b_rank=o["beta_step_rank"])
            self.add("b_proj.weight", HV, o["beta_step_rank"])
            for name in ("A_log", "dt_bias", "b_scale"):
                self.add(name, H)
            if o["use_residual"]:
                self.add("D", H)
        self.add("Ip_log", H)
        if o["use_gate"]:
            rows["g"] = HV
        for name, n in rows.items():
            self.add(name + "_proj.weight", n, self.width)
        self.add_convs({"q": HK, "k": HK, "v": HV})
        self.add("o_norm.weight", self.V)
        self.add("o_proj.weight", self.width, HV)

    def gates(self, x, v):
        """The log decay (B,T,H), what is written and its importance, (B,T,H,V)."""
        if self.paper:
            gamma = torch.sigmoid(self.linear(x, "gamma_proj"))
            beta = torch.sigmoid(self.linear(x, "beta_proj")).unflatten(-1, (self.H, self.V))
            b = beta * gamma[..., None]
            return torch.log1p(-gamma / (self.o["n_init"] * self.get("logN").exp())), b * v, b
        dt = F.softplus(self.linear(x, "dt_proj") + self.get("dt_bias"))
        write = torch.sigmoid(self.linear(x, "bs_proj"))[..., None]
        b = torch.sigmoid(self.linear(self.linear(x, "b_rank_proj"), "b_proj"))
        b = b.unflatten(-1, (self.H, self.V)) * write * F.softplus(self.get("b_scale"))[:, None]
        return -dt * self.get("A_log").exp(), write * v, b

    def forward(self, x, state):
        H, K, V = self.H, self.K, self.V
        q, k = (unit(self.project(x, which, state).unflatten(-1, (H, K)), 0, 1e-12)
                for which in "qk")
        q = self.contract(x, q, k, state)
        v = self.project(x, "v", state).unflatten(-1, (H, V))
        g, w, b = self.gates(x, v)
        if self.paper or self.o["metaplasticity"]:
            y = self.weigh(q, k, w, b, g, state)
        else:
            y = self.sum_read(q, k, w, g, K ** -0.5, state)
        if not self.paper and self.o["use_residual"]:
            y = y + self.get("D")[:, None] * v
        gate = self.linear(x, "g_proj") if self.o["use_gate"] else None
        return self.linear(self.gated_norm(y, gate, "o_norm.weight").flatten(-2), "o_proj")

    def weigh(self, q, k, w, b, g, state):
        ip = self.get("Ip_log").exp()[:, None, None]
        B, T, H, K = q.shape
        I = state["I"] if "I" in state else ip.expand(B, H, K, self.V)
        mu = state.get("mu", q.new_zeros(B, H, K, self.V))
        out = []
        for q_t, k_t, w_t, b_t, g_t in steps(q, k, w, b, g):
            a, forget = g_t.exp()[..., None, None], -torch.expm1(g_t)[..., None, None]
            kept = a * I
            I = kept + forget * ip + k_t.square()[..., :, None] * b_t[..., None, :]
            mu = (kept * mu + k_t[..., :, None] * w_t[..., None, :]) / I
            out.append(K ** -0.5 * (q_t[..., None, :] @ mu)[..., 0, :])
        state["I"], state["mu"] = I, mu
        return torch.stack(out, 1)


class PalimpsaPaper(Palimpsa):
    paper = True


class Kla(Mixer):
    """Kalman linear attention: a Gaussian per channel and slot that a diffusion widens."""

    def make(self):
        o = self.o
        self.V, self.K = int(o["expand"] * self.width), o["d_state"]
        low = o.get("dt_rank") or (self.width + 7) // 8
        ranks = [low if o[name] == "dt" else o[name] if isinstance(o[name], int) else 0
                 for name in ("value_rank", "var_rank")]
        self.codes = [rank or (0 if o[name] == "conv" else self.V)
                      for rank, name in zip(ranks, ("value_rank", "var_rank"))]
        self.add("in_proj.weight", (2 if o["use_gate"] else 1) * self.V, self.width)
        if o.get("conv_size"):
            self.add("conv.weight", self.V, 1, o["conv_size"])
            self.add("conv.bias", self.V)
        self.add("sensor_proj.weight", sum(self.codes) + 2 * self.K, self.V)
        for rank, name in zip(ranks, ("value_expand.weight", "var_expand.weight")):
            if rank:
                self.add(name, self.V, rank)
        for name in ("delta", "lambda_log"):
            self.add(name, self.V, self.K)
        if o["process_noise"] == "learned":
            self.add("process_noise", self.V, self.K)
        if o["skip"] != "none":
            self.add("lambda_skip", *([self.V] if o["skip"] == "vector" else []))
        self.add("out_proj.weight", self.width, self.V)

    def ccq_heads(self):
        return 1

    def dynamics(self):
        o, dt = self.o, F.softplus(self.get("delta")) + 1e-7
        c = self.get("lambda_log").exp()
        noise = self.get("process_noise")
        if noise is None:
            noise = torch.full_like(dt, 1e-7 if o["process_noise"] == "zero" else 0.01)
        if o.get("clip_value"):
            noise = noise.clamp_max(o["clip_value"])
        p = noise.clamp_min(1e-7) * dt
        if o["discretisation"] == "ou":
            z = 2 * c * dt
            p = p * (-torch.expm1(-z) / z)
        return (-c * dt).exp(), p * (1e-5 if o["process_noise"] == "zero" else 1.0)

    def sense(self, z):
        o = self.o
        value, var, k, q = self.linear(z, "sensor_proj").split([*self.codes, self.K, self.K], -1)
        v = z if self.codes[0] == 0 else value
        if self.get("value_expand.weight") is not None:
            v = self.linear(v, "value_expand")
        if self.get("var_expand.weight") is not None:
            var = self.linear(var, "var_expand")
        var = F.softplus(var) + o["obs_var_min"]
        if o.get("obs_var_max"):
            var = var.clamp_max(o["obs_var_max"])
        k, q = ((unit(y, 0, 1e-12) if o["use_qk_norm"] else y) for y in (k, q))
        if o.get("clip_value"):
            k, q = (y.clamp(-o["clip_value"], o["clip_value"]) for y in (k, q))
        return v, 1.0 / var, k, q

    def forward(self, x, state):
        o = self.o
        z, gate = self.linear(x, "in_proj"), None
        if o["use_gate"]:
            z, gate = z.chunk(2, -1)
        if o.get("conv_size"):
            z = self.convolve(z, self.get("conv.weight"), self.get("conv.bias"), state, "conv")
        else:
            z = F.silu(z)
        v, prec, k, q = self.sense(z)
        q = self.contract(x, q[:, :, None], k[:, :, None], state)[:, :, 0]
        a, p = self.dynamics()
        lam = state.get("lam", x.new_ones(x.shape[0], self.V, self.K))
        eta = state.get("eta", x.new_zeros(x.shape[0], self.V, self.K))
        square, p, out = a.square().clamp_min(1e-12), p.clamp_min(1e-12), []
        for v_t, r_t, k_t, q_t in steps(v, prec, k, q):
            den = (square + p * lam).clamp_min(1e-12)
            lam = lam / den + r_t[..., None] * k_t[:, None].square()
            eta = a / den * eta + (r_t * v_t)[..., None] * k_t[:, None]
            mean = eta / lam.clamp_min(1e-12)
            out.append((q_t[:, None] * (a * mean if o["decode_from_prior"] else mean)).sum(-1))
        state["lam"], state["eta"] = lam, eta
        y = torch.stack(out, 1)
        if o["skip"] != "none":
            y = y + self.get("lambda_skip") * z
        return self.linear(y if gate is None else y * F.silu(gate), "out_proj")


class Hyper(Mixer):
    """HyperMLP and HyperGLU: a row's scores are hidden units of a network whose weights are of lags."""

    branches = 1

    def make(self):
        o, self.H = self.o, self.o["num_heads"]
        self.Q, self.P = self.branches * self.H, o["block_size"] or self.context
        QK, HV, D = o["qk_rank"], o["vo_rank"], self.width
        self.R, self.S = o["op1_rank"] or 0, o["op2_rank"] or 0
        for name, rows, cols in (("q", QK, D), ("k", QK, D), ("v", HV, D), ("c_proj", D, HV)):
            self.add(name + ".weight", rows, cols)
        biased = {"left_gate": QK if o["use_qk_gate"] else 0, "control1": self.Q * self.R,
                  "right_gate": HV if o["use_vo_gate"] else 0, "control2": self.H * self.S}
        for name, rows in biased.items():
            if rows:
                self.add(name + ".weight", rows, D)
                self.add(name + ".bias", rows)
        if o["use_kv_conv"]:
            self.add("conv1.conv.weight", D, 1, o["conv_size"])
            self.add("conv2.conv.weight", D, 1, o["conv_size"])
        for name, n, rank in (("op", self.Q, self.R), ("op2", self.H, self.S)):
            if rank:
                self.add(name + ".mix.U", n, self.P, rank)
                self.add(name + ".mix.Vt", n, rank, self.P)
                self.add(name + ".mix.d", n, self.P)

    def open(self, x, name, n):
        if self.get(name + ".weight") is None:
            return None
        return torch.sigmoid(self.linear(x, name)).unflatten(-1, (n, -1))

    def mix(self, z, control, name):
        """x_j = z_j (1 + d_j) + sum_a (sum_i z_i U_ia) c_a Vt_aj over the n keys of a row, oldest first."""
        if control is None:
            return z
        n = z.shape[-1]
        first = 0 if self.o["layout"] == "position" else self.P - n
        U = self.get(name + ".mix.U")[:, first:first + n]
        Vt = self.get(name + ".mix.Vt")[..., first:first + n]
        d = self.get(name + ".mix.d")[:, first:first + n]
        h = torch.einsum("bqn,qnr->bqr", z, U) * control
        return z * (1 + d) + torch.einsum("bqr,qrn->bqn", h, Vt)

    def keys(self, x, name, n, state):
        weight = self.get("conv%d.conv.weight" % (1 if name == "k" else 2))
        if weight is not None:
            x = self.convolve(x, weight, None, state, name + "_conv", silu=False)
        return self.linear(x, name).unflatten(-1, (n, -1))

    def forward(self, x, state):
        o, T = self.o, x.shape[1]
        q, k = self.linear(x, "q").unflatten(-1, (self.Q, -1)), self.keys(x, "k", self.Q, state)
        if o["use_rope"]:
            q, k = (rotate(y, state["position"], o["rope_theta"]) for y in (q, k))
        left = self.open(x, "left_gate", self.Q)
        q = q if left is None else q * left
        v = self.keys(x, "v", self.H, state)
        k = state["k"] = torch.cat([state["k"], k], 1) if "k" in state else k
        v = state["v"] = torch.cat([state["v"], v], 1) if "v" in state else v
        if k.shape[1] > self.P:
            raise ValueError("a sequence of %d tokens: the layer has weights for %d"
                             % (k.shape[1], self.P))
        c1, c2 = self.open(x, "control1", self.Q), self.open(x, "control2", self.H)
        out = []
        for t in range(T):
            n = k.shape[1] - T + t + 1
            row = self.mix(torch.einsum("bqk,bnqk->bqn", q[:, t], k[:, :n]),
                           None if c1 is None else c1[:, t], "op")
            one, two = (row[:, :self.H], row[:, self.H:]) if self.branches == 2 else (row, None)
            size = one.norm(dim=-1, keepdim=True).clamp_min(1e-12)
            one = one / size if o["attn_norm"] == "l2" else one
            base = F.relu(one) if two is None else F.softplus(two) * F.relu(one)
            w = self.mix(base, None if c2 is None else c2[:, t], "op2")
            y = torch.einsum("bhn,bnhv->bhv", w, v[:, :n])
            out.append(y / size if o["attn_norm"] == "out_scale" else y)
        y, right = torch.stack(out, 1), self.open(x, "right_gate", self.H)
        return self.linear((y if right is None else y * right).flatten(-2), "c_proj")


class HyperGlu(Hyper):
    branches = 2


KINDS = {
    "attention": Attention, "relu_attention": ReluAttention, "gdn": Delta, "gla": Gla,
    "mamba2": Mamba2, "bayes": Bayes, "bayes_rotation": BayesRotation, "palimpsa_code": Palimpsa,
    "palimpsa": Palimpsa, "palimpsa_paper": PalimpsaPaper, "kla": Kla, "hypermlp": Hyper,
    "hyperglu": HyperGlu,
}


# ---- blocks -------------------------------------------------------------------------------------

class Norm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.layer = config.block("norm", "rms") == "layer"
        self.plus_one = config.block("norm_plus_one", False)
        self.eps = config.block("norm_eps", 1e-6)
        self.bias = None
        if self.layer and config.block("norm_bias", True):
            self.bias = nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, x):
        if self.layer:
            x = x - x.mean(-1, keepdim=True)
        y = rms(x, self.weight + 1 if self.plus_one else self.weight, self.eps)
        return y if self.bias is None else y + self.bias


ACTIVATIONS = {"swiglu": F.silu, "gelu": lambda x: F.gelu(x, approximate="tanh"), "gelu_erf": F.gelu,
               "relu_square": lambda x: F.relu(x).square()}


class Mlp(nn.Module):
    def __init__(self, config, width, names=("gate_proj", "up_proj", "down_proj"), fused=False):
        super().__init__()
        gates, bias, D = config.mlp == "swiglu", config.block("mlp_bias", False), config.hidden_size
        self.names, self.fused, self.act = names, fused and gates, ACTIVATIONS[config.mlp]
        self.by = config.block("mlp_gate_multiplier", 1.0), config.block("mlp_down_multiplier", 1.0)
        rows = {names[1]: width}
        if self.fused:
            rows = {"gate_up_proj": 2 * width}
        elif gates:
            rows[names[0]] = width
        self.gates = gates
        for name, n in rows.items():
            self.add_module(name, nn.Linear(D, n, bias=bias))
        self.add_module(names[2], nn.Linear(width, D, bias=bias))

    def forward(self, x):
        gate, up, down = self.names
        if self.fused:
            g, u = self._modules["gate_up_proj"](x).chunk(2, -1)
        else:
            u = self._modules[up](x)
            g = self._modules[gate](x) if self.gates else None
        h = self.act(u) if g is None else self.act(g * self.by[0]) * u
        return self._modules[down](h) * self.by[1]


class Experts(nn.Module):
    """A sparse MLP: a router chooses a few experts for each token."""

    def __init__(self, config):
        super().__init__()
        self.c = config
        n, D = config.num_experts, config.hidden_size
        self.gate = nn.Linear(D, n, bias=False)
        if config.block("router_bias", False):
            self.gate.e_score_correction_bias = nn.Parameter(torch.zeros(n))
        self.experts = nn.ModuleList(Mlp(config, config.moe_intermediate_size, ("w1", "w3", "w2"))
                                     for _ in range(n))
        shared = config.block("shared_expert_intermediate_size", 0)
        self.shared_expert = Mlp(config, shared) if shared else None
        self.shared_expert_gate = None
        if shared and config.block("shared_expert_gate", False):
            self.shared_expert_gate = nn.Linear(D, 1, bias=False)

    def choose(self, scores):
        c, n = self.c, self.c.num_experts
        bias = getattr(self.gate, "e_score_correction_bias", None)
        rank = scores if bias is None else scores + bias
        groups, kept = c.block("n_group", 0) or 1, c.block("topk_group", 0)
        if kept and kept < groups:
            best = rank.unflatten(-1, (groups, -1)).topk(min(2, n // groups), -1)[0].sum(-1)
            open_ = torch.zeros_like(best).scatter(-1, best.topk(kept, -1)[1], 1.0)
            rank = rank.masked_fill(open_.repeat_interleave(n // groups, -1) == 0, -math.inf)
        return torch.zeros_like(scores).scatter(-1, rank.topk(c.num_experts_per_tok, -1)[1], 1.0)

    def forward(self, x):
        c, raw = self.c, F.linear(x, self.gate.weight)
        scores = torch.sigmoid(raw) if c.block("router", "softmax") == "sigmoid" else raw.softmax(-1)
        w = scores * self.choose(scores)
        if c.block("norm_topk_prob", False):
            w = w / (w.sum(-1, keepdim=True) + 1e-20)
        w, y = w * c.block("routed_scaling_factor", 1.0), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            at = (w[..., i] != 0).nonzero(as_tuple=True)
            if len(at[0]):
                y[at] = y[at] + expert(x[at]) * w[..., i][at][:, None]
        if self.shared_expert is None:
            return y
        z = self.shared_expert(x)
        return y + (z if self.shared_expert_gate is None
                    else z * torch.sigmoid(self.shared_expert_gate(x)))


def options_of(config, kind):
    """Options of a kind: those of the file under the row's full name, or all keys of the file."""
    mixers = config.mixers
    for name in (kind, {"palimpsa": "palimpsa_code"}.get(kind, kind)):
        if name in mixers:
            return dict(mixers[name])
    return config.to_dict()


class Block(nn.Module):
    def __init__(self, config, index, name):
        super().__init__()
        kind, ccq = name.split("+")[0], name.endswith("+ccq")
        if kind not in KINDS:
            raise ValueError("layer %s is not in this file; use mneme's own package" % name)
        self.config = config
        half = "sparse" if config.block("num_experts", 0) else "dense"
        half = (config.block("mlp_layer_types", None) or [half] * config.num_hidden_layers)[index]
        self.attn_norm = Norm(config)
        self.attn = KINDS[kind](config, options_of(config, kind), ccq, index)
        if config.block("beside_attention", False):
            self.beside = Attention(config, options_of(config, "attention"), False, index)
        if config.mlp != "none" and half != "none":
            self.mlp_norm = Norm(config)
            self.mlp = (Experts(config) if half == "sparse"
                        else Mlp(config, config.intermediate_size,
                                 fused=config.block("mlp_fused", False)))
        caches = kind in ("attention", "relu_attention", "hypermlp", "hyperglu")
        after = config.block("norms_after", "none")
        self.after = after == "all" or (after == "attention" and caches)
        who = "attention" if caches else "mixer"
        by = config.block("residual_multiplier", 1.0)
        self.first = (config.block(who + "_alpha", 1.0), by * config.block(who + "_beta", 1.0))
        self.second = config.block("mlp_alpha", 1.0), by * config.block("mlp_beta", 1.0)

    def half(self, x, norm, layer, joint):
        """What a half gives, times its factor, and what it is added to."""
        n = x if self.after else norm(x)
        y = layer(n)
        base = n if self.config.block("residual", "stream") == "norm" else x
        return joint[1] * (norm(y) if self.after else y), joint[0] * base

    def forward(self, x, state):
        beside = state.setdefault("beside", {})
        beside["position"] = state["position"]

        def mixer(n):
            y = self.attn(n, state)
            return y + self.beside(n, beside) if hasattr(self, "beside") else y
        y, base = self.half(x, self.attn_norm, mixer, self.first)
        if self.config.block("parallel_residual", False):
            if hasattr(self, "mlp"):
                y = y + self.half(x, self.mlp_norm, self.mlp, self.second)[0]
            return x + y
        x = base + y
        if hasattr(self, "mlp"):
            y, base = self.half(x, self.mlp_norm, self.mlp, self.second)
            x = base + y
        return x


class Trunk(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.block("learned_positions", 0):
            self.positions = nn.Embedding(config.learned_positions, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i, name) for i, name in enumerate(config.names()))
        if config.block("norm_first", False):
            self.layers[0].pre_norm = Norm(config)
        self.norm = Norm(config)


class States(list):
    """What the layers remember of the tokens so far: a dict each. The cache of `generate`."""

    is_compileable = False

    def get_seq_length(self, layer_idx=0):
        return self[0]["position"] if self else 0

    def get_max_cache_shape(self):
        return None

    def reorder_cache(self, beam_idx):
        def pick(state):
            return {k: pick(v) if isinstance(v, dict) else v if k == "position"
                    else v.index_select(0, beam_idx.to(v.device)) for k, v in state.items()}
        self[:] = [pick(state) for state in self]
        return self


class MnemeForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model of mneme; past_key_values are States."""

    config_class = MnemeConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _is_stateful = True
    _supports_cache_class = False
    _no_split_modules = ["Block"]
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module):
        """Folders hold every parameter; training begins in mneme."""

    def get_input_embeddings(self):
        return self.model.embeddings

    def set_input_embeddings(self, value):
        self.model.embeddings = value

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, labels=None,
                use_cache=None, inputs_embeds=None, logits_to_keep=0, return_dict=None, **kwargs):
        """Logits [B, T, vocabulary], the loss of `labels` shifted by one, and States. Padding stands
        behind a row, where it changes nothing."""
        self._refuse_padding(attention_mask)
        c = self.config
        x = self.model.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        x = x * c.block("embedding_multiplier", 1.0)
        old = past_key_values if isinstance(past_key_values, States) and past_key_values else None
        states = States({**s} for s in old) if old else States({"position": 0} for _ in
                                                               self.model.layers)
        position, T = states.get_seq_length(), x.shape[1]
        if hasattr(self.model, "positions"):
            x = x + self.model.positions(torch.arange(position, position + T, device=x.device))
        if hasattr(self.model.layers[0], "pre_norm"):
            x = self.model.layers[0].pre_norm(x)
        for block, state in zip(self.model.layers, states):
            if "beside" in state:
                state["beside"] = {**state["beside"]}
            x = block(x, state)
            state["position"] = position + T
        if isinstance(logits_to_keep, int) and logits_to_keep:
            x = x[:, -logits_to_keep:]
        logits = self.lm_head(self.model.norm(x) * c.block("logits_multiplier", 1.0))
        cap, loss = c.block("logit_softcap", 0.0), None
        if cap:
            logits = cap * torch.tanh(logits / cap)
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(),
                                   labels[:, 1:].flatten().to(logits.device))
        kept = states if use_cache is not False else None
        if return_dict is False:
            return tuple(v for v in (loss, logits, kept) if v is not None)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=kept)

    @staticmethod
    def _refuse_padding(mask):
        if mask is not None and mask.dim() == 2 and (mask[:, 1:] > mask[:, :-1]).any():
            raise ValueError("padding on the left would be read as tokens; pad on the right "
                             "(tokenizer.padding_side = \"right\")")

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        """States are made by the first call: transformers' own caches are for keys and values."""

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None,
                                      use_cache=True, **kwargs):
        if past_key_values:
            input_ids = input_ids[:, past_key_values.get_seq_length():]
        return {"input_ids": input_ids, "past_key_values": past_key_values, "use_cache": use_cache,
                "attention_mask": None if past_key_values else attention_mask, "logits_to_keep": 1}

    @staticmethod
    def _reorder_cache(past_key_values, beam_idx):
        return past_key_values.reorder_cache(beam_idx)
