"""Finding the library: each way to fail says what to do. In processes of their own."""

import os
import subprocess
import sys

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
