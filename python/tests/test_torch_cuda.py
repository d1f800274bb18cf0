"""mneme.torch on a GPU: every operator against float64 on the CPU, and what PyTorch does with it.

MNEME_TEST_DEVICE=cpu runs what does not need a GPU there, to try the tests themselves."""

import gc
import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import mneme                                          # noqa: E402
from mneme import golden                              # noqa: E402
from mneme.torch import _call, nn as layers, ops      # noqa: E402
from mneme.torch._call import torch_operators         # noqa: E402
import laws                                           # noqa: E402
from test_golden import FILES                         # noqa: E402

DEVICE = os.environ.get("MNEME_TEST_DEVICE", "cuda")
if DEVICE == "cuda":
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU", allow_module_level=True)
    try:
        mneme.Context(device="cuda")
    except mneme.Error as error:
        pytest.skip(f"libmneme cannot use the GPU: {error}", allow_module_level=True)
on_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")

# Heads and lengths of models beside the small ones: whole tiles, and a tail.
LARGE = {
    "additive": dict(T=150, K=64, V=64), "delta": dict(T=150, K=64, V=64, R=64),
    "delta_net": dict(T=150, K=128, V=128), "gdn2": dict(T=100, K=64, V=64),
    "riccati": dict(T=40, K=16, R=32), "bayes": dict(T=40, K=16, V=32, R=32),
    "importance": dict(T=70, K=32, V=32), "palimpsa_paper": dict(T=70, K=32, V=32),
    "moebius": dict(T=150, K=16, V=64), "mesa": dict(T=70, K=32, V=32),
    "curvature": dict(T=100, K=64), "ccq_read": dict(T=100, K=64, V=64),
    "attention": dict(T=130, L=130, K=64, V=64), "scan": dict(T=12, K=16, V=64),
    "mlstm": dict(T=100, K=64, V=64), "conv": dict(T=150, D=96, W=4),
}


def numbers(name):
    return [p.value(name, p.default) for p in torch_operators[name].op.params]


def cast(name, values, dtype):
    """Inputs as a call of `dtype` takes them."""
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    out = []
    for field, x in zip(torch_operators[name].op.inputs, values):
        out.append(None if x is None else torch.as_tensor(np.asarray(x)).to(
            wide if field.wide else dtype))
    return out


def evaluate(name, tensors, cu, device, seed=1):
    """Main results and all gradients for random cotangents, on the CPU in float64."""
    top = torch_operators[name]
    tensors = [None if x is None else x.to(device).detach() for x in tensors]
    for field, x in zip(top.op.inputs, tensors):
        if x is not None and field.partner is not None:
            x.requires_grad_()
    host = [None if cu is None else torch.tensor(cu)] + [None] * top.has_counts
    results = top.forward(*tensors, *host, *numbers(name), top.main)
    results = results if isinstance(results, tuple) else (results,)
    wanted = [i for i in top.cots if top.main >> i & 1]
    named = {top.op.outputs[i].name: results[i] for i in top.op.main}
    generator = torch.Generator().manual_seed(seed)
    cots = [torch.randn(results[i].shape, generator=generator, dtype=torch.float64)
            .to(torch.bfloat16).to(results[i].dtype).to(device) for i in wanted]
    leaves = [(f, x) for f, x in zip(top.op.inputs, tensors) if x is not None and x.requires_grad]
    grads = torch.autograd.grad([results[i] for i in wanted], [x for _, x in leaves], cots,
                                allow_unused=True)
    for (field, x), dx in zip(leaves, grads):
        if dx is not None:
            if field.law == "COVARIANCE":
                dx = (dx + dx.transpose(-1, -2)) / 2
            named["d" + field.name] = dx
    return {key: y.detach().double().cpu() for key, y in named.items()}


def distance(x, y):
    scale = y.square().mean().sqrt().item() if y.numel() else 0.0
    return (x - y).square().mean().sqrt().item() / scale if scale > 0 else 0.0


def sensitivity(name, values, cu, unit, want):
    """How far results go when inputs are off by their rounding: what no kernel can help."""
    generator = torch.Generator().manual_seed(2)
    moved = []
    for field, x in zip(torch_operators[name].op.inputs, values):
        if x is not None and not field.counts_classes and field.law != "COVARIANCE":
            x = x * (1 + unit * (2 * torch.rand(x.shape, generator=generator,
                                                dtype=torch.float64) - 1))
        moved.append(x)
    got = evaluate(name, moved, cu, "cpu")
    return {key: distance(got[key], want[key]) for key in want}


def compare(name, cu, values, dtype):
    unit = 2.0 ** -8 if dtype is torch.bfloat16 else 2.0 ** -23
    given = cast(name, values, dtype)
    exact = [None if x is None else x.double() for x in given]
    want = evaluate(name, exact, cu, "cpu")
    allowed = sensitivity(name, exact, cu, unit, want)
    try:
        got = evaluate(name, given, cu, DEVICE)
    except NotImplementedError as error:
        if "no CUDA kernel" in str(error):
            pytest.skip(str(error))
        raise
    largest = max(y.square().sum().sqrt().item() for y in want.values())
    for key, y in want.items():
        if y.square().sum().sqrt().item() < 1e-9 * largest:
            continue    # a gradient that vanishes but for rounding
        far, most = distance(got[key], y), (4 if unit > 1e-4 else 64) * (unit + allowed[key])
        assert torch.isfinite(got[key]).all(), key
        assert far <= most, f"{name}: {key} is off by {far:.2e}, {most:.2e} is allowed"


def take(dtype):
    if dtype is torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("bfloat16 is for GPUs")


@pytest.mark.parametrize("form", ["all", "required", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", laws.NAMES)
def test_operators_are_their_reference(name, dtype, form):
    take(dtype)
    if form == "packed" and not laws.packs(torch_operators[name].op):
        pytest.skip("takes no sequences")
    values, cu = laws.sample(torch_operators[name].op, optional=form != "required",
                             packed=form == "packed")
    compare(name, cu, values, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", sorted(LARGE))
def test_operators_at_the_sizes_of_models(name, dtype):
    take(dtype)
    values, cu = laws.sample(torch_operators[name].op, sizes=LARGE[name])
    compare(name, cu, values, dtype)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_golden(path):
    def run(op, tensors, params, cu_seqlens, cotangents, context):
        given = {}
        for field in op.inputs:
            if field.name in tensors:
                x = torch.tensor(tensors[field.name], device=DEVICE)
                given[field.name] = x.requires_grad_() if field.partner is not None else x
        cu = None if cu_seqlens is None else torch.tensor(cu_seqlens).long()
        results = getattr(ops, op.name)(**given, **params, cu_seqlens=cu,
                                        outputs=[f.name for f in op.outputs])
        results = {f.name: y for f, y in zip(op.outputs, results)}
        grads = {}
        if cotangents and op.differentiable:
            names = [n for n in cotangents if n in results]
            wanted = [n for n, x in given.items() if x.requires_grad]
            found = torch.autograd.grad(
                [results[n] for n in names], [given[n] for n in wanted],
                [torch.tensor(cotangents[n], device=DEVICE) for n in names], allow_unused=True)
            grads = {n: None if g is None else g.cpu().numpy() for n, g in zip(wanted, found)}
        return {n: y.detach().cpu().numpy() for n, y in results.items()}, grads

    try:
        lines = golden.check(path, "f32", run=run)
    except NotImplementedError as error:
        if "no CUDA kernel" in str(error):
            pytest.skip(str(error))
        raise
    assert lines and all(line.passed for line in lines), [ln for ln in lines if not ln.passed]


@pytest.mark.parametrize("name", laws.NAMES)
def test_opcheck(name):
    top = torch_operators[name]
    values, _ = laws.sample(top.op)
    tensors = [None if x is None else x.to(DEVICE) for x in cast(name, values, torch.float32)]
    for field, x in zip(top.op.inputs, tensors):
        if x is not None and field.partner is not None:
            x.requires_grad_()
    host = [None] * (1 + top.has_counts)
    try:
        torch.library.opcheck(top.forward, (*tensors, *host, *numbers(name), top.main))
    except NotImplementedError as error:
        if "no CUDA kernel" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize("name", laws.NAMES)
def test_two_runs_have_the_same_bits(name):
    values, cu = laws.sample(torch_operators[name].op, sizes=LARGE.get(name))
    given = cast(name, values, torch.float32)
    try:
        first, second = (evaluate(name, given, cu, DEVICE) for _ in range(2))
    except NotImplementedError as error:
        if "no CUDA kernel" in str(error):
            pytest.skip(str(error))
        raise
    assert all(torch.equal(first[key], second[key]) for key in first)


def gated(dtype=torch.float32, B=2, T=96, H=2, K=64, V=64, seed=3):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)
    return [normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V),
            torch.nn.functional.logsigmoid(normal(B, T, H)), normal(B, T, H).sigmoid()]


def gated_rule(*inputs, **how):
    return ops.chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True,
                                      output_final_state=True, **how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_packed_has_the_bits_of_separate(dtype):
    take(dtype)
    inputs, cu = gated(dtype, B=1, T=200), [0, 5, 6, 130, 200]
    given = torch.tensor(cu, dtype=torch.int32, device=DEVICE)
    a = [x.clone().requires_grad_() for x in inputs]
    o, state = gated_rule(*a, cu_seqlens=given)
    o.square().sum().backward()
    for n in range(4):
        part = slice(cu[n], cu[n + 1])
        b = [x[:, part].clone().requires_grad_() for x in inputs]
        one, last = gated_rule(*b)
        one.square().sum().backward()
        assert torch.equal(one, o[:, part]) and torch.equal(last[0], state[n])
        assert all(torch.equal(x.grad[:, part], y.grad) for x, y in zip(a, b))


@pytest.mark.parametrize("kind", sorted(layers._layers.kinds()))
def test_layers_agree_with_the_cpu(kind):
    """Results and gradients of layers as they begin, float32 against float64 on the CPU."""
    torch.manual_seed(0)
    try:
        layer = layers.make(kind, 64, context=48)
    except (ValueError, NotImplementedError) as error:
        pytest.skip(str(error))
    x, cot = torch.randn(2, 40, 64), torch.randn(2, 40, 64)

    def run(device, dtype):
        layer.to(device, dtype).zero_grad()
        given = x.to(device, dtype).clone().requires_grad_()
        y = layer(given)
        y.backward(cot.to(device, dtype))
        named = {"y": y.detach(), "dx": given.grad,
                 **{"d" + n: p.grad for n, p in layer.named_parameters() if p.grad is not None}}
        return {n: z.double().cpu().clone() for n, z in named.items()}

    want = run("cpu", torch.float64)
    try:
        got = run(DEVICE, torch.float32)
    except NotImplementedError as error:
        if "no CUDA kernel" in str(error):
            pytest.skip(str(error))
        raise
    assert got.keys() == want.keys()
    off = {n: distance(got[n], y) for n, y in want.items() if n in ("y", "dx") or y.norm() > 1e-6}
    assert off["y"] < 1e-4 and all(far < 1e-3 for far in off.values()), off


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", laws.NAMES)
def test_known_calls_have_the_bits_of_python(name, dtype, monkeypatch):
    """Forward and backward, the first time and when the C function knows them."""
    take(dtype)
    top = torch_operators[name]
    if top.known is None:
        pytest.skip("no _fastcall: not built, or PyTorch is older than 2.10")
    values, _ = laws.sample(top.op, sizes=LARGE.get(name))
    given = [None if x is None else x.to(DEVICE) for x in cast(name, values, dtype)]
    leaves = [x.requires_grad_() for f, x in zip(top.op.inputs, given)
              if x is not None and f.partner is not None]

    def run():
        results = _call.call(top, given, tuple(numbers(name)), None, None, top.main)
        wanted = [results[i] for i in top.cots if top.main >> i & 1]
        grads = torch.autograd.grad(wanted, leaves, [torch.ones_like(y) for y in wanted],
                                    allow_unused=True)
        with torch.no_grad():
            again = _call.call(top, given, tuple(numbers(name)), None, None, top.main)
        return [y for y in (*results, *again, *grads) if y is not None]

    try:
        with monkeypatch.context() as patch:
            patch.setattr(top, "known", None)
            patch.setattr(top, "known_back", None)
            want = run()
    except NotImplementedError as error:
        if "no CUDA kernel" in str(error):
            pytest.skip(str(error))
        raise
    for turn in range(3):
        got = run()
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True)), turn


@on_gpu
def test_known_calls_keep_streams_graphs_and_autocast():
    q, k, v, g, beta = gated(T=64)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))

    def run():
        return ops.delta_net(q, k, v, beta, g, outputs=("o",)).o
    want = [run() for _ in range(2)][1]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.equal(run(), want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            got = run()
        got.zero_()
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(got, want)
    with torch.autocast("cuda", torch.bfloat16):
        assert run().dtype is torch.bfloat16
    assert torch.equal(run(), want)


# ---- streams, graphs, memory --------------------------------------------------------------------

@on_gpu
def test_work_keeps_the_order_of_the_current_stream():
    inputs = gated(T=256)
    want = gated_rule(*inputs)[0]
    side = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)    # what follows must wait for it
            late = [x * 1 for x in inputs]
            got = gated_rule(*late)[0] * 1
            for x in late:
                x.zero_()
        torch.cuda.synchronize()
        assert torch.equal(got, want)


@on_gpu
def test_memory_for_work_is_pytorchs():
    from mneme.torch import _device
    x = [x.requires_grad_() for x in gated(torch.bfloat16, B=4, T=2048, H=8, K=128, V=128)]
    torch.cuda.synchronize()
    context = _device.context(torch.cuda.current_device())
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    o, _ = gated_rule(*x)
    o.backward(o.detach())
    assert torch.cuda.max_memory_allocated() > 0
    assert context.bytes <= _device._KEEP
    assert context.bytes == sum(block.numel() for block in context.held.values())
    context.trim()
    assert context.bytes == 0 and not context.held
    assert torch.equal(gated_rule(*x)[0], o)


@on_gpu
def test_views_are_not_copied():
    q, k, v, g, beta = gated(torch.bfloat16, B=2, T=1024, H=8, K=128, V=128)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))    # else states grow to NaN
    assert ops.chunk_gated_delta_rule(q, k, v, g, beta)[0].isfinite().all()
    whole = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
    parts = [x.unflatten(-1, (8, 128)) for x in whole.split(1024, -1)]
    assert not any(x.is_contiguous() for x in parts)
    peaks = []
    for given in ((q, k, v), parts):
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        o = ops.chunk_gated_delta_rule(*given, g, beta)[0]
        peaks.append(torch.cuda.max_memory_allocated() - before)
        kept = o if given[0] is q else kept
        assert torch.equal(o, kept)
        o = None
    assert peaks[1] < peaks[0] + q.numel() * 2


@on_gpu
@pytest.mark.parametrize("name", laws.NAMES)
def test_graphs_replay_every_operator(name):
    top = torch_operators[name]
    values, _ = laws.sample(top.op)
    tensors = [None if x is None else x.cuda() for x in cast(name, values, torch.float32)]
    host = [None] * (1 + top.has_counts)

    def run():
        results = top.forward(*tensors, *host, *numbers(name), top.main)
        return results if isinstance(results, tuple) else (results,)

    try:
        want = [y.clone() for y in run()]
    except NotImplementedError as error:
        if "no CUDA kernel" in str(error):
            pytest.skip(str(error))
        raise
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for y in got:
        if y.numel():
            y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(got, want))


@on_gpu
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_a_graph_of_forward_and_backward(packed):
    inputs = [x.requires_grad_() for x in gated(torch.bfloat16, B=1, T=256)]
    how = dict(cu_seqlens=torch.tensor([0, 100, 256], device="cuda")) if packed else {}
    cot = torch.randn_like(inputs[2])

    def run():
        return torch.autograd.grad(gated_rule(*inputs, **how)[0], inputs, cot)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for seed in (5, 6):
        with torch.no_grad():
            for x, y in zip(inputs, gated(torch.bfloat16, B=1, T=256, seed=seed)):
                x.copy_(y)
        graph.replay()
        kept = [x.clone() for x in got]
        junk = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(8)]
        graph.replay()
        del junk
        want = run()
        assert all(torch.equal(x, y) for x, y in zip(kept, want))
        assert all(torch.equal(x, y) for x, y in zip(got, want))


@on_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_gpu():
    inputs = gated()
    want = gated_rule(*inputs)[0]
    got = gated_rule(*[x.to("cuda:1") for x in inputs])[0]
    assert torch.cuda.current_device() == 0 and torch.equal(got.cpu(), want.cpu())


# ---- what PyTorch does with operators -----------------------------------------------------------

@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile(mode):
    if DEVICE == "cpu" and mode != "default":
        pytest.skip("CUDA graphs need a GPU")
    torch._dynamo.reset()

    def run(*inputs):
        o, state = gated_rule(*inputs)
        return torch.tanh(o).sum() + state.sum()

    compiled = torch.compile(run, fullgraph=True, mode=mode)
    for step in range(3):
        a = [x.requires_grad_() for x in gated(seed=step)]
        b = [x.detach().clone().requires_grad_() for x in a]
        want = run(*a)
        want.backward()
        got = compiled(*b)
        got.backward()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
        for x, y in zip(a, b):
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-4)


def test_compile_a_layer():
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = layers.make("gdn", 64).to(DEVICE)
    x = torch.randn(2, 64, 64, device=DEVICE)
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-3, atol=1e-4)


def test_autocast():
    q, k, v, g, beta = gated()
    layer = torch.nn.Linear(64, 64, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        o, state = gated_rule(layer(q), k, v, g, beta)
        o.float().sum().backward()
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert layer.weight.grad.dtype == torch.float32 and layer.weight.grad.abs().sum() > 0
    want = gated_rule(layer(q), k, v, g, beta)[0]
    assert distance(o.detach().double(), want.detach().double()) < 2e-2


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    from torch.utils.checkpoint import checkpoint
    a = [x.requires_grad_() for x in gated()]
    b = [x.detach().clone().requires_grad_() for x in a]

    def run(*x):
        return gated_rule(*x)[0]
    run(*a).square().sum().backward()
    checkpoint(run, *b, use_reentrant=reentrant).square().sum().backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(a, b))


def test_float16_is_computed_in_float32():
    half = gated(torch.float16)
    o = gated_rule(*half)[0]
    want = gated_rule(*[x.float() for x in half])[0]
    assert o.dtype == torch.float16 and torch.equal(o, want.half())
    a = [x.clone().requires_grad_() for x in half]
    b = [x.float().requires_grad_() for x in half]
    gated_rule(*a)[0].float().square().sum().backward()
    gated_rule(*b)[0].half().float().square().sum().backward()
    assert all(torch.equal(x.grad, y.grad.half()) for x, y in zip(a, b))


@on_gpu
def test_float64_is_refused_with_a_sentence():
    with pytest.raises(NotImplementedError, match="f64 is for the CPU"):
        gated_rule(*[x.double() for x in gated()])


@on_gpu
def test_devices_are_not_mixed():
    q, k, v, g, beta = gated()
    with pytest.raises((RuntimeError, ValueError), match="cpu"):
        gated_rule(q, k.cpu(), v, g, beta)
