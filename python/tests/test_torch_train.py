"""What PyTorch does with modules of mneme.torch.nn when it trains them: several processes, fully
sharded parameters, activation checkpointing, compiled graphs, autocast."""

import inspect
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from mneme.torch import nn as mnn             # noqa: E402
import worker_ranks                           # noqa: E402

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def alone():
    """Losses and parameters of one process with the whole batch."""
    model = worker_ranks.make_model()
    losses = worker_ranks.train(model, model.parameters(), lambda tokens: tokens)
    return losses, dict(model.named_parameters())


def takes_ignored_parameters():
    from torch.distributed import fsdp
    return (hasattr(fsdp, "fully_shard")
            and "ignored_params" in inspect.signature(fsdp.fully_shard).parameters)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_as_one(kind, alone, tmp_path):
    """Gradients are sums over the ranks in another order: equal to rounding, not to the bit."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    if kind == "fsdp" and not takes_ignored_parameters():
        pytest.skip("this PyTorch has no fully_shard with ignored_params (2.7 and newer)")
    if kind == "fsdp" and torch.__version__.startswith("2.8."):
        pytest.skip("fully_shard of PyTorch 2.8 over gloo sums gradients where it should average")
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    workers = [subprocess.Popen([sys.executable, HERE / "worker_ranks.py", kind, str(rank), "2",
                                 tmp_path], env=env, stderr=subprocess.PIPE, text=True)
               for rank in range(2)]
    said = [worker.communicate(timeout=240)[1] for worker in workers]
    assert all(worker.returncode == 0 for worker in workers), "\n".join(said)[-3000:]
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    losses, parameters = alone
    assert found["losses"] == pytest.approx(losses, rel=2e-5)
    assert found["parameters"].keys() == parameters.keys()
    for name, p in parameters.items():
        torch.testing.assert_close(found["parameters"][name], p.detach(), rtol=1e-3, atol=2e-5,
                                   msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["gdn", "kda", "kla", "bayes", "attention", "mamba2"])
def test_activation_checkpointing_changes_no_bit(name, reentrant):
    from torch.utils.checkpoint import checkpoint
    torch.manual_seed(0)
    layer = mnn.make(name, 32, context=64)
    x = torch.randn(2, 40, 32)
    cot = torch.randn(2, 40, 32)

    def gradients(run):
        given = x.clone().requires_grad_()
        layer.zero_grad()
        y = run(given)
        y.backward(cot)
        return [y.detach(), given.grad] + [p.grad for p in layer.parameters()]

    want = gradients(layer)
    got = gradients(lambda given: checkpoint(layer, given, use_reentrant=reentrant))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")),
                    reason="inductor needs a C++ compiler")
def test_inductor_trains_a_layer_as_one_graph(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = mnn.make("gdn", 32)
    compiled = torch.compile(layer, fullgraph=True)
    x, cot = torch.randn(2, 24, 32), torch.randn(2, 24, 32)
    given = [x.clone().requires_grad_() for _ in range(2)]
    want = layer(given[0])
    want.backward(cot)
    grads = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    got = compiled(given[1])
    got.backward(cot)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(given[1].grad, given[0].grad, rtol=1e-3, atol=1e-5)
    for p, grad in zip(layer.parameters(), grads):
        torch.testing.assert_close(p.grad, grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["gdn", "kla", "bayes", "attention"])
def test_autocast_of_a_layer(name):
    """Products in bfloat16, gradients of float32 parameters in float32, results near float32's."""
    torch.manual_seed(0)
    layer = mnn.make(name, 32, context=64)
    x = torch.randn(2, 24, 32)
    want = layer(x).detach()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype is torch.bfloat16
    assert (y.float() - want).norm() < 0.05 * want.norm()
    y.float().square().sum().backward()
    assert all(p.grad is None or p.grad.dtype is torch.float32 for p in layer.parameters())
    assert sum(p.grad.norm() for p in layer.parameters() if p.grad is not None) > 0
