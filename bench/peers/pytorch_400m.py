#!/usr/bin/env python3
"""Training steps of a model of 400M parameters on a GPU in what is used beside mneme: a compiled PyTorch
transformer, and flash-linear-attention's gated delta net where `fla` is installed (its prompt and its
decoding too). One line of JSON: figures as `mneme bench train --device cuda --json` names them.

    python3 bench/peers/pytorch_400m.py transformer|gdn [--steps 8] [--batch 8] [--context 4096]

Width 1024, 24 blocks, SwiGLU of 2816, 32,000 tokens with a head of their own, bf16 passes over float32
parameters, fused AdamW, random tokens; "first step" counts from the start of the process."""
import time

BEGAN = time.perf_counter()

import argparse
import json
import statistics

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, BLOCKS, HEADS, HIDDEN, VOCABULARY = 1024, 24, 8, 2816, 32000


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, HEADS, C // HEADS).transpose(1, 3).unbind(2)
        q, k = (y * cos + torch.cat((-y[..., y.shape[-1] // 2:], y[..., :y.shape[-1] // 2]), -1) * sin
                for y in (q, k))
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Transformer(nn.Module):
    def __init__(self, context):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        turn = torch.outer(torch.arange(context), 10000.0 ** -torch.arange(0, 1, 2 * HEADS / WIDTH))
        turn = torch.cat((turn, turn), -1)
        self.register_buffer("cos", turn.cos())
        self.register_buffer("sin", turn.sin())
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def gdn():
    """The published layer at the size of mneme's case gdn.400m."""
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM
    config = GatedDeltaNetConfig(hidden_size=WIDTH, num_hidden_layers=BLOCKS, num_heads=4, head_dim=256, expand_v=1,
                                 intermediate_size=HIDDEN, vocab_size=VOCABULARY, tie_word_embeddings=False)
    return GatedDeltaNetForCausalLM(config)


def seconds(call, runs):
    """Median over runs, the device waited for."""
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def decoding(model, context):
    """A prompt of `context` tokens, and a token behind it."""
    ids = torch.randint(VOCABULARY, (1, context), device="cuda")
    model = model.eval().bfloat16()
    with torch.no_grad():
        past = model(ids, use_cache=True).past_key_values
        prompt = seconds(lambda: model(ids, use_cache=True), 5)
        token = seconds(lambda: model(ids[:, :1], past_key_values=past, use_cache=True), 30)
    return {"prefill_seconds": prompt, "decode_seconds": token}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("transformer", "gdn"))
    for name, default in (("steps", 8), ("batch", 8), ("context", 4096)):
        parser.add_argument(f"--{name}", type=int, default=default)
    o = parser.parse_args()
    model = (Transformer(o.context) if o.model == "transformer" else gdn()).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    run = torch.compile(model) if o.model == "transformer" else lambda ids: model(ids, labels=ids).loss

    def step():
        ids = torch.randint(VOCABULARY, (o.batch, o.context), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - BEGAN
    step()
    each = seconds(step, o.steps)
    free, total = torch.cuda.mem_get_info()
    result = {"name": o.model, "torch": torch.__version__, "device": torch.cuda.get_device_name(),
              "parameters": sum(p.numel() for p in model.parameters()), "first_step_seconds": first, "step_seconds": each,
              "tokens_per_second": o.batch * o.context / each, "gib_in_use": (total - free) / 2 ** 30}
    if o.model == "gdn":
        result.update(decoding(model, o.context))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
