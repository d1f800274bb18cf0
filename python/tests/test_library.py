"""Finding the library: each way to fail says what to do. In processes of their own."""

import os
import shutil
import subprocess
import sys

import pytest

SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def run(code, **environment):
    env = {**os.environ, **environment}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCE, env.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_no_library():
    status, text = run("import mneme; mneme.version()", MNEME_LIBRARY="/nowhere/libmneme.so")
    assert status and "libmneme cannot be loaded" in text and "MNEME_LIBRARY" in text


def test_a_wrong_library():
    import ctypes.util
    status, text = run("import mneme; mneme.version()", MNEME_LIBRARY=ctypes.util.find_library("m"))
    assert status and "it is not libmneme, or an older one" in text


def test_without_torch():
    code = "import sys; sys.modules['torch'] = None\nimport mneme, mneme.ops\nimport mneme.torch"
    status, text = run(code)
    assert status and "mneme.torch needs PyTorch" in text


def test_numpy_alone_is_enough():
    code = ("import sys\nfor name in ('torch', 'transformers', 'pandas'): sys.modules[name] = None\n"
            "import mneme, numpy\nfrom mneme import golden, ops, tasks, session, layers, runs\n"
            "print(ops.l2_norm(numpy.ones((2, 4), 'f')).sum())")
    status, text = run(code)
    assert status == 0, text


def test_an_unknown_name():
    status, text = run("import mneme; mneme.nothing")
    assert status and "mneme has no 'nothing'" in text


# A driver of CUDA 11.4 as far as a runtime asks before it gives up.
OLD_DRIVER = r"""
#include <string.h>
int cuInit(unsigned flags) { (void)flags; return 0; }
int cuDriverGetVersion(int *version) { *version = 11040; return 0; }
static int refuses(void) { return 3; }
int cuGetExportTable(const void **table, const void *id) { (void)id; *table = 0; return 1; }
int cuGetProcAddress_v2(const char *name, void **out, int version, unsigned long flags, int *how) {
    (void)version, (void)flags;
    *out = !strcmp(name, "cuInit") ? (void *)cuInit
         : !strcmp(name, "cuDriverGetVersion") ? (void *)cuDriverGetVersion
         : !strcmp(name, "cuGetExportTable") ? (void *)cuGetExportTable
         : !strcmp(name, "cuGetProcAddress") ? (void *)cuGetProcAddress_v2 : (void *)refuses;
    if (how) *how = 0;
    return 0;
}
int cuGetProcAddress(const char *name, void **out, int version, unsigned long flags) {
    return cuGetProcAddress_v2(name, out, version, flags, 0);
}
"""
ASK = ("import mneme\ntry: mneme.Context(device='cuda'); print('there is a GPU')\n"
       "except NotImplementedError as error: print(type(error).__name__, error)")


def test_a_gpu_asked_for_in_vain():
    status, text = run(ASK, CUDA_VISIBLE_DEVICES="")
    assert status == 0
    assert any(sentence in text for sentence in (
        "this build has no CUDA", "no NVIDIA driver", "no GPU is visible")), text


def test_an_old_driver(tmp_path):
    if "this build has no CUDA" in run(ASK, CUDA_VISIBLE_DEVICES="")[1]:
        pytest.skip("libmneme was built without CUDA")
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "driver.c").write_text(OLD_DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1",
                    tmp_path / "driver.c"], check=True)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("LD_LIBRARY_PATH")]))
    status, text = run(ASK, LD_LIBRARY_PATH=path)
    assert status == 0 and "the NVIDIA driver is too old: it supports CUDA 11.4" in text, text
