"""The operators under the names, layouts, defaults and errors of flash-linear-attention, and those
it has not in the same style.

Common arguments: q, k [B, T, H, K], v [B, T, H, V]; scale None for K^-0.5; initial_state
[N, H, K, V]; cu_seqlens [N + 1] packs sequences and needs B = 1. All give (o, final_state), the
state None unless output_final_state. state_v_first turns states to [N, H, V, K]."""

import functools
import inspect
import warnings

import torch
import torch.nn.functional as F

from ._call import _compiled, _is_compiling, call, host_integers, remember, torch_operators
from ._mixers import taylor

_T = torch_operators
_HALF = (torch.float16, torch.bfloat16)
__all__ = [
    "chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn",
    "chunk_retention", "fused_chunk_retention", "fused_recurrent_retention", "parallel_retention",
    "chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla",
    "parallel_simple_gla", "chunk_lightning_attn", "fused_recurrent_lightning_attn",
    "chunk_gla", "fused_chunk_gla", "fused_recurrent_gla",
    "chunk_delta_rule", "fused_chunk_delta_rule", "fused_recurrent_delta_rule",
    "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_gdn",
    "fused_recurrent_gdn", "chunk_kda", "fused_recurrent_kda", "chunk_gdn2",
    "fused_recurrent_gdn2", "chunk_dplr_delta_rule", "fused_recurrent_dplr_delta_rule",
    "chunk_iplr_delta_rule", "fused_recurrent_iplr_delta_rule", "chunk_rwkv7",
    "fused_recurrent_rwkv7", "fused_mul_recurrent_rwkv7", "chunk_comba", "fused_recurrent_comba",
    "chunk_gated_delta_product", "chunk_gsa", "fused_recurrent_gsa", "chunk_hgrn",
    "fused_recurrent_hgrn", "parallel_attn", "parallel_based", "fused_chunk_based",
    "chunk_mesa_net",
    "kla_scan", "palimpsa", "bayes_filter", "ccq_query", "ccq_linear_attn", "ccq_delta_rule",
    "hyperglu", "hypermlp", "longhorn", "mlstm_cell", "selective_scan",
]


# ---- what all share -----------------------------------------------------------------------------

def _check(q, k, v, initial_state, cu_seqlens, kwargs=None, known=()):
    if kwargs:
        if "head_first" in kwargs:
            raise DeprecationWarning("head_first has been removed. Inputs must be in "
                                     "`[B, T, H, ...]` format.")
        for name in kwargs:
            if name not in ("chunk_size", "chunk_indices", "disable_recompute",
                            "transpose_state_layout", *known):
                raise TypeError(f"unexpected keyword argument {name!r}")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q and k must have the same number of heads, but got q.shape[2]="
                         f"{q.shape[2]} and k.shape[2]={k.shape[2]}")
    if v.shape[2] % q.shape[2]:
        raise ValueError(f"num_v_heads (HV={v.shape[2]}) must be evenly divisible by num_heads "
                         f"(H={q.shape[2]})")
    if cu_seqlens is None:
        return
    if q.shape[0] != 1:
        raise ValueError(f"The batch size is expected to be 1 rather than {q.shape[0]} when using "
                         "`cu_seqlens`. Please flatten variable-length inputs before processing.")
    state = initial_state[0] if isinstance(initial_state, tuple) else initial_state
    if state is not None and state.shape[0] != len(cu_seqlens) - 1:
        raise ValueError("The number of initial states is expected to be equal to the number of "
                         f"input sequences, i.e., {len(cu_seqlens) - 1} rather than "
                         f"{state.shape[0]}.")


def _offsets(cu_seqlens, cu_seqlens_cpu):
    return cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu


def _scale(scale, k):
    return k.shape[-1] ** -0.5 if scale is None else float(scale)


def _v_first(state_v_first, kwargs):
    """state_v_first, or its old name."""
    old = kwargs.get("transpose_state_layout")
    if old is not None and state_v_first:
        raise ValueError("`transpose_state_layout` is the old name of `state_v_first`; give one of "
                         "the two.")
    if old is None:
        return state_v_first
    warnings.warn("`transpose_state_layout` is called `state_v_first` now", DeprecationWarning,
                  stacklevel=3)
    return old


def _turned(state, v_first):
    return state if state is None or not v_first else state.transpose(-1, -2)


def _unit(x):
    """x / sqrt(|x|^2 + 1e-6), the norm that flash-linear-attention fuses. What the operator will
    compute in float32 is not rounded to a half in between; _as_given() rounds its results. A view
    is copied once, for both ways."""
    x = x.contiguous()
    if x.dtype is torch.float16 or x.dtype is torch.bfloat16 and not x.is_cuda:
        x = x.float()
    return call(_T["l2_norm"], (x,), (1e-6, 1))[0]


def _as_given(o, q):
    """o in the dtype of the queries as they came."""
    return o.to(q.dtype) if o.dtype is torch.float32 and q.dtype in _HALF else o


def _backwards(tensors, state, cu_seqlens):
    """Tensors [B, T, ...], states and offsets of the sequences read from their ends."""
    turned = [x if x is None or x.dim() < 3 else x.flip(1) for x in tensors]
    if cu_seqlens is None:
        return turned, state, None
    offsets = host_integers(cu_seqlens)
    return turned, None if state is None else state.flip(0), (offsets[-1] - offsets).flip(0)


def _reversed(run, tensors, state, cu_seqlens):
    """run(tensors, state, cu_seqlens) -> (o, state) over the sequences from their ends."""
    tensors, state, offsets = _backwards(tensors, state, cu_seqlens)
    o, final = run(tensors, state, offsets)
    return o.flip(1), final if final is None or offsets is None else final.flip(0)


def _columns(name, q, k, v, g, gv, beta, scale, state, output_final_state, cu_seqlens):
    """An operator whose value channels have decays gv or strengths beta [B, T, H, V] of their own:
    each channel is a head with values of width 1, which shares queries and keys. A sum that only
    has gv is an operator of its own."""
    B, T, H, V = v.shape
    if name == "additive" and g is None and gv is not None:
        return _two("additive_column", (q, k, v, gv, _turned(state, True)), scale, cu_seqlens,
                    output_final_state, True)

    def spread(x):
        return x if x is None else x.repeat_interleave(V, 2)

    g = spread(g)
    if gv is not None:
        gv = gv.flatten(2)
        g = gv if g is None else g + (gv if g.dim() == 3 else gv.unsqueeze(-1))
    if beta is not None:
        beta = beta.flatten(2) if beta.dim() == 4 else spread(beta)
    start = None if state is None else state.transpose(-1, -2).flatten(1, 2).unsqueeze(-1)
    given = (q, k, v.reshape(B, T, H * V, 1), *(() if beta is None else (beta,)), g, start)
    o, final = _two(name, given, scale, cu_seqlens, output_final_state)
    if final is not None:
        final = final.view(-1, H, V, k.shape[-1]).transpose(-1, -2)
    return o.view(B, T, H, V), final


def _two(name, tensors, scale, cu_seqlens, output_final_state, v_first=False, given=None):
    """o and the final state of an operator whose results these are, read (state last). `given`:
    the queries before they were normalised."""
    o, state = call(_T[name], tensors, (scale,), cu_seqlens, None,
                    3 if output_final_state else 1)
    return o if given is None else _as_given(o, given), _turned(state, v_first)


_DIRECT = """
def {name}({head}):
    if cu_seqlens is None{no_more} and not _compiling():
        given = ({name!r}, k.shape[-1], scale, output_final_state, {others})
        made = _ask(_known, ({tensors}), given, None)
        return _learn(({tensors}), given, _slow({values})) if made is None else made
    return _slow({values})
"""


def _direct(operator, order):
    """For a function that is one call of `operator` where its other arguments have their defaults,
    with the tensors `order`, the number scale and results (o, state). Calls that look like an
    earlier one of that kind are left to src/fastcall.c before anything is looked at here."""
    top = _T[operator]
    names = order.replace("-", "").split()

    def learn(defaults, tensors, given, made):
        if all(a is b for a, b in zip(given[4:], defaults)):
            k = tensors[1]
            remember(top, given, None, (_scale(given[2], k),), 3 if given[3] else 1, tuple, 0)
        return made

    def wrap(function):
        if top.known is None:
            return function
        parameters = list(inspect.signature(function).parameters.values())
        more = [p for p in parameters if p.kind is p.VAR_KEYWORD]
        plain = [p for p in parameters if p not in more]
        others = [p for p in plain
                  if p.name not in (*names, "scale", "output_final_state", "cu_seqlens")]
        text = _DIRECT.format(
            name=function.__name__, no_more=" and not kwargs" * len(more),
            head=", ".join([p.name if p.default is p.empty else f"{p.name}={p.default!r}"
                            for p in plain] + ["**kwargs"] * len(more)),
            others="".join(p.name + ", " for p in others),
            tensors="".join(("None" if n == "-" else n) + ", " for n in order.split()),
            values=", ".join([p.name for p in plain] + ["**kwargs"] * len(more)))
        scope = {"_ask": _compiled.ask, "_known": top.known, "_compiling": _is_compiling,
                 "_slow": function,
                 "_learn": functools.partial(learn, [p.default for p in others])}
        exec(text, scope)
        return functools.wraps(function)(scope[function.__name__])
    return wrap


# ---- sums ---------------------------------------------------------------------------------------

def _additive(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, v_first=False,
              reverse=False):
    if reverse:
        return _reversed(
            lambda x, state, offsets: _additive(*x, scale, state, output_final_state, offsets,
                                                v_first),
            (q, k, v, g), initial_state, cu_seqlens)
    return _two("additive", (q, k, v, g, _turned(initial_state, v_first)), _scale(scale, k),
                cu_seqlens, output_final_state, v_first)


def _normalised(o, q, k, scale, z0, cu_seqlens, want):
    """o / (q . z + 1e-10) with z the sum of the keys, kept as values of width 1; z0 [N, 1, H, K]."""
    ones = torch.ones_like(k[..., :1])
    start = None if z0 is None else z0.squeeze(1).unsqueeze(-1)
    below, z = _two("additive", (q, k, ones, None, start), scale, cu_seqlens, want)
    return o / (below + 1e-10), None if z is None else z.squeeze(-1).unsqueeze(1)


def chunk_linear_attn(q, k, v, scale=None, initial_state=None, output_final_state=False,
                      normalize=True, cu_seqlens=None):
    """Linear attention, S = S + k v', o = S'q scale. With `normalize` divided by the query's
    product with the sum of the keys; states are then (kv_state, z_state [N, 1, H, K])."""
    _check(q, k, v, initial_state, cu_seqlens)
    kv, z = initial_state if normalize and isinstance(initial_state, tuple) else (initial_state,
                                                                                  None)
    o, state = _additive(q, k, v, None, scale, kv, output_final_state, cu_seqlens)
    if not normalize:
        return o, state
    o, z = _normalised(o, q, k, _scale(scale, k), z, cu_seqlens, output_final_state)
    return o, (state, z) if output_final_state else None


def fused_recurrent_linear_attn(q, k, v, scale=None, initial_state=None, output_final_state=False,
                                reverse=False, normalize=False, cu_seqlens=None):
    """chunk_linear_attn, which does not normalise unless told."""
    if reverse and normalize:
        raise NotImplementedError("reverse with normalize is not built; flip the sequence axis")
    if reverse:
        _check(q, k, v, initial_state, cu_seqlens)
        return _additive(q, k, v, None, scale, initial_state, output_final_state, cu_seqlens,
                         reverse=True)
    return chunk_linear_attn(q, k, v, scale, initial_state, output_final_state, normalize,
                             cu_seqlens)


def _heads(q):
    """0, 1, ... for each head, made where q is: nothing waits for a copy."""
    return torch.arange(q.shape[2], dtype=torch.float64, device=q.device)


@_direct("additive", "q k v g initial_state")
def chunk_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None,
                     output_final_state=False, state_v_first=False, cu_seqlens=None,
                     cu_seqlens_cpu=None, **kwargs):
    """A sum with log decay g [B, T, H] per token, or g_gamma [H] per head (Mamba-2, RetNet)."""
    _check(q, k, v, initial_state, cu_seqlens, kwargs, ("reverse",))
    if g is not None and g_gamma is not None:
        g, g_gamma = g + g_gamma, None
    return _additive(q, k, v, g if g is not None else g_gamma, scale, initial_state,
                     output_final_state, _offsets(cu_seqlens, cu_seqlens_cpu),
                     _v_first(state_v_first, kwargs), kwargs.get("reverse"))


def fused_recurrent_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None,
                               output_final_state=False, reverse=False, state_v_first=False,
                               cu_seqlens=None, **kwargs):
    """chunk_simple_gla; with `reverse` from the last token to the first."""
    return chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state,
                            state_v_first, cu_seqlens, reverse=reverse, **kwargs)


def fused_chunk_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None,
                           output_final_state=False, cu_seqlens=None):
    """chunk_simple_gla."""
    return chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state,
                            cu_seqlens=cu_seqlens)


def _no_attentions(wanted):
    if wanted:
        raise NotImplementedError("output_attentions: scores [B, H, T, T] are never made")


def parallel_simple_gla(q, k, v, g=None, scale=None, output_attentions=False, cu_seqlens=None,
                        cu_seqlens_cpu=None):
    """chunk_simple_gla without states: (o, None)."""
    _no_attentions(output_attentions)
    return chunk_simple_gla(q, k, v, g, scale=scale, cu_seqlens=cu_seqlens,
                            cu_seqlens_cpu=cu_seqlens_cpu)


def _retention_decay(q):
    return torch.log1p(-torch.exp2(-5.0 - _heads(q))).to(
        torch.float64 if q.dtype is torch.float64 else torch.float32)


def chunk_retention(q, k, v, scale=None, initial_state=None, output_final_state=False,
                    cu_seqlens=None, **kwargs):
    """RetNet: the decay of head h is 1 - 2^(-5 - h)."""
    _check(q, k, v, initial_state, cu_seqlens, kwargs,
           ("cu_seqlens_cpu", "reverse", "state_v_first"))
    return _additive(q, k, v, _retention_decay(q), scale, initial_state, output_final_state,
                     _offsets(cu_seqlens, kwargs.get("cu_seqlens_cpu")),
                     _v_first(kwargs.get("state_v_first"), kwargs), kwargs.get("reverse"))


def fused_recurrent_retention(q, k, v, scale=None, initial_state=None, output_final_state=False,
                              reverse=False, state_v_first=False, cu_seqlens=None, **kwargs):
    """chunk_retention; with `reverse` from the last token to the first."""
    return chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens,
                           reverse=reverse, state_v_first=state_v_first, **kwargs)


def parallel_retention(q, k, v, scale=None, output_attentions=False, cu_seqlens=None):
    """chunk_retention without states: (o, None)."""
    _no_attentions(output_attentions)
    return chunk_retention(q, k, v, scale, cu_seqlens=cu_seqlens)


def chunk_lightning_attn(q, k, v, layer_idx, num_layers, scale=None, initial_state=None,
                         output_final_state=False, cu_seqlens=None, **kwargs):
    """Lightning attention: the log decay of head h is -(8 / H) (1 - layer_idx / num_layers) h."""
    _check(q, k, v, initial_state, cu_seqlens, kwargs, ("reverse",))
    g = -(8.0 / q.shape[2] * (1 - layer_idx / num_layers)) * _heads(q)
    g = g.to(torch.float64 if q.dtype is torch.float64 else torch.float32)
    return _additive(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens,
                     reverse=kwargs.get("reverse"))


def fused_recurrent_lightning_attn(q, k, v, layer_idx, num_layers, scale=None, initial_state=None,
                                   output_final_state=False, reverse=False, cu_seqlens=None):
    """chunk_lightning_attn; with `reverse` from the last token to the first."""
    return chunk_lightning_attn(q, k, v, layer_idx, num_layers, scale, initial_state,
                                output_final_state, cu_seqlens, reverse=reverse)


@_direct("additive", "q k v g initial_state")
def chunk_gla(q, k, v, g, scale=None, initial_state=None, output_final_state=False,
              state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None):
    """Gated linear attention: log decay g [B, T, H, K] per key channel."""
    _check(q, k, v, initial_state, cu_seqlens)
    return _additive(q, k, v, g, scale, initial_state, output_final_state,
                     _offsets(cu_seqlens, cu_seqlens_cpu), state_v_first)


@_direct("additive", "q k v gk initial_state")
def fused_recurrent_gla(q, k, v, gk=None, gv=None, scale=None, initial_state=None,
                        output_final_state=False, reverse=False, state_v_first=False,
                        cu_seqlens=None, **kwargs):
    """chunk_gla with the decay per key channel as gk, per value channel as gv [B, T, H, V], each of
    which may be absent."""
    _check(q, k, v, initial_state, cu_seqlens, kwargs)
    v_first = _v_first(state_v_first, kwargs)
    if gv is None:
        return _additive(q, k, v, gk, scale, initial_state, output_final_state, cu_seqlens,
                         v_first, reverse)

    def run(x, state, offsets):
        return _columns("additive", *x, None, _scale(scale, k), state, output_final_state, offsets)

    how = ((q, k, v, gk, gv), _turned(initial_state, v_first), cu_seqlens)
    o, state = _reversed(run, *how) if reverse else run(*how)
    return o, _turned(state, v_first)


# ---- the delta rule -----------------------------------------------------------------------------

def _strength(beta, sigmoid, double):
    if double and not sigmoid:
        raise ValueError("`allow_neg_eigval=True` requires `use_beta_sigmoid_in_kernel=True`.")
    if sigmoid:
        beta = beta.float().sigmoid() if beta.dtype is not torch.float64 else beta.sigmoid()
        return beta * 2 if double else beta
    return beta


def _delta(q, k, v, g, beta, scale, initial_state, output_final_state, use_l2norm, v_first,
           cu_seqlens):
    given = None
    if use_l2norm:
        given, q, k = q, _unit(q), _unit(k)
    return _two("delta_net", (q, k, v, beta, g, _turned(initial_state, v_first)),
                _scale(scale, k), cu_seqlens, output_final_state, v_first, given)


@_direct("delta_net", "q k v beta - initial_state")
def chunk_delta_rule(q, k, v, beta, scale=None, initial_state=None, output_final_state=False,
                     use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs):
    """DeltaNet: S = S + beta k (v - S'k)', beta [B, T, H]."""
    _check(q, k, v, initial_state, cu_seqlens, kwargs)
    if beta is None:
        beta = torch.ones_like(v[..., 0])
    return _delta(q, k, v, None, beta, scale, initial_state, output_final_state,
                  use_qk_l2norm_in_kernel, False, _offsets(cu_seqlens, cu_seqlens_cpu))


def fused_recurrent_delta_rule(q, k, v, beta=None, scale=None, initial_state=None,
                               output_final_state=False, use_qk_l2norm_in_kernel=False,
                               cu_seqlens=None):
    """chunk_delta_rule; beta None is 1, and may be per value channel [B, T, H, V]."""
    if beta is not None and beta.dim() == 4:
        _check(q, k, v, initial_state, cu_seqlens)
        given = q
        q, k = (_unit(q), _unit(k)) if use_qk_l2norm_in_kernel else (q, k)
        o, state = _columns("delta_net", q, k, v, None, None, beta, _scale(scale, k),
                            initial_state, output_final_state, cu_seqlens)
        return _as_given(o, given), state
    return chunk_delta_rule(q, k, v, beta, scale, initial_state, output_final_state,
                            use_qk_l2norm_in_kernel, cu_seqlens)


def _gate(g, A_log, dt_bias, lower_bound=None, width=1):
    """The log decay of a raw gate: -exp(A) softplus(g + dt), or bound sigmoid(exp(A) (g + dt));
    width: key channels of a head, 1 for a gate per token."""
    wide = torch.float64 if g.dtype is torch.float64 else torch.float32
    g = g.to(wide)
    rate = 1.0 if A_log is None else A_log.to(wide).reshape(-1).exp()
    if width > 1 and A_log is not None:
        rate = rate.unsqueeze(-1)
    if dt_bias is not None:
        g = g + (dt_bias.to(wide).reshape(-1, width) if width > 1 else dt_bias.to(wide))
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * g)
    return -rate * F.softplus(g)


@_direct("delta_net", "q k v beta g initial_state")
def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None,
                           output_final_state=False, use_qk_l2norm_in_kernel=False,
                           use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
                           state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
                           chunk_indices=None, cp_context=None, **kwargs):
    """Gated DeltaNet: S = e^g S; S = S + beta k (v - S'k)', g and beta [B, T, HV], v may have more
    heads than q and k. use_gate_in_kernel (with A_log, dt_bias) takes g before its nonlinearity."""
    _check(q, k, v, initial_state, cu_seqlens, kwargs, ("use_gate_in_kernel", "A_log", "dt_bias"))
    if cp_context is not None:
        raise NotImplementedError("cp_context, a sequence over several GPUs, is not built here")
    if kwargs.get("use_gate_in_kernel"):
        if kwargs.get("A_log") is None:
            raise ValueError("A_log must be provided when use_gate_in_kernel=True.")
        g = _gate(g, kwargs["A_log"], kwargs.get("dt_bias"))
    beta = _strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    v_first = _v_first(state_v_first, kwargs)
    return _delta(q, k, v, g, beta, scale, initial_state, output_final_state,
                  use_qk_l2norm_in_kernel, v_first, _offsets(cu_seqlens, cu_seqlens_cpu))


@_direct("delta_net", "q k v beta g initial_state")
def fused_recurrent_gated_delta_rule(q, k, v, g=None, gk=None, gv=None, beta=None, scale=None,
                                     initial_state=None, output_final_state=False,
                                     use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
                                     A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False,
                                     allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
                                     **kwargs):
    """chunk_gated_delta_rule with decays per token g, per key channel gk [B, T, HV, K], per value
    channel gv [B, T, HV, V], and beta per token or per value channel."""
    _check(q, k, v, initial_state, cu_seqlens, kwargs)
    if use_gate_in_kernel:
        if A_log is None:
            raise ValueError("`A_log` must be provided when `use_gate_in_kernel=True`.")
        if g is None:
            raise ValueError("`g` (raw pre-activation) must be provided when "
                             "`use_gate_in_kernel=True`.")
        g = _gate(g, A_log, dt_bias)
    if gk is not None:
        g = gk if g is None else gk + g.unsqueeze(-1)
    beta = torch.ones_like(v[..., 0]) if beta is None else beta
    beta = _strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    v_first = _v_first(state_v_first, kwargs)
    if gv is None and beta.dim() == 3:
        return _delta(q, k, v, g, beta, scale, initial_state, output_final_state,
                      use_qk_l2norm_in_kernel, v_first, cu_seqlens)
    given = q
    q, k = (_unit(q), _unit(k)) if use_qk_l2norm_in_kernel else (q, k)
    o, state = _columns("delta_net", q, k, v, g, gv, beta, _scale(scale, k),
                        _turned(initial_state, v_first), output_final_state, cu_seqlens)
    return _as_given(o, given), _turned(state, v_first)


def _kda_gate(g, A_log, dt_bias, lower_bound, safe_gate, width):
    if A_log is None and lower_bound is None:
        raise ValueError("`A_log` must be provided when `use_gate_in_kernel=True` and "
                         "`lower_bound` is not set.")
    if safe_gate and lower_bound is None:
        raise ValueError("`lower_bound` must be specified when `safe_gate=True` and "
                         "`use_gate_in_kernel=True`.")
    if safe_gate and not -5 <= lower_bound < 0:
        raise ValueError(f"`lower_bound` must be in the safe range [-5, 0), got {lower_bound}.")
    return _gate(g, A_log, dt_bias, lower_bound, width)


@_direct("delta_net", "q k v beta g initial_state")
def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
              use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
              use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
              lower_bound=None, disable_recompute=False, return_intermediate_states=False,
              state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None,
              use_graph=False, max_num_seqs=None, **kwargs):
    """Kimi delta attention: the gated delta rule with log decay g [B, T, HV, K] per key channel.
    use_gate_in_kernel takes g before its nonlinearity, with A_log [HV] and dt_bias [HV K]."""
    _check(q, k, v, initial_state, cu_seqlens, kwargs, ("A_log", "dt_bias"))
    if cp_context is not None or return_intermediate_states or use_graph:
        raise NotImplementedError("cp_context, return_intermediate_states and use_graph are not "
                                  "built here")
    if use_gate_in_kernel:
        g = _kda_gate(g, kwargs.get("A_log"), kwargs.get("dt_bias"), lower_bound, safe_gate,
                      q.shape[-1])
    beta = _strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return _delta(q, k, v, g, beta, scale, initial_state, output_final_state,
                  use_qk_l2norm_in_kernel, _v_first(state_v_first, kwargs),
                  _offsets(cu_seqlens, cu_seqlens_cpu))


def fused_recurrent_kda(q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None,
                        output_final_state=False, use_qk_l2norm_in_kernel=False,
                        use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
                        allow_neg_eigval=False, lower_bound=None, state_v_first=False,
                        cu_seqlens=None, **kwargs):
    """chunk_kda with A_log and dt_bias among its arguments."""
    return chunk_kda(q, k, v, g, beta, scale, initial_state, output_final_state,
                     use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
                     allow_neg_eigval, lower_bound=lower_bound, state_v_first=state_v_first,
                     cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias, **kwargs)


def chunk_gdn2(q, k, v, g, b, w, scale=None, initial_state=None, output_final_state=False,
               use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, cu_seqlens=None,
               cu_seqlens_cpu=None, safe_gate=False, lower_bound=None, disable_recompute=False,
               return_intermediate_states=False, state_v_first=False, cp_context=None, **kwargs):
    """Gated DeltaNet-2: gates of erasing b [B, T, HV, K] and of writing w [B, T, HV, V] in place of
    beta, log decay g [B, T, HV, K]."""
    _check(q, k, v, initial_state, cu_seqlens, kwargs, ("A_log", "dt_bias"))
    if cp_context is not None or return_intermediate_states:
        raise NotImplementedError("cp_context and return_intermediate_states are not built here")
    if use_gate_in_kernel:
        g = _kda_gate(g, kwargs.get("A_log"), kwargs.get("dt_bias"), lower_bound, safe_gate,
                      q.shape[-1])
    v_first = _v_first(state_v_first, kwargs)
    given = q
    q, k = (_unit(q), _unit(k)) if use_qk_l2norm_in_kernel else (q, k)
    q, k = (_repeat(x, v.shape[2] // x.shape[2]) for x in (q, k))
    return _two("gdn2", (q, k, v, b, w, g, _turned(initial_state, v_first)), _scale(scale, k),
                _offsets(cu_seqlens, cu_seqlens_cpu), output_final_state, v_first, given)


def fused_recurrent_gdn2(q, k, v, g, b, w, A_log=None, dt_bias=None, scale=None,
                         initial_state=None, output_final_state=False,
                         use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, lower_bound=None,
                         state_v_first=False, cu_seqlens=None, **kwargs):
    """chunk_gdn2 with A_log and dt_bias among its arguments."""
    return chunk_gdn2(q, k, v, g, b, w, scale, initial_state, output_final_state,
                      use_qk_l2norm_in_kernel, use_gate_in_kernel, cu_seqlens,
                      lower_bound=lower_bound, state_v_first=state_v_first, A_log=A_log,
                      dt_bias=dt_bias, **kwargs)


# ---- diagonal plus low rank, several corrections, slots -----------------------------------------

def _repeat(x, times):
    """Each head so many times in a row, where an operator does not share heads by itself."""
    return x if times == 1 else x.repeat_interleave(times, 2)


def chunk_dplr_delta_rule(q, k, v, a, b, gk, scale=None, initial_state=None,
                          output_final_state=False, cu_seqlens=None, cu_seqlens_cpu=None,
                          safe_gate=False, chunk_size=None, disable_recompute=False,
                          cp_context=None, lower_bound=None, **kwargs):
    """Diagonal plus low rank: S = diag(e^gk) S + b (S'a)' + k v'; a, b, gk [B, T, H, K]."""
    _check(q, k, v, initial_state, cu_seqlens, kwargs)
    if cp_context is not None:
        raise NotImplementedError("cp_context, a sequence over several GPUs, is not built here")
    if lower_bound is not None and lower_bound >= 0:
        raise ValueError("`lower_bound` must be negative (gk is a log-decay < 0), got "
                         f"{lower_bound}.")
    return _two("dplr", (q, k, v, a, b, gk, initial_state), _scale(scale, k),
                _offsets(cu_seqlens, cu_seqlens_cpu), output_final_state)


def fused_recurrent_dplr_delta_rule(q, k, v, a, b, gk, scale=None, initial_state=None,
                                    output_final_state=False, reverse=False, cu_seqlens=None):
    """chunk_dplr_delta_rule; with `reverse` from the last token to the first."""
    def run(x, state, offsets):
        return chunk_dplr_delta_rule(*x, scale, state, output_final_state, offsets)

    how = ((q, k, v, a, b, gk), initial_state, cu_seqlens)
    return _reversed(run, *how) if reverse else run(*how)


def chunk_iplr_delta_rule(q, k, v, a, b, scale=None, initial_state=None, output_final_state=False,
                          cu_seqlens=None, cu_seqlens_cpu=None, **kwargs):
    """chunk_dplr_delta_rule without decay: the identity plus low rank."""
    return chunk_dplr_delta_rule(q, k, v, a, b, torch.zeros_like(k), scale, initial_state,
                                 output_final_state, cu_seqlens, cu_seqlens_cpu, **kwargs)


def fused_recurrent_iplr_delta_rule(q, k, v, a, b, scale=None, initial_state=None,
                                    output_final_state=False, cu_seqlens=None):
    """chunk_iplr_delta_rule."""
    return chunk_iplr_delta_rule(q, k, v, a, b, scale, initial_state, output_final_state,
                                 cu_seqlens)


def chunk_rwkv7(r, w, k, v, a, b, scale=1.0, initial_state=None, output_final_state=False,
                cu_seqlens=None, cu_seqlens_cpu=None, safe_gate=False, chunk_size=None,
                disable_recompute=False, cp_context=None, lower_bound=None):
    """RWKV-7: chunk_dplr_delta_rule with r the queries and w the log decay [B, T, H, K]."""
    return chunk_dplr_delta_rule(r, k, v, a, b, w, scale, initial_state, output_final_state,
                                 cu_seqlens, cu_seqlens_cpu, cp_context=cp_context,
                                 lower_bound=lower_bound)


def fused_recurrent_rwkv7(r, w, k, v, a, b, scale=None, initial_state=None,
                          output_final_state=True, cu_seqlens=None):
    """chunk_rwkv7, with the scale K^-0.5 and the final state unless told."""
    return chunk_dplr_delta_rule(r, k, v, a, b, w, scale, initial_state, output_final_state,
                                 cu_seqlens)


def fused_mul_recurrent_rwkv7(r, w, k, v, kk, a, scale=1.0, initial_state=None,
                              output_final_state=False, reverse=False, cu_seqlens=None):
    """fused_recurrent_rwkv7 with a = -kk and b = kk a."""
    return fused_recurrent_dplr_delta_rule(r, k, v, -kk, kk * a, w, scale, initial_state,
                                           output_final_state, reverse, cu_seqlens)


def chunk_comba(q, k, v, p, g, beta=None, scale=None, initial_state=None, output_final_state=False,
                use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None):
    """Comba: S = e^g S + beta k (v - S'p)', with p [B, T, H, K] (None: k) read from the state before
    its decay; g, beta [B, T, HV]."""
    p = k if p is None else p
    if q.shape[2] != p.shape[2]:
        raise ValueError(f"q, k and p must have the same number of heads, but got q.shape[2]="
                         f"{q.shape[2]}, k.shape[2]={k.shape[2]} and p.shape[2]={p.shape[2]}")
    _check(q, k, v, initial_state, cu_seqlens)
    given = q
    if use_qk_l2norm_in_kernel:
        q, k, p = _unit(q), _unit(k), _unit(p)
    q, k, p = (_repeat(x, v.shape[2] // x.shape[2]) for x in (q, k, p))
    written = k if beta is None else (k * beta.unsqueeze(-1)).to(k.dtype)
    return _two("dplr", (q, written, v, p, -written, g.unsqueeze(-1).expand(k.shape),
                         initial_state), _scale(scale, k), _offsets(cu_seqlens, cu_seqlens_cpu),
                output_final_state, given=given)


def fused_recurrent_comba(q, k, p, v, g, beta=None, scale=None, initial_state=None,
                          output_final_state=False, use_qk_l2norm_in_kernel=False,
                          cu_seqlens=None):
    """chunk_comba with p before v."""
    return chunk_comba(q, k, v, p, g, beta, scale, initial_state, output_final_state,
                       use_qk_l2norm_in_kernel, cu_seqlens)


def chunk_gated_delta_product(q, k, v, g, beta, num_householder, scale=None, initial_state=None,
                              output_final_state=False, use_qk_l2norm_in_kernel=False,
                              cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None):
    """Gated DeltaProduct: a decay g [B, T, H] (None: none) and num_householder corrections a token,
    whose k, v and beta follow one another along T: [B, T num_householder, H, ...]."""
    if cp_context is not None:
        raise NotImplementedError("cp_context, a sequence over several GPUs, is not built here")
    B, T, H = q.shape[:3]
    for name, x in (("k", k), ("v", v), ("beta", beta)):
        if tuple(x.shape[:3]) != (B, T * num_householder, H):
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected [B, T * num_householder, "
                             f"H, ...] = [{B}, {T * num_householder}, {H}, ...]")
    _check(q, k, v, initial_state, cu_seqlens)
    given = q
    if use_qk_l2norm_in_kernel:
        q, k = _unit(q), _unit(k)
    k, v, beta = (x.reshape(B, T, num_householder * H, *x.shape[3:]) for x in (k, v, beta))
    return _two("delta_product", (q, k, v, beta, g, initial_state), _scale(scale, k),
                _offsets(cu_seqlens, cu_seqlens_cpu), output_final_state, given=given)


def _additive_gate(s, cu_seqlens):
    """Slots of attention with bounded memory as a gate: e^(s - z) and z_(t-1) - z_t, z the log of
    the sum of e^s so far."""
    if cu_seqlens is not None:
        lengths = host_integers(cu_seqlens).diff().tolist()
        parts = [_additive_gate(x, None) for x in s.split(lengths, 1)]
        return tuple(torch.cat(x, 1) for x in zip(*parts))
    wide = s if s.dtype is torch.float64 else s.float()
    z = wide.logcumsumexp(1)
    return (wide - z).exp().to(s.dtype), torch.cat([z[:, :1], z[:, :-1]], 1) - z


def chunk_gsa(q, k, v, s, g=None, scale=None, initial_state=None, output_final_state=False,
              checkpoint_level=2, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs):
    """Gated slot attention: a memory of keys by M slots s [B, T, H, M] that fade by g [B, T, H, M],
    whose softmax reads one of values by slots. q may have more heads than k and v. States are
    (hk [N, H, K, M], hv [N, H, M, V])."""
    known = {name: kwargs[name] for name in kwargs if name != "reverse"}
    _check(k, k, v, None, None, known)
    cu_seqlens = _offsets(cu_seqlens, cu_seqlens_cpu)
    hk, hv = initial_state or (None, None)
    if cu_seqlens is not None:
        _check(q[:, :, :1], k[:, :, :1], v[:, :, :1], hk, cu_seqlens)
    if g is None:
        s, g = _additive_gate(s, cu_seqlens)
    if q.shape[2] < k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(f"The number of query heads ({q.shape[2]}) must be a multiple of the number "
                         f"of key heads ({k.shape[2]}).")
    times = q.shape[2] // k.shape[2]
    k, v, s, g = (_repeat(x, times) for x in (k, v, s, g))
    hk, hv = (x if x is None or times == 1 else x.repeat_interleave(times, 1) for x in (hk, hv))
    scores, hk = _columns("additive", q, k, s, None, g, None, _scale(scale, k), hk,
                          output_final_state, cu_seqlens)
    weights = torch.softmax(scores, -1)    # inside in float32
    o, hv = _two("additive", (weights.to(v.dtype), s, v, g, hv), 1.0, cu_seqlens,
                 output_final_state)
    if not output_final_state:
        return o, (None, None)
    return o, (hk[:, ::times], hv[:, ::times])


def fused_recurrent_gsa(q, k, v, s, g=None, scale=None, initial_state=None,
                        output_final_state=False, reverse=False, cu_seqlens=None):
    """chunk_gsa."""
    if reverse:
        raise NotImplementedError("reverse=True is not built; flip the sequence axis instead")
    return chunk_gsa(q, k, v, s, g, scale, initial_state, output_final_state,
                     cu_seqlens=cu_seqlens)


def fused_recurrent_hgrn(x, g, initial_state=None, output_final_state=False, cu_seqlens=None):
    """HGRN: h = e^g h + x for each channel; x, g [B, T, D], states [N, D]."""
    _check(x.unsqueeze(2), x.unsqueeze(2), x.unsqueeze(2), initial_state, cu_seqlens)
    one = torch.ones_like(x[..., :1]).unsqueeze(-1)
    start = None if initial_state is None else initial_state[:, :, None, None]
    o, state = _two("additive", (one, one, x.unsqueeze(-1), g, start), 1.0, cu_seqlens,
                    output_final_state)
    return o.squeeze(-1), None if state is None else state[:, :, 0, 0]


def chunk_hgrn(x, g, initial_state=None, output_final_state=False):
    """fused_recurrent_hgrn."""
    return fused_recurrent_hgrn(x, g, initial_state, output_final_state)


# ---- attention ----------------------------------------------------------------------------------

def parallel_attn(q, k, v, g=None, scale=None, window_size=None, cu_seqlens=None,
                  chunk_indices=None, *, sink_bias=None):
    """Softmax attention over what is not later, or the newest window_size of it; k and v may have
    fewer heads than q. Gives o alone."""
    if g is not None or sink_bias is not None:
        raise NotImplementedError("g, a forget gate of scores, and sink_bias are not built here")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"The number of query heads ({q.shape[2]}) must be divisible by the number "
                         f"of key/value heads ({k.shape[2]}).")
    _check(k, k, v, None, cu_seqlens)
    op = _T["attention"].op
    numbers = {"scale": _scale(scale, k), "window": window_size or 0}
    params = tuple(p.value(op.name, numbers.get(p.name, p.default)) for p in op.params)
    given = {"q": q, "k": k, "v": v}
    return call(_T["attention"], [given.get(f.name) for f in op.inputs], params, cu_seqlens)[0]


def parallel_based(q, k, v, scale=None, use_norm=True):
    """Based: 1 + s + s^2 / 2 in place of the exponential, s = q . k scale; with use_norm over its
    sum. Gives o alone."""
    _check(q, k, v, None, None)
    if scale is not None:
        q = q * (scale * q.shape[-1] ** 0.5)
    q, k = taylor(q), taylor(k)
    o = _two("additive", (q, k, v, None, None), 1.0, None, False)[0]
    if not use_norm:
        return o
    below = _two("additive", (q, k, torch.ones_like(v[..., :1]), None, None), 1.0, None, False)[0]
    return (o / (below + 1e-6)).to(v.dtype)


# ---- beliefs, and the rest ----------------------------------------------------------------------

def _mesa(q, k, v, g, beta, lam, scale=1.0, initial_state=None, output_final_state=False,
          cu_seqlens=None, steps=0):
    """MesaNet: what ridge regression on all pairs so far says to q; g, beta [B, T, H], lam [H, K].
    States are (Hkk [N, H, K, K], Hkv [N, H, K, V]). The solve is exact."""
    hkk, hkv = initial_state or (None, None)
    o, hkk, hkv = call(_T["mesa"], (q, k, v, g, beta, lam, hkk, hkv), (float(scale), steps), cu_seqlens,
                       None, 7 if output_final_state else 1)
    return o, (hkk, hkv) if output_final_state else None


def chunk_mesa_net(q, k, v, g, beta, lamb, h_kk_init=None, h_kv_init=None,
                   output_final_state=False, max_CG_iteration=30, use_qk_l2norm_in_kernel=False,
                   cu_seqlens=None, cu_seqlens_cpu=None):
    """The operator mesa with the names of flash-linear-attention: (o, h_kk, h_kv). The solve is
    exact; without gradients on a CPU it is max_CG_iteration steps of conjugate gradients, as models
    are evaluated. Gradients of h_kk_init are symmetric."""
    given = q
    if use_qk_l2norm_in_kernel:
        q, k = _unit(q), _unit(k)
    start = None if h_kk_init is None else (h_kk_init, h_kv_init)
    steps = max_CG_iteration if q.is_cpu and not torch.is_grad_enabled() else 0
    o, state = _mesa(q, k, v, g, beta, lamb, 1.0, start, output_final_state,
                     _offsets(cu_seqlens, cu_seqlens_cpu), steps)
    return (_as_given(o, given), *(state or (None, None)))


def kla_scan(v, prec, k, q, a, p, initial_state=None, output_final_state=False,
             return_variance=False, from_prior=False, cu_seqlens=None):
    """Kalman linear attention: v, precision [B, T, V], k, q [B, T, K], dynamics a, p [V, K].
    Gives (y, state), or (y, variance, state); states are (lam, eta) [N, V, K]."""
    lam, eta = initial_state or (None, None)
    wanted = 1 | 2 * bool(return_variance) | 12 * bool(output_final_state)
    y, var, lam, eta = call(_T["moebius"], (v, prec, k, q, a, p, lam, eta), (int(from_prior),),
                            cu_seqlens, None, wanted)
    state = (lam, eta) if output_final_state else None
    return (y, var, state) if return_variance else (y, state)


def palimpsa(q, k, v, b, g, ip, scale=None, initial_state=None, output_final_state=False,
             return_variance=False, cu_seqlens=None):
    """Palimpsa: mean and importance per cell; b [B, T, H, V] importance gate, log decay g
    [B, T, H], prior importance ip [H]. States are (mu, importance) [N, H, K, V]."""
    mu, imp = initial_state or (None, None)
    wanted = 1 | 2 * bool(return_variance) | 12 * bool(output_final_state)
    o, var, mu, imp = call(_T["importance"], (q, k, v, b, g, ip, mu, imp), (_scale(scale, k),),
                           cu_seqlens, None, wanted)
    state = (mu, imp) if output_final_state else None
    return (o, var, state) if return_variance else (o, state)


def bayes_filter(q, k, v, la, l2, r2, theta=None, p0=None, scale=1.0, initial_state=None,
                 output_final_state=False, return_variance=False, cu_seqlens=None):
    """The Bayesian Layer: la (theta) [B, T, H, K] log decay (angle), l2 [B, T, H] process noise,
    r2 [B, T, H, G] observation noise, p0 [H] prior variance. The variance is q'Pq [B, T, H, G];
    states are (M [N, H, R, V], P [N, H, G, R, R]), R = K, or 2 K with theta."""
    M, P = initial_state or (None, None)
    wanted = 1 | 16 * bool(return_variance) | 96 * bool(output_final_state)
    out = call(_T["bayes"], (q, k, v, la, theta, l2, r2, p0, M, P), (float(scale),), cu_seqlens,
               None, wanted)
    state = (out[5], out[6]) if output_final_state else None
    return (out[0], out[4], state) if return_variance else (out[0], state)


def ccq_query(q, k, gamma, initial_state=None, count=0, output_final_state=False, cu_seqlens=None):
    """The curvature-conditioned query q - gamma C q, C the covariance of the keys so far; gamma
    [B, T, H]. States are (kk [N, H, K, K], ks [N, H, K]) after `count` tokens, a number or one per
    sequence."""
    kk, ks = initial_state or (None, None)
    many = None if isinstance(count, int) else count
    qt, kk, ks = call(_T["curvature"], (q, k, gamma, kk, ks), (0 if many is not None else count,),
                      cu_seqlens, many, 7 if output_final_state else 1)
    return qt, (kk, ks) if output_final_state else None


def ccq_linear_attn(q, k, v, gamma, g=None, scale=None, cu_seqlens=None):
    """A sum with decay g (any form) read with the curvature-conditioned query: (o, None)."""
    return call(_T["ccq_read"], (q, k, gamma, v, g, None, None, None, None),
                (0, _scale(scale, k)), cu_seqlens, None, 1)[0], None


def ccq_delta_rule(q, k, v, gamma, beta, g=None, scale=None, cu_seqlens=None):
    """A delta-rule memory read with the curvature-conditioned query: (o, None)."""
    return call(_T["ccq_read"], (q, k, gamma, v, g, beta, None, None, None),
                (0, _scale(scale, k)), cu_seqlens, None, 1)[0], None


def _hyper(kind, q, k, v, gate, mix1, mix2, norm, layout, eps, cu_seqlens):
    op = _T["hyper"].op
    numbers = {"eps": eps, "kind": kind, "norm": norm, "layout": layout}
    params = tuple(p.value(op.name, numbers[p.name]) for p in op.params)
    return call(_T["hyper"], (q, k, v, gate, *(mix1 or (None,) * 4), *(mix2 or (None,) * 4)),
                params, cu_seqlens)[0]


def hyperglu(q, k, v, gate=None, mix1=None, mix2=None, norm="out_scale", layout="lag", eps=1e-12,
             cu_seqlens=None):
    """HyperGLU head: q, k [B, T, 2 H, K], v, gate [B, T, H, V]; a mix is (control, U, Vt, d):
    [B, T, Q, R], [Q, P, R], [Q, R, P], [Q, P], with Q = 2 H before and H after the activation."""
    return _hyper("glu", q, k, v, gate, mix1, mix2, norm, layout, eps, cu_seqlens)


def hypermlp(q, k, v, gate=None, mix1=None, mix2=None, norm="out_scale", layout="lag", eps=1e-12,
             cu_seqlens=None):
    """HyperMLP head: as hyperglu with one branch, q, k [B, T, H, K]."""
    return _hyper("relu", q, k, v, gate, mix1, mix2, norm, layout, eps, cu_seqlens)


def longhorn(q, k, v, beta, scale=1.0, initial_state=None, output_final_state=False, diagonal=True,
             cu_seqlens=None):
    """Longhorn: each value channel solves its regression online, beta [B, T, H, V] > 0. `diagonal`
    as published; without it the rule before it was cut to a diagonal."""
    return _two("longhorn_diag" if diagonal else "longhorn_column", (q, k, v, beta, initial_state),
                float(scale), cu_seqlens, output_final_state)


def mlstm_cell(q, k, v, ipre, fpre, scale=None, initial_state=None, output_final_state=False,
               cu_seqlens=None):
    """xLSTM's matrix memory: gates before their nonlinearity [B, T, H]. States are (C, n, m),
    without gradient."""
    C, n, m = initial_state or (None, None, None)
    out = call(_T["mlstm"], (q, k, v, ipre, fpre, C, n, m), (_scale(scale, k),), cu_seqlens, None,
               1 | 14 * bool(output_final_state))
    return out[0], tuple(out[1:4]) if output_final_state else None


def selective_scan(u, dt, A, B, C, D=None, z=None, dt_bias=None, softplus=False, initial_state=None,
                   output_final_state=False, cu_seqlens=None):
    """Mamba-1's scan: u, dt, z [B, T, V], A [V, K], B, C [B, T, K], D, dt_bias [V]."""
    y, h = call(_T["scan"], (u, dt, A, B, C, D, z, dt_bias, initial_state), (int(softplus),),
                cu_seqlens, None, 3 if output_final_state else 1)
    return y, h


# One implementation serves the ways to compute that flash-linear-attention tells apart.
fused_chunk_linear_attn = chunk_linear_attn
fused_chunk_retention = chunk_retention
fused_chunk_gla = chunk_gla
fused_chunk_delta_rule = chunk_delta_rule
fused_chunk_based = parallel_based
chunk_gdn, fused_recurrent_gdn = chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
