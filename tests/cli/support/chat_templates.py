#!/usr/bin/env python3
"""Prompts of chat templates beside those of the reference: text and ids of every case of a folder of checkpoints.

usage: chat_templates.py MNEME FOLDER

FOLDER/*/chats.json holds messages, tools, options, and the text and ids of the reference or its error. An error has to
be an error here as well; what it says is that of the template where the template speaks.
"""
import glob
import json
import os
import subprocess
import sys
import tempfile

mneme, folder = sys.argv[1:]
bad = n = 0
for path in sorted(glob.glob(os.path.join(folder, "*", "chats.json"))):
    where = os.path.dirname(path)
    for case in json.load(open(path, encoding="utf-8")):
        options = dict(case["options"])
        given = {"messages": case["messages"], "chat_template_kwargs": options}
        if case["tools"] is not None:
            given["tools"] = case["tools"]
        if options.pop("continue_final_message", False):
            given["continue_final_message"] = True
            options.pop("add_generation_prompt")
        with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
            json.dump(given, file)
            file.flush()
            run = subprocess.run([mneme, "generate", "--model", where, "--chat", "--messages", file.name, "--dry-run",
                                  "--json"], capture_output=True, text=True)
        n += 1
        name = os.path.basename(where) + "/" + case["name"]
        if "error" in case:
            kind, _, says = case["error"].partition(": ")
            if run.returncode == 0 or (kind == "TemplateError" and says not in run.stderr):
                bad += 1
                print("%s: wants %s, gave %s" % (name, case["error"], run.stderr or run.stdout))
        elif run.returncode != 0:
            bad += 1
            print("%s: %s" % (name, run.stderr))
        else:
            out = json.loads(run.stdout)
            if out["prompt"] != case["text"] or out["tokens"] != case["ids"]:
                bad += 1
                print("%s: wants\n%r %s\ngave\n%r %s" % (name, case["text"], case["ids"], out["prompt"], out["tokens"]))
print("%d prompts compared, %d differ" % (n, bad))
sys.exit(bad != 0 or n == 0)
