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


def _text(options, place):
    given = {k: v for k, v in options.items() if v is not None}
    if place != (0, 1):
        given["index"], given["n_layers"] = place
    return json.dumps(given, sort_keys=True)


def describe(name, width, context=2048, place=(0, 1), **options):
    """Layer `name` ("gdn", "gla+ccq") of a model of this width: its sizes by letter, its options
    filled in, its parameters. `context`: most tokens of a sequence, for layers that are limited;
    `place`: which of so many layers of its model it is, for those that go by that (rwkv7)."""
    return _describe(name, _text(options, place), width, context)


def start(name, width, parameter, context=2048, seed=0, stream=0, spread=0.02, place=(0, 1),
          **options):
    """The numbers a parameter of such a layer begins with, as `mneme train` draws them."""
    row = next((p for p in describe(name, width, context, place, **options)["parameters"]
                if p["name"] == parameter), None)
    if row is None:
        raise ValueError(f"{name} has no parameter {parameter!r}")
    out = np.empty(row["shape"], np.float32)
    _library.check(_library.library().mn_layer_start(
        out.ctypes.data, name.encode(), _text(options, place).encode(), width, context,
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
    width, spread, context = model["hidden_size"], model["initializer_range"], model["context"]
    stream, n = iter(range(1 << 30)), len(model["layers"])
    rows = [describe(layer["name"], width, context, (i, n), **layer["options"])
            for i, layer in enumerate(model["layers"])]

    def normal(shape, at):
        return lambda: spread * np.random.default_rng((seed, at)).standard_normal(shape)

    def matrix(name, *shape):
        return name, shape, normal(shape, next(stream))

    def norm(name):
        for what, first in (("weight", np.ones), ("bias", np.zeros))[:1 + model["norm_bias"]]:
            next(stream)
            yield f"{name}.{what}", (width,), functools.partial(first, width)

    def mixer(i, layer, parameter):
        at, options = next(stream), {k: v for k, v in layer["options"].items() if v is not None}
        return (f"model.layers.{i}.attn.{parameter['name']}", tuple(parameter["shape"]),
                lambda: start(layer["name"], width, parameter["name"], context, seed, at, spread,
                              (i, n), **options))

    yield matrix("model.embeddings.weight", model["vocab_size"], width)
    for i, layer in enumerate(model["layers"]):
        if model["norm_first"] and i == 0:
            yield from norm("model.layers.0.pre_norm")
        if layer["name"] != "none":
            yield from norm(f"model.layers.{i}.attn_norm")
        for parameter in rows[i]["parameters"]:
            yield mixer(i, layer, parameter)
        if model["mlp"] != "none":
            yield from norm(f"model.layers.{i}.mlp_norm")
            yield from (matrix(f"model.layers.{i}.mlp.{name}", *shape)
                        for name, shape in _mlp_shapes(model))
    bounds = bound_shape(rows)
    if bounds:
        yield "model.lower_bounds", bounds, functools.partial(np.zeros, bounds)
    yield from norm("model.norm")
    if not model["tied"]:
        yield matrix("lm_head.weight", model["vocab_size"], width)


def _mlp_shapes(model):
    """(name, shape) of the parameters of a block's second half."""
    width, inner = model["hidden_size"], model["intermediate_size"]
    if model["mlp"] == "rwkv7":
        return [("x_k", (width,)), ("key.weight", (inner, width)), ("value.weight", (width, inner))]
    gate = [("gate_proj.weight", (inner, width))] if model["mlp"] in ("swiglu", "geglu") else []
    return gate + [("up_proj.weight", (inner, width)), ("down_proj.weight", (width, inner))]


def bound_shape(rows):
    """Shape of model.lower_bounds where a described layer has least gates (hgrn2), else None."""
    first = next((row for row in rows if row["options"].get("use_lower_bound")), None)
    return first and (len(rows), first["sizes"]["H"] * first["sizes"]["K"])
