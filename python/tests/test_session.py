"""Models, sessions, beliefs, tokenizers."""

import numpy as np
import pytest

import mneme


def test_a_model_reads_and_goes_on(small_folder):
    model = mneme.Model(small_folder)
    assert model.vocabulary == 300
    tokens = model.tokenizer.encode("a memory of what was read")
    assert model.tokenizer.decode(tokens) == "a memory of what was read"
    session = model.session()
    assert session.logits is None and session.position == 0
    session.feed(tokens)
    assert session.position == tokens.size and session.logits.shape == (300,)
    twin = model.session()
    for token in tokens:
        twin.step(token)
    np.testing.assert_allclose(twin.logits, session.logits, rtol=2e-4, atol=2e-5)


def test_score_is_the_log_softmax(small_folder):
    model = mneme.Model(small_folder)
    tokens = np.arange(20) * 7 % 256
    scores = model.score(tokens)
    assert scores[0] == 0
    session = model.session()
    for t in range(1, 20):
        session.step(tokens[t - 1])
        x = session.logits.astype(np.float64)
        assert scores[t] == pytest.approx(x[tokens[t]] - np.log(np.exp(x).sum()), abs=1e-4)


def test_beliefs(small_folder):
    model = mneme.Model(small_folder)
    session = model.session(belief=True).feed(np.arange(12))
    beliefs = session.beliefs()
    assert sorted(beliefs) == [1, 2]                  # kla and bayes keep one, gdn does not
    assert all(v.shape == (12,) and (v > 0).all() for v in beliefs.values())
    assert model.session().feed([1, 2]).beliefs() == {}


def test_snapshots_forks_and_files(small_folder, tmp_path):
    session = mneme.Model(small_folder).session().feed(np.arange(9))
    kept, before = session.snapshot(), session.logits
    assert 0 < kept.bytes
    fork = session.fork()
    session.save(tmp_path / "state.safetensors")
    session.feed([5, 6, 7])
    after = session.logits
    assert np.array_equal(fork.logits, before)
    assert np.array_equal(fork.feed([5, 6, 7]).logits, after)
    assert np.array_equal(session.restore(kept).feed([5, 6, 7]).logits, after)
    other = session.model.session().load(tmp_path / "state.safetensors")
    assert np.array_equal(other.feed([5, 6, 7]).logits, after)
    assert session.reset().position == 0


def test_generation_is_a_function_of_the_seed(small_folder):
    model = mneme.Model(small_folder)
    def draw(seed):
        return model.session().feed([1, 2, 3]).generate(12, temperature=1.0, seed=seed).tolist()
    assert draw(1) == draw(1) != draw(2)
    greedy = model.session().feed([1, 2, 3])
    assert greedy.sample() == int(greedy.logits.argmax())
    stop = greedy.sample()
    assert greedy.generate(5, stop=stop).size == 0


def test_mistakes_are_named(small_folder, tmp_path):
    with pytest.raises(mneme.Error, match="config.json"):
        mneme.Model(tmp_path)
    session = mneme.Model(small_folder).session()
    with pytest.raises(mneme.Error, match="300"):
        session.feed([5000])
    with pytest.raises(TypeError, match="whole numbers"):
        session.feed([0.5])
    with pytest.raises(TypeError, match="no 'heat'"):
        session.feed([1]).sample(heat=2)
    with pytest.raises(ValueError, match="not one of f32"):
        session.model.session(dtype="f16")


def test_tasks_are_those_of_the_program(repository):
    inputs, targets = mneme.Task("mqar", vocab=64, length=32, pairs=2).draw(3, seed=5, split="test")
    assert inputs.shape == targets.shape == (3, 32)
    answers = [(i, t) for i, row in enumerate(targets) for t in np.flatnonzero(row >= 0)]
    assert len(answers) == 6
    for i, t in answers:
        key = inputs[i, t]
        first = np.flatnonzero(inputs[i] == key)[0]
        assert first < t and inputs[i, first + 1] == targets[i, t]
    vectors = mneme.Task("collision")
    x, y = vectors.draw(2)
    assert x.shape == (2, vectors.length, vectors.features) and x.dtype == np.float32
    assert mneme.Task("mad-recall", setting="vocab-32").vocabulary == 32
    with pytest.raises(mneme.Error, match="pears"):
        mneme.Task("mqar", pears=3)
    with pytest.raises(ValueError, match="no setting"):
        mneme.Task("mqar", setting="huge")
    with pytest.raises(mneme.Error, match="no split"):
        mneme.Task("mqar").draw(1, split="dev")


def test_layers_describe_themselves():
    kinds = mneme.layers.kinds()
    assert kinds["gdn"]["operator"] == "delta_net" and kinds["bayes"]["variance"]
    row = mneme.layers.describe("gla+ccq", 64, num_heads=2)
    names = [p["name"] for p in row["parameters"]]
    assert names[-2:] == ["ccq_gamma.weight", "ccq_gamma.bias"] and row["sizes"]["H"] == 2
    bias = mneme.layers.start("gla+ccq", 64, "ccq_gamma.bias", num_heads=2)
    np.testing.assert_array_equal(bias, np.float32([-2.2, -2.2]))
    with pytest.raises(mneme.Error, match='did you mean "num_heads"'):
        mneme.layers.describe("gla", 64, num_head=2)


def test_gates_of_other_software_that_are_not_built_are_refused():
    from mneme import layers
    config = {"model_type": "gated_deltanet", "hidden_size": 32, "num_hidden_layers": 1,
              "vocab_size": 300, "head_dim": 16, "num_heads": 2}
    assert layers.describe_model({**config, "output_gate_activation": "swish"})
    with pytest.raises(mneme.Error, match="output_gate_activation.*only swish"):
        layers.describe_model({**config, "output_gate_activation": "sigmoid"})
