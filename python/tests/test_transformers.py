"""AutoModelForCausalLM on folders of mneme."""

import json
import pathlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import mneme                                             # noqa: E402
import mneme.safetensors                                 # noqa: E402
import mneme.transformers                                # noqa: E402
from transformers import AutoModelForCausalLM            # noqa: E402
from mneme.transformers import MnemeConfig, MnemeForCausalLM, States    # noqa: E402
from support import write_model                          # noqa: E402


@pytest.fixture(autouse=True)
def ours():
    """Other tests may have imported flash-linear-attention since, which serves its types itself."""
    mneme.transformers.register()


CONFIGS = {
    "hybrid": {"layers": "gdn, attention, bayes, kla", "hidden_size": 32, "vocab_size": 300},
    "tied": {"layers": "gla+ccq", "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 256,
             "tie_word_embeddings": True},
    "fla": {"model_type": "gated_deltanet", "num_hidden_layers": 2, "hidden_size": 32,
            "num_heads": 2, "head_dim": 8, "vocab_size": 256, "intermediate_size": 64},
}


FIXTURES = pathlib.Path(__file__).resolve().parents[3] / "shared/checkpoints"
TYPES = ["comba", "delta_net", "delta_net-variant", "gated_deltanet", "gated_deltanet-hybrid",
         "gated_deltanet-plain", "gated_deltaproduct", "gla", "gla-nofuse", "gsa", "hgrn2", "kda",
         "kda-safe", "linear_attn", "linear_attn-hedgehog", "mesa_net", "mla", "retnet", "rwkv7",
         "transformer"]


@pytest.mark.parametrize("name", TYPES)
def test_folders_of_flash_linear_attention_have_its_logits(name):
    """Folders and float64 logits that its own modules made; float64 here as well."""
    folder = FIXTURES / ("fla-" + name)
    if not folder.exists():
        pytest.skip("there are no such folders beside the repository")
    if name.split("-")[0] not in mneme.transformers.registered:
        pytest.skip("flash-linear-attention serves this type itself")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    expected = mneme.safetensors.load(folder / "expect.safetensors")[0]
    exact = json.loads((folder / "expect.json").read_text())["float32_rel"]
    for length in (1, 5, 65):
        want = np.array(expected[f"logits_{length}"])
        with torch.no_grad():
            got = model(torch.tensor(np.array(expected[f"ids_{length}"])), use_cache=False).logits
        error = np.abs(got.numpy() - want).max() / np.abs(want).max()
        assert error < max(5e-6, 5 * exact[str(length)]), error


@pytest.fixture(params=CONFIGS, ids=list(CONFIGS))
def folder(request, tmp_path):
    return write_model(tmp_path / "model", CONFIGS[request.param])


def test_logits_are_those_of_the_session(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = np.arange(30) * 11 % 250
    session = mneme.Model(folder).session()
    want = np.stack([session.step(t).logits for t in tokens])
    with torch.no_grad():
        got = model(torch.tensor(tokens)[None]).logits[0].numpy()
    assert np.sqrt(np.mean((got - want) ** 2)) < 2e-4 * np.sqrt(np.mean(want ** 2))


def test_generation_with_the_cache_is_that_without_and_of_the_session(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.arange(1, 8)[None] * 5
    how = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    cached = model.generate(prompt, use_cache=True, **how)
    plain = model.generate(prompt, use_cache=False, **how)
    session = mneme.Model(folder).session().feed(prompt[0].numpy())
    assert cached.shape == (1, 19)
    assert cached.tolist() == plain.tolist()
    assert cached[0, 7:].tolist() == session.generate(12).tolist()


def test_saving_and_loading_both_ways(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved/config.json").read_text())
    original = json.loads((folder / "config.json").read_text())
    same = {k: v for k, v in original.items() if k != "architectures"}
    assert {k: config.get(k) for k in same} == same
    tokens = np.arange(20)
    a = mneme.Model(folder).session().feed(tokens).logits
    b = mneme.Model(tmp_path / "saved").session().feed(tokens).logits
    assert np.array_equal(a, b)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for x, y in zip(model.parameters(), again.parameters()):
        assert torch.equal(x, y)


def test_a_new_model_learns_and_is_read_by_the_library(tmp_path):
    torch.manual_seed(0)
    model = MnemeForCausalLM(MnemeConfig(layers="gdn", hidden_size=32, vocab_size=20,
                                         num_hidden_layers=1))
    model.train()
    model.gradient_checkpointing_enable()
    tokens = torch.arange(40)[None] % 20
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(20):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    model.save_pretrained(tmp_path)
    score = mneme.Model(tmp_path).score(tokens[0].numpy())
    model.eval()
    with torch.no_grad():
        assert -score[1:].mean() == pytest.approx(model(tokens, labels=tokens).loss.item(), rel=1e-4)


def test_beams_reorder_states(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    out = model.generate(torch.arange(1, 7)[None], max_new_tokens=6, num_beams=3, do_sample=False,
                         eos_token_id=None, pad_token_id=0)
    assert out.shape == (1, 12)
    states = States([{"position": 3, "memory": torch.arange(3.0)[:, None]}])
    assert states.reorder_cache(torch.tensor([2, 0]))[0]["memory"].flatten().tolist() == [2, 0]


def test_padding_on_the_left_is_not_read(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write_model(
        tmp_path / "m", {"layers": "gdn, bayes, kla, mlstm", "hidden_size": 32, "vocab_size": 90}))
    tokens = torch.tensor([[0, 0, 0, 5, 6, 7, 8], [9, 3, 1, 4, 1, 5, 9]])
    mask = (tokens > 0).long()
    how = dict(max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    both = model.generate(tokens, attention_mask=mask, **how)
    assert both[0, 7:].tolist() == model.generate(tokens[:1, 3:], **how)[0, 4:].tolist()
    assert both[1, 7:].tolist() == model.generate(tokens[1:], **how)[0, 7:].tolist()
    right = model(tokens[:1, 3:]).logits
    torch.testing.assert_close(model(tokens, attention_mask=mask).logits[:1, 3:], right, rtol=1e-4,
                               atol=1e-5)


def test_padding_where_positions_count_is_refused(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write_model(
        tmp_path / "m", {"layers": "attention", "hidden_size": 32, "vocab_size": 90}))
    with pytest.raises(ValueError, match="pad on the right"):
        model(torch.ones(1, 5, dtype=torch.long), attention_mask=torch.tensor([[0, 0, 1, 1, 1]]))


def test_unknown_options_are_named():
    with pytest.raises(mneme.Error, match="gnd"):
        MnemeConfig(layers="gnd", hidden_size=32, vocab_size=20)
