"""One of several processes of test_torch_train.py: worker_ranks.py KIND RANK RANKS FOLDER. Trains a
model of mneme.torch.nn on its part of a batch with gloo and saves losses and parameters."""

import pathlib
import sys

import torch
import torch.distributed as dist

from mneme.torch import nn as mnn

CONFIG = {"layers": "gdn, kla, bayes", "hidden_size": 32, "vocab_size": 17}


def make_model():
    torch.manual_seed(0)
    return mnn.LanguageModel(CONFIG)


def batch(step, rows):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(17, (rows, 20), generator=generator)


def train(model, parameters, part, steps=3, reduce=lambda loss: loss):
    """Losses of plain SGD: rounding does not grow as it does where gradients are normalised."""
    optimiser, losses = torch.optim.SGD(parameters, 0.5), []
    for step in range(steps):
        tokens = part(batch(step, 4))
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(reduce(loss.detach()).item())
    return losses


def main(kind, rank, ranks, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank,
                            world_size=ranks)
    model = make_model()
    if kind == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    else:
        wrapped = mnn.shard(model)

    def mean(loss):
        dist.all_reduce(loss)
        return loss / ranks

    rows = 4 // ranks
    losses = train(wrapped, wrapped.parameters(),
                   lambda tokens: tokens[rank * rows:(rank + 1) * rows], reduce=mean)
    whole = {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
             for name, p in model.named_parameters()}
    if rank == 0:
        torch.save({"losses": losses, "parameters": whole}, pathlib.Path(folder) / "out.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
