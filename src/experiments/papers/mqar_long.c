/* mqar_long.c - recall over 2048 tokens: state against width. */
#include "experiments/experiment_internal.h"

const mn_experiment_text mn_experiment_mqar_long = {
    .common = MN_JSON_TEXT({
        "grid": {
            "job": {
                "task": {"name": "mqar-long"},
                "model": {"num_hidden_layers": 2, "mlp": "gelu", "tie_word_embeddings": false},
                "train": {
                    "lr": 0.001, "weight_decay": 0, "beta2": 0.999, "clip": 5, "warmup": 0,
                    "schedule": "constant", "min_lr": 0
                },
                "evaluate": {"metric": "token", "select": "loss"}
            },
            "grid": {
                "model": {
                    "kla": {"model": {"layers": "kla", "d_state": 16, "expand": 1}},
                    "mamba1": {"model": {"layers": "mamba1", "state_size": 16, "expand": 2}},
                    "gdn": {"model": {"layers": "gdn", "expand_v": 2}},
                    "gla": {"model": {"layers": "gla", "num_heads": 4, "expand_v": 1}}
                }
            }
        },
        "tables": [
            {"title": "Accuracy by width of the model", "rows": "model", "columns": "width",
             "value": "token", "percent": true, "figure": "lines"}
        ]
    }),
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "task": {"options": {"length": 64, "vocab": 32}, "train": 3200, "test": 64},
                    "train": {"steps": 4000, "batch": 16, "lr": 0.003},
                    "evaluate": {"every": 250, "stop_at": 0.99}
                },
                "grid": {
                    "width": {"32": {"model": {"hidden_size": 32, "intermediate_size": 64}}},
                    "seed": [0]
                },
                "only": {"model": ["kla", "gdn"]}
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "task": {"options": {"length": 128, "vocab": 48}, "train": 3200, "test": 128},
                    "train": {"steps": 4000, "batch": 16},
                    "evaluate": {"every": 500, "batch": 16, "stop_at": 0.99}
                },
                "grid": {
                    "width": {
                        "32": {"model": {"hidden_size": 32, "intermediate_size": 64}},
                        "64": {"model": {"hidden_size": 64, "intermediate_size": 128}}
                    },
                    "train.lr": [0.001, 0.003], "seed": [0, 1]
                }
            }
        }),
        [MN_PRESET_FULL] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "task": {"setting": "baseline"}, "epochs": 750,
                    "evaluate": {"every": 0, "patience": 70, "batch": 16}
                },
                "grid": {
                    "width": {
                        "64": {
                            "model": {"hidden_size": 64, "intermediate_size": 128},
                            "train": {"batch": 64}
                        },
                        "128": {
                            "model": {"hidden_size": 128, "intermediate_size": 256},
                            "train": {"batch": 32}
                        },
                        "256": {
                            "model": {"hidden_size": 256, "intermediate_size": 512},
                            "train": {"batch": 16}
                        }
                    },
                    "seed": [0, 1, 2, 3, 4]
                }
            }
        }),
    },
    .notes = {
        "The paper calls this task an MQAR of zoology, which needs more tokens in its "
        "vocabulary than in a sequence. Counts and harness are those of the in-context "
        "recall of MAD with 256 tokens at length 2048, which is what runs here.",
        "Widths of heads and states are those nearest to the paper that each layer takes "
        "at all widths.",
        NULL
    },
};
