"""Reverse-mode automatic differentiation on numpy arrays, as large as plain recurrences need it.

A Var is an array with links to the Vars it was computed from; backward() goes through them newest
first. Numbers and numpy arrays among the operands are constants. Nothing here changes the type of
an array, so the same formulas run in float64 and in float32.
"""
import itertools

import numpy as np

_order = itertools.count()


class Var:
    """An array, the function that passes its gradient on, and the gradient itself after backward()."""

    __slots__ = ("value", "grad", "parents", "pull", "index")
    __array_ufunc__ = None  # numpy's operators leave ndarray * Var to Var

    def __init__(self, value, parents=(), pull=None):
        self.value = np.asarray(value)
        self.grad = None
        self.parents = parents
        self.pull = pull
        self.index = next(_order)

    shape = property(lambda self: self.value.shape)
    ndim = property(lambda self: self.value.ndim)

    def gather(self, grad):
        """Adds `grad` to the gradient; an axis that broadcasting made is summed."""
        grad = _unbroadcast(grad, self.value.shape)
        self.grad = grad.copy() if self.grad is None else self.grad + grad

    def gather_at(self, index, grad):
        """Adds `grad` to a part of the gradient, in place: a long sequence is read token by token."""
        if self.grad is None:
            self.grad = np.zeros_like(self.value)
        self.grad[index] += grad

    def __add__(self, other):
        return _binary(self, other, np.add, lambda g, a, b: g, lambda g, a, b: g)

    def __sub__(self, other):
        return _binary(self, other, np.subtract, lambda g, a, b: g, lambda g, a, b: -g)

    def __rsub__(self, other):
        return -self + other

    def __mul__(self, other):
        return _binary(self, other, np.multiply, lambda g, a, b: g * b, lambda g, a, b: g * a)

    def __truediv__(self, other):
        return _binary(self, other, np.divide, lambda g, a, b: g / b,
                       lambda g, a, b: -g * (a / b) / b)

    def __rtruediv__(self, other):
        return _binary(other, self, np.divide, lambda g, a, b: g / b,
                       lambda g, a, b: -g * (a / b) / b)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self):
        return _unary(self, -self.value, lambda g: -g)

    def __getitem__(self, index):
        return Var(self.value[index], (self,), lambda g: self.gather_at(index, g))

    def reshape(self, *shape):
        return Var(self.value.reshape(*shape), (self,),
                   lambda g: self.gather(g.reshape(self.value.shape)))

    def swap(self, a, b):
        """The array with two axes exchanged."""
        return Var(self.value.swapaxes(a, b), (self,), lambda g: self.gather(g.swapaxes(a, b)))


def value(x):
    return x.value if isinstance(x, Var) else x


def constant(x):
    """The same number without a gradient."""
    return value(x)


def backward(outputs):
    """Gradients of sum(y * dy) over the pairs (y, dy) of `outputs`, left in .grad of every Var."""
    reached, todo = {}, [y for y, _ in outputs]
    while todo:
        node = todo.pop()
        if node.index not in reached:
            reached[node.index] = node
            todo.extend(node.parents)
    for y, dy in outputs:
        y.gather(np.asarray(dy, y.value.dtype).reshape(y.value.shape))
    for index in sorted(reached, reverse=True):
        node = reached[index]
        if node.pull is not None and node.grad is not None:
            node.pull(node.grad)


def _unbroadcast(grad, shape):
    grad = np.asarray(grad)
    if grad.shape == shape:
        return grad
    extra = grad.ndim - len(shape)
    ones = tuple(i + extra for i, n in enumerate(shape) if n == 1 and grad.shape[i + extra] != 1)
    return grad.sum(axis=tuple(range(extra)) + ones).reshape(shape)


def _unary(x, result, pull):
    return Var(result, (x,), lambda g: x.gather(pull(g)))


def _binary(a, b, function, pull_a, pull_b):
    va, vb = value(a), value(b)
    parents = tuple(x for x in (a, b) if isinstance(x, Var))

    def pull(g):
        if isinstance(a, Var):
            a.gather(pull_a(g, va, vb))
        if isinstance(b, Var):
            b.gather(pull_b(g, va, vb))
    return Var(function(va, vb), parents, pull)


def exp(x):
    y = np.exp(x.value)
    return _unary(x, y, lambda g: g * y)


def expm1(x):
    return _unary(x, np.expm1(x.value), lambda g: g * np.exp(x.value))


def log(x):
    return _unary(x, np.log(x.value), lambda g: g / x.value)


def log1p(x):
    return _unary(x, np.log1p(x.value), lambda g: g / (1 + x.value))


def tanh(x):
    y = np.tanh(x.value)
    return _unary(x, y, lambda g: g * (1 - y * y))


def sin(x):
    return _unary(x, np.sin(x.value), lambda g: g * np.cos(x.value))


def cos(x):
    return _unary(x, np.cos(x.value), lambda g: -g * np.sin(x.value))


def sqrt(x):
    """The root; its gradient at 0 is taken as 0, which is right wherever a floor stands before it."""
    y = np.sqrt(x.value)
    safe = np.where(y > 0, y, 1).astype(y.dtype)
    return _unary(x, y, lambda g: np.where(y > 0, 0.5 * g / safe, 0).astype(y.dtype))


def _sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e)).astype(x.dtype)


def sigmoid(x):
    """1 / (1 + exp(-x)) with all digits at both ends."""
    y, rest = _sigmoid(x.value), _sigmoid(-x.value)
    return _unary(x, y, lambda g: g * y * rest)


def softplus(x):
    y = np.maximum(x.value, 0) + np.log1p(np.exp(-np.abs(x.value)))
    return _unary(x, y, lambda g: g * _sigmoid(x.value))


def logsigmoid(x):
    return -softplus(-x)


def silu(x):
    return x * sigmoid(x)


def gelu_tanh(x):
    return 0.5 * x * (1 + tanh((x + 0.044715 * x * x * x) * (2 / np.pi) ** 0.5))


def relu(x):
    return _unary(x, np.maximum(x.value, 0), lambda g: g * (x.value > 0))


def magnitude(x):
    return _unary(x, np.abs(x.value), lambda g: g * np.sign(x.value))


def floor_at(x, low):
    """max(x, low) for a number or constant array `low`; no gradient where `low` holds."""
    return _unary(x, np.maximum(x.value, np.asarray(low, x.value.dtype)),
                  lambda g: g * (x.value > low))


def total(x, axis, keepdims=False):
    def pull(g):
        full = g if keepdims else np.expand_dims(g, axis)
        x.gather(np.broadcast_to(full, x.value.shape))
    return Var(x.value.sum(axis=axis, keepdims=keepdims), (x,), pull)


def mean(x, axis, keepdims=False):
    return total(x, axis, keepdims) * (1 / x.value.shape[axis])


def logsumexp(x, axis, keepdims=False):
    top = x.value.max(axis=axis, keepdims=True)
    scaled = np.exp(x.value - top)
    full = np.log(scaled.sum(axis=axis, keepdims=True)) + top
    share = scaled / scaled.sum(axis=axis, keepdims=True)

    def pull(g):
        x.gather(share * (g if keepdims else np.expand_dims(g, axis)))
    return Var(full if keepdims else full.squeeze(axis), (x,), pull)


def softmax(x, axis=-1):
    scaled = np.exp(x.value - x.value.max(axis=axis, keepdims=True))
    y = scaled / scaled.sum(axis=axis, keepdims=True)
    return _unary(x, y, lambda g: y * (g - (g * y).sum(axis=axis, keepdims=True)))


def keep(x, mask, instead):
    """x where `mask` is true, the number `instead` elsewhere."""
    return _unary(x, np.where(mask, x.value, np.asarray(instead, x.value.dtype)),
                  lambda g: np.where(mask, g, 0).astype(g.dtype))


def larger(a, b):
    """max(a, b) of two Vars; the gradient goes to the larger one."""
    return keep(a, value(a) >= value(b), 0) + keep(b, value(a) < value(b), 0)


def einsum(formula, a, b):
    """np.einsum of two operands in which no index is summed alone."""
    sources, target = formula.split("->")
    left, right = sources.split(",")
    assert set(left) <= set(right + target) and set(right) <= set(left + target), formula
    va, vb = value(a), value(b)

    def pull(g):
        if isinstance(a, Var):
            a.gather(np.einsum(f"{target},{right}->{left}", g, vb))
        if isinstance(b, Var):
            b.gather(np.einsum(f"{left},{target}->{right}", va, g))
    parents = tuple(x for x in (a, b) if isinstance(x, Var))
    return Var(np.einsum(formula, va, vb), parents, pull)


def linear(x, weight, bias=None):
    """x W^T + bias over the last axis, W (out, in)."""
    flat = einsum("ni,oi->no", x.reshape(-1, x.shape[-1]), weight)
    y = flat.reshape(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def _joined(parts, result, pull):
    return Var(result, tuple(p for p in parts if isinstance(p, Var)), pull)


def stack(parts, axis):
    def pull(g):
        for part, piece in zip(parts, np.moveaxis(g, axis, 0)):
            if isinstance(part, Var):
                part.gather(piece)
    return _joined(parts, np.stack([value(p) for p in parts], axis), pull)


def concat(parts, axis):
    ends = np.cumsum([p.shape[axis] for p in parts])[:-1]

    def pull(g):
        for part, piece in zip(parts, np.split(g, ends, axis)):
            if isinstance(part, Var):
                part.gather(piece)
    return _joined(parts, np.concatenate([value(p) for p in parts], axis), pull)


def take(x, indices, axis):
    """Entries of one axis in a given order, repeats allowed."""
    return x[(slice(None),) * (axis % x.ndim) + (np.asarray(indices),)] if _once(indices) else \
        Var(np.take(x.value, indices, axis), (x,), lambda g: _scatter(x, indices, axis, g))


def _once(indices):
    return len(set(np.ravel(indices).tolist())) == np.size(indices)


def _scatter(x, indices, axis, grad):
    full = np.zeros_like(x.value)
    np.add.at(np.moveaxis(full, axis, 0), indices, np.moveaxis(grad, axis, 0))
    x.gather(full)


def solve(a, b):
    """x of A x = b for matrices A (..., n, n) and vectors b (..., n)."""
    x = np.linalg.solve(value(a), value(b)[..., None])[..., 0]

    def pull(g):
        y = np.linalg.solve(np.swapaxes(value(a), -1, -2), g[..., None])[..., 0]
        if isinstance(a, Var):
            a.gather(-y[..., :, None] * x[..., None, :])
        if isinstance(b, Var):
            b.gather(y)
    return Var(x, tuple(v for v in (a, b) if isinstance(v, Var)), pull)
