"""The functions of flash-linear-attention in mneme.torch.ops against their recurrences, a token at a
time in torch, forward and backward in float64; and, where that package is, their signatures."""

import importlib
import inspect
import warnings

import pytest

torch = pytest.importorskip("torch")

from mneme.torch import fla as exchange, ops      # noqa: E402

B, T, H, K, V = 2, 9, 2, 4, 3


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)),
                       dtype=torch.float64).requires_grad_()


def decays(*shape, seed=7):
    g = torch.nn.functional.logsigmoid(normal(*shape, seed=seed)).detach()
    return g.requires_grad_()


def agree(got, want, inputs):
    """Results, and gradients of all inputs for random cotangents."""
    cots = [torch.randn_like(y) for y in want]
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)
    mine = torch.autograd.grad(got, inputs, cots, retain_graph=True)
    theirs = torch.autograd.grad(want, inputs, cots, retain_graph=True)
    for x, y in zip(mine, theirs):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9)


def repeated(x, heads):
    return x.repeat_interleave(heads // x.shape[2], 2)


def over_time(step, S, n):
    out = []
    for t in range(n):
        S, o = step(t, S)
        out.append(o)
    return torch.stack(out, 1), S


def read(S, q, t):
    return torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * K ** -0.5


def outer(k, v):
    return k.unsqueeze(-1) * v.unsqueeze(-2)


def dplr(q, k, v, a, b, g, S):
    def step(t, S):
        S = (S * g[:, t].exp().unsqueeze(-1) + outer(b[:, t], torch.einsum(
            "bhkv,bhk->bhv", S, a[:, t])) + outer(k[:, t], v[:, t]))
        return S, read(S, q, t)
    return over_time(step, S, q.shape[1])


def dplr_inputs():
    q, k, a, b = (0.5 * normal(B, T, H, K, seed=s).detach() for s in range(4))
    given = [x.requires_grad_() for x in (q, k, normal(B, T, H, V).detach(), a, 0.5 * b)]
    return [*given, decays(B, T, H, K)], normal(B, H, K, V)


def test_dplr_and_its_names():
    (q, k, v, a, b, g), S = dplr_inputs()
    every = [q, k, v, a, b, g, S]
    want = dplr(q, k, v, a, b, g, S)
    agree(ops.chunk_dplr_delta_rule(q, k, v, a, b, g, initial_state=S, output_final_state=True),
          want, every)
    agree(ops.fused_recurrent_rwkv7(q, g, k, v, a, b, initial_state=S), want, every)
    agree(ops.chunk_rwkv7(q, g, k, v, a, b, scale=K ** -0.5, initial_state=S,
                          output_final_state=True), want, every)
    agree(ops.fused_mul_recurrent_rwkv7(q, g, k, v, a, b, K ** -0.5, S, True),
          dplr(q, k, v, -a, a * b, g, S), every)
    for f in (ops.chunk_iplr_delta_rule, ops.fused_recurrent_iplr_delta_rule):
        agree(f(q, k, v, a, b, initial_state=S, output_final_state=True),
              dplr(q, k, v, a, b, 0 * g, S), [q, k, v, a, b, S])


@pytest.mark.parametrize("HV", [H, 2 * H])
def test_comba(HV):
    q, k, p = (0.5 * normal(B, T, H, K, seed=s) for s in range(3))
    v, S = normal(B, T, HV, V), normal(B, HV, K, V)
    g, beta = decays(B, T, HV), normal(B, T, HV).sigmoid()
    Q, k1, P = (repeated(x, HV) for x in (q, k, p))

    def step(t, S):
        u = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, P[:, t])
        S = S * g[:, t, :, None, None].exp() + outer(k1[:, t], u * beta[:, t].unsqueeze(-1))
        return S, read(S, Q, t)

    want = over_time(step, S, T)
    how = dict(initial_state=S, output_final_state=True)
    agree(ops.chunk_comba(q, k, v, p, g, beta, **how), want, [q, k, v, p, g, beta, S])
    agree(ops.fused_recurrent_comba(q, k, p, v, g, beta, **how), want, [q, k, v, p, g, beta, S])


@pytest.mark.parametrize("gated", [True, False])
def test_gated_delta_product(gated):
    n = 3
    q, k = normal(B, T, H, K), 0.5 * normal(B, T * n, H, K)
    v, beta, S = normal(B, T * n, H, V), normal(B, T * n, H).sigmoid(), normal(B, H, K, V)
    g = decays(B, T, H) if gated else None

    def step(t, S):
        S = S * g[:, t, :, None, None].exp() if gated else S
        for j in range(t * n, t * n + n):
            u = v[:, j] - torch.einsum("bhkv,bhk->bhv", S, k[:, j])
            S = S + outer(k[:, j], u * beta[:, j].unsqueeze(-1))
        return S, read(S, q, t)

    inputs = [q, k, v, beta, S] + ([g] if gated else [])
    got = ops.chunk_gated_delta_product(q, k, v, g, beta, n, initial_state=S,
                                        output_final_state=True)
    agree(got, over_time(step, S, T), inputs)
    with pytest.raises(ValueError, match=r"k has shape .* expected \[B, T \* num_householder"):
        ops.chunk_gated_delta_product(q, k[:, :T], v, g, beta, n)


def slots(q, k, v, s, g, S):
    """The two memories of gated slot attention."""
    def first(t, M):
        M = M * g[:, t].exp().unsqueeze(-2) + outer(k[:, t], s[:, t])
        return M, read(M, q, t)

    def second(t, M):
        M = M * g[:, t].exp().unsqueeze(-1) + outer(s[:, t], v[:, t])
        return M, torch.einsum("bhmv,bhm->bhv", M, weights[:, t])

    scores, hk = over_time(first, S[0], q.shape[1])
    weights = scores.softmax(-1)
    o, hv = over_time(second, S[1], q.shape[1])
    return o, hk, hv


@pytest.mark.parametrize("HQ", [H, 2 * H])
def test_gated_slots(HQ):
    M = 5
    q, k, v, s = normal(B, T, HQ, K), normal(B, T, H, K), normal(B, T, H, V), normal(B, T, H, M)
    g, S = decays(B, T, H, M), (normal(B, H, K, M), normal(B, H, M, V))
    want = slots(q, *(repeated(x, HQ) for x in (k, v, s, g)),
                 [x.repeat_interleave(HQ // H, 1) for x in S])
    o, (hk, hv) = ops.chunk_gsa(q, k, v, s, g, initial_state=S, output_final_state=True)
    times = HQ // H
    agree((o, hk, hv), (want[0], want[1][:, ::times], want[2][:, ::times]), [q, k, v, s, g, *S])
    assert ops.fused_recurrent_gsa(q, k, v, s, g)[1] == (None, None)


def test_slots_without_gates_are_bounded_attention():
    M = 5
    q, k, v, s = (normal(1, T, H, n) for n in (K, K, V, M))
    z = s.logcumsumexp(1)
    g = torch.cat([z[:, :1], z[:, :-1]], 1) - z
    zero = torch.zeros(1, H, K, M, dtype=torch.float64), torch.zeros(1, H, M, V,
                                                                     dtype=torch.float64)
    want = slots(q, k, v, (s - z).exp(), g, zero)[0]
    agree([ops.chunk_gsa(q, k, v, s)[0]], [want], [q, k, v, s])
    packed = ops.chunk_gsa(q, k, v, s, cu_seqlens=[0, 4, T])[0]
    alone = ops.chunk_gsa(*(x[:, 4:] for x in (q, k, v, s)))[0]
    assert torch.equal(packed[:, 4:], alone)


def test_hgrn():
    x, g, h = normal(B, T, 6), decays(B, T, 6), normal(B, 6)
    out, S = [], h
    for t in range(T):
        S = S * g[:, t].exp() + x[:, t]
        out.append(S)
    for f in (ops.chunk_hgrn, ops.fused_recurrent_hgrn):
        agree(f(x, g, h, True), (torch.stack(out, 1), S), [x, g, h])


@pytest.mark.parametrize("gk", [True, False])
def test_decays_of_value_channels(gk):
    q, k, v, S = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V), normal(B, H, K, V)
    a, b = decays(B, T, H, K) if gk else None, decays(B, T, H, V, seed=9)

    def step(t, S):
        S = S * a[:, t].exp().unsqueeze(-1) if gk else S
        S = S * b[:, t].exp().unsqueeze(-2) + outer(k[:, t], v[:, t])
        return S, read(S, q, t)

    inputs = [q, k, v, b, S] + ([a] if gk else [])
    agree(ops.fused_recurrent_gla(q, k, v, a, b, initial_state=S, output_final_state=True),
          over_time(step, S, T), inputs)


def test_delta_rule_of_value_channels():
    q, k = normal(B, T, H, K), 0.5 * normal(B, T, H, K)
    v, S, beta = normal(B, T, 2 * H, V), normal(B, 2 * H, K, V), normal(B, T, 2 * H, V).sigmoid()
    g, gv = decays(B, T, 2 * H), decays(B, T, 2 * H, V, seed=3)
    Q, k1 = repeated(q, 2 * H), repeated(k, 2 * H)

    def step(t, S):
        S = S * (g[:, t].unsqueeze(-1) + gv[:, t]).exp().unsqueeze(-2)
        u = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k1[:, t])
        S = S + outer(k1[:, t], u * beta[:, t])
        return S, read(S, Q, t)

    got = ops.fused_recurrent_gated_delta_rule(q, k, v, g, gv=gv, beta=beta, initial_state=S,
                                               output_final_state=True)
    agree(got, over_time(step, S, T), [q, k, v, g, gv, beta, S])


def test_gdn2_and_its_gates():
    q, k = normal(B, T, H, K), 0.5 * normal(B, T, H, K)
    v, b, w = normal(B, T, H, V), normal(B, T, H, K).sigmoid(), normal(B, T, H, V).sigmoid()
    raw, A, dt, S = normal(B, T, H, K), normal(H), normal(H * K), normal(B, H, K, V)
    g = -A.exp()[:, None] * torch.nn.functional.softplus(raw + dt.view(H, K))

    def step(t, S):
        S = S * g[:, t].exp().unsqueeze(-1)
        u = w[:, t] * v[:, t] - torch.einsum("bhkv,bhk->bhv", S, b[:, t] * k[:, t])
        S = S + outer(k[:, t], u)
        return S, read(S, q, t)

    want, every = over_time(step, S, T), [q, k, v, raw, b, w, A, dt, S]
    how = dict(initial_state=S, output_final_state=True, use_gate_in_kernel=True, A_log=A,
               dt_bias=dt)
    agree(ops.chunk_gdn2(q, k, v, raw, b, w, **how), want, every)
    agree(ops.fused_recurrent_gdn2(q, k, v, raw, b, w, **how), want, every)


@pytest.mark.parametrize("packed", [False, True])
def test_backwards_in_time(packed):
    n = 1 if packed else B
    q, k, v, g = normal(n, T, H, K), normal(n, T, H, K), normal(n, T, H, V), decays(n, T, H, K)
    cu = [0, 4, T] if packed else None
    S = normal(2, H, K, V)
    o, last = ops.fused_recurrent_gla(q, k, v, g, initial_state=S, output_final_state=True,
                                      reverse=True, cu_seqlens=cu)
    for i in range(2):
        part = (slice(0, 1), slice(cu[i], cu[i + 1])) if packed else (slice(i, i + 1), slice(None))
        one, state = ops.chunk_gla(*(x[part].flip(1) for x in (q, k, v, g)),
                                   initial_state=S[i:i + 1], output_final_state=True)
        assert torch.equal(one.flip(1), o[part]) and torch.equal(state[0], last[i])


def test_attention_and_based():
    q, k, v = normal(B, T, 4, K), normal(B, T, H, K), normal(B, T, H, V)
    scores = torch.einsum("bthk,bshk->bhts", q, repeated(k, 4)) * K ** -0.5
    ahead = torch.ones(T, T, dtype=torch.bool).triu(1)
    old = torch.ones(T, T, dtype=torch.bool).tril(-3)
    for mask, window in ((ahead, None), (ahead | old, 3)):
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        want = torch.einsum("bhts,bshv->bthv", weights, repeated(v, 4))
        agree([ops.parallel_attn(q, k, v, window_size=window)], [want], [q, k, v])
    q = normal(B, T, H, K)
    s = torch.einsum("bthk,bshk->bhts", q, k) * 0.3
    s = (1 + s + s * s / 2).masked_fill(ahead, 0.0)
    want = torch.einsum("bhts,bshv->bthv", s, v) / (s.sum(-1).transpose(1, 2)[..., None] + 1e-6)
    agree([ops.parallel_based(q, k, v, scale=0.3)], [want], [q, k, v])
    agree([ops.fused_chunk_based(q, k, v, scale=0.3)], [want], [q, k, v])


# ---- signatures ---------------------------------------------------------------------------------

NAMES = [(place, name) for place, names in exchange.PLACES.items() for name in names]


@pytest.mark.parametrize("place, name", NAMES, ids=[name for _, name in NAMES])
def test_signatures_are_theirs(place, name):
    """Arguments in their order, with their names and defaults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("fla.ops." + place,
                                     reason="flash-linear-attention is not installed")
        importlib.import_module("fla.ops." + place)
    if not hasattr(module, name):
        pytest.skip("this version of flash-linear-attention has no such function")
    theirs = inspect.signature(inspect.unwrap(getattr(module, name))).parameters
    ours = inspect.signature(getattr(ops, name)).parameters
    named = [p for p in theirs.values() if p.kind is not p.VAR_KEYWORD]
    if not named:
        pytest.skip("theirs says **kwargs only")
    assert list(ours)[:len(named)] == [p.name for p in named]
    for p in named:
        assert ours[p.name].default == p.default or p.default is p.empty, p.name
