"""Layers as modules: [B, T, D] -> [B, T, D], one class for each row of the mixer table.

    layer = mneme.torch.nn.GDN(512, num_heads=8)          # options as in config.json
    y = layer(x)
    y, state, _ = layer(x, return_state=True)             # prefill, then
    y, state, _ = layer(token, state=state, return_state=True)
    y, _, variance = mneme.torch.nn.Bayes(512)(x, belief=True)     # variance [B, T]

Parameters have the names and shapes of our folders (and of flash-linear-attention's for layers it
has too), and begin with the numbers that `mneme train` draws. `make("gla+ccq", 512)` builds a layer
by its name, `patch` exchanges the mixers of a model."""

import collections

import torch
from torch import nn

from .. import layers as _layers
from . import _mixers
from ._call import call, torch_operators

__all__ = ["Mixer", "MixerOutput", "RMSNorm", "MLP", "ChannelMix", "Block", "LanguageModel", "make",
           "patch", "shard"]

MixerOutput = collections.namedtuple("MixerOutput", "output state variance")


class _Weights(nn.Module):
    """Parameters under one name that are no linear map: a norm, a convolution."""


class Mixer(nn.Module):
    """A sequence layer of a model of width D.

    kind: "gdn", "bayes", "gla+ccq", ... (mneme.layers.kinds()); context: most tokens of a sequence,
    for layers whose weights belong to lags; place: which of so many layers of its model it is, for
    those that go by that; options: those of the kind, as in config.json."""

    kind = None

    def __init__(self, width, kind=None, context=2048, norm_eps=1e-6, spread=0.02, device=None,
                 dtype=None, place=(0, 1), **options):
        super().__init__()
        name = kind or self.kind
        if name is None:
            raise TypeError("Mixer needs a kind, such as \"gdn\"; or use its class, such as GDN")
        described = _layers.describe(name, width, context, place, **options)
        self.name, self.kind, self.ccq = name, described["kind"], described["ccq"]
        self.width, self.context, self.norm_eps, self.spread = width, context, norm_eps, spread
        self.given, self.options, self.place = options, described["options"], place
        self.index = place[0]
        self.sizes, self.has_variance = described["sizes"], described["variance"]
        self._rows = described["parameters"]
        for row in self._rows:
            self._add(row, device, dtype)
        self.reset_parameters()
        self._forward = _mixers.FORWARD[self.kind]

    def _home(self, path):
        """The module that holds what is called so; containers are made on the way."""
        home = self
        for part in path:
            if not hasattr(home, part):
                home.add_module(part, _Weights())
            home = getattr(home, part)
        return home

    def _add(self, row, device, dtype):
        *path, last = row["name"].split(".")
        shape = row["shape"]
        bias = any(r["name"] == ".".join([*path, "bias"]) for r in self._rows)
        if last == "weight" and len(shape) == 2 and path:
            linear = nn.utils.skip_init(nn.Linear, shape[1], shape[0], bias=bias,
                                        device=device or "cpu", dtype=dtype)
            self._home(path[:-1]).add_module(path[-1], linear)
        elif not (last == "bias" and isinstance(self._home(path), nn.Linear)):
            value = torch.empty(shape, device=device, dtype=dtype)
            self._home(path).register_parameter(last, nn.Parameter(value))
        self.get_parameter(row["name"]).requires_grad_(row["group"] != "frozen")

    @torch.no_grad()
    def reset_parameters(self, seed=None):
        """First numbers, as `mneme train` draws them; seed None takes torch's generator."""
        if seed is None:
            seed = int(torch.randint(2 ** 62, (), device="cpu"))
        for i, row in enumerate(self._rows):
            parameter = self.get_parameter(row["name"])
            if parameter.is_meta:
                continue
            parameter.copy_(torch.from_numpy(_layers.start(
                self.name, self.width, row["name"], self.context, seed, i, self.spread, self.place,
                **self.given)))

    def groups(self):
        """{parameter's name: (group, whether weight decay applies)}, for optimisers."""
        return {row["name"]: (row["group"], row["decays"]) for row in self._rows}

    def forward(self, x, state=None, return_state=False, belief=False, cu_seqlens=None, shared=None,
                bound=None):
        """x [B, T, D]. Gives y, or with return_state or belief a MixerOutput: the state to go on
        from (a dict, None unless asked), the read variance [B, T] averaged over heads (None where
        the layer keeps none). A model gives `shared`, a dict for all its layers in one pass (the
        first values of rwkv7), and `bound`, log odds of the least gates (hgrn2)."""
        run = _mixers.Pass(self, state, return_state, belief, cu_seqlens, shared, bound)
        y = self._forward(run, x)
        if not (return_state or belief):
            return y
        return MixerOutput(y, run.final(x.shape[1]) if return_state else None, run.variance)

    def extra_repr(self):
        given = ", ".join(f"{k}={v!r}" for k, v in self.given.items())
        return f"{self.width}, {self.name!r}" + (", " + given if given else "")


def _class_name(kind):
    special = {"gdn": "GDN", "kda": "KDA", "gdn2": "GDN2", "gla": "GLA", "kla": "KLA",
               "retnet": "RetNet", "hypermlp": "HyperMLP", "hyperglu": "HyperGLU",
               "mlstm": "MLSTM", "delta": "DeltaNet", "linear": "LinearAttention",
               "relu_attention": "ReLUAttention", "rwkv7": "RWKV7", "hgrn2": "HGRN2", "gsa": "GSA",
               "rg_lru": "RGLRU", "mla": "MLA", "gated_deltaproduct": "GatedDeltaProduct",
               "diff_attention": "DifferentialAttention", "none": "NoMixer"}
    return special.get(kind) or "".join(part.title() for part in kind.split("_"))


def _documentation(kind, row):
    lines = [f"Layer {kind!r}, [B, T, D] -> [B, T, D].", "", f"    transition: {row['transition']}",
             f"    belief: {row['belief']}", f"    read: {row['read']}", "", "Options:"]
    lines += [f"    {o['name']} = {o['default']}: {o['about']}" for o in row["options"]]
    return "\n".join(lines)


for _kind, _row in _layers.kinds().items():
    _name = _class_name(_kind)
    globals()[_name] = type(_name, (Mixer,), {"kind": _kind, "__module__": __name__,
                                              "__doc__": _documentation(_kind, _row)})
    __all__.append(_name)


def make(name, width, **options):
    """A layer by its name: "gdn", "bayes", "gla+ccq"."""
    return Mixer(width, kind=name, **options)


# ---- what stands around a mixer -----------------------------------------------------------------

class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) weight over the last axis."""

    def __init__(self, width, eps=1e-6, device=None, dtype=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype))

    def forward(self, x):
        return call(torch_operators["rms_norm"], (x, self.weight), (self.eps,))[0]


def _norm(described):
    width, eps = described["hidden_size"], described["norm_eps"]
    if described["norm"] == "layer":
        return nn.LayerNorm(width, eps=eps, bias=described["norm_bias"])
    return RMSNorm(width, eps)


class MLP(nn.Module):
    """down(act(gate x) * up x), or down(act(up x)). Kinds are those of models: swiglu, geglu, gelu,
    gelu_erf, relu_square."""

    def __init__(self, width, inner, kind="swiglu", device=None, dtype=None):
        super().__init__()
        how = dict(bias=False, device=device, dtype=dtype)
        self.kind, self.act = kind, _ACTIVATIONS[kind]
        if kind in ("swiglu", "geglu"):
            self.gate_proj = nn.Linear(width, inner, **how)
        self.up_proj = nn.Linear(width, inner, **how)
        self.down_proj = nn.Linear(inner, width, **how)

    def forward(self, x):
        up = self.up_proj(x)
        if self.kind in ("swiglu", "geglu"):
            return self.down_proj(self.act(self.gate_proj(x)) * up)
        return self.down_proj(self.act(up))


def _gelu(x):
    return nn.functional.gelu(x, approximate=_mixers.GELU)


_ACTIVATIONS = {"swiglu": nn.functional.silu, "geglu": _gelu, "gelu": _gelu,
                "gelu_erf": nn.functional.gelu, "relu_square": lambda x: x.relu().square()}


class ChannelMix(nn.Module):
    """value(relu(key(x + x_k (x of the token before - x)))^2): the second half of RWKV-7."""

    def __init__(self, width, inner):
        super().__init__()
        self.x_k = nn.Parameter(torch.zeros(width))
        self.key = nn.Linear(width, inner, bias=False)
        self.value = nn.Linear(inner, width, bias=False)

    def forward(self, x, before):
        return self.value(self.key(x + (before - x) * self.x_k).relu().square())


class Block(nn.Module):
    """h = x + mixer(norm x); y = h + mlp(norm h). The mixer is called `attn`, as in checkpoints;
    `described` is a model's description, index which of its layers this is."""

    def __init__(self, described, index):
        super().__init__()
        layer, width = described["layers"][index], described["hidden_size"]
        options = {k: v for k, v in layer["options"].items() if v is not None}
        if described["norm_first"] and index == 0:
            self.pre_norm = _norm(described)
        if layer["name"] != "none":
            self.attn_norm = _norm(described)
        self.attn = Mixer(width, layer["name"], described["context"], described["norm_eps"],
                          described["initializer_range"], place=(index, len(described["layers"])),
                          **options)
        self.mlp_kind = described["mlp"]
        # the second half is called so in files of flash-linear-attention's rwkv7
        self.half = "ffn" if described["config"].get("model_type") == "rwkv7" else "mlp"
        if self.mlp_kind != "none":
            self.add_module(self.half + "_norm", _norm(described))
            inner = described["intermediate_size"]
            self.add_module(self.half, ChannelMix(width, inner) if self.mlp_kind == "rwkv7" else
                            MLP(width, inner, self.mlp_kind))

    def forward(self, x, **how):
        x = self.pre_norm(x) if hasattr(self, "pre_norm") else x
        out = self.attn(self.attn_norm(x) if hasattr(self, "attn_norm") else x, **how)
        several = isinstance(out, MixerOutput)
        state = out.state if several else None
        if hasattr(self, "attn_norm"):
            x = x + (out.output if several else out)
        if self.mlp_kind != "none":
            y, half = getattr(self, self.half + "_norm")(x), getattr(self, self.half)
            if self.mlp_kind == "rwkv7":
                run = _mixers.Pass(self.attn, how.get("state"), state is not None, False,
                                   how.get("cu_seqlens"))
                x = x + half(y, run.shift(y, "channel_shift"))
                state = None if state is None else {**state, **run.left}
            else:
                x = x + half(y)
        return MixerOutput(x, state, out.variance) if several else x


class _Trunk(nn.Module):
    def __init__(self, described):
        super().__init__()
        n = len(described["layers"])
        self.embeddings = nn.Embedding(described["vocab_size"], described["hidden_size"])
        self.layers = nn.ModuleList(Block(described, i) for i in range(n))
        bounds = _layers.bound_shape([{"options": block.attn.options, "sizes": block.attn.sizes}
                                      for block in self.layers])
        if bounds:
            self.lower_bounds = nn.Parameter(torch.zeros(bounds))
        self.norm = _norm(described)

    def shares(self):
        """What the blocks of a pass are given beside x, one dict each."""
        shared, bounds = {}, self._bounds()
        return [{"shared": shared, "bound": bounds[i]} for i in range(len(self.layers))]

    def _bounds(self):
        """Least gates of the layers as log odds: log(sum over 1 .. l of e^w) - log(sum over the
        others of e^w), w a row of lower_bounds for each layer; none in the first."""
        n = len(self.layers)
        if not hasattr(self, "lower_bounds"):
            return [None] * n
        w = self.lower_bounds
        w = w if w.dtype is torch.float64 else w.float()
        out = [None]
        for i in range(1, n):
            others = torch.cat([w[:1], w[i + 1:]])
            out.append(w[1:i + 1].logsumexp(0) - others.logsumexp(0))
        return out


class LanguageModel(nn.Module):
    """The model that a config.json (a dict) means; state_dict() has the names of our folders.

        model = LanguageModel({"layers": "gdn*5, attention", "hidden_size": 512,
                               "vocab_size": 50304})"""

    def __init__(self, config):
        super().__init__()
        self.described = described = _layers.describe_model(config)
        if described["decoder"] != "none" or not described["plain"]:
            what = (f"decoder {described['decoder']!r}" if described["decoder"] != "none" else
                    "what its blocks do otherwise (experts, biases, multipliers, ...)")
            raise NotImplementedError(f"{what} is not built in PyTorch; mneme.Model reads such "
                                      "folders")
        self.model = _Trunk(described)
        self.lm_head = nn.Linear(described["hidden_size"], described["vocab_size"], bias=False)
        self.reset_parameters()
        if described["tied"]:
            self.lm_head.weight = self.model.embeddings.weight

    @torch.no_grad()
    def reset_parameters(self):
        spread = self.described["initializer_range"]
        for module in self.modules():
            if isinstance(module, (MLP, ChannelMix)):
                for linear in module.children():
                    nn.init.normal_(linear.weight, 0.0, spread)
        for i, block in enumerate(self.model.layers):
            if block.mlp_kind == "rwkv7":    # rwkv7.c: 1 - c^((1 - i / n)^4), c the channel's share
                x_k = getattr(block, block.half).x_k
                channel = torch.arange(x_k.numel()) / x_k.numel()
                x_k.copy_(1.0 - channel ** ((1.0 - i / len(self.model.layers)) ** 4))
        nn.init.normal_(self.model.embeddings.weight, 0.0, spread)
        nn.init.normal_(self.lm_head.weight, 0.0, spread)

    def forward(self, tokens, states=None, return_states=False, belief=False, cu_seqlens=None):
        """tokens [B, T]. Logits [B, T, vocabulary]; with return_states or belief a MixerOutput of
        lists, an entry for each layer."""
        x, several = self.model.embeddings(tokens), return_states or belief
        kept, variances = [], []
        for i, (block, share) in enumerate(zip(self.model.layers, self.model.shares())):
            state = None if states is None else states[i]
            x = block(x, state=state, return_state=return_states, belief=belief,
                      cu_seqlens=cu_seqlens, **share)
            if several:
                x, state, variance = x
                kept.append(state)
                variances.append(variance)
        logits = self.lm_head(self.model.norm(x))
        cap = self.described["logit_softcap"]
        if cap:
            logits = cap * torch.tanh(logits / cap)
        if not several:
            return logits
        return MixerOutput(logits, kept if return_states else None, variances if belief else None)


# ---- exchanging mixers --------------------------------------------------------------------------

def _find_mixers(model):
    """Modules that mix along the sequence, in order: (parent, name, module, width)."""
    found = []
    for path, module in model.named_modules():
        if not path:
            continue
        parent_path, _, name = path.rpartition(".")
        if isinstance(module, Mixer):
            found.append((model.get_submodule(parent_path), name, module, module.width))
    return found


def patch(model, to, layers=None, select=None, width=None, keep=True, **options):
    """Exchanges mixers of `model` for layers of kind `to`, in place; returns their places.

    Mixers are found by being ours, or by `select`: a function (path, module) -> bool, or the last
    part of their paths ("attn", "self_attn"); then `width` is needed where the model's hidden size
    cannot be read from it. `layers` are the indices among them that are exchanged (default: all).
    With `keep`, parameters of the same name and shape go over: q, k, v and output projections.
    `to` may name both kinds, "gdn -> bayes": then `layers` count those of the first kind."""
    places = _find_mixers(model) if select is None else _selected(model, select, width)
    if "->" in to:
        kind, to = (part.strip() for part in to.split("->"))
        every = places
        places = [p for p in every if getattr(p[2], "name", None) == kind]
        if every and not places:
            raise ValueError(f"no mixer of this model is {kind!r}; there are "
                             + ", ".join(sorted({getattr(p[2], "name", type(p[2]).__name__)
                                                 for p in every})))
    if not places:
        raise ValueError("there is no mixer in this model; name them by select=\"self_attn\"")
    wanted = range(len(places)) if layers is None else list(layers)
    for i in wanted:
        if not -len(places) <= i < len(places):
            raise ValueError(f"layer {i} is not there; the model has {len(places)} mixers")
    done = []
    for i in wanted:
        parent, name, old, size = places[i]
        example = next(old.parameters(), None)
        new = Mixer(size, to, getattr(old, "context", 2048), getattr(old, "norm_eps", 1e-6),
                    place=getattr(old, "place", (0, 1)), **options)
        if keep:
            _carry_over(old, new)
        if example is not None:
            new = new.to(example.device, example.dtype)
        if not isinstance(old, Mixer):
            new = _Foreign(new, old)
        parent.register_module(name, new) if hasattr(parent, "register_module") else setattr(
            parent, name, new)
        done.append(i)
    return done


def _selected(model, select, width):
    test = select if callable(select) else lambda path, module: path.split(".")[-1] == select
    found, config = [], getattr(model, "config", None)
    size = width or getattr(config, "hidden_size", None) or getattr(config, "n_embd", None)
    for path, module in model.named_modules():
        if path and test(path, module):
            if size is None:
                raise ValueError("the model does not tell its width; give width=")
            parent_path, _, name = path.rpartition(".")
            found.append((model.get_submodule(parent_path), name, module, size))
    return found


@torch.no_grad()
def _carry_over(old, new):
    theirs = dict(old.named_parameters())
    for name, parameter in new.named_parameters():
        found = theirs.get(name)
        if found is not None and found.shape == parameter.shape and not parameter.is_meta:
            parameter.copy_(found)


class _Foreign(nn.Module):
    """Our mixer where another module stood: takes its call, gives as many results. What a call says
    of masks, positions and caches is not looked at: a recurrent layer needs no positions, and
    padding belongs to the right."""

    def __init__(self, mixer, old):
        super().__init__()
        self.mixer = mixer
        self.n_results = getattr(old, "n_results", 1)
        self.returns_tuple = type(old).__module__.startswith(("transformers", "fla"))
        self.is_fla = type(old).__module__.startswith("fla")

    def forward(self, hidden_states=None, *args, **kwargs):
        x = hidden_states if hidden_states is not None else kwargs.pop("x", None)
        y = self.mixer(x, cu_seqlens=kwargs.get("cu_seqlens"))
        if self.is_fla:
            return y, None, kwargs.get("past_key_values")
        return (y, None) if self.returns_tuple else y


# ---- several processes --------------------------------------------------------------------------

def _mean_over(group):
    """A hook that makes a gradient its mean over the ranks of a group."""
    import torch.distributed as dist
    n = dist.get_world_size(group)

    def hook(parameter):
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= n

    return hook


def shard(model, mesh=None, blocks=(Block,), **options):
    """PyTorch's fully_shard for `model` and each of its blocks, in place (2.7 and newer).

    fully_shard takes no scalars, which some layers have (kla, mamba, rwkv7): those stay whole, and
    their gradients are made their means over the ranks. `blocks` are the classes that are sharded
    one by one; options are those of fully_shard. Begin with the same parameters on every rank."""
    import inspect
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    if "ignored_params" not in inspect.signature(fully_shard).parameters:
        raise NotImplementedError("shard needs fully_shard with ignored_params, PyTorch 2.7 or "
                                  f"newer; this is {torch.__version__}")
    if mesh is None:
        device = next(model.parameters()).device.type
        mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    scalars = {p for p in model.parameters() if p.dim() == 0}
    for module in model.modules():
        if isinstance(module, blocks):
            fully_shard(module, mesh=mesh, ignored_params=scalars, **options)
    group = mesh.get_group() if mesh.ndim == 1 else None    # of two axes: all ranks
    for p in model.parameters():
        if p in scalars and p.requires_grad:
            p.register_post_accumulate_grad_hook(_mean_over(group))
    return fully_shard(model, mesh=mesh, ignored_params=scalars, **options)
