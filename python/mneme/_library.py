"""Finds libmneme, loads it, and turns its statuses into exceptions.

The library is looked for in MNEME_LIBRARY, then beside this package (where a wheel has it), then
where the system keeps shared libraries. It describes its own operators, layers and tasks (the
mn_describe_ calls of mneme.h), so nothing of its tables is repeated here."""

import ctypes
import ctypes.util
import functools
import json
import os
import pathlib
import sys
import threading

__all__ = ["Error", "library", "check", "describe", "context", "Context"]

_STATUS = {1: ValueError, 2: MemoryError, 3: OSError, 4: ValueError, 5: NotImplementedError,
           6: ArithmeticError, 7: RuntimeError}


class Error(Exception):
    """What libmneme refuses. Also a ValueError, MemoryError, OSError, NotImplementedError,
    ArithmeticError or RuntimeError, after its status; `status` has the name."""

    status = ""


@functools.lru_cache(maxsize=None)
def _error_class(status):
    return type("Error", (Error, _STATUS.get(status, RuntimeError)), {"__module__": "mneme"})


class LibraryNotFound(ImportError):
    """There is no libmneme, or one that does not fit this package."""


_P = ctypes.c_void_p
_I = ctypes.c_int64
_S = ctypes.c_char_p
_PP = ctypes.POINTER(ctypes.c_void_p)
_Z = ctypes.c_size_t
_U = ctypes.c_uint64
_D = ctypes.c_double
_PI = ctypes.POINTER(ctypes.c_int64)

# Every function of mneme.h but the operators: result, arguments.
_PROTOTYPES = {
    "mn_version": (_S, []),
    "mn_last_error": (_S, []),
    "mn_status_name": (_S, [ctypes.c_int]),
    "mn_context_create": (ctypes.c_int, [_PP, _P]),
    "mn_context_destroy": (None, [_P]),
    "mn_context_threads": (ctypes.c_int, [_P]),
    "mn_context_target": (_S, [_P]),
    "mn_context_synchronize": (ctypes.c_int, [_P]),
    "mn_context_use_stream": (ctypes.c_int, [_P, _P]),
    "mn_context_trim": (None, [_P]),
    "mn_tokenizer_load": (ctypes.c_int, [_PP, _S]),
    "mn_tokenizer_destroy": (None, [_P]),
    "mn_tokenizer_ids": (ctypes.c_int, [_PP, _PI, _P, _S, _Z, ctypes.c_bool]),
    "mn_tokenizer_decode": (ctypes.c_int, [_P, _P, _I, ctypes.c_bool, _PP,
                                           ctypes.POINTER(_Z)]),
    "mn_model_open": (ctypes.c_int, [_PP, _S]),
    "mn_model_close": (None, [_P]),
    "mn_model_vocabulary": (_I, [_P]),
    "mn_session_create": (ctypes.c_int, [_PP, _P, _P, _P]),
    "mn_session_destroy": (None, [_P]),
    "mn_session_feed": (ctypes.c_int, [_P, _P, _I]),
    "mn_session_step": (ctypes.c_int, [_P, ctypes.c_int32]),
    "mn_session_score": (ctypes.c_int, [_P, _P, _I, _P]),
    "mn_session_logits": (_P, [_P]),
    "mn_session_position": (_I, [_P]),
    "mn_session_bytes": (_Z, [_P]),
    "mn_session_beliefs": (ctypes.c_int, [_P]),
    "mn_session_belief_layer": (ctypes.c_int, [_P, ctypes.c_int]),
    "mn_session_belief": (_I, [_PP, _P, ctypes.c_int]),
    "mn_session_reset": (ctypes.c_int, [_P]),
    "mn_session_snapshot": (ctypes.c_int, [_PP, _P]),
    "mn_session_restore": (ctypes.c_int, [_P, _P]),
    "mn_snapshot_bytes": (_Z, [_P]),
    "mn_snapshot_destroy": (None, [_P]),
    "mn_session_fork": (ctypes.c_int, [_PP, _P]),
    "mn_session_save": (ctypes.c_int, [_P, _S]),
    "mn_session_load": (ctypes.c_int, [_P, _S]),
    "mn_session_sample": (ctypes.c_int, [ctypes.POINTER(ctypes.c_int32), _P, _P, _P, _I]),
    "mn_task_open": (ctypes.c_int, [_PP, _S, _S]),
    "mn_task_close": (None, [_P]),
    "mn_task_sizes": (None, [_P, _PI, _PI, _PI, _PI]),
    "mn_task_draw": (ctypes.c_int, [_P, _U, _S, _I, _I, _P, _P, _P]),
    "mn_describe_operators": (ctypes.c_int, [_PP]),
    "mn_describe_layers": (ctypes.c_int, [_PP]),
    "mn_describe_layer": (ctypes.c_int, [_PP, _S, _S, _I, _I]),
    "mn_describe_model": (ctypes.c_int, [_PP, _S]),
    "mn_describe_tasks": (ctypes.c_int, [_PP]),
    "mn_layer_start": (ctypes.c_int, [_P, _S, _S, _I, _I, _S, _D, _U, _U]),
}


def _candidates():
    given = os.environ.get("MNEME_LIBRARY")
    if given:
        return [given]
    here = pathlib.Path(__file__).parent
    beside = sorted(str(p) for p in here.glob("libmneme.so*"))
    return beside + ["libmneme.so.0", ctypes.util.find_library("mneme")]


def _package_version():
    from importlib import metadata
    try:
        return metadata.version("mneme")
    except metadata.PackageNotFoundError:    # run from a source tree
        return None


def _fits(lib, path):
    for name, (result, arguments) in _PROTOTYPES.items():
        try:
            function = getattr(lib, name)
        except AttributeError:
            raise LibraryNotFound(
                f"{path} has no {name}: it is not libmneme, or an older one than this package; "
                "reinstall the package, or point MNEME_LIBRARY to the right file") from None
        function.restype, function.argtypes = result, arguments
    found, wanted = lib.mn_version().decode(), _package_version()
    if wanted and found.split(".")[:2] != wanted.split(".")[:2]:
        raise LibraryNotFound(f"{path} is libmneme {found} and this package is mneme {wanted}; "
                              "reinstall the package, or point MNEME_LIBRARY to the right file")


@functools.lru_cache(maxsize=None)
def library():
    """libmneme as a ctypes.CDLL with all prototypes set."""
    reasons = []
    for path in filter(None, _candidates()):
        try:
            lib = ctypes.CDLL(path)
        except OSError as error:
            reasons.append(str(error))
            continue
        _fits(lib, path)
        return lib
    raise LibraryNotFound(
        "libmneme cannot be loaded (" + "; ".join(reasons) + "); install the wheel, build the "
        "library and point MNEME_LIBRARY to it, or install it where the system looks")


def check(status):
    """Raises what the status means, with libmneme's sentence."""
    if status:
        lib = library()
        error = _error_class(status)(lib.mn_last_error().decode())
        error.status = lib.mn_status_name(status).decode()
        raise error


_free = ctypes.CDLL(None).free
_free.restype, _free.argtypes = None, [ctypes.c_void_p]


def take(pointer, size=None):
    """The bytes behind a pointer of malloc, which is freed."""
    value = ctypes.string_at(pointer) if size is None else ctypes.string_at(pointer, size)
    _free(pointer)
    return value


def describe(what, *arguments):
    """mn_describe_WHAT as Python data: "operators", "layers", "layer", "model", "tasks"."""
    out = ctypes.c_void_p()
    call = getattr(library(), "mn_describe_" + what)
    check(call(ctypes.byref(out), *(a.encode() if isinstance(a, str) else a for a in arguments)))
    return json.loads(take(out.value))


class _ContextOptions(ctypes.Structure):
    _fields_ = [("n_threads", ctypes.c_int), ("target", ctypes.c_char_p),
                ("device", ctypes.c_char_p), ("stream", ctypes.c_void_p),
                ("allocate", ctypes.c_void_p), ("release", ctypes.c_void_p),
                ("owner", ctypes.c_void_p)]


class Context:
    """Worker threads, scratch memory and the chosen kernels; or a GPU. One thread at a time.

    threads: 0 for one per core; target: "ref", "avx2", "avx512", "neon" or None for the best; device:
    "cpu", "cuda" or "cuda:N"; stream: a cudaStream_t as a number, which stays yours; memory: two C
    functions that give and take back the GPU's memory for work, see mneme.h."""

    def __init__(self, threads=0, target=None, device=None, stream=None, memory=(None, None)):
        self.handle = None
        options = _ContextOptions(threads, target.encode() if target else None,
                                  device.encode() if device else None, stream,
                                  *(f and ctypes.cast(f, ctypes.c_void_p) for f in memory))
        out = ctypes.c_void_p()
        check(library().mn_context_create(ctypes.byref(out), ctypes.byref(options)))
        self.handle = out.value

    def __del__(self, finalizing=sys.is_finalizing):
        if (getattr(self, "handle", None) and not getattr(self, "forked", False)
                and not finalizing()):
            library().mn_context_destroy(self.handle)
            self.handle = None

    @property
    def threads(self):
        return library().mn_context_threads(self.handle)

    @property
    def target(self):
        return library().mn_context_target(self.handle).decode()

    def trim(self):
        """Gives back memory for work, which calls keep for the next one."""
        library().mn_context_trim(self.handle)

    def synchronize(self):
        """Waits for a GPU; what failed there comes out here."""
        check(library().mn_context_synchronize(self.handle))

    def __repr__(self):
        return f"mneme.Context(target={self.target!r}, threads={self.threads})"


_local = threading.local()
_threads = 0


def set_threads(count):
    """Worker threads of the contexts that are made from now on; 0: one per core."""
    global _threads
    _threads = int(count)
    _local.__dict__.clear()


def context(device=None, stream=None):
    """This thread's context for a device and stream, made at the first call."""
    key = (device, stream)
    contexts = _local.__dict__.setdefault("contexts", {})
    found = contexts.get(key)
    if found is None:
        found = contexts[key] = Context(_threads, device=device, stream=stream)
    return found


def cpu_handle():
    """The handle of this thread's context of the CPU; calls of operators begin here."""
    try:
        return _local.handle
    except AttributeError:
        _local.handle = context().handle
        return _local.handle


def made_handle():
    """cpu_handle() where there is one; None in a thread that has not computed on the CPU."""
    return getattr(_local, "handle", None)


def _forget_contexts():
    """A forked child has no worker threads: its contexts are made anew."""
    for found in _local.__dict__.get("contexts", {}).values():
        found.forked = True
    _local.__dict__.clear()


os.register_at_fork(after_in_child=_forget_contexts)
