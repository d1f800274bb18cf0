"""hawk_block: Griffin's recurrent block with its states, under the names of recurrentgemma."""
import rg_lru
from core import autodiff as ad
from core.blocks import conv
from hawk_layer import gate

EQUATION = """\
u = conv_1d(linear_x x) + bias, no activation;  gates gx, ga: block-diagonal linear of u, blocks (in, out);
y = linear_out(gelu_tanh(linear_y x) rg_lru(u, gx, ga, a_param)).

conv_1d.w (W,E), tap W-1 meets the current token; tail0, tail (B,W-1,E); h0, h (B,E)."""

INPUTS = {"x": "BTD", "linear_y.weight": "ED", "linear_x.weight": "ED", "linear_y.bias": "E",
          "linear_x.bias": "E", "linear_out.weight": "DE", "linear_out.bias": "D",
          "conv_1d.w": "WE", "conv_1d.b": "E", "rg_lru.input_gate.w": "nww",
          "rg_lru.input_gate.b": "nw", "rg_lru.a_gate.w": "nww", "rg_lru.a_gate.b": "nw",
          "rg_lru.a_param": "E", "tail0": "BME", "h0": "BE"}
OUTPUTS = {"y": "BTD", "tail": "BME", "h": "BE"}


def evaluate(x, p):
    z = x["x"]
    u, tail = conv(ad.linear(z, x["linear_x.weight"], x["linear_x.bias"]),
                   x["conv_1d.w"].swap(0, 1), x.get("tail0"), x["conv_1d.b"])
    given = {"h0": x["h0"]} if "h0" in x else {}
    out = rg_lru.evaluate({"x": u, "a_param": x["rg_lru.a_param"],
                           "gx": gate(u, x["rg_lru.input_gate.w"], x["rg_lru.input_gate.b"]),
                           "ga": gate(u, x["rg_lru.a_gate.w"], x["rg_lru.a_gate.b"]), **given}, p)
    y = ad.gelu_tanh(ad.linear(z, x["linear_y.weight"], x["linear_y.bias"])) * out["y"]
    return {"y": ad.linear(y, x["linear_out.weight"], x["linear_out.bias"]), "tail": tail,
            "h": out["h"]}


SIZES = dict(B=2, T=15, D=10, n=3, w=4)
OPTIONS = {}


def draw(d, n, o):
    E = n.n * n.w
    x = {"x": d.normal(n.B, n.T, n.D)}
    for name in ("linear_y", "linear_x"):
        x.update({f"{name}.weight": d.weight(E, n.D), f"{name}.bias": d.normal(E, by=0.1)})
    x.update({"linear_out.weight": d.weight(n.D, E), "linear_out.bias": d.normal(n.D, by=0.1),
              "conv_1d.w": d.normal(4, E, by=0.5), "conv_1d.b": d.normal(E, by=0.1)})
    for name in ("input_gate", "a_gate"):
        x.update({f"rg_lru.{name}.w": d.normal(n.n, n.w, n.w, by=0.5),
                  f"rg_lru.{name}.b": d.normal(n.n, n.w, by=0.1)})
    x.update({"rg_lru.a_param": d.uniform(-9.0, -4.3, E), "tail0": d.normal(n.states, 3, E),
              "h0": d.normal(n.states, E)})
    return x, {}


CASES = {"hawk_block_state0": dict(note="given convolution tail and state")}
