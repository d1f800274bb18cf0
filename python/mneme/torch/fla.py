"""Our operators where flash-linear-attention has its own.

    import mneme.torch.fla
    mneme.torch.fla.install()          # before or after fla's layers are imported
    model = AutoModelForCausalLM.from_pretrained("fla-hub/...")

install() exchanges the functions in every loaded module of `fla`, so that its layers, models and
tests run as they are; uninstall() puts the old ones back. With norms=True (default) its RMS norms,
gated ones too, and short convolutions are exchanged with the operators; under autocast a norm rounds
its result to autocast's dtype once, where each projection behind it would have rounded its own copy.
Calls that ask for what is not built here (a residual of the convolution, biases of norms) go to the
old function."""

import importlib
import sys

import torch

from . import ops

__all__ = ["install", "uninstall"]

# where flash-linear-attention defines what mneme.torch.ops has under the same name
PLACES = {
    "linear_attn": ["chunk_linear_attn", "fused_chunk_linear_attn",
                    "fused_recurrent_linear_attn"],
    "retention": ["chunk_retention", "fused_chunk_retention", "fused_recurrent_retention",
                  "parallel_retention"],
    "simple_gla": ["chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla",
                   "parallel_simple_gla"],
    "lightning_attn": ["chunk_lightning_attn", "fused_recurrent_lightning_attn"],
    "gla": ["chunk_gla", "fused_chunk_gla", "fused_recurrent_gla"],
    "delta_rule": ["chunk_delta_rule", "fused_chunk_delta_rule", "fused_recurrent_delta_rule"],
    "gated_delta_rule": ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule",
                         "chunk_gdn", "fused_recurrent_gdn"],
    "kda": ["chunk_kda", "fused_recurrent_kda"],
    "gdn2": ["chunk_gdn2", "fused_recurrent_gdn2"],
    "generalized_delta_rule": ["chunk_dplr_delta_rule", "fused_recurrent_dplr_delta_rule",
                               "chunk_iplr_delta_rule", "fused_recurrent_iplr_delta_rule"],
    "rwkv7": ["chunk_rwkv7", "fused_recurrent_rwkv7"],
    "rwkv7.fused_recurrent": ["fused_mul_recurrent_rwkv7"],
    "comba": ["chunk_comba", "fused_recurrent_comba"],
    "gated_delta_product": ["chunk_gated_delta_product"],
    "gsa": ["chunk_gsa", "fused_recurrent_gsa"],
    "hgrn": ["chunk_hgrn", "fused_recurrent_hgrn"],
    "attn": ["parallel_attn"],
    "based": ["parallel_based", "fused_chunk_based"],
    "mesa_net": ["chunk_mesa_net"],
}
_replaced = []    # (module, name, theirs)


def _silu(activation):
    return {None: "none", "silu": "silu", "swish": "silu"}.get(activation)


def _conv(theirs):
    def causal_conv1d(x, weight=None, bias=None, residual=None, initial_state=None,
                      output_final_state=False, activation=None, backend="triton", cu_seqlens=None,
                      cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs):
        if (weight is None or residual is not None or cp_context is not None or output_final_state
                or initial_state is not None or _silu(activation) is None or x.dim() != 3):
            return theirs(x=x, weight=weight, bias=bias, residual=residual,
                          initial_state=initial_state, output_final_state=output_final_state,
                          activation=activation, backend=backend, cu_seqlens=cu_seqlens,
                          cu_seqlens_cpu=cu_seqlens_cpu, chunk_indices=chunk_indices,
                          cp_context=cp_context, **kwargs)
        offsets = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
        y = ops.conv(x, weight, bias, act=_silu(activation), cu_seqlens=offsets, outputs=("y",)).y
        return y, None
    return causal_conv1d


def _with_residual(x, residual, in_fp32):
    """What is normalised, and what goes on as the residual."""
    if residual is not None:
        x = x + residual if not in_fp32 else x.float() + residual.float()
    return x, x.float() if in_fp32 else x


def _dtype_after(x):
    """The dtype of a norm of x: its own, or under autocast what comes next would make of it."""
    device = x.device.type
    if x.dtype is torch.float32 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def _rms(theirs):
    def rms_norm(x, weight, bias, residual=None, eps=1e-5, prenorm=False, residual_in_fp32=False):
        if weight is None or bias is not None:
            return theirs(x, weight, bias, residual, eps, prenorm, residual_in_fp32)
        kind = _dtype_after(x)
        x, residual = _with_residual(x, residual, residual_in_fp32)
        y = ops.rms_norm(x, weight, eps=eps).to(kind)
        return (y, residual) if prenorm else y
    return rms_norm


def _rms_gated(theirs):
    def rms_norm_gated(x, g, weight, bias, activation="swish", residual=None, prenorm=False,
                       residual_in_fp32=False, eps=1e-6):
        act = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}.get(activation)
        if weight is None or bias is not None or act is None:
            return theirs(x, g, weight, bias, activation, residual, prenorm, residual_in_fp32, eps)
        kind = _dtype_after(x)
        x, residual = _with_residual(x, residual, residual_in_fp32)
        y = ops.rms_norm_gated(x, g, weight, eps=eps, act=act).to(kind)
        return (y, residual) if prenorm else y
    return rms_norm_gated


_NORMS = [("fla.modules.causal_conv1d.ops", "fla.modules.convolution", "causal_conv1d", _conv),
          ("fla.modules.norm.layernorm", "fla.modules.layernorm", "rms_norm", _rms),
          ("fla.modules.norm.fused_norm_gate", "fla.modules.fused_norm_gate", "rms_norm_gated",
           _rms_gated)]


def _exchange(theirs, ours):
    """Every module of fla that holds `theirs` holds `ours`."""
    for name, module in list(sys.modules.items()):
        if module is None or not (name == "fla" or name.startswith("fla.")):
            continue
        for key, value in list(vars(module).items()):
            if value is theirs:
                _replaced.append((module, key, theirs))
                setattr(module, key, ours)


def _import_any(*names):
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("fla."):
                raise
    return None


def install(norms=True):
    """Exchanges the operators of flash-linear-attention for ours; returns their names."""
    if _replaced:
        return sorted({key for _, key, _ in _replaced})
    try:
        import fla    # noqa: F401
    except ImportError as error:
        raise ImportError("mneme.torch.fla.install() needs flash-linear-attention (pip install "
                          f"flash-linear-attention): {error}") from None
    for place, names in PLACES.items():
        module = _import_any("fla.ops." + place)
        for name in names if module else ():
            theirs = getattr(module, name, None)
            if theirs is not None:
                _exchange(theirs, getattr(ops, name))
    for new, old, name, make in _NORMS if norms else ():
        module = _import_any(new, old)
        theirs = getattr(module, name, None)
        if theirs is not None:
            _exchange(theirs, make(theirs))
    return sorted({key for _, key, _ in _replaced})


def uninstall():
    """The functions of flash-linear-attention again."""
    while _replaced:
        module, key, theirs = _replaced.pop()
        setattr(module, key, theirs)
