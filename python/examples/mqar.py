"""Multi-query associative recall in twenty lines: a small gated delta net learns to look up.

    python mqar.py [STEPS]"""

import sys

import torch
import mneme
from mneme.torch.nn import LanguageModel

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
device = "cuda" if torch.cuda.is_available() else "cpu"
task = mneme.Task("mqar", vocab=20, length=12, pairs=2)
model = LanguageModel({"layers": "gdn*2", "hidden_size": 64, "vocab_size": task.vocabulary,
                       "num_heads": 2, "head_dim": 16}).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
for step in range(steps + 1):
    held_out = step % 50 == 0 or step == steps
    tokens, targets = task.draw(64, first=64 * step, split="test" if held_out else "train")
    logits = model(torch.tensor(tokens, device=device).long())
    targets = torch.tensor(targets, device=device).long()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    if held_out:
        right = (logits.argmax(-1) == targets)[targets != -100].float().mean()
        print(f"step {step:4}  loss {loss.item():.3f}  answers right {100 * right.item():.0f} %")
        continue
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
