"""Formulas that several operators are made of, each once."""
import numpy as np

from core import autodiff as ad


def zeros(like, *shape):
    """A state before the first token."""
    return np.zeros(shape, ad.value(like).dtype)


def tokens(x):
    """x_t for every t of (B,T,...)."""
    return [x[:, t] for t in range(x.shape[1])]


def rms(x, eps):
    """x / sqrt(mean(x^2) + eps) over the last axis."""
    return x / ad.sqrt(ad.mean(x * x, -1, True) + eps)


def unit_root(x, eps):
    """x / sqrt(|x|^2 + eps) over the last axis."""
    return x / ad.sqrt(ad.total(x * x, -1, True) + eps)


def unit_max(x, eps):
    """x / max(|x|, eps) over the last axis."""
    return x / ad.floor_at(ad.sqrt(ad.total(x * x, -1, True)), eps)


def rope(x, kind, base, pos0=0, width=0):
    """Pairs of the first `width` channels (0: all) of x (B,T,H,D) turned by pos base^(-2j/width)."""
    rest = x.shape[-1]
    width = width or rest
    half = width // 2
    dtype = ad.value(x).dtype
    angle = np.outer(np.arange(pos0, pos0 + x.shape[1]),
                     float(base) ** (-2.0 * np.arange(half) / width))[:, None, :]
    c, s = np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)
    first = slice(0, half) if kind == "half" else slice(0, width, 2)
    second = slice(half, width) if kind == "half" else slice(1, width, 2)
    a, b = x[..., first], x[..., second]
    turned = [a * c - b * s, a * s + b * c]
    if kind == "half":
        y = ad.concat(turned, -1)
    else:
        y = ad.stack(turned, -1).reshape(*x.shape[:-1], width)
    return y if width == rest else ad.concat([y, x[..., width:]], -1)


def heads_for(x, n_heads):
    """x (B,T,J,*) with head floor(h J / n_heads) as head h."""
    have = x.shape[2]
    if have == n_heads:
        return x
    return ad.take(x, [h * have // n_heads for h in range(n_heads)], 2)


def conv(x, w, tail, bias=None):
    """Depthwise causal convolution of (B,T,C) with taps w (C,W) after the inputs `tail` (B,W-1,C).

    Tap W-1 meets the current token. Returns the result and the last W-1 inputs."""
    width, length = w.shape[1], x.shape[1]
    if tail is None:
        tail = zeros(x, x.shape[0], width - 1, x.shape[2])
    whole = ad.concat([tail, x], 1)
    y = sum(whole[:, i:i + length] * w[:, i] for i in range(width))
    return (y if bias is None else y + bias), whole[:, length:]


def causal(n, window=0):
    """Which (query t, key i) are visible: i <= t, and i > t - window where there is a window."""
    t, i = np.arange(n)[:, None], np.arange(n)[None, :]
    return (i <= t) & ((i > t - window) if window else True)


def softmax_maps(q, k, scale, window=0):
    """Attention weights (B,H,T,T) of q (B,T,H,d) and k with as many heads."""
    scores = ad.einsum("bthd,bihd->bhti", q, k) * scale
    return ad.softmax(ad.keep(scores, causal(q.shape[1], window), -np.inf))
