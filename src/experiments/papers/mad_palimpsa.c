/* mad_palimpsa.c - the MAD tasks with two layers, as Palimpsa's paper trains them. */
#include "experiments/experiment_internal.h"

const mn_experiment_text mn_experiment_mad_palimpsa = {
    .base = &mn_base_mad_tasks,
    .common = MN_JSON_TEXT({
        "pilot": {"seeds": [100], "axes": ["train.lr", "train.weight_decay"], "value": "macro"},
        "grid": {
            "job": {
                "model": {
                    "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 352,
                    "num_heads": 8, "tie_word_embeddings": false
                },
                "train": {
                    "beta2": 0.98, "clip": 0, "warmup": 750, "schedule": "cosine",
                    "min_lr": 1e-05, "groups": {"vector": {"decays": true}}
                },
                "evaluate": {"metric": "macro", "select": "loss", "stop_at": 0.999}
            },
            "grid": {
                "model": {
                    "palimpsa, paper": {"model": {"layers": "palimpsa_paper", "expand_v": 1}},
                    "palimpsa, code": {"model": {"layers": "palimpsa_code", "expand_v": 1}},
                    "mamba2": {
                        "model": {"layers": "mamba2", "head_dim": 32, "state_size": 16, "expand": 2}
                    },
                    "gla": {"model": {"layers": "gla", "expand_k": 1, "expand_v": 1}},
                    "delta": {"model": {"layers": "delta"}},
                    "gdn": {"model": {"layers": "gdn", "head_dim": 16, "expand_v": 1}},
                    "mesa": {"model": {"layers": "mesa"}},
                    "attention": {"model": {"layers": "attention"}}
                }
            }
        },
        "claims": [
            {"says": "palimpsa recalls 95 percent or more",
             "table": 0, "cell": ["palimpsa, paper", "recall"], "above": 0.95},
            {"says": "palimpsa copies 95 percent or more",
             "table": 0, "cell": ["palimpsa, paper", "copy"], "above": 0.95},
            {"says": "palimpsa is ahead of gla by ten points in recall",
             "table": 0, "cell": ["palimpsa, paper", "recall"], "less": ["gla", "recall"],
             "above": 0.1, "learned": 0.5}
        ],
        "tables": [
            {"title": "Macro accuracy on the MAD tasks", "rows": "model", "columns": "task",
             "value": "macro", "percent": true, "figure": "bars"}
        ]
    }),
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "model": {"hidden_size": 32, "num_heads": 4, "intermediate_size": 64},
                    "train": {"warmup": 100, "steps": 800}
                },
                "only": {
                    "model": ["palimpsa, paper", "gla"], "task": ["recall", "copy"]
                }
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "model": {"hidden_size": 64, "num_heads": 4, "intermediate_size": 128},
                    "train": {"batch": 32, "lr": 0.003, "weight_decay": 0.01, "warmup": 100},
                    "steps_at_most": 1000
                },
                "grid": {"seed": [0]},
                "only": {"model": ["palimpsa, paper", "palimpsa, code", "gla", "gdn", "attention"]}
            }
        }),
        [MN_PRESET_FULL] = MN_JSON_TEXT({
            "grid": {
                "job": {"epochs": 200, "train": {"batch": 32}, "evaluate": {"batch": 128}},
                "grid": {
                    "train.lr": [0.003, 0.001, 0.0005, 0.0001],
                    "train.weight_decay": [0.01, 0.1], "seed": [0]
                }
            }
        }),
    },
    .notes = {
        "The paper averages a sweep of settings of each task and takes the best learning rate and "
        "decay after that; here each task has its baseline setting and its own best.",
        "The paper merges recall and noisy recall into one column, whose numbers stand at both. "
        "Its baselines are quoted from the paper of MesaNet.",
        "The paper's layer and that of its published code differ; both are here.",
        NULL
    },
};
