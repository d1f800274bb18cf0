"""The model class for lm-evaluation-harness."""

import types

import numpy as np
import pytest

pytest.importorskip("lm_eval")

import mneme                                  # noqa: E402
from support import write_model               # noqa: E402
from mneme.lm_eval import MnemeLM             # noqa: E402


def ask(*args):
    return types.SimpleNamespace(args=args)


@pytest.fixture
def lm(tmp_path):
    config = {"layers": "gdn, attention", "hidden_size": 32, "vocab_size": 256}
    return MnemeLM(folder=str(write_model(tmp_path / "m", config)))


def test_it_is_registered(small_folder):
    from lm_eval.api.registry import get_model
    assert get_model("mneme") is MnemeLM
    assert MnemeLM.create_from_arg_string(f"folder={small_folder}").max_gen_toks == 256
    with pytest.raises(ValueError, match="folder=DIR"):
        MnemeLM()


def test_likelihoods_are_those_of_the_session(lm):
    questions = [("the cat sat", " on a mat"), ("the cat sat", " down"), ("", "once"), ("a ", "b")]
    answers = lm.loglikelihood([ask(*q) for q in questions])
    for (context, continuation), (total, greedy) in zip(questions, answers):
        both = lm.tokenizer_.encode(context + continuation)
        n = len(lm.tokenizer_.encode(context.rstrip()))
        want = lm.model_.score(both)[n:]
        assert total == pytest.approx(want.sum(), abs=1e-3) and greedy in (True, False)


def test_the_most_probable_answer_is_greedy(lm):
    best = lm.model_.session().feed(lm.tok_encode("the cat")).generate(3)
    (_, greedy), = lm._loglikelihood_tokens([(None, lm.tok_encode("the cat"), best.tolist())])
    assert greedy
    (_, other), = lm._loglikelihood_tokens([(None, lm.tok_encode("the cat"),
                                             [(int(best[0]) + 1) % 256])])
    assert not other


def test_rolling_and_generating(lm):
    text = "a memory of what was read"
    assert lm.loglikelihood_rolling([ask(text)])[0] == pytest.approx(
        lm.model_.score(lm.tok_encode(text)).sum())
    how = {"max_gen_toks": 20, "until": []}
    whole, = lm.generate_until([ask(text, how)])
    drawn = lm.model_.session().feed(lm.tok_encode(text)).generate(20)
    assert whole == lm.tokenizer_.decode(drawn)
    stop = whole[4]
    cut, = lm.generate_until([ask(text, {"max_gen_toks": 20, "until": [stop]})])
    assert cut == whole[:whole.index(stop)]
    assert np.isfinite(mneme.Model(lm.model_.folder).score([1, 2, 3])).all()
