"""Loads a published checkpoint and goes on with a text, twice: with numpy alone, and in transformers.

    python published.py FOLDER "text" [--tokens 40] [--transformers]

FOLDER is what `hf download NAME --local-dir FOLDER` leaves: config.json, model.safetensors and
tokenizer.json of flash-linear-attention's models, Llama, Qwen3 and others (`mneme info` lists them),
or of a model that mneme trained. --transformers runs the PyTorch modules instead, on a GPU where
there is one."""

import argparse
import sys


def with_numpy(given):
    import mneme
    model = mneme.Model(given.folder)
    session = model.session().feed(model.tokenizer.encode(given.text))
    return model.tokenizer.decode(session.generate(given.tokens, temperature=given.temperature,
                                                   seed=given.seed))


def with_transformers(given):
    import torch
    import mneme
    import mneme.transformers    # makes AutoModelForCausalLM know the folders    # noqa: F401
    from transformers import AutoModelForCausalLM
    tokenizer = mneme.Tokenizer(given.folder)
    model = AutoModelForCausalLM.from_pretrained(given.folder)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    ids = torch.tensor(tokenizer.encode(given.text)).long()[None].to(model.device)
    torch.manual_seed(given.seed)
    how = dict(do_sample=True, temperature=given.temperature) if given.temperature else {}
    out = model.generate(ids, max_new_tokens=given.tokens, pad_token_id=0, **how)
    return tokenizer.decode(out[0, ids.shape[1]:].cpu().numpy())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("text")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transformers", action="store_true")
    given = parser.parse_args()
    run = with_transformers if given.transformers else with_numpy
    sys.stdout.write(given.text + run(given) + "\n")


if __name__ == "__main__":
    main()
