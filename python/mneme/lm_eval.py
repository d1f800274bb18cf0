"""mneme in lm-evaluation-harness, without PyTorch: sessions of the library do the reading.

    python -m mneme.lm_eval --model mneme --model_args folder=runs/gdn/best --tasks lambada_openai

or, in a program, `import mneme.lm_eval` before lm_eval.simple_evaluate(model="mneme", ...)."""

import json
import pathlib

import numpy as np

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ImportError as _error:
    raise ImportError("mneme.lm_eval needs lm-evaluation-harness: pip install lm_eval. The import "
                      f"says: {_error}") from None

from . import _library
from .session import Model

__all__ = ["MnemeLM"]


@register_model("mneme")
class MnemeLM(TemplateLM):
    """folder: a model folder with its tokenizer; device: "cpu", "cuda" or "cuda:N"; max_gen_toks:
    tokens of an answer that names no end. Contexts that questions share are read once."""

    def __init__(self, folder=None, pretrained=None, device="cpu", dtype="f32", max_gen_toks=256,
                 threads=0, batch_size=None, max_batch_size=None, **kwargs):
        super().__init__()
        folder = folder or pretrained
        if folder is None:
            raise ValueError("mneme needs model_args folder=DIR")
        self.model_ = Model(folder)
        self.tokenizer_ = self.model_.tokenizer
        context = _library.Context(int(threads), device=None if device == "cpu" else device)
        self.session = self.model_.session(dtype=dtype, context=context)
        self.max_gen_toks = int(max_gen_toks)
        text = json.loads((pathlib.Path(folder) / "config.json").read_text())
        self._end = text.get("eos_token_id", text.get("bos_token_id"))
        self._begin = text.get("bos_token_id", self._end)

    @property
    def eot_token_id(self):
        return self._end

    @property
    def prefix_token_id(self):
        return self._begin

    @property
    def tokenizer_name(self):
        return self.model_.folder.replace("/", "__")

    def tok_encode(self, string, left_truncate_len=None, add_special_tokens=None, **kwargs):
        ids = self.tokenizer_.encode(string, special=False).tolist()
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def _encode_pair(self, context, continuation):
        """Blanks at the end of the context belong to the continuation."""
        blanks = len(context) - len(context.rstrip())
        if blanks:
            continuation, context = context[-blanks:] + continuation, context[:-blanks]
        both = self.tok_encode(context + continuation)
        first = self.tok_encode(context)
        return first, both[len(first):]

    def loglikelihood(self, requests, disable_tqdm=False):
        pairs = []
        for context, continuation in (r.args for r in requests):
            if context:
                pairs.append(((context, continuation), *self._encode_pair(context, continuation)))
            else:
                start = [] if self._begin is None else [self._begin]
                pairs.append(((context, continuation), start, self.tok_encode(continuation)))
        return self._loglikelihood_tokens(pairs, disable_tqdm)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        answers = [None] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: tuple(requests[i][1]))
        before, kept = None, None
        for i in order:
            words, context, continuation = requests[i]
            if before is None or list(context) != before:
                self.session.reset()
                if len(context):
                    self.session.feed(context)
                before, kept = list(context), self.session.snapshot()
            else:
                self.session.restore(kept)
            answers[i] = self._score(continuation)
            if words is not None:
                self.cache_hook.add_partial("loglikelihood", words, answers[i])
        return answers

    def _score(self, tokens):
        """Log probability of tokens after what the session has read, and whether each was the
        most probable."""
        total, greedy = 0.0, True
        for token in tokens:
            logits = self.session.logits
            if logits is not None:      # nothing foretold the first token of a sequence
                logits = logits.astype(np.float64)
                top = logits.max()
                total += logits[token] - top - np.log(np.exp(logits - top).sum())
                greedy = greedy and int(logits.argmax()) == token
            self.session.step(token)
        return float(total), bool(greedy)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        answers = []
        for text, in (r.args for r in requests):
            self.session.reset()
            if self._begin is not None:
                self.session.step(self._begin)
            tokens = self.tok_encode(text)
            answers.append(float(self.session.score(tokens).sum()))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), answers[-1])
        return answers

    def generate_until(self, requests, disable_tqdm=False):
        return [self._generate(context, dict(how)) for context, how in (r.args for r in requests)]

    def _generate(self, context, how):
        until = how.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        count = int(how.get("max_gen_toks") or how.get("max_new_tokens") or self.max_gen_toks)
        heat = float(how.get("temperature") or 0.0) if how.get("do_sample") else 0.0
        tokens = self.tok_encode(context)
        if not tokens:
            tokens = [] if self._begin is None else [self._begin]
        if not tokens:
            raise ValueError("an empty context, and the model names no token to begin with")
        self.session.reset().feed(tokens)
        drawn, text = [], ""
        for _ in range(count):
            token = self.session.sample(temperature=heat, seed=int(how.get("seed") or 0))
            if token == self._end:
                break
            drawn.append(token)
            text = self.tokenizer_.decode(drawn)
            ends = [text.index(stop) for stop in until if stop and stop in text]
            if ends:
                text = text[:min(ends)]
                break
            self.session.step(token)
        self.cache_hook.add_partial("generate_until", (context, how), text)
        return text


def main():
    from lm_eval.__main__ import cli_evaluate
    cli_evaluate()


if __name__ == "__main__":
    # the class of the package, not a second one of __main__
    from mneme import lm_eval as _package
    _package.main()
