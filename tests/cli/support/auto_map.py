"""auto_map.py MNEME WORK FOLDER ... - transformers loads each folder by its own file and gives the logits
of mneme within 1e-5 of the largest; generation with a cache is that without. Exit status 77 and the reason where
transformers is not there."""
import inspect
import os
import sys
import traceback

os.environ["HF_MODULES_CACHE"] = os.path.join(sys.argv[2], "modules")
try:
    import torch
    from transformers import AutoModelForCausalLM
except ImportError as error:
    print("skipped: %s" % error)
    sys.exit(77)


def logits_of(mneme, folder, work, ids):
    import json
    import struct
    import subprocess
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
    return torch.frombuffer(bytearray(data[first:end]),
                            dtype=torch.float32).view(head["logits"]["shape"])


def check(mneme, work, folder):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True,
                                                 dtype=torch.float32).eval()
    ids = torch.randint(0, model.config.vocab_size, (1, 24))
    with torch.no_grad():
        want, have = logits_of(mneme, folder, work, ids[0].tolist()), model(ids).logits[0]
        away = ((have - want).abs().max() / want.abs().max()).item()
        # transformers' own classes have called their cache by several names
        names = inspect.signature(type(model).forward).parameters
        cache = next(n for n in ("cache", "cache_params", "past_key_values") if n in names)
        state, parts = None, []
        for t in range(ids.shape[1]):
            out = model(ids[:, t:t + 1], use_cache=True, **{cache: state})
            state = out[cache]
            parts.append(out.logits)
        single = ((torch.cat(parts, 1)[0] - want).abs().max() / want.abs().max()).item()
        how = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
        texts = [model.generate(ids[:, :5], use_cache=cache, **how) for cache in (True, False)]
    same = torch.equal(*texts)
    good = away < 1e-5 and single < 1e-5 and same and texts[0].shape[1] == 17
    print("%-40s %.1e %.1e %s" % (os.path.basename(folder), away, single,
                                  "" if good else "FAILED"))
    return good


def try_(mneme, work, folder):
    try:
        return check(mneme, work, folder)
    except Exception as error:
        traceback.print_exc()
        print("%-40s FAILED: %s" % (os.path.basename(folder), str(error)[:200]))
        return False


if not all([try_(sys.argv[1], sys.argv[2], folder) for folder in sys.argv[3:]]):
    sys.exit(1)
