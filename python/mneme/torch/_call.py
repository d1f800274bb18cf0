"""Operators in PyTorch: registration, dtypes, autograd.

Every operator of the library becomes torch.ops.mneme.NAME and torch.ops.mneme.NAME_backward, with
an implementation over plain pointers on the current stream, a shape function and a gradient, so
that torch.compile, autocast, activation checkpointing and functorch's grad see ordinary operators.
Results that a call does not ask for come back empty.

    mneme::additive(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? state0, Tensor? cu_seqlens,
                    float scale, int outputs) -> (Tensor, Tensor)

`outputs` and `grads` have a bit per tensor. cu_seqlens lies in host memory."""

import ctypes
import functools

import torch

from . import _device, _fast
from .. import _library
from .._operators import Operator, operators, safe_name

_NAMES = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16"}
_QUICK_CPU, _QUICK_CUDA = (torch.float32, torch.float64), (torch.float32, torch.bfloat16)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_library_of_ops = torch.library.Library("mneme", "DEF")

# What may see the calls of a thread: modes, functions of subclasses, functorch's transformations.
_modes = getattr(torch._C, "_len_torch_dispatch_stack", None)
_functions = getattr(torch._C, "_len_torch_function_stack", None)
_transforms = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
_knows_modes = None not in (_modes, _functions, _transforms)

_compiled = _fast.load((_modes, _functions, _transforms))
_run_known = None if _compiled is None else _compiled.run
_is_compiling = torch.compiler.is_compiling    # a constant to who traces


def _known_calls(op, function, inputs, cotangents=()):
    """Where the compiled way keeps calls of a C function; None without it."""
    if _compiled is None:
        return None
    words = (*(f.word for f in inputs), *cotangents)
    return _compiled.operator(ctypes.cast(function, ctypes.c_void_p).value, op.bytes // 8, words)


def _with_autograd(name, run, keep, gradient):
    """Gives mneme::NAME its gradient; its results are those of the operator `run`. As
    torch.library.register_autograd does, but for `run` in place of NAME itself below autograd."""

    def forward(ctx, *args):
        with torch._C._AutoDispatchBelowAutograd():
            results = run(*args)
        keep(ctx, args, results)
        return results

    function = type("mneme_" + name, (torch.autograd.Function,),
                    {"forward": staticmethod(forward), "backward": staticmethod(gradient)})

    def kernel(*args):
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad
                                           for x in args):
            return function.apply(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return run(*args)

    _library_of_ops.impl(name, kernel, "Autograd")


class TorchOperator:
    """How one operator is called from PyTorch."""

    def __init__(self, op: Operator):
        self.op = op
        self.n = len(op.inputs)
        self.cots = [i for i, f in enumerate(op.outputs) if f.partner is not None]
        self.grads = [i for i, f in enumerate(op.inputs) if f.partner is not None]
        self.main = sum(1 << i for i in op.main)
        self.has_counts = op.counts0 is not None
        # after the tensors: cu_seqlens, perhaps counts0, then the numbers
        self.n_host = 2 if self.has_counts else 1
        self.last_numbers = None    # of the functions in ops: as given, as taken
        self.no_host = (None,) * self.n_host
        self.known = _known_calls(op, op.forward, op.inputs)
        self.known_back = None
        self.plain = (None,) * self.n
        self.wide = tuple(f.wide for f in op.inputs)
        self.input_words = tuple(f.word for f in op.inputs)
        self.output_words = tuple((f.word, f.wide) for f in op.outputs)
        self._register()

    # ---- schemas

    def _numbers(self):
        kinds = {"real": "float", "int": "int", "choice": "int"}
        return [f"{kinds[p.kind]} {safe_name(p.name)}" for p in self.op.params]

    def _schema(self, backward):
        op = self.op
        parts = [("Tensor " if f.required else "Tensor? ") + safe_name(f.name) for f in op.inputs]
        if backward:
            parts += ["Tensor? cot_" + op.outputs[i].name for i in self.cots]
        parts += ["Tensor? cu_seqlens"] + ["Tensor? counts0"] * self.has_counts
        parts += self._numbers() + ["int grads" if backward else "int outputs"]
        n = len(self.grads) if backward else len(op.outputs)
        result = "Tensor" if n == 1 else "(" + ", ".join(["Tensor"] * n) + ")"
        return f"({', '.join(parts)}) -> {result}"

    def _define(self, name, backward, run, fake):
        """One operator without gradients; what a compiled graph calls."""
        lib, tags = _library_of_ops, (torch.Tag.pt2_compliant_tag,)
        lib.define(name + self._schema(backward), tags=tags)
        for device in ("CPU", "CUDA"):
            lib.impl(name, run, device)
        torch.library.register_fake("mneme::" + name, fake, lib=lib)
        return getattr(torch.ops.mneme, name).default

    def _register(self):
        """NAME is what is called and what autograd sees; traced graphs get NAME_run, for which
        the dispatcher asks nothing of Python but its result."""
        name = self.op.name
        self.forward = self._define(name, False, self.run_forward, self.fake_forward)
        if not self.op.differentiable:
            return
        back = name + "_backward"
        self.backward = self._define(back, True, self.run_backward, self.fake_backward)
        self.known_back = _known_calls(self.op, self.op.backward, self.op.inputs,
                                       [self.op.outputs[i].partner for i in self.cots])
        self.eager, self.transformed = self.eager_functions()
        run = self._define(name + "_run", False, self.run_forward, self.fake_forward)
        run_back = self._define(back + "_run", True, self.run_backward, self.fake_backward)
        _with_autograd(name, run, self.keep, self.gradient)
        _with_autograd(back, run_back, lambda ctx, inputs, output: None, self.no_second_gradient)

    # ---- running

    def quick(self, tensors, params, wanted, host=None):
        """What _prepare gives where the call fits the operator as it is and nobody traces it, else
        None; and whether a tensor wants a gradient. One look at each tensor: most of what a small
        call costs is here."""
        op, kind, wide, index, grad = self.op, None, None, None, False
        shapes, strides, data, views = [], self.plain, [], False
        for i, x in enumerate(tensors):
            if x is None:
                shapes.append(None)
                data.append(0)
                continue
            if type(x) not in _PLAIN:
                return None, False
            if kind is None:
                kind, index = x.dtype, x.get_device()
                wide = torch.float32 if kind is torch.bfloat16 else kind
                if kind not in (_QUICK_CPU if index < 0 else _QUICK_CUDA) or not _is_here(x):
                    return None, False
                if index >= 0 and kind is not torch.bfloat16 and torch.is_autocast_enabled("cuda"):
                    return None, False
            elif x.get_device() != index:
                return None, False
            if x.dtype is not (wide if self.wide[i] else kind):
                return None, False
            shape = x.shape
            if not x.is_contiguous():
                field = op.inputs[i]
                stride = op.strides_of(field, shape, x.stride()) if field.may_stride else None
                if stride is None:
                    return None, False
                strides, views = strides if views else list(strides), True
                strides[i] = stride
            if x.requires_grad:
                grad = True
            shapes.append(shape)
            data.append(x.data_ptr())
        if kind is None:
            return None, False
        plan = op.plan(_NAMES[kind], tuple(shapes), tuple(strides) if views else strides, params,
                       None if host is None or host[0] is None else host[0].shape[0] - 1)
        return (self._words(plan, data, host), plan, (kind, wide), index), grad

    def _words(self, plan, data, host):
        """The argument struct of a call, but for where results go."""
        op = self.op
        words = op.array.from_buffer_copy(plan.words)
        for at, pointer in zip(self.input_words, data):
            words[at] = pointer
        if host is None:
            return words
        if host[0] is not None:
            words[op.call["cu_seqlens"] // 8] = host[0].data_ptr()
        if self.has_counts and host[1] is not None:
            if host[1].shape[0] != plan.sizes["N"]:
                raise ValueError(f"{op.name}: counts0 holds {host[1].shape[0]} numbers for "
                                 f"{plan.sizes['N']} sequences")
            words[op.counts0 // 8] = host[1].data_ptr()
        return words

    def _prepare(self, tensors, host, params):
        """Argument words, the plan, the dtypes of the call, and what must live until it is done."""
        op = self.op
        anchor = tensors[self.anchor(tensors)]
        call_type = next((x.dtype for f, x in zip(op.inputs, tensors)
                          if x is not None and not f.wide), anchor.dtype)
        if call_type not in _NAMES:
            raise TypeError(f"{op.name}: {op.inputs[0].name} is {call_type}; operators take "
                            "float32, float64 (CPU) and bfloat16 (GPU)")
        wide_type = torch.float32 if call_type is torch.bfloat16 else call_type
        shapes, strides, data, keep = [], [], [], []
        for field, x in zip(op.inputs, tensors):
            if x is None:
                shapes.append(None)
                strides.append(None)
                data.append(0)
                continue
            if x.dtype is not (wide_type if field.wide else call_type):
                raise TypeError(f"{op.name}: {field.name} is {x.dtype}, expected "
                                f"{wide_type if field.wide else call_type} beside {call_type}")
            if x.device != anchor.device:
                raise ValueError(f"{op.name}: {field.name} is on {x.device}, other inputs on "
                                 f"{anchor.device}")
            shape, stride = x.shape, None
            if not x.is_contiguous():
                stride = op.strides_of(field, shape, x.stride()) if field.may_stride else None
                if stride is None:
                    x = x.contiguous()
                    keep.append(x)
            shapes.append(shape)
            strides.append(stride)
            data.append(x.data_ptr())
        cu_seqlens = host[0]
        plan = op.plan(_NAMES[call_type], tuple(shapes), tuple(strides), params,
                       None if cu_seqlens is None else cu_seqlens.shape[0] - 1)
        return self._words(plan, data, host), plan, (call_type, wide_type), keep

    def new_results(self, words, plan, types, like, wanted):
        """New tensors for the results, None where not wanted; their addresses go to `words`."""
        results, i = [], 0
        for at, is_wide in self.output_words:
            if wanted >> i & 1:
                y = like.new_empty(plan.out_shapes[i], dtype=types[is_wide])
                words[at] = y.data_ptr()
                results.append(y)
            else:
                results.append(None)
            i += 1
        return results

    def compute(self, args, keeps=True):
        """Results of a forward call, None where not wanted. `keeps`: see _device.run."""
        n, wanted = self.n, args[-1]
        tensors, host, params = args[:n], args[n:n + self.n_host], args[n + self.n_host:-1]
        known = self.known if all(x is None for x in host) else None
        made = self._make_known(known, self.op.forward, tensors, params, wanted, keeps)
        if made is not None:
            return made
        words, plan, types, keep = self._prepare(tensors, host, params)
        like = tensors[self.anchor(tensors)]
        if known is not None and not keep and type(like) in _PLAIN and _nobody_looks():
            _learn(self, tensors, params, wanted, plan, types, like)
        results = self.new_results(words, plan, types, like, wanted)
        _device.run(self.op.forward, like.get_device(), words, host, keeps)
        return results

    @staticmethod
    def _make_known(known, function, tensors, params, wanted, keeps):
        """Results of a call that looks like an earlier one; None of any other."""
        if known is None:
            return None
        made = _run_known(known, tensors, params, wanted, keeps)
        if type(made) is tuple:
            words, results, index, _ = made
            _device.run(function, index, words, (), keeps)
            return results
        if type(made) is int:
            _library.check(made)
        return made

    def compute_gradients(self, args, keeps=True):
        """Gradients of a backward call, None where not wanted."""
        op, n, m = self.op, self.n, len(self.cots)
        host, params = args[n + m:n + m + self.n_host], args[n + m + self.n_host:-1]
        tensors, wanted = args[:n], args[-1]
        known = self.known_back if all(x is None for x in host) else None
        made = self._make_known(known, op.backward, args[:n + m], params, wanted, keeps)
        if made is not None:
            return made
        words, plan, types, keep = self._prepare(tensors, host, params)
        held = self._take_cotangents(words, plan, types, args[n:n + m])
        if known is not None and not keep and all(x is y for x, y in zip(held, args[n:n + m])):
            self._learn_gradients(args[:n + m], params, wanted, plan)
        results = []
        for k, i in enumerate(self.grads):
            x, dx = tensors[i], None
            if wanted >> k & 1 and x is not None:
                dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
                words[op.inputs[i].partner] = dx.data_ptr()
            results.append(dx)
        _device.run(op.backward, tensors[self.anchor(tensors)].get_device(), words, host, keeps)
        return results

    def _take_cotangents(self, words, plan, types, cots):
        """Writes cotangents into the struct; returns them as it takes them, None where absent."""
        op, held = self.op, []
        for i, cot in zip(self.cots, cots):
            if cot is not None:
                field = op.outputs[i]
                cot = cot.to(types[field.wide]).contiguous()
                if cot.shape != plan.out_shapes[i]:
                    raise ValueError(f"{op.name}: the cotangent of {field.name} has shape "
                                     f"{tuple(cot.shape)}, expected {plan.out_shapes[i]}")
                words[field.partner] = cot.data_ptr()
            held.append(cot)
        return held

    def _learn_gradients(self, tensors, params, wanted, plan):
        """Lets the compiled way make such backward calls from now on."""
        results = tuple(
            (self.op.inputs[i].partner, *_fast.maker(x.shape, x.dtype, x.device))
            if wanted >> k & 1 and x is not None else None
            for k, i in enumerate(self.grads) for x in (tensors[i],))
        _compiled.learn(self.known_back, tensors, params, wanted, bytes(plan.words), results)

    @staticmethod
    def anchor(tensors):
        """The place of the first tensor there is."""
        return next(i for i, x in enumerate(tensors) if x is not None)

    def _filled(self, results, fields, tensors):
        """An operator gives tensors: empty ones stand for what was not wanted."""
        if all(y is not None for y in results):
            return results[0] if len(results) == 1 else tuple(results)
        like, types = tensors[self.anchor(tensors)], self._types(tensors)
        full = [_fast.nothing(types[f.wide], like.device) if y is None else y
                for f, y in zip(fields, results)]
        return full[0] if len(full) == 1 else tuple(full)

    # Compiled graphs call operators here, and may do so with an allocation pool of their own (CUDA
    # graph trees warm up in theirs): memory for work that stayed would be a stranger in it.

    def run_forward(self, *args):
        return self._filled(self.compute(args, keeps=False), self.op.outputs, args[:self.n])

    def run_backward(self, *args):
        return self._filled(self.compute_gradients(args, keeps=False),
                            [self.op.inputs[i] for i in self.grads], args[:self.n])

    # ---- shapes

    def _types(self, tensors):
        call_type = next((x.dtype for f, x in zip(self.op.inputs, tensors)
                          if x is not None and not f.wide), torch.float32)
        return call_type, torch.float32 if call_type is torch.bfloat16 else call_type

    def fake_forward(self, *args):
        op, n = self.op, self.n
        tensors, cu_seqlens, wanted = args[:n], args[n], args[-1]
        shapes = tuple(None if x is None else tuple(x.shape) for x in tensors)
        sizes, lead = op.bind(shapes, None if cu_seqlens is None else cu_seqlens.shape[0] - 1)
        types = self._types(tensors)
        like = next(x for x in tensors if x is not None)
        results = []
        for i, field in enumerate(op.outputs):
            shape = op.out_shape(field, sizes, lead) if wanted >> i & 1 else (0,)
            results.append(torch.empty(shape, dtype=types[field.wide], device=like.device))
        return results[0] if len(results) == 1 else tuple(results)

    def fake_backward(self, *args):
        tensors, wanted = args[:self.n], args[-1]
        types = self._types(tensors)
        like = next(x for x in tensors if x is not None)
        results = []
        for k, i in enumerate(self.grads):
            x = tensors[i]
            if wanted >> k & 1 and x is not None:
                results.append(torch.empty(x.shape, dtype=x.dtype, device=x.device))
            else:
                results.append(torch.empty(0, dtype=types[self.op.inputs[i].wide],
                                           device=like.device))
        return results[0] if len(results) == 1 else tuple(results)

    # ---- gradients

    def keep(self, ctx, inputs, output):
        n = self.n
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:n + self.n_host])
        ctx.params = inputs[n + self.n_host:-1]
        outputs = output if isinstance(output, tuple) else (output,)
        wanted = inputs[-1]
        fixed = [y for i, y in enumerate(outputs) if y is not None and
                 (not wanted >> i & 1 or self.op.outputs[i].partner is None)]
        ctx.mark_non_differentiable(*fixed)

    def gradient(self, ctx, *cots, run=None):
        n = self.n
        saved = ctx.saved_tensors
        tensors, host = saved[:n], saved[n:]
        none = (None,) * (self.n_host + len(self.op.params) + 1)
        if all(cots[i] is None for i in self.cots):
            return (None,) * n + none
        wanted = 0
        for k, i in enumerate(self.grads):
            if ctx.needs_input_grad[i]:
                wanted |= 1 << k
        args = (*tensors, *(cots[i] for i in self.cots), *host, *ctx.params, wanted)
        results = (run or self.backward)(*args)
        if isinstance(results, torch.Tensor):
            results = (results,)
        grads = [None] * n
        for k, i in enumerate(self.grads):
            if wanted >> k & 1:
                grads[i] = results[k]
        return tuple(grads) + none

    def eager_functions(self):
        """The same gradient as autograd.Functions, twice: for eager calls that nobody traces, at a
        third of the dispatcher's time, and for functorch, which takes no other."""
        top = self

        class Gradient(torch.autograd.Function):
            @staticmethod
            def forward(*args):
                return tuple(top.compute_gradients(args))

            @staticmethod
            def setup_context(ctx, inputs, output):
                pass

            @staticmethod
            def backward(ctx, *cots):
                return top.no_second_gradient(ctx, *cots)

        def backward(ctx, *cots):
            watched = torch.is_grad_enabled()    # create_graph, or functorch
            return top.gradient(ctx, *cots, run=Gradient.apply if watched
                                else lambda *args: top.compute_gradients(args))

        def launch(index, words, host):
            status = None
            if index >= 0 and type(words) is bytes:    # the compiled way made them
                status = _compiled.launch(top.known, index, words)
            if status is None:
                _device.run(top.op.forward, index, words, host)
            elif status:
                _library.check(status)

        class Eager(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *args):
                results = tuple(top.compute(args))
                top.keep(ctx, args, results)
                return results

        class Quick(torch.autograd.Function):
            """Eager with the call prepared: the last argument is (struct, results, GPU or -1, host
            arrays, numbers, wanted), those before are the tensors."""
            @staticmethod
            def forward(ctx, *args):
                words, results, index, host, params, wanted = args[-1]
                launch(index, words, host)
                results = tuple(results)
                top.keep(ctx, (*args[:-1], *host, *params, wanted), results)
                return results

            @staticmethod
            def backward(ctx, *cots):
                return *backward(ctx, *cots)[:top.n], None

        class Transformed(torch.autograd.Function):
            @staticmethod
            def forward(*args):
                return tuple(top.compute(args))

            @staticmethod
            def setup_context(ctx, inputs, output):
                top.keep(ctx, inputs, output)

        Eager.backward = Transformed.backward = staticmethod(backward)
        Eager.__name__ = Eager.__qualname__ = "mneme_" + self.op.name
        Quick.__name__ = Quick.__qualname__ = "mneme_" + self.op.name
        # What Function.apply asks of functorch, call() has asked.
        self.prepared = super(torch.autograd.Function, Quick).apply
        return Eager.apply, Transformed.apply

    def no_second_gradient(self, ctx, *cots):
        raise NotImplementedError(f"mneme::{self.op.name} has a first derivative only; leave out "
                                  "create_graph=True")


# ---- what functions call ------------------------------------------------------------------------

def host_integers(values, name="cu_seqlens"):
    """Offsets as int64 in host memory. Those of a tensor on a GPU are read back once and kept with
    it; give cu_seqlens_cpu to spare the wait."""
    if values is None:
        return None
    if not isinstance(values, torch.Tensor):
        return torch.tensor(values, dtype=torch.int64)
    if values.device.type == "cpu":
        return values.to(torch.int64).contiguous()
    if torch.compiler.is_compiling():
        return values.to("cpu", torch.int64)
    kept = getattr(values, "_mneme_host", None)
    if kept is None or kept[0] != values._version:
        kept = values._mneme_host = (values._version, values.to("cpu", torch.int64))
    return kept[1]


_HALF = (torch.float16, torch.bfloat16)


# Inputs that say how, not what: gates, noises and weights are often kept wider than activations.
_SIDE = ("DECAY", "GATE", "POSITIVE", "NOISE", "MEMORY", "CLASS")
_WEIGHTS = ("w", "bias")
_KEEP_WIDE = ("rms_norm", "rms_norm_gated", "l2_norm", "cross_entropy")    # under autocast


def _call_type(op, tensors):
    """The dtype of a call: float64 where an input has it, bfloat16 on a GPU where all activations
    have it or autocast says so (norms and losses keep theirs), else float32. Gates, decays and
    weights beside bfloat16 activations are rounded to it."""
    half = True
    for field, x in zip(op.inputs, tensors):
        if x is None or field.counts_classes:
            continue
        if x.dtype is torch.float64:
            return torch.float64
        if not (field.wide or field.law in _SIDE or field.name in _WEIGHTS):
            half = half and x.dtype is torch.bfloat16
    device = [x.device for x in tensors if x is not None][0]
    if device.type == "cuda" and (half or (op.name not in _KEEP_WIDE
                                           and torch.is_autocast_enabled("cuda") and
                                           torch.get_autocast_dtype("cuda") is torch.bfloat16)):
        return torch.bfloat16
    return torch.float32


def _nobody_looks():
    """No mode and no transformation sees the calls of this thread."""
    return (_knows_modes and not torch.compiler.is_compiling() and not _modes()
            and not _functions() and _transforms() is None)


def _is_here(x):
    """Its numbers are in the memory of the CPU or a CUDA GPU."""
    return x.is_cpu or x.is_cuda


def _is_eager(tensors):
    """Nobody traces or fakes this call: it need not go through the dispatcher."""
    if torch.compiler.is_compiling() or not _knows_modes or _modes() or _functions():
        return False
    if _transforms() is not None:
        return True
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN or x.device.type not in ("cpu", "cuda")):
            return False
    return True


def _run(top, args, n):
    """The operator on arguments that fit it: results as a list, None or empty for unwanted."""
    if not _is_eager(args[:n]):
        results = top.forward(*args)
        return results if isinstance(results, tuple) else (results,)
    if torch.is_grad_enabled() and top.op.differentiable:
        if _transforms() is not None:
            return top.transformed(*args)
        for x in args[:n]:
            if x is not None and x.requires_grad:
                return top.eager(*args)
    return top.compute(args)


def call_known(top, tensors, params, wanted):
    """Results of a call that looks like an earlier one; None of any other."""
    if top.known is None or _is_compiling():
        return None
    made = _run_known(top.known, tensors, params, wanted, True)
    if type(made) is list or made is None:
        return made
    return finish_known(top, tensors, params, wanted, made)


def finish_known(top, tensors, params, wanted, made):
    """Results of a known call that the compiled way left, or its failure."""
    if type(made) is tuple:
        return _finish(top, tensors, params, wanted, top.no_host, *made)
    return _library.check(made)


def remember(top, given, outputs, params, wanted, kind, main):
    """How a call was written: its numbers, names of results, and what to make of the latter."""
    if top.known is not None and not _is_compiling():
        _compiled.means(top.known, given, outputs, params, wanted, kind, main,
                        functools.partial(finish_known, top))


def call(top, tensors, params, cu_seqlens=None, counts0=None, wanted=None):
    """Runs an operator on tensors of any floating dtype; results have the dtype of the first
    input, states and sums at least float32. Gives a tuple with None for what was not wanted."""
    if wanted is None:
        wanted = top.main
    if cu_seqlens is None and counts0 is None:
        made = call_known(top, tensors, params, wanted)
        if made is not None:
            return made
    return call_new(top, tensors, params, cu_seqlens, counts0, wanted)


def call_new(top, tensors, params, cu_seqlens, counts0, wanted):
    """call() of what does not look like an earlier call."""
    if _nobody_looks():
        if cu_seqlens is None and counts0 is None:
            host = top.no_host
        else:
            host = (host_integers(cu_seqlens),)
            if top.has_counts:
                host += (host_integers(counts0, "counts0"),)
        prepared, grad = top.quick(tensors, params, wanted, host)
        if prepared is not None:
            words, plan, types, index = prepared
            like = tensors[top.anchor(tensors)]
            if top.known is not None and host is top.no_host:
                _learn(top, tensors, params, wanted, plan, types, like)
            results = top.new_results(words, plan, types, like, wanted)
            return _finish(top, tensors, params, wanted, host, words, results, index, grad)
    return _call_any(top, tensors, params, cu_seqlens, counts0, wanted)


def _finish(top, tensors, params, wanted, host, words, results, index, grad):
    """Makes a call whose struct and results are there, with autograd where a gradient is asked."""
    if grad and top.op.differentiable and torch.is_grad_enabled():
        return list(top.prepared(*tensors, (words, results, index, host, params, wanted)))
    _device.run(top.op.forward, index, words, host)
    return results


def _learn(top, tensors, params, wanted, plan, types, like):
    """Lets the compiled way make such calls from now on."""
    results = tuple((word, *_fast.maker(plan.out_shapes[i], types[is_wide], like.device))
                    if wanted >> i & 1 else None
                    for i, (word, is_wide) in enumerate(top.output_words))
    _compiled.learn(top.known, tensors, params, wanted, bytes(plan.words), results)


def _call_any(top, tensors, params, cu_seqlens, counts0, wanted):
    """call() of tensors that need a conversion, and under what traces and transforms calls."""
    op = top.op
    if len(params) != len(op.params):
        raise TypeError(f"{op.name}: {len(params)} numbers for {len(op.params)}: "
                        + ", ".join(p.name for p in op.params))
    given = [x for x in tensors if x is not None]    # no next(): older PyTorch cannot trace it
    if not given:
        raise TypeError(f"{op.name}: {op.inputs[0].name} is missing")
    first = given[0]
    kind, rounds = first.dtype, None
    plain = kind is torch.float32 or kind is torch.float64
    for x in tensors:
        if x is not None and x.dtype is not kind:
            plain = False
            break
    if not plain or first.is_cuda:
        kind = _call_type(op, tensors)
        wide = torch.float32 if kind is torch.bfloat16 else kind
        narrow = [x.dtype for f, x in zip(op.inputs, tensors) if x is not None and not f.wide
                  and not f.counts_classes]
        rounds = narrow[0] if narrow else kind
        rounds = rounds if rounds in _HALF and rounds is not kind else None
        tensors = [x if x is None else x.to(wide if f.wide else kind)
                   for f, x in zip(op.inputs, tensors)]
    host = (host_integers(cu_seqlens),)
    if top.has_counts:
        host += (host_integers(counts0, "counts0"),)
    results = _run(top, (*tensors, *host, *params, wanted), top.n)
    out = [y if wanted >> i & 1 else None for i, y in enumerate(results)]
    if rounds is not None:
        out = [y if y is None or f.is_state or f.wide else y.to(rounds)
               for f, y in zip(op.outputs, out)]
    return out


def _make():
    return {name: TorchOperator(op) for name, op in operators().items()}


torch_operators = _make()
