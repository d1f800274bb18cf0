"""mneme.torch.ops: registration, gradients, dtypes, compilation."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import mneme                                      # noqa: E402
from mneme import golden, ops as arrays           # noqa: E402
from mneme.torch import ops                       # noqa: E402
from mneme.torch._call import torch_operators     # noqa: E402
import laws                                       # noqa: E402
from test_golden import FILES                     # noqa: E402

torch.manual_seed(0)


def tensors_of(name, grad=True, **how):
    op = torch_operators[name].op
    values, cu = laws.sample(op, **how)
    out = []
    for field, x in zip(op.inputs, values):
        t = None if x is None else torch.tensor(x)
        out.append(t if t is None or not grad or field.partner is None else t.requires_grad_())
    return out, cu


def raw_arguments(name, outputs=None, **how):
    top = torch_operators[name]
    tensors, cu = tensors_of(name, **how)
    host = [None if cu is None else torch.tensor(cu)] + [None] * top.has_counts
    numbers = [p.value(name, p.default) for p in top.op.params]
    return (*tensors, *host, *numbers, top.main if outputs is None else outputs)


def symmetric(name, tensors):
    """Covariances count by their symmetric part: the differences must not leave it."""
    out = []
    for field, x in zip(torch_operators[name].op.inputs, tensors):
        if x is not None and field.law == "COVARIANCE":
            x = (x + x.transpose(-1, -2)) / 2
        out.append(x)
    return out


@pytest.mark.parametrize("optional", [True, False], ids=["all", "required"])
@pytest.mark.parametrize("name", laws.NAMES)
def test_opcheck(name, optional):
    torch.library.opcheck(torch_operators[name].forward, raw_arguments(name, optional=optional))


@pytest.mark.parametrize("name", [n for n in laws.NAMES if laws.packs(torch_operators[n].op)])
def test_opcheck_packed(name):
    torch.library.opcheck(torch_operators[name].forward, raw_arguments(name, packed=True))


@pytest.mark.parametrize("path", ["op", "eager"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("name", laws.NAMES)
def test_gradcheck(name, packed, path):
    """Every result with a cotangent against every input, float64, finite differences."""
    top = torch_operators[name]
    if packed and not laws.packs(top.op):
        pytest.skip("takes no sequences")
    arguments = raw_arguments(name, packed=packed)
    n = top.n
    outputs = [i for i in top.cots if top.main >> i & 1]
    where = [i for i, x in enumerate(arguments[:n]) if x is not None and x.requires_grad]

    def run(*inputs):
        given = list(arguments[:n])
        for i, x in zip(where, inputs):
            given[i] = x
        given = symmetric(name, given)
        call = top.forward if path == "op" else top.eager
        results = call(*given, *arguments[n:])
        results = results if isinstance(results, tuple) else (results,)
        return tuple(results[i] for i in outputs)

    inputs = tuple(arguments[i] for i in where)
    assert torch.autograd.gradcheck(run, inputs, eps=1e-6, atol=2e-6, rtol=2e-4, fast_mode=True)


@pytest.mark.parametrize("name", ["additive", "delta_net", "ccq_read"])
@pytest.mark.parametrize("form", [0, 1, 2], ids=["head", "token", "channel"])
def test_gradcheck_of_every_decay(name, form):
    tensors, _ = tensors_of(name, alternative=-1)
    top = torch_operators[name]
    at = next(i for i, f in enumerate(top.op.inputs) if f.decays)
    shape = [(2,), (2, 5, 2), (2, 5, 2, 4)][form]
    tensors[at] = (-torch.rand(shape, dtype=torch.float64)).requires_grad_()
    numbers = [p.value(name, p.default) for p in top.op.params]

    def run(g):
        given = list(tensors)
        given[at] = g
        return top.forward(*symmetric(name, given), None, *numbers, 1)[0]

    assert torch.autograd.gradcheck(run, (tensors[at],), fast_mode=True)


@pytest.mark.parametrize("dtype", ["f64", "f32"])
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_golden(path, dtype):
    def run(op, tensors, params, cu_seqlens, cotangents, context):
        given = {}
        for field in op.inputs:
            if field.name in tensors:
                x = torch.tensor(tensors[field.name])
                given[field.name] = x.requires_grad_() if field.partner is not None else x
        cu = None if cu_seqlens is None else torch.tensor(cu_seqlens).long()
        results = getattr(ops, op.name)(**given, **params, cu_seqlens=cu,
                                        outputs=[f.name for f in op.outputs])
        results = {f.name: y for f, y in zip(op.outputs, results)}
        grads = {}
        if cotangents and op.differentiable:
            names = [n for n in cotangents if n in results]
            wanted = [n for n, x in given.items() if x.requires_grad]
            found = torch.autograd.grad([results[n] for n in names], [given[n] for n in wanted],
                                        [torch.tensor(cotangents[n]) for n in names],
                                        allow_unused=True)
            grads = {n: None if g is None else g.numpy() for n, g in zip(wanted, found)}
        return {n: y.detach().numpy() for n, y in results.items()}, grads

    lines = golden.check(path, dtype, run=run)
    assert lines and all(line.passed for line in lines), [ln for ln in lines if not ln.passed]


def delta_inputs(dtype=torch.float32, B=2, T=24, H=2, K=8, V=8, HV=2):
    generator = torch.Generator().manual_seed(3)
    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    return (normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V),
            torch.nn.functional.logsigmoid(normal(B, T, HV)), normal(B, T, HV).sigmoid())


def naive_gated_delta_rule(q, k, v, g, beta, scale, state=None):
    """The recurrence, a token at a time, in torch."""
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    times = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(times, 2), k.repeat_interleave(times, 2)
    S = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]) if state is None else state
    outputs = []
    for t in range(q.shape[1]):
        S = S * g[:, t, :, None, None].exp()
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + k[:, t, :, :, None] * u[:, :, None, :]
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outputs, 1), S


@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
@pytest.mark.parametrize("HV", [2, 4])
def test_gated_delta_rule_is_its_recurrence(function, HV):
    inputs = [x.requires_grad_() for x in delta_inputs(torch.float64, HV=HV)]
    h0 = torch.randn(2, HV, 8, 8, dtype=torch.float64, requires_grad=True)
    q, k, v, g, beta = inputs
    got = getattr(ops, function)(q, k, v, g=g, beta=beta, initial_state=h0, output_final_state=True,
                                 use_qk_l2norm_in_kernel=True)
    want = naive_gated_delta_rule(q, k, v, g, beta, 8 ** -0.5, h0)
    cots = [torch.randn_like(y) for y in want]
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)
    mine = torch.autograd.grad(got, [*inputs, h0], cots)
    theirs = torch.autograd.grad(want, [*inputs, h0], cots)
    for x, y in zip(mine, theirs):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9)


def test_states_value_first_and_the_gate_inside():
    q, k, v, raw, beta = delta_inputs(torch.float64)
    A, dt = torch.randn(2, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    g = -A.exp() * torch.nn.functional.softplus(raw + dt)
    want = ops.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    got = ops.chunk_gated_delta_rule(q, k, v, raw, torch.logit(beta), output_final_state=True,
                                     state_v_first=True, use_gate_in_kernel=True, A_log=A,
                                     dt_bias=dt, use_beta_sigmoid_in_kernel=True)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1].transpose(-1, -2))
    more = ops.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=got[1], state_v_first=True,
                                      output_final_state=True)
    torch.testing.assert_close(more[0], ops.chunk_gated_delta_rule(q, k, v, g, beta,
                                                                   initial_state=want[1])[0])


def test_kda_reads_a_decay_per_channel():
    q, k, v, _, beta = delta_inputs(torch.float64)
    raw = torch.randn(2, 24, 2, 8, dtype=torch.float64)
    A, dt = torch.randn(2, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    o, _ = ops.chunk_kda(q, k, v, raw, beta, A_log=A, dt_bias=dt, use_gate_in_kernel=True)
    g = -A.exp()[:, None] * torch.nn.functional.softplus(raw + dt.view(2, 8))
    torch.testing.assert_close(o, ops.fused_recurrent_gated_delta_rule(q, k, v, gk=g, beta=beta)[0])
    bounded, _ = ops.chunk_kda(q, k, v, raw, beta, A_log=A, use_gate_in_kernel=True, safe_gate=True,
                               lower_bound=-5.0)
    g = -5.0 * torch.sigmoid(A.exp()[:, None] * raw)
    torch.testing.assert_close(bounded, ops.chunk_kda(q, k, v, g, beta)[0])


def test_sums_agree_with_one_another():
    q, k, v, g, _ = delta_inputs(torch.float64)
    by_token, state = ops.chunk_simple_gla(q, k, v, g, output_final_state=True)
    by_channel, same = ops.chunk_gla(q, k, v, g[..., None].expand(-1, -1, -1, 8),
                                     output_final_state=True)
    torch.testing.assert_close(by_token, by_channel)
    torch.testing.assert_close(state, same)
    gamma = torch.log1p(-torch.exp2(-5.0 - torch.arange(2, dtype=torch.float64)))
    torch.testing.assert_close(ops.chunk_retention(q, k, v)[0],
                               ops.chunk_simple_gla(q, k, v, g_gamma=gamma)[0])
    scores = torch.einsum("bthk,bshk->bhts", q, k).tril() * 8 ** -0.5
    plain = torch.einsum("bhts,bshv->bthv", scores, v)
    torch.testing.assert_close(ops.chunk_linear_attn(q, k, v, normalize=False)[0], plain)
    both = ops.chunk_linear_attn(q, k.abs(), v, output_final_state=True)
    z = k.abs().cumsum(1)
    raw = ops.chunk_linear_attn(q, k.abs(), v, normalize=False)[0]
    below = (q * z).sum(-1, keepdim=True) * 8 ** -0.5 + 1e-10
    torch.testing.assert_close(both[0], raw / below)
    assert both[1][1].shape == (2, 1, 2, 8)
    half = [x[:, :12] for x in (q, k.abs(), v)], [x[:, 12:] for x in (q, k.abs(), v)]
    _, first = ops.chunk_linear_attn(*half[0], output_final_state=True)
    torch.testing.assert_close(ops.chunk_linear_attn(*half[1], initial_state=first)[0],
                               both[0][:, 12:])


@pytest.mark.parametrize("on_tensor", [True, False])
def test_packed_has_the_bits_of_separate(on_tensor):
    q, k, v, g, beta = delta_inputs(B=1)
    cu = [0, 5, 6, 24]
    given = torch.tensor(cu, dtype=torch.int32) if on_tensor else torch.tensor(cu)
    h0 = torch.randn(3, 2, 8, 8)
    o, state = ops.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=h0, cu_seqlens=given,
                                          output_final_state=True, use_qk_l2norm_in_kernel=True)
    for n in range(3):
        part = slice(cu[n], cu[n + 1])
        one = ops.chunk_gated_delta_rule(*(x[:, part] for x in (q, k, v, g, beta)),
                                         initial_state=h0[n:n + 1], output_final_state=True,
                                         use_qk_l2norm_in_kernel=True)
        assert torch.equal(one[0], o[:, part]) and torch.equal(one[1][0], state[n])


@pytest.mark.parametrize("change, error, sentence", [
    (dict(cu_seqlens=torch.tensor([0, 24])), ValueError, "batch size is expected to be 1 rather"),
    (dict(head_first=True), DeprecationWarning, "head_first has been removed"),
    (dict(use_gate_in_kernel=True), ValueError, "A_log must be provided"),
    (dict(allow_neg_eigval=True), ValueError, "requires `use_beta_sigmoid_in_kernel=True`"),
    (dict(heads_first=True), TypeError, "unexpected keyword argument 'heads_first'"),
    (dict(v=torch.zeros(2, 24, 3, 8)), ValueError, "evenly divisible"),
    (dict(k=torch.zeros(2, 24, 1, 8)), ValueError, "same number of heads"),
    (dict(beta=torch.zeros(2, 24)), ValueError, r"beta has shape \(2, 24\), expected \(B, T, H\)"),
])
def test_mistakes_are_named(change, error, sentence):
    q, k, v, g, beta = delta_inputs()
    with pytest.raises(error, match=sentence):
        ops.chunk_gated_delta_rule(**{**dict(q=q, k=k, v=v, g=g, beta=beta), **change})


def test_states_must_be_as_many_as_sequences():
    q, k, v, g, beta = delta_inputs(B=1)
    with pytest.raises(ValueError, match="number of initial states is expected"):
        ops.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=torch.zeros(1, 2, 8, 8),
                                   cu_seqlens=torch.tensor([0, 4, 24]))


def test_results_are_those_of_numpy():
    inputs = delta_inputs()
    o, state = ops.delta_net(*[inputs[i] for i in (0, 1, 2, 4, 3)])
    want = arrays.delta_net(*[inputs[i].numpy() for i in (0, 1, 2, 4, 3)])
    assert np.array_equal(o.numpy(), want.o) and np.array_equal(state.numpy(), want.state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_computed_in_float32(dtype):
    inputs = delta_inputs(dtype)
    half = [x.requires_grad_() for x in inputs]
    wide = [x.detach().float().requires_grad_() for x in inputs]
    o, state = ops.chunk_gated_delta_rule(*half, output_final_state=True)
    want, same = ops.chunk_gated_delta_rule(*wide, output_final_state=True)
    assert o.dtype == dtype and state.dtype == torch.float32
    assert torch.equal(o, want.to(dtype)) and torch.equal(state, same)
    cot = torch.randn_like(want).to(dtype)
    grads = torch.autograd.grad(o, half, cot)
    for mine, theirs in zip(grads, torch.autograd.grad(want, wide, cot.float())):
        assert mine.dtype == dtype and torch.equal(mine, theirs.to(dtype))


def test_autocast():
    q, k, v, g, beta = delta_inputs()
    layer = torch.nn.Linear(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        o, state = ops.chunk_gated_delta_rule(layer(q), k, v, g, beta, output_final_state=True)
        o.float().sum().backward()
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert layer.weight.grad.dtype == torch.float32 and layer.weight.grad.abs().sum() > 0


def test_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint
    for reentrant in (False, True):
        a = [x.requires_grad_() for x in delta_inputs()]
        b = [x.detach().clone().requires_grad_() for x in a]
        def run(*x):
            return ops.chunk_gated_delta_rule(*x)[0]
        run(*a).square().sum().backward()
        checkpoint(run, *b, use_reentrant=reentrant).square().sum().backward()
        assert all(torch.equal(x.grad, y.grad) for x, y in zip(a, b))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_makes_one_graph(dynamic):
    torch._dynamo.reset()

    def run(q, k, v, g, beta):
        o, state = ops.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True,
                                              use_qk_l2norm_in_kernel=True)
        return torch.tanh(o).sum() + state.sum()

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for T in (24, 17) if dynamic else (24,):
        a = [x.requires_grad_() for x in delta_inputs(T=T)]
        b = [x.detach().clone().requires_grad_() for x in a]
        want, got = run(*a), compiled(*b)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        want.backward()
        got.backward()
        for x, y in zip(a, b):
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-6, atol=1e-7)


def test_compile_packed():
    torch._dynamo.reset()
    q, k, v, g, beta = delta_inputs(B=1)
    cu = torch.tensor([0, 5, 24])

    def run(*x):
        return ops.chunk_gated_delta_rule(*x, cu_seqlens=cu)[0]

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, g, beta), run(q, k, v, g, beta))


def test_functional_gradients():
    q, k, v, g, beta = delta_inputs(torch.float64)
    def loss(v):
        return ops.chunk_gated_delta_rule(q, k, v, g, beta)[0].square().sum()
    leaf = v.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(torch.func.grad(loss)(v), leaf.grad)


def test_no_second_derivative():
    q, k, v, g, beta = (x.requires_grad_() for x in delta_inputs())
    o = ops.chunk_gated_delta_rule(q, k, v, g, beta)[0]
    with pytest.raises((NotImplementedError, RuntimeError), match="first derivative only"):
        first, = torch.autograd.grad(o.sum(), q, create_graph=True)
        first.sum().backward()


def test_views_are_not_copied_and_give_the_same_bits():
    q, k, v, g, beta = delta_inputs()
    packed = torch.cat([q, k], -1)
    a, b = packed.split(8, -1)
    assert not a.is_contiguous()
    want = ops.chunk_gated_delta_rule(q, k, v, g, beta)[0]
    assert torch.equal(ops.chunk_gated_delta_rule(a, b, v, g, beta)[0], want)
    swapped = v.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(ops.chunk_gated_delta_rule(q, k, swapped, g, beta)[0], want)


def test_a_gradient_of_some_inputs_only():
    q, k, v, g, beta = delta_inputs()
    v.requires_grad_()
    all_of = [x.detach().clone().requires_grad_() for x in (q, k, v, g, beta)]
    ops.chunk_gated_delta_rule(q, k, v, g, beta)[0].sum().backward()
    ops.chunk_gated_delta_rule(*all_of)[0].sum().backward()
    assert torch.equal(v.grad, all_of[2].grad) and q.grad is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_is_asked_for_in_vain():
    with pytest.raises(mneme.Error, match="CUDA|GPU"):
        mneme.Context(device="cuda:0")


def test_the_beliefs_tell_variances():
    B, T, H, K, V, G = 1, 6, 2, 4, 4, 2
    la = -torch.rand(B, T, H, K)
    q, k = torch.randn(2, B, T, H, K).unbind(0)
    args = (q, k, torch.randn(B, T, H, V), la, torch.rand(B, T, H), torch.rand(B, T, H, G))
    o, variance, (M, P) = ops.bayes_filter(*args, return_variance=True, output_final_state=True)
    assert o.shape == (B, T, H, V) and variance.shape == (B, T, H, G) and (variance > 0).all()
    torch.testing.assert_close(variance[:, -1], torch.einsum("bhk,bhgkl,bhl->bhg", q[:, -1], P,
                                                             q[:, -1]), rtol=1e-4, atol=1e-5)
    more, (M2, _) = ops.bayes_filter(*args, initial_state=(M, P), output_final_state=True)
    assert not torch.equal(more, o) and M2.shape == M.shape


def test_states_turn_under_both_names():
    q, k, v, g, beta = delta_inputs(torch.float64)
    want = ops.chunk_retention(q, k, v, output_final_state=True)[1].transpose(-1, -2)
    for how in (dict(state_v_first=True), dict(transpose_state_layout=True)):
        torch.testing.assert_close(ops.fused_recurrent_retention(
            q, k, v, output_final_state=True, **how)[1], want)
    for function, more in ((ops.chunk_retention, {}), (ops.fused_recurrent_gla, dict(gk=None)),
                           (ops.chunk_gated_delta_rule, dict(g=g, beta=beta))):
        with pytest.raises(ValueError, match="old name of `state_v_first`"):
            function(q, k, v, state_v_first=True, transpose_state_layout=True, **more)
