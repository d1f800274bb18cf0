"""Random inputs of new files: exact float32 numbers, a stream of their own for every tensor drawn."""
import types
import zlib

import numpy as np

# decays from none to exp(-40), as the cases called extreme have them
HARD_DECAYS = (0.0, -1e-6, -0.1, -40.0)


def exact(x):
    """The nearest float32 numbers, in float64."""
    return np.asarray(x, np.float32).astype(np.float64)


def scale_of(width):
    """width^-1/2 as the float32 number a kernel is given."""
    return float(np.float32(width ** -0.5))


class Draw:
    """Numbers that depend on nothing but the seed, the words given here and the order of the calls."""

    def __init__(self, seed, *words):
        keys = [seed] + [zlib.crc32(word.encode()) for word in words]
        self.random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(keys)))

    def normal(self, *shape, by=1.0, around=0.0):
        return exact(around + by * self.random.standard_normal(shape))

    def uniform(self, low, high, *shape):
        return exact(self.random.uniform(low, high, shape))

    def log_uniform(self, low, high, *shape):
        return exact(np.exp(self.random.uniform(np.log(low), np.log(high), shape)))

    def choice(self, values, *shape):
        return exact(self.random.choice(np.asarray(values, np.float64), shape))

    def unit(self, *shape):
        """Vectors of length 1 along the last axis."""
        x = self.random.standard_normal(shape)
        return exact(x / np.sqrt((x * x).sum(-1, keepdims=True)))

    def hard_keys(self, *shape):
        """Unit vectors among which about a third are zero or of length 1e-8."""
        size = self.random.choice([1.0, 1.0, 1.0, 1.0, 0.0, 1e-8], shape[:-1] + (1,))
        x = self.random.standard_normal(shape)
        return exact(size * x / np.sqrt((x * x).sum(-1, keepdims=True)))

    def log_decay(self, *shape, around=2.0):
        """logsigmoid(normal + around): the larger `around`, the weaker the decay."""
        return exact(-np.logaddexp(0.0, -(around + self.random.standard_normal(shape))))

    def symmetric(self, *shape):
        """Symmetric matrices over the last two axes."""
        x = self.random.standard_normal(shape)
        return exact(0.5 * (x + np.swapaxes(x, -1, -2)))

    def positive(self, *shape):
        """Symmetric positive definite matrices, eigenvalues of about 0.5 to 5."""
        n = shape[-1]
        x = self.random.standard_normal(shape)
        full = x @ np.swapaxes(x, -1, -2) / n + 0.5 * np.eye(n)
        return exact(0.5 * (full + np.swapaxes(full, -1, -2)))

    def weight(self, n_out, n_in):
        """A matrix that keeps the size of what it is applied to."""
        return exact(self.random.standard_normal((n_out, n_in)) / np.sqrt(n_in))


def decayed(d, o, *shape):
    """A log decay as the options ask: hard, weak over long sequences, or ordinary."""
    if o.extreme:
        return d.choice(HARD_DECAYS, *shape)
    return d.log_decay(*shape, around=4.0 if o.weak else 2.0)


def keys(d, o, *shape):
    """Unit keys, or hard ones in an extreme case."""
    return d.hard_keys(*shape) if o.extreme else d.unit(*shape)


def named(**entries):
    return types.SimpleNamespace(**entries)
