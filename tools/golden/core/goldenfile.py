"""Golden files: safetensors with string metadata, every tensor F64, little-endian, C order.

The order of the entries is fixed (metadata, inputs, outputs, cotangents, gradients, cu_seqlens), so
the same numbers always make the same bytes.
"""
import json
import struct

import numpy as np

_RESERVED = {"case", "op", "note", "equation", "inputs", "outputs", "cotangents", "grads",
             "integers", "symmetric", "cu_seqlens", "seed"}


class FormatError(ValueError):
    """The file is not a golden file; the text says what is wrong with it."""


def read(path):
    """The metadata and the tensors of a file."""
    with open(path, "rb") as file:
        raw = file.read()
    if len(raw) < 8:
        raise FormatError("shorter than a safetensors header")
    (length,) = struct.unpack("<Q", raw[:8])
    if length > len(raw) - 8:
        raise FormatError("the header is longer than the file")
    try:
        header = json.loads(raw[8:8 + length])
        metadata = header.pop("__metadata__")
        tensors = {name: _tensor(raw[8 + length:], name, entry) for name, entry in header.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise FormatError(f"not a golden file: {error}") from error
    return metadata, tensors


def _tensor(data, name, entry):
    if entry["dtype"] != "F64":
        raise FormatError(f"{name} is {entry['dtype']}, golden tensors are F64")
    start, end = entry["data_offsets"]
    count = int(np.prod(entry["shape"], dtype=np.int64))
    if not 0 <= start <= end <= len(data) or end - start != 8 * count:
        raise FormatError(f"{name} does not lie inside the file")
    return np.frombuffer(data, "<f8", count, start).reshape(entry["shape"]).astype(np.float64)


def write(path, metadata, tensors):
    """Writes strings and arrays in the order in which they are given."""
    header, at = {"__metadata__": metadata}, 0
    for name, array in tensors.items():
        size = 8 * array.size
        header[name] = {"dtype": "F64", "shape": list(array.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array, "<f8").tobytes())


def names(metadata, key):
    """A comma-separated list of the metadata."""
    return [name for name in metadata.get(key, "").split(",") if name]


def parameters(metadata):
    """The operator's own entries: numbers as numbers, True and False as such, else words."""
    return {key: _parse(text) for key, text in metadata.items()
            if key not in _RESERVED and not key.startswith(("tol32.", "tol64."))}


def _parse(text):
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
