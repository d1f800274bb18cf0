"""Synthetic tasks: samples made by a known law, with the answers that a memory has to give.

    task = mneme.Task("mqar", pairs=8)
    tokens, targets = task.draw(64, split="train", seed=0)     # (64, length) each, -100: no answer"""

import ctypes
import functools
import json
import sys

import numpy as np

from . import _library
from ._library import check, library

__all__ = ["Task", "names", "describe"]

NO_TARGET = -100


@functools.lru_cache(maxsize=None)
def _rows():
    return {row["name"]: row for row in _library.describe("tasks")["tasks"]}


def names():
    """All tasks."""
    return list(_rows())


def describe(name):
    """Options with defaults, metric and published settings of a task."""
    if name not in _rows():
        raise ValueError(f"there is no task {name!r}; there are " + ", ".join(_rows()))
    return _rows()[name]


class Task:
    """A task with its options. `setting` is a published one ("vocab-32"); keywords go over it."""

    def __init__(self, name, setting=None, **options):
        self.handle = None
        given = {}
        if setting is not None:
            found = [s for s in describe(name)["settings"] if s["name"] == setting]
            if not found:
                raise ValueError(f"{name} has no setting {setting!r}; it has "
                                 + ", ".join(s["name"] for s in describe(name)["settings"]))
            for change in found[0]["changes"].split():
                key, _, value = change.partition("=")
                try:
                    given[key] = json.loads(value)
                except ValueError:
                    given[key] = value
        given.update(options)
        out = ctypes.c_void_p()
        check(library().mn_task_open(ctypes.byref(out), name.encode(), json.dumps(given).encode()))
        self.handle, self.name, self.options = out.value, name, given
        sizes = [ctypes.c_int64() for _ in range(4)]
        library().mn_task_sizes(self.handle, *(ctypes.byref(s) for s in sizes))
        self.vocabulary, self.features, self.classes, self.length = (s.value for s in sizes)

    def __del__(self, finalizing=sys.is_finalizing):
        if getattr(self, "handle", None) and not finalizing():
            library().mn_task_close(self.handle)
            self.handle = None

    def draw(self, count, first=0, split="train", seed=0):
        """Samples [first, first + count): inputs (count, length) int32, or (count, length,
        features) float32 for tasks of vectors; targets (count, length) int32, -100 where nothing
        is asked. A function of the arguments alone."""
        targets = np.empty((count, self.length), np.int32)
        if self.features:
            inputs = np.zeros((count, self.length, self.features), np.float32)
        else:
            inputs = np.empty((count, self.length), np.int32)
        pointers = (None, inputs.ctypes.data) if self.features else (inputs.ctypes.data, None)
        check(library().mn_task_draw(self.handle, seed, split.encode(), first, count, *pointers,
                                     targets.ctypes.data))
        return inputs, targets

    def __repr__(self):
        return f"mneme.Task({self.name!r}, length={self.length}, vocabulary={self.vocabulary})"
