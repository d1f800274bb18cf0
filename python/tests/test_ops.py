"""Operators on numpy arrays."""

import threading

import numpy as np
import pytest

import mneme
from mneme import _library, ops
from mneme._operators import operators


def inputs(seed=0, B=2, T=9, H=3, K=8, V=5, dtype=np.float32):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, B, T, H, K)).astype(dtype)
    v = rng.standard_normal((B, T, H, V)).astype(dtype)
    return q, k / np.linalg.norm(k, axis=-1, keepdims=True), v


def test_every_operator_of_the_library_is_here():
    header = (_library.pathlib.Path(__file__).parents[2] / "include/mneme.h").read_text()
    table = header.split("#define MN_OPS(OP)")[1].split("#define")[0]
    names = [part.split(")")[0] for part in table.split("OP(")[1:]]
    assert names == list(operators()) == ops.__all__
    assert all(getattr(ops, name).__doc__ for name in names)


def test_additive_is_its_equation():
    q, k, v = inputs()
    g = -np.abs(np.random.default_rng(1).standard_normal((2, 9, 3))).astype(np.float32)
    o, state = ops.additive(q, k, v, g, scale=0.5)
    S = np.zeros((2, 3, 8, 5))
    for t in range(9):
        S = np.exp(g[:, t])[..., None, None] * S + k[:, t, :, :, None] * v[:, t, :, None, :]
        np.testing.assert_allclose(o[:, t], 0.5 * np.einsum("bhkv,bhk->bhv", S, q[:, t]), rtol=2e-4,
                                   atol=2e-5)
    np.testing.assert_allclose(state, S, rtol=2e-4, atol=2e-5)


def test_gradient_is_that_of_finite_differences():
    q, k, v = inputs(dtype=np.float64)
    beta = np.random.default_rng(2).uniform(0.1, 0.9, (2, 9, 3))
    do = np.random.default_rng(3).standard_normal(v.shape)
    grads = ops.delta_net.backward(q, k, v, beta, cotangents={"o": do})
    for name, x in (("q", q), ("k", k), ("v", v), ("beta", beta)):
        step = 1e-6 * np.random.default_rng(4).standard_normal(x.shape)
        arguments = {"q": q, "k": k, "v": v, "beta": beta}
        above = ops.delta_net(**{**arguments, name: x + step}).o
        below = ops.delta_net(**{**arguments, name: x - step}).o
        slope = np.sum(do * (above - below)) / 2
        assert abs(slope - np.sum(getattr(grads, name) * step)) < 1e-7 * abs(slope) + 1e-12


def test_views_with_strides_give_the_same_bits():
    q, k, v = inputs()
    packed = np.concatenate([q, k], -1)
    wide = np.ascontiguousarray(v.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    assert not packed[..., :8].flags.c_contiguous and not wide.flags.c_contiguous
    got = ops.additive(packed[..., :8], packed[..., 8:], wide)
    want = ops.additive(q, k, v)
    assert np.array_equal(got.o, want.o) and np.array_equal(got.state, want.state)
    backwards = ops.additive(q[:, ::-1], k[..., ::-1], v)
    plain = ops.additive(q[:, ::-1].copy(), k[..., ::-1].copy(), v)
    assert np.array_equal(backwards.o, plain.o)


def test_packed_gives_the_bits_of_separate_runs():
    q, k, v = inputs(B=1, T=20)
    beta = np.full((1, 20, 3), 0.5, np.float32)
    cu = [0, 7, 8, 20]
    o, state = ops.delta_net(q, k, v, beta, cu_seqlens=cu)
    for n in range(3):
        part = slice(cu[n], cu[n + 1])
        one = ops.delta_net(q[:, part], k[:, part], v[:, part], beta[:, part])
        assert np.array_equal(one.o, o[:, part]) and np.array_equal(one.state[0], state[n])


def test_state_goes_on_where_it_was():
    q, k, v = inputs()
    whole = ops.additive(q, k, v)
    first = ops.additive(q[:, :4], k[:, :4], v[:, :4])
    rest = ops.additive(q[:, 4:], k[:, 4:], v[:, 4:], state0=first.state)
    np.testing.assert_allclose(rest.o, whole.o[:, 4:], rtol=1e-5, atol=1e-6)


def test_the_same_bits_at_any_number_of_threads():
    q, k, v = inputs(T=300)
    a = ops.additive(q, k, v, context=mneme.Context(threads=1))
    b = ops.additive(q, k, v, context=mneme.Context(threads=3))
    assert np.array_equal(a.o, b.o)


def test_targets_may_be_whole_numbers():
    logits = np.random.default_rng(0).standard_normal((4, 6, 10)).astype(np.float32)
    target = np.random.default_rng(1).integers(0, 10, (4, 6))
    target[0, 0] = -100
    loss = ops.cross_entropy(logits, target)
    lse = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    nll = lse - np.take_along_axis(logits, np.maximum(target, 0)[..., None], -1)[..., 0]
    assert loss == pytest.approx(nll[target >= 0].mean(), rel=1e-6)
    both = ops.cross_entropy(logits, target, outputs=("loss", "nll"))
    assert both.nll.shape == (4, 6) and both.nll[0, 0] == 0


def test_numbers_have_defaults_and_choices():
    x = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    root = ops.l2_norm(x, kind="root", eps=1.0)
    np.testing.assert_allclose(root, x / np.sqrt((x * x).sum(-1, keepdims=True) + 1), rtol=1e-5)
    with pytest.raises(ValueError, match="kind is 'sum', not one of max, root"):
        ops.l2_norm(x, kind="sum")


@pytest.mark.parametrize("change, sentence", [
    (dict(k=np.zeros((2, 9, 3, 7))), r"additive: k has shape \(2, 9, 3, 7\), expected "
                                     r"\(B, T, J, K\) with K = 8 as in q"),
    (dict(v=np.zeros((2, 9, 3))), r"v has shape \(2, 9, 3\), expected \(B, T, H, V\)"),
    (dict(k=None), r"k is missing, it has shape \(B, T, J, K\)"),
    (dict(g=np.ones((2, 9, 3))), "g holds a value above 0 or NaN"),
    (dict(state0=np.zeros((3, 3, 8, 5))), r"state0 has shape .* with N = 2"),
    (dict(cu_seqlens=[0, 9]), "cu_seqlens needs B = 1"),
    (dict(outputs=["y"]), "additive has no result 'y'; it has o, state"),
    (dict(q=np.array("text")), "q holds .*, not numbers"),
])
def test_mistakes_are_named(change, sentence):
    q, k, v = inputs()
    with pytest.raises((ValueError, TypeError), match=sentence):
        ops.additive(**{**dict(q=q, k=k, v=v), **change})


def test_errors_have_the_status_of_the_library():
    with pytest.raises(mneme.Error) as caught:
        mneme.Context(target="avx1024")
    assert caught.value.status == "bad argument" and isinstance(caught.value, ValueError)
    q, k, v = inputs()
    with pytest.raises(ValueError, match="no cotangent 'q'"):
        ops.additive.backward(q, k, v, cotangents={"q": q})


def test_without_a_gpu_the_reason_is_told():
    try:
        mneme.Context(device="cuda:99")
    except mneme.Error as error:
        assert any(word in str(error) for word in ("CUDA", "GPU", "NVIDIA"))
    else:
        pytest.fail("there is no hundredth GPU")


def test_threads_have_contexts_of_their_own():
    q, k, v = inputs(T=200)
    want, got = ops.additive(q, k, v).o, [None] * 4

    def run(i):
        for _ in range(5):
            got[i] = ops.additive(q, k, v).o

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(g, want) for g in got)


def test_a_forked_process_computes():
    import multiprocessing
    q, k, v = inputs(T=64)
    ops.additive(q, k, v)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        o = pool.apply_async(_run_in_child, (q, k, v)).get(60)
    assert np.array_equal(o, ops.additive(q, k, v).o)


def _run_in_child(q, k, v):
    return ops.additive(q, k, v).o
