#!/usr/bin/env python3
"""Recomputes golden files: every output and gradient from the stored inputs, in float64.

A result x agrees with the stored r if max |x - r| <= rtol max |r|. The text of the equation, the
tensor lists and the packing are compared as well. Exit status 1 if anything disagrees."""
import argparse
import sys

sys.dont_write_bytecode = True

import numpy as np  # noqa: E402

from core import goldenfile, operator  # noqa: E402


def recompute(metadata, tensors):
    """Results under the names of the file."""
    names = goldenfile.names
    module = operator.find(metadata["op"])
    inputs = {name: tensors[name] for name in names(metadata, "inputs")}
    cotangents = {name: tensors[name] for name in names(metadata, "cotangents")}
    cu = [int(c) for c in names(metadata, "cu_seqlens")] or None
    if cu and not np.array_equal(cu, tensors["cu_seqlens"]):
        raise ValueError("cu_seqlens differs between metadata and tensor")
    if metadata.get("equation") != module.EQUATION:
        raise ValueError(f"its equation is not that of tools/golden/{metadata['op']}.py")
    return operator.run(module, inputs, goldenfile.parameters(metadata), cotangents, cu,
                        names(metadata, "grads"), names(metadata, "outputs"),
                        names(metadata, "symmetric"))


def errors(path):
    """(name, max |x - r| / max |r|, rms likewise) of every result of a file."""
    metadata, tensors = goldenfile.read(path)
    found = []
    for name, x in recompute(metadata, tensors).items():
        r = tensors[name]
        if x.size != r.size:
            raise ValueError(f"{name} has shape {x.shape}, stored {r.shape}")
        off = np.abs(x.reshape(r.shape) - r)
        top = np.abs(r).max(initial=0.0)
        rms = np.sqrt((r * r).mean())
        found.append((name, off.max(initial=0.0) / top if top else off.max(initial=0.0),
                      np.sqrt((off * off).mean()) / (rms or 1.0)))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--rtol", type=float, default=1e-10, help="default: %(default)s")
    parser.add_argument("--quiet", action="store_true", help="only failures and the closing line")
    parser.add_argument("--verbose", action="store_true", help="a line for every tensor")
    options = parser.parse_args()
    failed, compared, worst = 0, 0, (0.0, "nothing")
    for path in options.files:
        try:
            found = errors(path)
        except (OSError, KeyError, ValueError) as error:
            print(f"FAIL {path}: {error.args[0] if isinstance(error, KeyError) else error}")
            failed += 1
            continue
        compared += len(found)
        name, most, _ = max(found, key=lambda row: row[1] if row[1] == row[1] else np.inf)
        worst = max(worst, (most, f"{path} {name}"))
        passed = most <= options.rtol
        failed += not passed
        if options.verbose:
            for tensor, largest, rms in found:
                print(f"     {path} {tensor}: max {largest:.2e} rms {rms:.2e}")
        if not passed or not options.quiet:
            print(f"{'ok  ' if passed else 'FAIL'} {path}: {len(found)} results, worst {name} "
                  f"{most:.2e}")
    print(f"{len(options.files)} files, {compared} results, {failed} files failed; worst "
          f"{worst[0]:.2e} in {worst[1]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
