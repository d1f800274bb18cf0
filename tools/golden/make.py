#!/usr/bin/env python3
"""Makes golden files: random inputs, outputs and gradients in float64, measured tolerances.

Names are operators (all their cases) or cases. Sizes and options of a case can be changed, so files
of other shapes and seeds are made as easily as those in tests/golden. With --from, the inputs are
those of files that exist, and everything else is computed anew."""
import argparse
import os
import sys

sys.dont_write_bytecode = True

import numpy as np  # noqa: E402

from core import goldenfile, operator, sample, tolerance  # noqa: E402


def sizes_of(module, case, changed):
    """Sizes of a case; a packed one is a single row of all its sequences."""
    sizes = {**module.SIZES, **{k: v for k, v in case.items() if k in module.SIZES}, **changed}
    lengths = case.get("packed")
    if lengths:
        sizes.update(B=1, T=sum(lengths))
    return sample.named(**sizes, states=len(lengths) if lengths else sizes.get("B", 1))


def options_of(module, case, changed):
    return sample.named(**{**module.OPTIONS, **{k: v for k, v in case.items()
                                                if k in module.OPTIONS}, **changed})


def outputs_of(module, x, p, cu, options):
    """Names and shapes of the outputs that the file has."""
    left_out = getattr(module, "without_outputs", lambda o: ())(options)
    _, y = operator.forward(module, x, p, cu)
    return {name: var.shape for name, var in y.items() if name not in left_out}


def cotangents_of(module, outputs, options, d):
    outside = set(getattr(module, "NO_COTANGENT", ()))
    outside |= set(getattr(module, "without_cotangent", lambda o: ())(options))
    made = {}
    for name, shape in outputs.items():
        if name in outside:
            continue
        symmetric = name in getattr(module, "SYMMETRIC", ())
        made[f"d{name}"] = (d.symmetric if symmetric else d.normal)(*shape)
    return made


def metadata_of(module, op, name, note, lists, p, cu, tolerances):
    texts = {"case": name, "op": op, "note": note, "equation": module.EQUATION}
    texts.update({key: ",".join(names) for key, names in lists.items() if names or key in
                  ("inputs", "outputs", "cotangents", "grads")})
    if cu:
        texts["cu_seqlens"] = ",".join(map(str, cu))
    texts.update({key: str(value) for key, value in p.items()})
    for tensor, (single, double) in tolerances.items():
        texts[f"tol32.{tensor}"], texts[f"tol64.{tensor}"] = f"{single:.2e}", f"{double:.2e}"
    return texts


def assemble(op, name, note, inputs, p, cotangents, cu, outputs, seed):
    """Metadata and tensors of a file."""
    module = operator.find(op)
    still = getattr(module, "NO_GRADIENT", ())
    grads = [f"d{x}" for x in inputs if x not in still] if cotangents else []
    symmetric = [x for x in getattr(module, "SYMMETRIC", ()) if x in inputs or x in outputs]
    call = (module, inputs, p, cotangents, cu, grads, list(outputs), symmetric)
    results = operator.run(*call)
    lists = {"inputs": list(inputs), "outputs": list(outputs), "cotangents": list(cotangents),
             "grads": grads, "symmetric": symmetric,
             "integers": [x for x in getattr(module, "INTEGERS", ()) if x in inputs]}
    metadata = metadata_of(module, op, name, note, lists, p, cu, tolerance.measure(call, seed))
    tensors = {**inputs, **{y: results[y] for y in outputs}, **cotangents,
               **{g: results[g] for g in grads}}
    if cu:
        tensors["cu_seqlens"] = np.array(cu, np.float64)
    return metadata, tensors


def draw_case(op, name, seed, changed):
    module = operator.find(op)
    case = module.CASES[name]
    unknown = set(changed) - set(module.SIZES) - set(module.OPTIONS)
    if unknown:
        raise ValueError(f"{op} has no {', '.join(sorted(unknown))}; it has "
                         f"{', '.join([*module.SIZES, *module.OPTIONS])}")
    n = sizes_of(module, case, {k: v for k, v in changed.items() if k in module.SIZES})
    o = options_of(module, case, {k: v for k, v in changed.items() if k in module.OPTIONS})
    d = sample.Draw(seed, op, name)
    inputs, p = module.draw(d, n, o)
    lengths = case.get("packed")
    cu = [0, *map(int, np.cumsum(lengths))] if lengths else None
    outputs = outputs_of(module, inputs, p, cu, o)
    cotangents = cotangents_of(module, outputs, o, d)
    return assemble(op, name, case["note"], inputs, p, cotangents, cu, outputs, seed)


def redo(path, seed):
    """The file again from its own inputs and cotangents."""
    metadata, tensors = goldenfile.read(path)
    names = goldenfile.names
    cu = [int(c) for c in names(metadata, "cu_seqlens")] or None
    return assemble(metadata["op"], metadata["case"], metadata["note"],
                    {x: tensors[x] for x in names(metadata, "inputs")},
                    goldenfile.parameters(metadata),
                    {c: tensors[c] for c in names(metadata, "cotangents")}, cu,
                    names(metadata, "outputs"), seed)


def chosen(names):
    """(operator, case) of every name; all of them without names."""
    every = [(op, case) for op in operator.all_names() for case in operator.find(op).CASES]
    for name in names:
        found = [pair for pair in every if name in pair]
        if not found:
            raise ValueError(f"no operator or case is called {name}; --list names them")
        yield from found
    if not names:
        yield from every


def setting(text):
    """NAME=VALUE of a size or an option."""
    name, _, value = text.partition("=")
    if not value:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE")
    words = {"True": True, "False": False}
    return name, words[value] if value in words else int(value) if value.isdigit() else value


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="operators or cases (all)")
    parser.add_argument("--out", default=".", metavar="DIR", help="default: here")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE",
                        help="a size (B, T, K, ...) or an option of all that is made")
    parser.add_argument("--from", dest="files", nargs="+", default=[], metavar="FILE",
                        help="files whose inputs are used again")
    parser.add_argument("--list", action="store_true", help="operators and their cases")
    options = parser.parse_args()
    if options.list:
        for op in operator.all_names():
            print(f"{op}: {', '.join(operator.find(op).CASES)}")
        return 0
    try:
        os.makedirs(options.out, exist_ok=True)
        jobs = [lambda path=path: redo(path, options.seed) for path in options.files]
        if not options.files or options.names:
            jobs += [lambda op=op, case=case: draw_case(op, case, options.seed, dict(options.set))
                     for op, case in chosen(options.names)]
        for job in jobs:
            metadata, tensors = job()
            path = os.path.join(options.out, metadata["case"] + ".safetensors")
            goldenfile.write(path, metadata, tensors)
            print(path, flush=True)
    except (OSError, KeyError, ValueError) as error:
        print(f"make.py: {error.args[0] if isinstance(error, KeyError) else error}",
              file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
