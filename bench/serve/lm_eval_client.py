"""lm-evaluation-harness, unmodified, against mneme serve: tasks of every kind of request on data made
here, and each log-likelihood against the logits of `mneme eval`.

usage: lm_eval_client.py MNEME MAKE_MODEL [--model FOLDER] [--lm-eval PATH]     pip install "lm_eval[api]"

Without --model: random weights; one of your own needs a tokenizer that names an end of text.
"""
import argparse
import json
import math
import os
import shutil
import struct
import subprocess
import tempfile

from serving import Server, chat_model, table

parser = argparse.ArgumentParser()
parser.add_argument("mneme")
parser.add_argument("make_model")
parser.add_argument("--model")
parser.add_argument("--lm-eval", default="lm_eval")
parser.add_argument("--text", default="tom put the key in the box . then anna took the key to the garden .")
args = parser.parse_args()

CONFIG = {"layers": "gdn, kla", "num_hidden_layers": 2, "hidden_size": 64,
          "max_position_embeddings": 4096}
MAX_LENGTH = 257
TASKS = {
    "own_choices": """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]""",
    "own_likelihood": """output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
metric_list: [{metric: perplexity}, {metric: acc}]""",
    "own_rolling": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]""",
    "own_generation": """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["."], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match}]""",
}


def write_tasks(folder):
    words = args.text.split()
    with open(f"{folder}/data.jsonl", "w") as f:
        for i in range(24):
            turned = words[i % len(words):] + words[:i % len(words)]
            row = {"question": " ".join(turned[:6 + i % 5]), "answer": 0,
                   "choices": [" " + " ".join(turned[6 + i % 5:][:1 + i % 3]), " " + words[i % 7],
                               " " + " ".join(words[:3])], "text": " ".join(turned * (1 + i % 6))}
            f.write(json.dumps(row) + "\n")
    for name, body in TASKS.items():
        with open(f"{folder}/{name}.yaml", "w") as f:
            f.write(f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
                    f"    test: {folder}/data.jsonl\ntest_split: test\n{body}\n")


def run_harness(server, folder):
    model = (f"model=any,base_url={server.url}/v1/completions,num_concurrent=4,"
             f"max_length={MAX_LENGTH},tokenizer_backend=remote,tokenized_requests=True")
    subprocess.run([args.lm_eval, "--model", "local-completions", "--model_args", model, "--tasks",
                    ",".join(TASKS), "--include_path", folder, "--log_samples", "--output_path",
                    folder + "/out", "--batch_size", "8"], check=True,
                   env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
                        "HF_HOME": folder + "/hf", "TOKENIZERS_PARALLELISM": "false"})
    found = {}
    for where, _, names in os.walk(folder + "/out"):
        for name in names:
            for task in TASKS:
                if name.startswith(f"samples_{task}_"):
                    with open(os.path.join(where, name)) as f:
                        found[task] = [json.loads(line) for line in f]
    return found


def log_probabilities(folder, ids):
    """Of ids 1 .. n - 1, from the logits that mneme eval writes."""
    tokens, out = folder + "/tokens.json", folder + "/logits.safetensors"
    with open(tokens, "w") as f:
        json.dump(ids, f)
    subprocess.run([args.mneme, "eval", "--model", args.model, "--tokens", tokens, "--logits", out],
                   check=True, capture_output=True)
    with open(out, "rb") as f:
        blob = f.read()
    size, = struct.unpack_from("<Q", blob)
    about = json.loads(blob[8:8 + size])["logits"]
    width, start, told = about["shape"][-1], 8 + size + about["data_offsets"][0], []
    for t in range(len(ids) - 1):
        row = struct.unpack_from(f"<{width}f", blob, start + 4 * width * t)
        top = max(row)
        told.append(row[ids[t + 1]] - top - math.log(math.fsum(math.exp(x - top) for x in row)))
    return told


def encode(server, text):
    return server.ask("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]


def prefix(server):
    info = server.ask("GET", "/tokenizer_info")
    return encode(server, info["bos_token"] or info["eos_token"])[0]


def windows(ids, prefix_id, most):
    """How the harness cuts a long text: each token is predicted once, at most `most` at a time."""
    yield [prefix_id] + ids[:most], 1
    for done in range(most, len(ids), most):
        end = min(done + most, len(ids))
        before = ids[max(end - most - 1, 0):done]
        yield before + ids[done:end], len(before)


def worst_of(server, folder, samples, rolling):
    """Largest difference of a log-likelihood, and how many were compared."""
    worst, count = 0.0, 0
    for sample in samples:
        requests = sample["arguments"]
        requests = list(requests.values()) if isinstance(requests, dict) else requests
        for request, reply in zip(requests, sample["filtered_resps"] if not rolling else sample["resps"]):
            texts = list(request.values()) if isinstance(request, dict) else request
            while isinstance(reply, list):
                reply = reply[0]
            if rolling:
                pieces = windows(encode(server, texts[0]), prefix(server), MAX_LENGTH - 2)
            else:
                context = encode(server, texts[0])
                pieces = [(encode(server, texts[0] + texts[1]), len(context))]
            told = float(str(reply).strip("()").split(",")[0])
            want = sum(sum(log_probabilities(folder, ids)[n - 1:]) for ids, n in pieces)
            worst = max(worst, abs(told - want))
            count += 1
    return worst, count


with tempfile.TemporaryDirectory() as folder:
    write_tasks(folder)
    args.model = args.model or chat_model(args.make_model, folder + "/model", CONFIG)
    server = Server(args.mneme, args.model)
    found = run_harness(server, folder)
    rows = []
    for task in ("own_choices", "own_likelihood", "own_rolling"):
        worst, count = worst_of(server, folder, found[task], task == "own_rolling")
        rows.append((f"{task}: {count} log-likelihoods, largest difference", f"{worst:.1e}", "1e-4"))
        if not (worst < 1e-4 and count >= 20):
            rows.append((task, "DIFFERS", ""))
    texts = [str(s["resps"]) for s in found["own_generation"]]
    rows.append(("own_generation: continuations", len([t for t in texts if len(t) > 8]), len(texts)))
    rows.append(("exit status", server.stop(), 0))
    table(rows)
