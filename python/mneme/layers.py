"""Sequence layers as the library's tables have them: options, sizes, parameters, initial values.

    mneme.layers.kinds()["gdn"]["options"]         what may be set
    mneme.layers.describe("gdn", 256)["parameters"]     names and shapes, as in checkpoints"""

import functools
import json

import numpy as np

from . import _library

__all__ = ["kinds", "describe", "start", "describe_model", "model_types",
           "model_parameters"]


@functools.lru_cache(maxsize=None)
def kinds():
    """All layers by name: axes, operator, options with defaults."""
    return {row["name"]: row for row in _library.describe("layers")["layers"]}


@functools.lru_cache(maxsize=None)
def _describe(name, options, width, context):
    return _library.describe("layer", name, options, width, context)


def _text(options):
    return json.dumps({k: v for k, v in options.items() if v is not None}, sort_keys=True)


def describe(name, width, context=2048, **options):
    """Layer `name` ("gdn", "gla+ccq") of a model of this width: its sizes by letter, its options
    filled in, its parameters. `context`: most tokens of a sequence, for layers that are limited."""
    return _describe(name, _text(options), width, context)


def start(name, width, parameter, context=2048, seed=0, stream=0, spread=0.02, **options):
    """The numbers a parameter of such a layer begins with, as `mneme train` draws them."""
    row = next((p for p in describe(name, width, context, **options)["parameters"]
                if p["name"] == parameter), None)
    if row is None:
        raise ValueError(f"{name} has no parameter {parameter!r}")
    out = np.empty(row["shape"], np.float32)
    _library.check(_library.library().mn_layer_start(
        out.ctypes.data, name.encode(), _text(options).encode(), width, context,
        parameter.encode(), spread, seed, stream))
    return out


def describe_model(config):
    """The model that a config.json (a dict) means, everything filled in."""
    return _library.describe("model", json.dumps(config))


@functools.lru_cache(maxsize=None)
def model_types():
    """{model_type of other software: our layer}, such as "gated_deltanet": "gdn"."""
    return describe_model({"layers": "gdn", "hidden_size": 64})["model_types"]


def model_parameters(model, seed=0):
    """(name, shape, start) of each parameter of a described model, in the order of the library's
    own; start() gives its first numbers."""
    width, spread = model["hidden_size"], model["initializer_range"]
    stream = iter(range(1 << 30))

    def normal(shape, at):
        return lambda: spread * np.random.default_rng((seed, at)).standard_normal(shape)

    def matrix(name, *shape):
        return name, shape, normal(shape, next(stream))

    def norm(name):
        next(stream)
        return name, (width,), lambda: np.ones(width)

    def mixer(i, layer, parameter):
        at, options = next(stream), {k: v for k, v in layer["options"].items() if v is not None}
        return (f"model.layers.{i}.attn.{parameter['name']}", tuple(parameter["shape"]),
                lambda: start(layer["name"], width, parameter["name"], model["context"], seed, at,
                              spread, **options))

    yield matrix("model.embeddings.weight", model["vocab_size"], width)
    inner = model["intermediate_size"]
    for i, layer in enumerate(model["layers"]):
        yield norm(f"model.layers.{i}.attn_norm.weight")
        row = describe(layer["name"], width, model["context"], **layer["options"])
        for parameter in row["parameters"]:
            yield mixer(i, layer, parameter)
        if model["mlp"] == "none":
            continue
        yield norm(f"model.layers.{i}.mlp_norm.weight")
        if model["mlp"] == "swiglu":
            yield matrix(f"model.layers.{i}.mlp.gate_proj.weight", inner, width)
        yield matrix(f"model.layers.{i}.mlp.up_proj.weight", inner, width)
        yield matrix(f"model.layers.{i}.mlp.down_proj.weight", width, inner)
    yield norm("model.norm.weight")
    if not model["tied"]:
        yield matrix("lm_head.weight", model["vocab_size"], width)
