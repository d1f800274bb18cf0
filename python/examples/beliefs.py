"""How sure a model is of what it remembers, token by token, as numpy arrays and a picture.

    python beliefs.py FOLDER "text" [PICTURE.png]

FOLDER is a model with layers that keep a belief (bayes, palimpsa, kla). The variance is that of the
read, averaged over heads; it falls where the memory has seen something like the query before.
Needs numpy; the picture needs matplotlib."""

import sys

import numpy as np

import mneme


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    model = mneme.Model(sys.argv[1])
    tokens = model.tokenizer.encode(sys.argv[2])
    session = model.session(belief=True).feed(tokens)
    beliefs = session.beliefs()
    if not beliefs:
        sys.exit(f"{sys.argv[1]} has no layer that keeps a belief")
    for layer, variance in beliefs.items():
        print(f"layer {layer}: read variance {variance.mean():.4g} on average, "
              f"{variance[-1]:.4g} at the last of {len(variance)} tokens")
    np.savez("beliefs.npz", tokens=tokens, **{f"layer{i}": v for i, v in beliefs.items()})
    if len(sys.argv) > 3:
        draw(model, tokens, beliefs, sys.argv[3])


def draw(model, tokens, beliefs, path):
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        sys.exit("the picture needs matplotlib: pip install matplotlib; beliefs.npz has the numbers")
    figure, axes = pyplot.subplots(figsize=(10, 4), layout="constrained")
    for layer, variance in beliefs.items():
        axes.plot(variance, marker="o", label=f"layer {layer}")
    axes.set_xticks(range(len(tokens)), [model.tokenizer.decode([t]) for t in tokens], rotation=90)
    axes.set_ylabel("read variance")
    axes.legend()
    figure.savefig(path)
    print(path)


if __name__ == "__main__":
    main()
