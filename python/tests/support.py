"""Model folders for tests, made with numpy and the library's own description of layers."""

import json
import pathlib

import numpy as np

from mneme import layers, safetensors


def tokenizer_of_bytes():
    """A tokenizer.json with a token per byte."""
    letters = {}
    plain = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    extra = 0
    for byte in range(256):
        if byte in plain:
            letters[byte] = chr(byte)
        else:
            letters[byte] = chr(256 + extra)
            extra += 1
    vocab = {letters[b]: b for b in range(256)}
    return {"version": "1.0", "added_tokens": [], "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            "post_processor": None, "decoder": {"type": "ByteLevel"},
            "model": {"type": "BPE", "vocab": vocab, "merges": []}}


def write_model(folder, config, seed=0, spread=0.3):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model = layers.describe_model(config)
    tensors = {}
    for i, (name, shape, start) in enumerate(layers.model_parameters(model, seed=seed)):
        rng = np.random.default_rng((seed, i))
        noise = spread * rng.standard_normal(shape) / np.sqrt(shape[-1] if shape else 1)
        tensors[name] = (start() + noise).astype(np.float32)
    safetensors.save(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(model["config"], indent=2))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_of_bytes()))
    return folder
