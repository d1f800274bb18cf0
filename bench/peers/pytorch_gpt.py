#!/usr/bin/env python3
"""Training steps of a GPT in eager PyTorch on the processor.

The model of the llm.c peer (bench/peers/llmc.sh): learned positions, pre-norm blocks with biases,
fused attention, GELU, output weights tied to the embedding, float32, AdamW. Times steps on random
tokens and prints tokens per second: the median step, and the fastest.

    pip install torch
    python3 bench/peers/pytorch_gpt.py --threads 2
"""
import argparse
import math
import time

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, C // self.heads).unbind(2)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.tokens = nn.Embedding(o.vocabulary, o.width)
        self.places = nn.Embedding(o.context, o.width)
        self.blocks = nn.ModuleList(Block(o.width, o.heads) for _ in range(o.layers))
        self.norm = nn.LayerNorm(o.width)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def optimizer_of(model):
    """AdamW in its fastest form that this version has on the processor."""
    options = dict(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    try:
        return torch.optim.AdamW(model.parameters(), fused=True, **options), "fused"
    except RuntimeError:
        return torch.optim.AdamW(model.parameters(), foreach=True, **options), "foreach"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in dict(threads=2, steps=20, batch=4, context=256, layers=6, width=384,
                              heads=6, vocabulary=65).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    torch.manual_seed(1)
    model = GPT(o)
    optimizer, form = optimizer_of(model)
    seconds = []
    for step in range(-3, o.steps):
        ids = torch.randint(o.vocabulary, (o.batch, o.context + 1))
        start = time.perf_counter()
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step >= 0:
            seconds.append(time.perf_counter() - start)
    seconds.sort()
    n = o.batch * o.context
    count = sum(p.numel() for p in model.parameters())
    print(f"PyTorch {torch.__version__}, {o.threads} threads, {count} parameters, AdamW {form}")
    print(f"loss {loss.item():.4f} after {o.steps} steps; ln {o.vocabulary} is {math.log(o.vocabulary):.4f}")
    print(f"PyTorch eager: {n / seconds[len(seconds) // 2]:.0f} tokens/s (median of {o.steps} steps), "
          f"{n / seconds[0]:.0f} (fastest)")


if __name__ == "__main__":
    main()
