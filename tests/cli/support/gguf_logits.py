"""gguf_logits.py MNEME FOLDER FILE WORK [BOUND] - llama.cpp's logits of a GGUF file beside mneme's of the folder, relative to
the largest. Exit status 77 and the reason where llama_cpp (llama-cpp-python) is not there or has not the architecture."""
import array
import ctypes
import json
import os
import struct
import subprocess
import sys

try:
    import llama_cpp
    import numpy as np
except ImportError as error:
    print("skipped: %s" % error)
    sys.exit(77)

mneme, folder, path, work = sys.argv[1:5]
bound = float(sys.argv[5]) if len(sys.argv) > 5 else 1e-5
with open(os.path.join(folder, "config.json")) as file:
    vocabulary = json.load(file)["vocab_size"]
ids = [(7 * i * i + 3 * i + 1) % vocabulary for i in range(24)]


def of_mneme():
    tokens, out = os.path.join(work, "tokens.json"), os.path.join(work, "logits.safetensors")
    with open(tokens, "w") as file:
        json.dump(ids, file)
    run = subprocess.run([mneme, "eval", "--model", folder, "--tokens", tokens, "--logits", out,
                          "--threads", "1"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    with open(out, "rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        head, data = json.loads(file.read(size)), file.read()
    first, end = head["logits"]["data_offsets"]
    return np.array(array.array("f", data[first:end])).reshape(head["logits"]["shape"])


lines = []


@llama_cpp.llama_log_callback
def hear(level, text, data):
    lines.append(text.decode(errors="replace"))


llama_cpp.llama_log_set(hear, ctypes.c_void_p(0))
llama_cpp.llama_backend_init()
model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
if not model:
    text = "".join(lines)
    print("%-24s not loaded: %s" % (os.path.basename(folder), " | ".join(
        line for line in text.splitlines() if "error" in line)[:300]))
    sys.exit(77 if "unknown model architecture" in text else 1)
params = llama_cpp.llama_context_default_params()
params.n_ctx, params.n_batch, params.n_threads, params.n_threads_batch = 64, 64, 1, 1
params.flash_attn_type = 0    # which would read keys and values in half precision
params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
context = llama_cpp.llama_init_from_model(model, params)
batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
batch.n_tokens = len(ids)
for i, token in enumerate(ids):
    batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
    batch.seq_id[i][0] = 0
status = llama_cpp.llama_decode(context, batch)
assert status == 0, "".join(lines)[-300:]
have = np.stack([np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (vocabulary,)).copy()
                 for i in range(len(ids))])
want = of_mneme()
away = np.abs(have - want).max() / np.abs(want).max()
print("%-24s llama.cpp is %.1e away" % (os.path.basename(folder), away))
sys.exit(0 if away < bound else 1)
