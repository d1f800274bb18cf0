"""Operators as the library describes them, and the filling of their argument structs.

A Plan is all of a call but the pointers: it depends on shapes, dtype and numbers only, and is kept,
so that a call that looks like an earlier one copies a template and writes pointers into it."""

import collections
import ctypes
import functools
import keyword
import math
import struct

from . import _library

__all__ = ["Operator", "operators", "DTYPES"]


class Field:
    """A tensor of an operator."""

    def __init__(self, row):
        self.name, self.role, self.law = row["name"], row["role"], row["law"]
        self.wide = row["wide"]
        self.word = row["offset"] // 8
        self.partner = None if row["partner"] is None else row["partner"] // 8
        self.axes = row["axes"].split("|")
        self.is_input = self.role in ("in", "opt", "raw")
        self.required = self.role in ("in", "raw") and len(self.axes) == 1
        self.counts_classes = self.law == "CLASS"
        self.is_state = self.axes[0].startswith("N")
        self.decays = len(self.axes) > 1
        self.may_stride = any(a[:2] in ("BT", "BL") for a in self.axes)

    def shape_text(self):
        def one(axes):
            return "(" + ", ".join("..." if c == "*" else c for c in axes) + ")"
        return " or ".join(one(a) for a in self.axes)

    def axes_of(self, rank):
        """The alternative with so many axes; None if there is none."""
        for axes in self.axes:
            if axes.count("*") and rank >= len(axes) - 1:
                return axes
            if len(axes) == rank:
                return axes
        return None


class Param:
    """A number of an operator."""

    def __init__(self, row):
        self.name, self.kind, self.offset = row["name"], row["kind"], row["offset"]
        self.names = row["choices"].split(",") if row["choices"] else None
        if self.kind == "choice":
            self.default = False if self.names == ["False", "True"] else self.names[0]
        else:
            self.default = float(row["default"]) if self.kind == "real" else int(row["default"])

    def value(self, op, given):
        if self.kind == "real":
            return float(given)
        if self.kind == "int":
            return int(given)
        if isinstance(given, (bool, int)):
            return int(given)
        if given not in self.names:
            raise ValueError(f"{op}: {self.name} is {given!r}, not one of "
                             + ", ".join(self.names))
        return self.names.index(given)

    def write(self, buffer, op, given):
        code = {"real": "d", "int": "q", "choice": "i"}[self.kind]
        struct.pack_into(code, buffer, self.offset, self.value(op, given))


Plan = collections.namedtuple("Plan", "words template out_shapes sizes n_seqs")


class Operator:
    """One operator: its tensors, numbers, and two C functions."""

    def __init__(self, row, call):
        self.name, self.vector, self.about = row["name"], row["vector"], row["about"]
        self.bytes, self.call = row["bytes"], call
        self.decay, self.counts0 = row["decay"], row["counts0"]
        fields = [Field(f) for f in row["fields"]]
        self.inputs = [f for f in fields if f.is_input]
        self.outputs = [f for f in fields if not f.is_input]
        self.params = [Param(p) for p in row["params"]]
        self.by_name = {f.name: f for f in fields}
        self.turns = "theta" in self.by_name
        self.differentiable = any(f.partner is not None for f in self.outputs)
        lib = _library.library()
        self.forward = getattr(lib, "mn_op_" + self.name)
        self.backward = getattr(lib, f"mn_op_{self.name}_backward")
        for function in (self.forward, self.backward):
            function.restype = ctypes.c_int
            function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.array = ctypes.c_uint64 * (self.bytes // 8)
        self.result = collections.namedtuple("".join(p.title() for p in self.name.split("_")),
                                             [safe_name(f.name) for f in self.outputs])
        self.gradient = collections.namedtuple(self.result.__name__ + "Gradient",
                                               [safe_name(f.name) for f in self.inputs])
        self.main = tuple(i for i, f in enumerate(self.outputs) if f.role == "out")
        self.plans = {}

    # ---- sizes

    def _bind(self, sizes, origin, field, shape):
        axes = field.axes_of(len(shape))
        if axes is None:
            raise ValueError(f"{self.name}: {field.name} has shape {tuple(shape)}, expected "
                             f"{field.shape_text()}")
        lead = len(shape) - len(axes) + 1
        at = 0
        for letter in axes:
            if letter == "*":
                size, where = math.prod(shape[at:at + lead]), f"the leading axes of {field.name}"
                at += lead
                letter = "B"
            else:
                size, where = shape[at], field.name
                at += 1
            if letter in "NM1":
                continue
            known = sizes.setdefault(letter, size)
            origin.setdefault(letter, where)
            if known != size:
                raise ValueError(f"{self.name}: {field.name} has shape {tuple(shape)}, expected "
                                 f"{field.shape_text()} with {letter} = {known} as in "
                                 f"{origin[letter]}")
        return axes

    def _check_rest(self, sizes, field, axes, shape):
        """What axes N, M and 1 must be, once all letters are known."""
        if "*" in axes:
            return
        for letter, size in zip(axes, shape):
            want = self._size(sizes, letter)
            if want != size:
                raise ValueError(f"{self.name}: {field.name} has shape {tuple(shape)}, expected "
                                 f"{field.shape_text()} with {letter} = {want}")

    def _size(self, sizes, letter):
        if letter == "M":
            return sizes["W"] - 1
        return 1 if letter == "1" else sizes[letter]

    def bind(self, shapes, n_seqs):
        """Sizes by letter from the shapes of the inputs (None where not given)."""
        sizes, origin, bound = {}, {}, []
        lead = ()
        for field, shape in zip(self.inputs, shapes):
            if shape is None:
                if field.required:
                    raise TypeError(f"{self.name}: {field.name} is missing, it has shape "
                                    f"{field.shape_text()}")
                continue
            axes = self._bind(sizes, origin, field, shape)
            bound.append((field, axes, shape))
            if axes.startswith("*"):
                lead = tuple(shape[:len(shape) - len(axes) + 1])
            if self.turns and field.name == "k":
                turned = shapes[self._index("theta")] is not None
                sizes["R"] = shape[-1] * (2 if turned else 1)
                origin["R"] = "k and theta"
        sizes["N"] = n_seqs if n_seqs is not None else sizes.get("B", 1)
        for field, axes, shape in bound:
            self._check_rest(sizes, field, axes, shape)
        return sizes, lead

    def _index(self, name):
        return next(i for i, f in enumerate(self.inputs) if f.name == name)

    def out_shape(self, field, sizes, lead):
        shape = []
        for letter in field.axes[0]:
            if letter == "*":
                shape.extend(lead)
            else:
                shape.append(self._size(sizes, letter))
        return tuple(shape)

    def decay_kind(self, shapes):
        """mn_decay: 0 absent, 1 (H), 2 (B,T,H), 3 (B,T,H,K)."""
        for field, shape in zip(self.inputs, shapes):
            if field.decays:
                return 0 if shape is None else 1 + field.axes.index(field.axes_of(len(shape)))
        return 0

    # ---- plans

    def plan(self, dtype, shapes, strides, params, n_seqs):
        """A Plan; strides holds None for contiguous inputs, else strides in elements."""
        key = (dtype, shapes, strides, params, n_seqs)
        found = self.plans.get(key)
        if found is None:
            if len(self.plans) > 4096:    # lengths without end would fill the memory
                self.plans.clear()
            found = self.plans[key] = self._make_plan(dtype, shapes, strides, params, n_seqs)
        return found

    def _make_plan(self, dtype, shapes, strides, params, n_seqs):
        sizes, lead = self.bind(shapes, n_seqs)
        buffer = bytearray(self.bytes)
        struct.pack_into("i", buffer, self.call["dtype"], DTYPES[dtype])
        for letter, offset in self.call["sizes"].items():
            struct.pack_into("q", buffer, offset, sizes.get(letter, 0))
        struct.pack_into("q", buffer, self.call["n_seqs"], n_seqs or 0)
        if self.decay is not None:
            struct.pack_into("i", buffer, self.decay, self.decay_kind(shapes))
        for param, given in zip(self.params, params):
            param.write(buffer, self.name, given)
        for field, stride in zip(self.inputs, strides):
            if stride is not None:
                struct.pack_into("3q", buffer, field.word * 8 + 8, *stride)
        out_shapes = tuple(self.out_shape(f, sizes, lead) for f in self.outputs)
        words = self.array.from_buffer_copy(buffer)
        return Plan(words, bytes(buffer), out_shapes, sizes, n_seqs)

    def strides_of(self, field, shape, strides):
        """Strides that the library takes, of a tensor that is not contiguous; None: copy it."""
        axes = field.axes_of(len(shape))
        if axes is None or axes[:2] not in ("BT", "BL") or strides[-1] != 1:
            return None
        if any(s < 0 for s in strides) or len(axes) > 4:
            return None
        per_head = strides[2] if len(axes) > 2 and axes[2] in "HJQ" else 0
        if len(axes) == 4 and axes[2] not in "HJQ":
            return None
        return (strides[0], strides[1], per_head)


def safe_name(name):
    return name + "_" if keyword.iskeyword(name) else name


DTYPES = {}


@functools.lru_cache(maxsize=None)
def operators():
    """All operators by name."""
    described = _library.describe("operators")
    DTYPES.update({name: i for i, name in enumerate(described["dtypes"])})
    return {row["name"]: Operator(row, described["call"]) for row in described["operators"]}
