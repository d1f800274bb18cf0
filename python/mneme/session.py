"""Models and sessions: a sequence that a model is reading.

    model = mneme.Model("folder")
    session = model.session(belief=True)
    session.feed(model.tokenizer.encode("Once upon a time"))
    session.logits                      # numpy, of the next token
    session.beliefs()                   # {layer: variances of the tokens fed last}
    print(model.tokenizer.decode(session.generate(50, temperature=0.8, seed=1)))"""

import ctypes
import os
import sys

import numpy as np

from . import _library
from ._library import check, library

__all__ = ["Model", "Session", "Snapshot", "Tokenizer", "Sampling"]


def _path(path):
    return os.fsencode(os.fspath(path))


def _ids(tokens):
    array = np.asarray(tokens)
    if array.ndim > 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(f"tokens are whole numbers along one axis, not {array.dtype} of shape "
                        f"{array.shape}")
    return np.ascontiguousarray(array.reshape(-1), dtype=np.int32)


class _Handle:
    """Something of the library that is destroyed with its Python object."""

    _destroy = ""

    def __init__(self, handle):
        self.handle = handle

    def __del__(self, finalizing=sys.is_finalizing):
        if getattr(self, "handle", None) and not finalizing():
            getattr(library(), self._destroy)(self.handle)
            self.handle = None

    def close(self):
        """Frees it now."""
        self.__del__()


class Tokenizer(_Handle):
    """A tokenizer.json, or the folder that holds one."""

    _destroy = "mn_tokenizer_destroy"

    def __init__(self, path):
        out = ctypes.c_void_p()
        check(library().mn_tokenizer_load(ctypes.byref(out), _path(path)))
        super().__init__(out.value)

    def encode(self, text, special=True):
        """Token ids (n,) int32. With `special` the text of special tokens becomes those."""
        data = text.encode() if isinstance(text, str) else bytes(text)
        ids, count = ctypes.c_void_p(), ctypes.c_int64()
        check(library().mn_tokenizer_ids(ctypes.byref(ids), ctypes.byref(count), self.handle, data,
                                         len(data), special))
        return np.frombuffer(_library.take(ids.value, count.value * 4), np.int32)

    def decode(self, tokens, special=False, errors="replace"):
        """Text of token ids; special tokens are left out unless `special`."""
        ids = _ids(tokens)
        text, size = ctypes.c_void_p(), ctypes.c_size_t()
        check(library().mn_tokenizer_decode(self.handle, ids.ctypes.data, ids.size, special,
                                            ctypes.byref(text), ctypes.byref(size)))
        return _library.take(text.value, size.value).decode(errors=errors)


class Sampling(ctypes.Structure):
    """How the next token is drawn; all zeros: always the most probable."""

    _fields_ = [("repetition_penalty", ctypes.c_double), ("repetition_window", ctypes.c_int64),
                ("temperature", ctypes.c_double), ("top_k", ctypes.c_int64),
                ("top_p", ctypes.c_double), ("min_p", ctypes.c_double),
                ("seed", ctypes.c_uint64), ("stream", ctypes.c_uint64)]


class Model(_Handle):
    """A folder with config.json and weights, in float32."""

    _destroy = "mn_model_close"

    def __init__(self, folder):
        out = ctypes.c_void_p()
        check(library().mn_model_open(ctypes.byref(out), _path(folder)))
        super().__init__(out.value)
        self.folder = os.fspath(folder)
        self._tokenizer = None

    @property
    def vocabulary(self):
        return library().mn_model_vocabulary(self.handle)

    @property
    def tokenizer(self):
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.folder)
        return self._tokenizer

    def session(self, belief=False, prefill_chunk=0, dtype="f32", context=None):
        """A Session at the beginning of a sequence. `belief` keeps read variances; dtype "bf16"
        is for a context of a GPU."""
        return Session(self, belief, prefill_chunk, dtype, context)

    def score(self, tokens, context=None):
        """Log probability of each token after those before it, (n,); 0 for the first."""
        return self.session(context=context).score(tokens)


class _SessionOptions(ctypes.Structure):
    _fields_ = [("prefill_chunk", ctypes.c_int64), ("belief", ctypes.c_bool),
                ("dtype", ctypes.c_int), ("relative", ctypes.c_bool)]


class Snapshot(_Handle):
    """What a session remembered."""

    _destroy = "mn_snapshot_destroy"

    @property
    def bytes(self):
        return library().mn_snapshot_bytes(self.handle)


class Session(_Handle):
    """One sequence that a model is reading."""

    _destroy = "mn_session_destroy"

    def __init__(self, model, belief=False, prefill_chunk=0, dtype="f32", context=None):
        from ._operators import DTYPES, operators
        operators()
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}, not one of " + ", ".join(DTYPES))
        self.context, self.model = context or _library.context(), model
        options = _SessionOptions(prefill_chunk, belief, DTYPES[dtype])
        out = ctypes.c_void_p()
        check(library().mn_session_create(ctypes.byref(out), self.context.handle, model.handle,
                                          ctypes.byref(options)))
        super().__init__(out.value)

    def feed(self, tokens):
        """Reads any number of tokens."""
        ids = _ids(tokens)
        check(library().mn_session_feed(self.handle, ids.ctypes.data, ids.size))
        return self

    def step(self, token):
        """Reads one token."""
        check(library().mn_session_step(self.handle, int(token)))
        return self

    def score(self, tokens):
        """Reads tokens; log probabilities that each had when its turn came, (n,) float64."""
        ids = _ids(tokens)
        out = np.empty(ids.size, np.float64)
        check(library().mn_session_score(self.handle, ids.ctypes.data, ids.size, out.ctypes.data))
        return out

    @property
    def logits(self):
        """Of the next token, (vocabulary,) float32, a copy; None before the first token."""
        pointer = library().mn_session_logits(self.handle)
        if not pointer:
            return None
        size = self.model.vocabulary * 4
        return np.frombuffer(ctypes.string_at(pointer, size), np.float32).copy()

    @property
    def position(self):
        """Tokens read."""
        return library().mn_session_position(self.handle)

    @property
    def bytes(self):
        """What it remembers."""
        return library().mn_session_bytes(self.handle)

    def beliefs(self):
        """{layer: read variance of each token fed last, averaged over heads}, for layers that
        keep one; needs belief=True."""
        lib, out = library(), {}
        for i in range(lib.mn_session_beliefs(self.handle)):
            pointer = ctypes.c_void_p()
            count = lib.mn_session_belief(ctypes.byref(pointer), self.handle, i)
            if count:
                numbers = ctypes.string_at(pointer.value, count * 4)
                out[lib.mn_session_belief_layer(self.handle, i)] = np.frombuffer(
                    numbers, np.float32).copy()
        return out

    def sample(self, recent=(), **how):
        """Draws the next token without reading it. `how`: fields of Sampling; temperature 0, the
        default, takes the most probable."""
        unknown = set(how) - {name for name, _ in Sampling._fields_}
        if unknown:
            raise TypeError(f"sample has no {sorted(unknown)[0]!r}; it has "
                            + ", ".join(name for name, _ in Sampling._fields_))
        ids, token = _ids(recent), ctypes.c_int32()
        check(library().mn_session_sample(ctypes.byref(token), self.handle,
                                          ctypes.byref(Sampling(**how)),
                                          ids.ctypes.data if ids.size else None, ids.size))
        return token.value

    def generate(self, count, stop=(), **how):
        """Draws and reads up to `count` tokens, (n,) int32; ends before one of `stop`."""
        tokens, stop = [], set(np.atleast_1d(stop).tolist())
        for _ in range(count):
            token = self.sample(tokens if how.get("repetition_penalty") else (), **how)
            if token in stop:
                break
            tokens.append(token)
            self.step(token)
        return np.array(tokens, np.int32)

    def reset(self):
        """Forgets everything."""
        check(library().mn_session_reset(self.handle))
        return self

    def snapshot(self):
        out = ctypes.c_void_p()
        check(library().mn_session_snapshot(ctypes.byref(out), self.handle))
        return Snapshot(out.value)

    def restore(self, snapshot):
        check(library().mn_session_restore(self.handle, snapshot.handle))
        return self

    def fork(self):
        """A second session that goes on from here by itself."""
        out = ctypes.c_void_p()
        check(library().mn_session_fork(ctypes.byref(out), self.handle))
        twin = object.__new__(Session)
        twin.handle, twin.model, twin.context = out.value, self.model, self.context
        return twin

    def save(self, path):
        """Writes what it remembers as safetensors."""
        check(library().mn_session_save(self.handle, _path(path)))

    def load(self, path):
        check(library().mn_session_load(self.handle, _path(path)))
        return self
