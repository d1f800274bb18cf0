"""safetensors files with numpy alone: F64, F32, F16, BF16 (as float32) and whole numbers."""

import json
import struct

import numpy as np

__all__ = ["load", "save"]

_TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64,
          "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_}


def load(path):
    """(tensors, metadata): arrays by name, and the file's own text by key."""
    with open(path, "rb") as file:
        data = file.read()
    if len(data) < 8:
        raise ValueError(f"{path}: too short for a safetensors file")
    size, = struct.unpack_from("<Q", data)
    if size > len(data) - 8:
        raise ValueError(f"{path}: its header of {size} bytes goes beyond the end")
    header = json.loads(data[8:8 + size])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, row in header.items():
        begin, end = (8 + size + at for at in row["data_offsets"])
        raw = data[begin:end]
        if row["dtype"] == "BF16":
            value = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif row["dtype"] in _TYPES:
            value = np.frombuffer(raw, _TYPES[row["dtype"]])
        else:
            raise ValueError(f"{path}: {name} is of type {row['dtype']}, which is not read here")
        tensors[name] = value.reshape(row["shape"])
    return tensors, metadata


def save(path, tensors, metadata=None):
    """Writes arrays by name."""
    names = {np.dtype(t): name for name, t in _TYPES.items()}
    header, parts, at = {}, [], 0
    if metadata:
        header["__metadata__"] = {k: str(v) for k, v in metadata.items()}
    for name, value in tensors.items():
        value = np.require(value, None, "C")
        raw = value.tobytes()
        header[name] = {"dtype": names[value.dtype], "shape": list(value.shape),
                        "data_offsets": [at, at + len(raw)]}
        parts.append(raw)
        at += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(parts))
