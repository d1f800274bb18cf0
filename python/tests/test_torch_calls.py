"""Calls that look like an earlier one (mneme._fastcall): the same bits as calls through Python, and
left to Python wherever something else is going on."""

import ctypes
import os
import pathlib
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

from mneme import _library                            # noqa: E402
from mneme.torch import _call, _device, _fast, ops    # noqa: E402
from mneme.torch._call import torch_operators         # noqa: E402
import laws                                           # noqa: E402

compiled = pytest.mark.skipif(
    _call._compiled is None, reason="no _fastcall: not built, or PyTorch is older than 2.10")


def inputs(name, dtype=torch.float32, seed=0):
    op = torch_operators[name].op
    values, _ = laws.sample(op, seed=seed)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    return tuple(None if x is None else torch.tensor(x).to(wide if f.wide else dtype)
                 for f, x in zip(op.inputs, values))


def numbers(name):
    return tuple(p.value(name, p.default) for p in torch_operators[name].op.params)


def through_python(monkeypatch, top, *args):
    with monkeypatch.context() as patch:
        patch.setattr(top, "known", None)
        patch.setattr(top, "known_back", None)
        return _call.call(top, *args)


def counted(monkeypatch):
    """What the compiled way answers from now on, call by call."""
    answers, run = [], _call._run_known

    def counting(*args):
        answers.append(run(*args))
        return answers[-1]

    monkeypatch.setattr(_call, "_run_known", counting)
    return answers


def same(a, b):
    return all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("name", sorted(torch_operators))
def test_the_bits_are_those_of_python(name, dtype, monkeypatch):
    top, answers = torch_operators[name], counted(monkeypatch)
    everything = (1 << len(top.op.outputs)) - 1
    for wanted in (top.main, everything):
        for seed in (0, 1):
            given = inputs(name, dtype, seed)
            want = through_python(monkeypatch, top, given, numbers(name), None, None, wanted)
            for _ in range(2):
                got = _call.call(top, given, numbers(name), None, None, wanted)
                assert same(got, want)
    assert type(answers[1]) is list and type(answers[-1]) is list


@compiled
@pytest.mark.parametrize("name", laws.NAMES)
def test_gradients_are_those_of_python(name, monkeypatch):
    top, answers = torch_operators[name], counted(monkeypatch)
    cots = None

    def gradients(call):
        nonlocal cots
        given = [x if x is None or f.partner is None else x.clone().requires_grad_()
                 for f, x in zip(top.op.inputs, inputs(name))]
        results = call(top, given, numbers(name), None, None, top.main)
        wanted = [results[i] for i in top.cots if top.main >> i & 1]
        cots = cots or [torch.randn_like(y) for y in wanted]
        leaves = [x for x in given if x is not None and x.requires_grad]
        return torch.autograd.grad(wanted, leaves, cots, allow_unused=True)

    with monkeypatch.context() as patch:
        patch.setattr(top, "known", None)
        patch.setattr(top, "known_back", None)
        want = gradients(_call.call)
    assert not answers
    assert all(same(gradients(_call.call), want) for _ in range(3))
    assert [type(x) for x in answers[-2:]] == [tuple, list]


@compiled
def test_cotangents_are_told_apart(monkeypatch):
    """Expanded, strided and absent ones, of another dtype, or of one result only."""
    top = torch_operators["delta_net"]
    given = [*delta(grad=True), torch.randn(2, 2, 8, 8, requires_grad=True)]
    leaves = given

    def gradients(known, which):
        results = _call.call(top, given, (0.5,), None, None, 3)
        o, state = results
        loss = {"sum": lambda: o.sum(), "state": lambda: state.square().sum(),
                "both": lambda: o.square().sum() + state.sum(),
                "turned": lambda: (o.transpose(1, 2) * 2).exp().sum()}[which]()
        with monkeypatch.context() as patch:
            if not known:
                patch.setattr(top, "known_back", None)
            return torch.autograd.grad(loss, leaves, allow_unused=True)

    for which in ("sum", "both", "state", "turned"):
        want = gradients(False, which)
        assert all(same(gradients(True, which), want) for _ in range(3)), which
    only = torch.autograd.grad(_call.call(top, given, (0.5,), None, None, 3)[0].sum(), given[2])
    assert torch.equal(only[0], gradients(True, "sum")[2])


def delta(T=12, grad=False):
    generator = torch.Generator().manual_seed(T)
    q, k, v = (torch.randn(2, T, 2, 8, generator=generator) for _ in range(3))
    g, beta = -torch.rand(2, T, 2, generator=generator), torch.rand(2, T, 2, generator=generator)
    return [x.requires_grad_(grad) for x in (q, k, v, beta, g)]


@compiled
def test_what_is_not_alike_is_not_mistaken(monkeypatch):
    top, answers = torch_operators["delta_net"], counted(monkeypatch)
    base = (*delta(), None)
    state = torch.randn(2, 2, 8, 8)
    views = tuple(torch.cat([x, x], -1)[..., :8] if x is not None and x.dim() == 4 else x
                  for x in base)
    longer = (*delta(13), None)
    other = (*base[:4], base[4][..., None].expand(-1, -1, -1, 8).contiguous(), None)
    for given in (base, (*base[:5], state), views, longer, other):
        for params in ((0.53,), (0.27,)):    # of no other test
            want = through_python(monkeypatch, top, given, params, None, None, 3)
            for _ in range(2):
                assert same(_call.call(top, given, params, None, None, 3), want)
    assert [type(x) for x in answers[-20:]] == [type(None), list] * 10


@compiled
def test_more_shapes_than_are_kept():
    wants = {T: ops.delta_net(*delta(T)).o for T in range(1, 40)}
    assert all(torch.equal(ops.delta_net(*delta(T)).o, want) for T, want in wants.items())


@compiled
def test_modes_and_transformations_go_through_python(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode
    given = delta()
    want = ops.delta_net(*given).o
    assert torch.equal(ops.delta_net(*given).o, want)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in given]
        assert type(ops.delta_net(*fakes).o) is not torch.Tensor
    leaf = [x.clone().requires_grad_() for x in given]
    ops.delta_net(*leaf).o.sum().backward()
    grads = torch.func.grad(lambda v: ops.delta_net(*given[:2], v, *given[3:]).o.sum())(given[2])
    assert torch.equal(grads, leaf[2].grad)

    class Marked(torch.Tensor):
        pass
    answers = counted(monkeypatch)
    marked = [x.as_subclass(Marked) for x in given]
    assert torch.equal(ops.delta_net(*marked).o.as_subclass(torch.Tensor), want)
    assert set(answers) == {None}
    with torch.no_grad():
        assert ops.delta_net(*leaf).o.grad_fn is None
    with torch.inference_mode():
        assert torch.equal(ops.delta_net(*given).o, want)


@compiled
def test_errors_have_their_sentences():
    good = delta()
    ops.delta_net(*good), ops.delta_net(*good)
    bad = [*good[:4], good[4].clone()]
    bad[4][0, 0, 0] = 0.5
    for _ in range(2):
        with pytest.raises(ValueError, match="log decay"):
            ops.delta_net(*bad)
    with pytest.raises(ValueError, match="has shape"):
        ops.delta_net(*good[:3], good[3][:, :5], good[4])


def asked(monkeypatch, name):
    """The function `name` of ops, and what the compiled way answers it from now on."""
    answers, function = [], getattr(ops, name)
    ask = function.__globals__["_ask"]

    def asking(*args):
        answers.append(ask(*args))
        return answers[-1]

    monkeypatch.setitem(function.__globals__, "_ask", asking)
    return function, answers


@compiled
def test_calls_as_they_were_written(monkeypatch):
    """Numbers by value and type, names of results, one result or a named tuple: each wording is
    learned once, and means the same as before."""
    function, answers = asked(monkeypatch, "delta_net")
    q, k, v, beta, g = inputs("delta_net")[:5]
    for given in ({}, {"scale": 0.5}, {"scale": 1}, {"outputs": ("o",)}, {"outputs": ("state",)},
                  {"outputs": ("o", "state"), "scale": 0.25}):
        first, second = (function(q, k, v, beta, g, **given) for _ in range(2))
        assert answers[-1] is second and type(first) is type(second)
        assert same(first, second) and second._fields == first._fields
    assert function(q, k, v, beta, g, scale=1).o.equal(function(q, k, v, beta, g, scale=1.0).o)
    before = len(answers)
    listed = function(q, k, v, beta, g, outputs=["o"])    # a list may change: not remembered
    assert answers[before:] == [None] and listed.state is None
    function, answers = asked(monkeypatch, "rms_norm")
    x, w = torch.randn(3, 8), torch.randn(8)
    assert function(x, w).equal(function(x, w)) and isinstance(answers[-1], torch.Tensor)


@compiled
def test_more_wordings_than_are_kept(monkeypatch):
    function, answers = asked(monkeypatch, "l2_norm")
    x = torch.randn(2, 8)
    for _ in range(2):
        for i in range(20):
            eps = 10.0 ** (-i)
            want = through_python(monkeypatch, torch_operators["l2_norm"], (x,), (eps, 1))[0]
            assert function(x, eps=eps, kind="root").equal(want)
    assert len(answers) == 40
    assert function(x, eps=eps, kind="root").equal(want) and answers[-1] is not None


@compiled
def test_gradients_of_what_was_written(monkeypatch):
    function, answers = asked(monkeypatch, "delta_net")
    tensors = [x.requires_grad_() for x in inputs("delta_net")[:5]]
    grads = []
    for _ in range(3):
        o = function(*tensors, outputs=("o",)).o
        assert o.requires_grad
        grads.append(torch.autograd.grad(o.sum(), tensors))
    assert answers[-1] is not None and same(grads[0], grads[2])
    with torch.no_grad():
        assert not function(*tensors, outputs=("o",)).o.requires_grad


DIRECT = {"chunk_simple_gla": "head", "chunk_gla": "channel", "fused_recurrent_gla": "channel",
          "chunk_delta_rule": "beta", "chunk_gated_delta_rule": "both",
          "fused_recurrent_gated_delta_rule": "both", "chunk_kda": "channel beta"}


def fla_arguments(name, K=8):
    torch.manual_seed(K)
    q, k, v = torch.randn(2, 5, 2, K), torch.randn(2, 5, 2, K), torch.randn(2, 5, 2, 6)
    g = -torch.rand(2, 5, 2, K) if "channel" in DIRECT[name] else -torch.rand(2, 5, 2)
    gate = "gk" if name == "fused_recurrent_gla" else "g"
    given = {"q": q, "k": k, "v": v}
    if DIRECT[name] != "beta":
        given[gate] = g
    if "delta" in name or "kda" in name:
        given["beta"] = torch.rand(2, 5, 2)
    return given


@compiled
@pytest.mark.parametrize("name", sorted(DIRECT))
def test_functions_that_are_one_call(name, monkeypatch):
    """What they give is what they give without a memory of earlier calls; settings that mean more
    than one call are never answered from there."""
    function, answers = asked(monkeypatch, name)
    for K in (8, 4, 8):
        given = fla_arguments(name, K)
        state = torch.randn(2, 2, K, 6)
        for more in ({}, {"scale": 0.5}, {"output_final_state": True},
                     {"output_final_state": True, "initial_state": state}):
            want = function.__wrapped__(**given, **more)
            first, second = function(**given, **more), function(**given, **more)
            assert answers[-1] is second and type(second) is tuple
            assert same(first, want) and same(second, want)
    before = len(answers)
    turned = {"state_v_first": True, "initial_state": state.transpose(-1, -2).contiguous(),
              "output_final_state": True}
    if name != "chunk_delta_rule":
        for _ in range(2):
            assert same(function(**given, **turned), function.__wrapped__(**given, **turned))
        assert answers[before:] == [None, None]
    with pytest.raises((TypeError, DeprecationWarning)):
        function(**given, head_first=True)
    offsets = torch.tensor([0, 5])
    one = {key: x[:1] for key, x in given.items()}
    assert same(function(**one, cu_seqlens=offsets), function.__wrapped__(**one))


@compiled
def test_threads_have_their_own_calls():
    wants = {T: ops.delta_net(*delta(T)).o for T in range(1, 24)}
    wrong = []

    def work(first):
        for i in range(200):
            T = 1 + (first + i) % 23
            if not torch.equal(ops.delta_net(*delta(T)).o, wants[T]):
                wrong.append(T)

    threads = [threading.Thread(target=work, args=(7 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_python_serves_where_it_is_switched_off():
    code = ("import torch; from mneme.torch import _call, ops\n"
            "assert _call._compiled is None\n"
            "x = torch.ones(1, 4); print(ops.l2_norm(x).sum().item())")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                         env={**os.environ, "MNEME_FASTCALL": "0"},
                         cwd=pathlib.Path(__file__).parent)
    assert float(out.stdout) == pytest.approx(2.0, rel=1e-4)


# ---- memory for work on a GPU, told by what stands in for one -----------------------------------

class Library:
    """Counts what a context of a GPU is told."""

    def __init__(self, context):
        self.context, self.trims, self.streams = context, 0, []

    def mn_context_trim(self, handle):
        self.trims += 1
        self.context.held.clear()
        self.context.bytes = 0

    def mn_context_use_stream(self, handle, stream):
        self.mn_context_trim(handle)
        self.streams.append(stream)
        return 0


@pytest.fixture
def pretended(monkeypatch):
    context = object.__new__(_device.DeviceContext)
    context.index, context.held, context.bytes, context.recorded = 0, {}, 0, []
    context.lock, context.stream, context.handle = threading.Lock(), 7, None
    library = Library(context)
    monkeypatch.setattr(_device._library, "library", lambda: library)
    monkeypatch.setattr(_device, "_current", lambda: 0)
    monkeypatch.setattr(_device, "_stream_of", lambda index: 7)
    monkeypatch.setattr(_device, "_records", lambda: False)

    def operator(handle, words):
        context.held[id(words)] = words
        context.bytes += 1024
        return 0

    return context, library, operator


def test_eager_calls_keep_memory_for_work(pretended):
    context, library, operator = pretended
    context.run(operator, b"", ())
    assert context.bytes == 1024 and library.trims == 0


def test_calls_of_compiled_graphs_keep_none(pretended):
    """CUDA graph trees warm up with their own pool and refuse what lives on in it."""
    context, library, operator = pretended
    context.run(operator, b"", (), keeps=False)
    assert context.bytes == 0 and not context.held and library.trims == 1


def test_recordings_begin_and_end_without_memory(pretended, monkeypatch):
    context, library, operator = pretended
    context.run(operator, b"", ())
    monkeypatch.setattr(_device, "_records", lambda: True)
    offsets = torch.tensor([0, 4])
    context.run(operator, b"", (offsets, None))
    assert context.bytes == 0 and library.trims == 2 and context.recorded[0] is offsets


def test_another_stream_gives_memory_back(pretended, monkeypatch):
    context, library, operator = pretended
    context.run(operator, b"", ())
    monkeypatch.setattr(_device, "_stream_of", lambda index: 9)
    context.run(operator, b"", ())
    assert library.streams == [9] and context.bytes == 1024


class Gpu:
    """What stands in for a GPU that the compiled way was told of, and for PyTorch's streams."""

    def __init__(self, index):
        self.index, self.stream, self.records, self.status = index, 7, False, 0
        self.did, self.lock = [], threading.Lock()
        self.call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(self._call)
        self.operator = _call._compiled.operator(ctypes.cast(self.call, ctypes.c_void_p).value, 4,
                                                 (1, 2))
        _call._compiled.gpu(index, 99, 7, self._acquire, self._release, self._trim, False)

    def _call(self, handle, words):
        self.did.append((handle, bytes(ctypes.string_at(words, 32))))
        return self.status

    def _acquire(self):
        self.did.append("acquire")
        return self.lock.acquire()

    def _release(self):
        self.did.append("release")
        self.lock.release()

    def _trim(self):
        self.did.append("trim")

    def launch(self, words=b"x" * 32):
        self.did.clear()
        return _call._compiled.launch(self.operator, self.index, words)


@pytest.fixture(scope="module")
def gpu():
    found = Gpu(15)

    def setup(stream_of, records):
        watchers = (_call._modes, _call._functions, _call._transforms)
        assert _call._compiled.setup(torch.Tensor.__dlpack_c_exchange_api__, torch.Tensor,
                                     torch.nn.Parameter, torch.is_grad_enabled,
                                     torch.is_autocast_enabled, _fast._any_autocast,
                                     _device._current, stream_of, records,
                                     _library.made_handle, watchers)
    setup(lambda index: found.stream, lambda: found.records)
    yield found
    setup(_device._stream_of, _device._records)


@compiled
def test_calls_on_a_gpu_hold_its_lock(gpu):
    assert gpu.launch() == 0
    assert gpu.did == ["acquire", (99, b"x" * 32), "release"]
    assert gpu.launch(b"x" * 24) is None and gpu.did == []    # another struct


@compiled
def test_other_streams_and_recordings_are_left_to_python(gpu):
    gpu.stream = 8
    assert gpu.launch() is None and gpu.did == ["acquire", "release"]
    _call._compiled.gpu_is(15, 8, False)
    assert gpu.launch() == 0
    gpu.stream = 0    # PyTorch's name of the default stream
    assert gpu.launch() is None
    _call._compiled.gpu_is(15, 1, False)
    assert gpu.launch() == 0
    gpu.stream, gpu.records = 9, True    # the default stream cannot be recorded
    _call._compiled.gpu_is(15, 9, False)
    assert gpu.launch() is None and gpu.did == ["acquire", "release"]
    gpu.records, gpu.stream = False, 7
    _call._compiled.gpu_is(15, 7, False)
    assert _call._compiled.launch(gpu.operator, 14, b"x" * 32) is None    # of which nobody told


@compiled
def test_a_gpu_gives_memory_back_and_tells_its_status(gpu):
    _call._compiled.gpu_is(15, 7, True)
    gpu.status = 3
    assert gpu.launch() == 3
    assert gpu.did == ["acquire", (99, b"x" * 32), "trim", "release"]
    gpu.status = 0
    _call._compiled.gpu_is(15, 7, False)
    gpu.stream = "no number"
    with pytest.raises(TypeError):
        gpu.launch()
    assert not gpu.lock.locked()
    gpu.stream = 7


def test_the_dispatcher_keeps_none(monkeypatch):
    """What torch.compile calls, forward and back, says so."""
    seen, run = [], _device.run

    def watching(function, index, words, host, keeps=True):
        seen.append(keeps)
        return run(function, index, words, host, keeps)

    monkeypatch.setattr(_device, "run", watching)
    top = torch_operators["delta_net"]
    monkeypatch.setattr(top, "known", None)
    monkeypatch.setattr(top, "known_back", None)
    results = top.forward(*delta(grad=True), None, None, 1.0, 1)
    results[0].sum().backward()
    assert seen == [False, False]
    _call.call(top, delta(), (1.0,))
    assert seen == [False, False, True]
