"""Launches on GPUs: PyTorch's current stream, and memory for work from PyTorch's allocator.

A GPU has one context for all threads of the process. What it holds between calls belongs to the
stream they went to: another stream, or a CUDA graph that is being recorded, gives it back first.
Inside of a recording nothing is kept: addresses there belong to the graph's pool. Nor does a call
that a compiled graph makes keep anything: graph trees run it once with their pool before they
record it, and whatever lives on in that pool must be a result."""

import ctypes
import functools
import threading

import torch

from .. import _library

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_KEEP = 64 << 20        # bytes for work that stay with a context between calls
_DEFAULT_STREAM = 1     # cudaStreamLegacy: for PyTorch it is 0, which here would be none

_stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda index: torch.cuda.current_stream(index).cuda_stream)
_current = getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device
_records = getattr(torch._C, "_cuda_isCurrentStreamCapturing",
                   None) or torch.cuda.is_current_stream_capturing
compiled = None         # _fast.py's module, which makes calls by itself while nothing below changes


class DeviceContext(_library.Context):
    """The context of one GPU."""

    def __init__(self, index):
        self.index, self.device = index, torch.device("cuda", index)
        self.held, self.bytes = {}, 0
        self.recorded = []    # host arrays that graphs read when they are replayed
        self.lock = threading.Lock()
        self.allocate, self.release = _ALLOCATE(self._allocate), _RELEASE(self._release)
        self.stream = _stream_of(index) or _DEFAULT_STREAM
        super().__init__(1, device=f"cuda:{index}", stream=self.stream,
                         memory=(self.allocate, self.release))
        if compiled is not None:
            compiled.gpu(index, self.handle, self.stream, self.lock.acquire, self.lock.release,
                         self.trim, torch.cuda.device_count() == 1)

    def _tell(self):
        if compiled is not None:
            compiled.gpu_is(self.index, self.stream, self.bytes > _KEEP)

    def _allocate(self, owner, size):
        try:
            block = torch.empty(size, dtype=torch.uint8, device=self.device)
        except Exception:    # out of memory: the library says so
            return None
        at = block.data_ptr()
        self.held[at] = block
        self.bytes += size
        self._tell()
        return at

    def _release(self, owner, at):
        block = self.held.pop(at, None)
        if block is not None:
            self.bytes -= block.numel()
            self._tell()

    def run(self, function, words, host, keeps=True):
        """One operator on the current stream; `host` are the host arrays it reads. `keeps`: memory
        for work may stay for the next call."""
        if _current() != self.index:
            with torch.cuda.device(self.index):
                return self.run(function, words, host, keeps)
        stream = _stream_of(self.index) or _DEFAULT_STREAM
        records = _records()
        with self.lock:
            if records:
                self.trim()
            if stream != self.stream:
                _library.check(_library.library().mn_context_use_stream(self.handle, stream))
                self.stream = stream
                self._tell()
            status = function(self.handle, words)
            if records or self.bytes > (_KEEP if keeps else 0):
                self.trim()
        if status:
            _library.check(status)
        if records:
            self.recorded.extend(x for x in host if x is not None)


_made = threading.Lock()


@functools.lru_cache(maxsize=None)
def context(index):
    with _made:
        return DeviceContext(index)


def run(function, index, words, host, keeps=True):
    """Calls an operator of the library for tensors on GPU `index`, or on the CPU (-1)."""
    if index < 0:
        status = function(_library.cpu_handle(), words)
        if status:
            _library.check(status)
    else:
        context(index).run(function, words, host, keeps)
