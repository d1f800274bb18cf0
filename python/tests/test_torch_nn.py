"""mneme.torch.nn: every layer against the library's own, decoding, packing, beliefs, patching."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import mneme                                          # noqa: E402
from mneme import layers, safetensors                 # noqa: E402
from mneme.torch import nn as mnn                     # noqa: E402

KINDS = list(layers.kinds())
CCQ = [k + "+ccq" for k, row in layers.kinds().items() if row["ccq"]]
WITH_OPTIONS = [
    ("gdn", dict(num_heads=2, num_v_heads=4, head_dim=8, allow_neg_eigval=True)),
    ("gdn", dict(use_gate=False, use_short_conv=False)),
    ("delta", dict(use_beta=False, qk_activation="elu", qk_norm="sum", use_gate=True)),
    ("delta", dict(qk_activation="relu", use_short_conv=False)),
    ("delta", dict(qk_activation="identity", conv_size=1)),
    ("kda", dict(lower_bound=-5.0, num_heads=2, num_v_heads=4, head_dim=8)),
    *[("linear", dict(feature_map=m, norm_q=q, norm_k=q, norm_feature_map=n)) for m, q, n in (
        ("hedgehog", True, True), ("t2r", False, False), ("dpfp", False, False),
        ("elu", True, True), ("relu", False, False), ("identity", False, False),
        ("taylor", False, True))],
    ("linear", dict(tie_feature_map_qk=True, num_heads=4, num_kv_heads=2)),
    ("gla", dict(use_short_conv=True, feature_map="swish", clamp_min=-0.1, fuse_norm=False)),
    ("gla", dict(use_output_gate=False, num_heads=4, num_kv_heads=2)),
    ("retnet", dict(feature_map="relu", use_short_conv=True)),
    ("attention", dict(num_heads=4, num_kv_heads=2, qkv_bias=True)),
    ("relu_attention", dict(num_heads=2, use_rope=False)),
    ("kla", dict(value_rank="conv", var_rank="dt", skip="vector", process_noise="fixed")),
    ("kla", dict(value_rank=4, var_rank=3, skip="none", process_noise="zero", use_gate=False)),
    ("kla", dict(conv_size=0, clip_value=0.5, obs_var_max=2.0, discretisation="zoh",
                 decode_from_prior=True, use_qk_norm=False)),
    ("palimpsa_code", dict(metaplasticity=False)),
    ("palimpsa_code", dict(use_residual=False, learn_prior=True, use_short_conv=False)),
    ("palimpsa_paper", dict(use_gate=False, learn_prior=True)),
    ("bayes", dict(transition="identity", noise_groups=1, learn_prior=True)),
    ("bayes_rotation", dict(input_angle=True, use_short_conv=False, use_gate=False)),
    ("mesa", dict(use_output_gate=True)),
    ("mamba2", dict(n_groups=2, head_dim=16, state_size=8, use_bias=True, D_has_hdim=True)),
    ("mamba2", dict(rmsnorm=False, state_size=8)),
    ("mamba2", dict(norm_before_gate=True, state_size=8, use_conv_bias=False)),
    ("log_linear_mamba2", dict(n_groups=2, head_dim=16, state_size=8, use_bias=True)),
    ("mamba1", dict(use_bias=True, dt_rank=3)),
    ("mlstm", dict(use_short_conv=False, gate_soft_cap=0.0, use_gate=False)),
    ("longhorn", dict(num_heads=2, use_bias=True)),
    ("hypermlp", dict(op1_rank=0, attn_norm="l2", use_kv_conv=False)),
    ("hyperglu", dict(op2_rank=0, layout="position", use_qk_gate=False, use_vo_gate=False,
                      use_rope=True)),
]


def shake(module, seed=0):
    """Numbers away from where layers begin, so that a forgotten parameter shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            fan = p.shape[-1] if p.dim() > 1 else 1
            p.add_(0.3 * torch.randn(p.shape, generator=generator) / max(fan, 1) ** 0.5)


def library_says(folder, config, model, tokens, belief=False):
    """Logits that the library computes from the same parameters, for every token."""
    folder.mkdir(exist_ok=True)
    tensors = {k: v.detach().numpy() for k, v in model.state_dict().items()}
    if model.described["tied"]:
        tensors.pop("lm_head.weight")
    safetensors.save(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(__import__("json").dumps(config))
    session = mneme.Model(folder).session(belief=belief)
    rows = []
    for token in tokens:
        rows.append(session.step(token).logits)
    return np.stack(rows), session


def close(a, b, tolerance=2e-4):
    a, b = np.asarray(a), np.asarray(b)
    error = np.sqrt(np.mean((a - b) ** 2)) / (np.sqrt(np.mean(b ** 2)) or 1.0)
    assert error < tolerance, error


@pytest.mark.parametrize("name, options", [(k, {}) for k in KINDS + CCQ] + WITH_OPTIONS,
                         ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x)) or "d")
def test_layer_is_that_of_the_library(name, options, tmp_path):
    """Whole sequence in torch, token by token there: the same logits and variances."""
    kind = name.split("+")[0]
    config = {"layers": name, "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 20,
              "mixers": {kind: options}, "max_position_embeddings": 64, "model_type": "mneme"}
    torch.manual_seed(1)
    model = mnn.LanguageModel(config)
    shake(model)
    tokens = torch.randint(20, (1, 23))
    out = model(tokens, belief=True)
    want, session = library_says(tmp_path / "m", config, model, tokens[0].numpy(), belief=True)
    close(out.output[0].detach(), want)
    beliefs = session.beliefs()
    if layers.kinds()[kind]["variance"] and options.get("metaplasticity", True):
        assert set(beliefs) == {0, 1}
        for i, variance in beliefs.items():
            assert out.variance[i][0, -1].item() == pytest.approx(float(variance[-1]), rel=2e-3)
    else:
        assert out.variance == [None, None]
    loss = model(tokens).logsumexp(-1).sum()
    loss.backward()
    for path, parameter in model.named_parameters():
        assert not parameter.requires_grad or (parameter.grad is not None
                                               and torch.isfinite(parameter.grad).all()), path


@pytest.mark.parametrize("more", [
    dict(mlp="gelu", tie_word_embeddings=True), dict(mlp="none", logit_softcap=5.0),
    dict(layers="attention*2, gdn, kla+ccq", num_hidden_layers=4, norm_eps=1e-3),
    dict(model_type="gla", num_heads=2, expand_k=0.5, intermediate_size=48)],
    ids=["gelu-tied", "softcap", "hybrid", "fla"])
def test_model_is_that_of_the_library(more, tmp_path):
    config = {"hidden_size": 32, "vocab_size": 20, "num_hidden_layers": 2, **more}
    if "model_type" not in config:
        config.setdefault("layers", "gdn")
    model = mnn.LanguageModel(config)
    shake(model)
    tokens = torch.randint(20, (1, 15))
    want, _ = library_says(tmp_path / "m", config, model, tokens[0].numpy())
    close(model(tokens).detach()[0], want)


@pytest.mark.parametrize("name", KINDS + ["gla+ccq", "bayes+ccq", "kla+ccq", "mamba1+ccq"])
def test_decoding_goes_on_where_prefill_ended(name):
    torch.manual_seed(2)
    layer = mnn.make(name, 32, context=64)
    shake(layer)
    layer, x = layer.double(), torch.randn(2, 12, 32, dtype=torch.float64)
    whole = layer(x)
    with torch.no_grad():
        parts, state = [], None
        for piece in (x[:, :5], x[:, 5:6], x[:, 6:9], x[:, 9:10], x[:, 10:]):
            y, state, _ = layer(piece, state=state, return_state=True)
            parts.append(y)
    assert state["position"] == 12
    close(torch.cat(parts, 1), whole.detach(), 1e-9)


@pytest.mark.parametrize("name", KINDS + ["gla+ccq"])
def test_packed_sequences_do_not_see_one_another(name):
    torch.manual_seed(3)
    layer = mnn.make(name, 32, context=64)
    shake(layer)
    layer, x = layer.double(), torch.randn(1, 17, 32, dtype=torch.float64)
    cu = torch.tensor([0, 4, 5, 17])
    with torch.no_grad():
        y = layer(x, cu_seqlens=cu)
        for n in range(3):
            part = slice(int(cu[n]), int(cu[n + 1]))
            close(y[:, part], layer(x[:, part]), 1e-9)


@pytest.mark.parametrize("name", KINDS)
def test_float32_is_near_float64(name):
    """Results and gradients of layers as they begin, longer than a chunk of any kernel."""
    torch.manual_seed(0)
    layer = mnn.make(name, 64, context=72)
    x, cot = torch.randn(2, 2, 70, 64, dtype=torch.float64)

    def run(dtype):
        layer.to(dtype).zero_grad()
        given = x.to(dtype).clone().requires_grad_()
        y = layer(given)
        y.backward(cot.to(dtype))
        return {"y": y.detach(), "dx": given.grad.clone(),
                **{n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}}

    want, got = run(torch.float64), run(torch.float32)
    for path, y in want.items():
        if y.norm() > 1e-6:
            close(got[path], y, 1e-4 if path == "y" else 1e-3)


def test_names_are_those_of_the_tables():
    for name in KINDS + CCQ:
        layer = mnn.make(name, 64)
        row = layers.describe(name, 64)
        got = {k: list(v.shape) for k, v in layer.state_dict().items()}
        assert got == {p["name"]: p["shape"] for p in row["parameters"]}
    assert mnn.GDN(64).name == "gdn" and mnn.KLA.__doc__ and "num_heads" in mnn.GDN.__doc__


def test_first_numbers_follow_the_seed():
    torch.manual_seed(5)
    a = mnn.GDN(64)
    torch.manual_seed(5)
    b = mnn.GDN(64)
    c = mnn.GDN(64)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    assert not torch.equal(a.q_proj.weight, c.q_proj.weight)
    assert a.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert (a.A_log.exp() < 16).all() and a.o_norm.weight.eq(1).all()
    assert a.groups()["A_log"] == ("vector", False)


def test_options_are_checked():
    with pytest.raises(mneme.Error, match='did you mean "num_heads"'):
        mnn.GDN(64, num_head=2)
    with pytest.raises(TypeError, match="needs a kind"):
        mnn.Mixer(64)
    with pytest.raises(mneme.Error):
        mnn.make("gnd", 64)


@pytest.mark.parametrize("name", ["gdn", "bayes", "attention", "mamba2"])
def test_compile_makes_one_graph(name):
    torch._dynamo.reset()
    layer = mnn.make(name, 32)
    x = torch.randn(2, 9, 32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-6)


def test_training_in_bfloat16_under_autocast():
    torch.manual_seed(0)
    model = mnn.LanguageModel({"layers": "gdn, bayes", "hidden_size": 32, "vocab_size": 16})
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    tokens = torch.arange(64).view(2, 32) % 16
    losses = []
    for _ in range(30):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1),
                                                 tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_patch_exchanges_our_layers():
    torch.manual_seed(0)
    model = mnn.LanguageModel({"layers": "gdn", "num_hidden_layers": 4, "hidden_size": 32,
                               "vocab_size": 16})
    kept = model.model.layers[1].attn.o_norm.weight
    old = model.model.layers[1].attn
    assert mnn.patch(model, "kda", layers=[1, 3], num_heads=2) == [1, 3]
    assert [b.attn.name for b in model.model.layers] == ["gdn", "kda", "gdn", "kda"]
    assert model(torch.zeros(1, 5, dtype=torch.long)).shape == (1, 5, 16) and kept is not None
    same = mnn.patch(model, "gdn", layers=[0])
    assert same == [0] and old.name == "gdn"
    with pytest.raises(ValueError, match="layer 9 is not there"):
        mnn.patch(model, "gdn", layers=[9])


def test_patch_of_one_kind():
    model = mnn.LanguageModel({"layers": "gdn, attention, gdn, gdn", "hidden_size": 32,
                               "vocab_size": 16})
    assert mnn.patch(model, "gdn -> bayes", layers=[0, -1]) == [0, -1]
    assert [b.attn.name for b in model.model.layers] == ["bayes", "attention", "gdn", "bayes"]
    variances = model(torch.zeros(1, 5, dtype=torch.long), belief=True).variance
    assert variances[0].shape == (1, 5) and (variances[0] > 0).all() and variances[2] is None
    with pytest.raises(ValueError, match="no mixer of this model is 'gla'; there are attention"):
        mnn.patch(model, "gla->kda")


def test_patch_carries_over_what_fits():
    a = mnn.LanguageModel({"layers": "delta", "hidden_size": 32, "vocab_size": 16})
    weight = a.model.layers[0].attn.v_proj.weight.detach().clone()
    mnn.patch(a, "kda")
    assert torch.equal(a.model.layers[0].attn.v_proj.weight, weight)
    mnn.patch(a, "delta", keep=False)
    assert not torch.equal(a.model.layers[0].attn.v_proj.weight, weight)


def test_patch_exchanges_layers_of_others():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q = torch.nn.Linear(16, 16)

        def forward(self, x):
            return self.q(x)

    model = torch.nn.Sequential(torch.nn.ModuleDict({"attn": Attention()}),
                                torch.nn.ModuleDict({"attn": Attention()}))
    assert mnn.patch(model, "gla", select="attn", width=16) == [0, 1]
    assert model[1]["attn"](torch.randn(1, 4, 16)).shape == (1, 4, 16)
    with pytest.raises(ValueError, match="give width="):
        mnn.patch(torch.nn.Sequential(torch.nn.ModuleDict({"attn": Attention()})), "gla",
                  select="attn")
    with pytest.raises(ValueError, match="no mixer"):
        mnn.patch(torch.nn.Linear(2, 2), "gla")
