"""A GPT in the manner of nanoGPT, whose attention is exchanged for a layer of mneme by one argument.

    python nanogpt.py --text FILE --mixer attention      # scaled_dot_product_attention
    python nanogpt.py --text FILE --mixer gdn            # or kda, gla, bayes, gdn+ccq, ...
    python nanogpt.py --text FILE --mixer gdn --start attention.pt

The model below knows nothing of mneme; `patch` finds its modules called "attn" and puts a layer in
their place. With --start it begins from weights that were trained with attention."""

import argparse
import math
import time

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(),
                                 nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, context, layers, width, heads):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", required=True, help="what is learned: a text file")
    parser.add_argument("--mixer", default="gdn", help="attention, or a layer of mneme")
    parser.add_argument("--only", help="blocks that are exchanged, as 1,3; all by default")
    parser.add_argument("--start", help="weights to begin from")
    parser.add_argument("--save", help="where to write the weights")
    for name, value in (("steps", 500), ("batch", 16), ("context", 128), ("layers", 4),
                        ("width", 128), ("heads", 4)):
        parser.add_argument("--" + name, type=int, default=value)
    return parser.parse_args()


def main():
    given = parse()
    torch.manual_seed(1337)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with open(given.text, encoding="utf-8") as file:
        text = file.read()
    letters = sorted(set(text))
    data = torch.tensor([letters.index(c) for c in text])
    model = GPT(len(letters), given.context, given.layers, given.width, given.heads)
    if given.start:
        model.load_state_dict(torch.load(given.start))
    if given.mixer != "attention":
        from mneme.torch import patch
        only = [int(i) for i in given.only.split(",")] if given.only else None
        done = patch(model, given.mixer, layers=only, select="attn", width=given.width)
        print(f"blocks {', '.join(map(str, done))}: {given.mixer}")
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    start = time.perf_counter()
    for step in range(given.steps):
        at = torch.randint(len(data) - given.context - 1, (given.batch,))
        rows = torch.stack([data[i:i + given.context + 1] for i in at]).to(device)
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == given.steps - 1:
            print(f"step {step:5}  loss {loss.item():.4f} ({loss.item() / math.log(2):.2f} bits)  "
                  f"{time.perf_counter() - start:.1f} s")
    if given.save:
        torch.save(model.state_dict(), given.save)


if __name__ == "__main__":
    main()
