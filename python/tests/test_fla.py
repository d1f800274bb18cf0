"""Where flash-linear-attention is installed: our operators in its modules, its folders here, ours
there. Without a GPU its own kernels do not run, ours do."""

import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    models = pytest.importorskip("fla.models", reason="flash-linear-attention is not installed")

import mneme                                   # noqa: E402
import mneme.torch.fla as exchange             # noqa: E402

TOKENS = torch.arange(70)[None] * 7 % 97


def swiglu(x, y):
    return torch.nn.functional.silu(x) * y


@pytest.fixture
def exchanged(monkeypatch):
    names = exchange.install()
    import fla.modules.mlp
    monkeypatch.setattr(fla.modules.mlp, "swiglu", swiglu)
    yield names
    exchange.uninstall()


PAIRS = {
    "gated_deltanet": ("GatedDeltaNet", dict(head_dim=16, num_heads=2, expand_v=2)),
    "delta_net": ("DeltaNet", dict(num_heads=2)),
    "kda": ("KDA", dict(head_dim=16, num_heads=2)),
    "gla": ("GLA", dict(num_heads=2)),
    "linear_attn": ("LinearAttention", dict(num_heads=2)),
    "mesa_net": ("MesaNet", dict(head_dim=16, num_heads=2)),
}


def their_model(kind, **more):
    name, how = PAIRS[kind]
    make, config = getattr(models, name + "ForCausalLM"), getattr(models, name + "Config")
    torch.manual_seed(1)
    model = make(config(hidden_size=32, num_hidden_layers=2, vocab_size=97, fuse_swiglu=False,
                        fuse_cross_entropy=False, use_cache=False, **how, **more))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model.eval()


def test_install_and_uninstall():
    import fla.layers.gated_deltanet as layer
    before = layer.chunk_gated_delta_rule
    assert "chunk_gated_delta_rule" in exchange.install()
    assert layer.chunk_gated_delta_rule is mneme.torch.ops.chunk_gated_delta_rule
    exchange.uninstall()
    assert layer.chunk_gated_delta_rule is before


@pytest.mark.parametrize("kind", sorted(PAIRS))
def test_their_folder_has_equal_logits_here(kind, tmp_path, exchanged):
    model = their_model(kind)
    with torch.no_grad():
        want = model(TOKENS, use_cache=False).logits[0]
    model.save_pretrained(tmp_path)
    session = mneme.Model(tmp_path).session()
    rows = []
    for token in TOKENS[0].tolist():
        session.feed([token])
        rows.append(session.logits.copy())
    got = np.stack(rows)
    np.testing.assert_allclose(got, want.numpy(), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("kind", sorted(PAIRS))
def test_our_folder_has_equal_logits_there(kind, tmp_path, exchanged, make_model):
    name, how = PAIRS[kind]
    template = their_model(kind).config.to_dict()
    keys = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size", "num_heads",
            "head_dim", "expand_v", "hidden_ratio", "intermediate_size", "norm_eps")
    folder = make_model(tmp_path / "ours", {k: template[k] for k in keys
                                            if template.get(k) is not None})
    session = mneme.Model(folder).session()
    session.feed(TOKENS[0].tolist())
    theirs = getattr(models, name + "ForCausalLM").from_pretrained(
        folder, fuse_swiglu=False, fuse_cross_entropy=False).eval()
    with torch.no_grad():
        got = theirs(TOKENS, use_cache=False).logits[0, -1].numpy()
    np.testing.assert_allclose(got, session.logits, rtol=2e-3, atol=2e-4)


def test_a_step_of_training_runs(exchanged):
    model = their_model("gated_deltanet").train()
    loss = model(TOKENS, labels=TOKENS, use_cache=False).logits.square().mean()
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all()
               for n, p in model.named_parameters() if "attn" in n)
