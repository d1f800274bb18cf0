"""Speculative decoding with n-gram guesses on the built-in stories: the same tokens, and how much
sooner. Each turn begins with a story of its own. Both servers take turns, so that the load of the
machine falls on both.

usage: guesses.py MNEME MODEL [--tokens 10000] [--turns 20] [--draft 8]
"""
import argparse
import random
import time

from serving import Server, quantile, table

parser = argparse.ArgumentParser()
parser.add_argument("mneme")
parser.add_argument("model")
parser.add_argument("--tokens", type=int, default=10000)
parser.add_argument("--turns", type=int, default=20)
parser.add_argument("--draft", type=int, default=8)
parser.add_argument("--temperature", type=float, default=0)
parser.add_argument("--threads", default="2")
args = parser.parse_args()

servers = [Server(args.mneme, args.model, "--draft", str(n), "--threads", args.threads)
           for n in (0, args.draft)]
each = args.tokens // args.turns
names = ["anna", "ben", "clara", "david", "emma", "felix", "grace", "hugo"]
things = ["lamp", "drum", "book", "vase", "coin", "knife", "cup", "rope"]
places = ["mill", "barn", "garden", "church", "tower", "cellar", "attic", "kitchen"]


def story(rng):
    return " ".join(f"{rng.choice(names)} puts the {rng.choice(things)} in the {rng.choice(places)}."
                    for _ in range(3))


took, same, tokens = ([], []), True, 0
for turn in range(args.turns):
    body = dict(prompt=story(random.Random(turn)), max_tokens=each, ignore_eos=True, seed=turn,
                temperature=args.temperature, logprobs=0)
    told = []
    for server, seconds in zip(servers, took):
        start = time.perf_counter()
        choice = server.complete(**body)["choices"][0]
        seconds.append(time.perf_counter() - start)
        told.append((choice["text"], choice["logprobs"]))
    same &= told[0] == told[1]
    tokens += each
ratios = [a / b for a, b in zip(*took)]
guessed = servers[1].metric("mneme_guessed_tokens_total")
right = servers[1].metric("mneme_guessed_right_total")
table([(f"{tokens} tokens and their log probabilities", "equal" if same else "DIFFER", "equal"),
       ("tokens/s without, median", f"{each / quantile(took[0], .5):.0f}", ""),
       (f"tokens/s with --draft {args.draft}, median", f"{each / quantile(took[1], .5):.0f}", ""),
       ("times, median of turns", f"{quantile(ratios, .5):.2f}", ">= 1.6"),
       ("times, all tokens", f"{sum(took[0]) / sum(took[1]):.2f}", ""),
       ("guessed, of them right", f"{guessed:.0f}, {right:.0f}", ""),
       ("exit status", [s.stop() for s in servers], "[0, 0]")])
