"""Training runs, sweeps and experiments as arrays, pandas frames, or W&B runs.

    run = mneme.runs.read("runs/gdn")             # metrics.jsonl: {"step": ..., "loss": ...}
    mneme.runs.frame("runs/gdn").plot(x="step", y="loss")
    mneme.runs.results("sweep")                   # a row for each job, labels and scores
    mneme.runs.to_wandb("runs/gdn", project="memory")

TensorBoard reads the folder of a run as it is; `events` reads its event files without TensorBoard.
pandas and wandb are imported by the functions that need them."""

import json
import math
import pathlib
import struct

import numpy as np

__all__ = ["read", "frame", "results", "results_frame", "events", "to_wandb", "config"]


def _lines(path):
    """Objects of a file of JSON lines. A last line without its newline is still being written."""
    with open(path, "rb") as file:
        data = file.read()
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}: line {number} is no JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}: line {number} is no object")
        yield row


def _file(path, name):
    path = pathlib.Path(path)
    path = path / name if path.is_dir() else path
    if not path.exists():
        raise FileNotFoundError(f"{path.parent} has no {name}: it is no folder of " +
                                ("a run" if name == "metrics.jsonl" else "a sweep or experiment"))
    return path


def read(run):
    """Columns of a run's metrics.jsonl: float64, NaN where a line does not tell."""
    rows = list(_lines(_file(run, "metrics.jsonl")))
    names = list(dict.fromkeys(name for row in rows for name, value in row.items()
                               if value is None or isinstance(value, (int, float))))
    return {name: np.array([math.nan if row.get(name) is None else float(row[name])
                            for row in rows]) for name in names}


def config(run):
    """What a run was asked for: its train.json."""
    return json.loads(_file(run, "train.json").read_text())


def _pandas():
    try:
        import pandas
    except ImportError:
        raise ImportError("frames need pandas: pip install pandas; read() and results() do without"
                          ) from None
    return pandas


def frame(run):
    """read() as a pandas frame."""
    return _pandas().DataFrame(read(run))


def results(folder):
    """A dict for each job of a sweep or experiment: its labels, status, and numbers of its result;
    "curve" is a list. Records that failed have their "error"."""
    rows = []
    for record in _lines(_file(folder, "results.jsonl")):
        row = {"key": record.get("key"), "status": record.get("status"),
               "seconds": record.get("seconds")}
        row.update(record.get("job", {}).get("labels", {}))
        if record.get("error"):
            row["error"] = record["error"]
        row.update(record.get("result") or {})
        rows.append(row)
    return rows


def results_frame(folder):
    """results() as a pandas frame."""
    return _pandas().DataFrame(results(folder))


# ---- event files --------------------------------------------------------------------------------

def _varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _fields(data):
    """(number, value) of a protocol buffer: whole numbers, doubles, floats and bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
        elif kind == 1:
            value, at = struct.unpack_from("<d", data, at)[0], at + 8
        elif kind == 2:
            size, at = _varint(data, at)
            value, at = data[at:at + size], at + size
        elif kind == 5:
            value, at = struct.unpack_from("<f", data, at)[0], at + 4
        else:
            raise ValueError(f"a field of kind {kind}")
        yield key >> 3, value


def events(path):
    """{tag: (steps, values)} of an event file, or of all in a run's folder."""
    path = pathlib.Path(path)
    files = sorted(path.glob("events.out.tfevents.*")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"{path} has no event files")
    found = {}
    for file in files:
        data, at = file.read_bytes(), 0
        while at + 12 <= len(data):
            size, = struct.unpack_from("<Q", data, at)
            if at + 16 + size > len(data):
                break                      # still being written
            _event(data[at + 12:at + 12 + size], found)
            at += 16 + size
    return {tag: (np.array([s for s, _ in rows]), np.array([v for _, v in rows]))
            for tag, rows in found.items()}


def _event(data, found):
    step, summaries = 0, []
    for number, value in _fields(data):
        if number == 2:
            step = value
        elif number == 5:
            summaries.append(value)
    for summary in summaries:
        for number, value in _fields(summary):
            if number != 1:
                continue
            parts = dict(_fields(value))
            if 1 in parts and isinstance(parts.get(2), float):
                found.setdefault(parts[1].decode(), []).append((step, parts[2]))


# ---- W&B ----------------------------------------------------------------------------------------

def to_wandb(run, **how):
    """Sends a run to Weights & Biases, step by step; `how` goes to wandb.init. Gives its run."""
    try:
        import wandb
    except ImportError:
        raise ImportError("to_wandb needs wandb: pip install wandb") from None
    rows = list(_lines(_file(run, "metrics.jsonl")))
    folder = _file(run, "metrics.jsonl").parent
    how.setdefault("name", folder.name)
    if (folder / "train.json").exists():
        how.setdefault("config", config(folder))
    there = wandb.init(**how)
    for row in rows:
        step = int(row.get("step", 0))
        there.log({k: v for k, v in row.items() if k != "step" and v is not None}, step=step)
    there.finish()
    return there
