/* experiment_mqar.c - recall of several pairs, where keys and values come from one vocabulary. */
#include "experiments/experiment_parts.h"

const mn_experiment_text mn_experiment_mqar = {
    .common = MN_JSON_TEXT({
        "grid": {
            "job": {
                "model": {"num_hidden_layers": 2, "mlp": "none", "tie_word_embeddings": false},
                "train": {
                    "weight_decay": 0.1, "beta2": 0.999, "clip": 0, "schedule": "cosine",
                    "min_lr": 0,
                    "groups": {"vector": {"decays": true}}
                },
                "evaluate": {"metric": "example", "stop_at": 0.99}
            },
            "grid": {
                "model": {
                    "bayes": {
                        "model": {
                            "layers": "bayes", "head_dim": 32, "expand_v": 1, "noise_groups": 1
                        }
                    },
                    "bayes, no conv": {
                        "model": {
                            "layers": "bayes", "head_dim": 32, "expand_v": 1, "noise_groups": 1,
                            "use_short_conv": false
                        }
                    },
                    "gdn": {"model": {"layers": "gdn", "head_dim": 32, "expand_v": 2}},
                    "gdn, no conv": {
                        "model": {
                            "layers": "gdn", "head_dim": 32, "expand_v": 2,
                            "use_short_conv": false
                        }
                    },
                    "mamba2": {
                        "model": {
                            "layers": "mamba2", "head_dim": 32, "state_size": 32, "expand": 2
                        }
                    },
                    "attention": {"model": {"layers": "attention", "head_dim": 32}}
                }
            }
        },
        "tables": [
            {"title": "Part of the pairs recalled", "rows": "model", "columns": "task",
             "value": "example", "percent": true, "figure": "lines"}
        ]
    }),
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "model": {"hidden_size": 32},
                    "task": {"train": 0, "test": 256},
                    "train": {"steps": 1500, "batch": 32, "warmup": 100, "lr": 0.005},
                    "evaluate": {"every": 250}
                },
                "grid": {
                    "task": {
                        "32-2": {
                            "task": {
                                "name": "mqar-shared",
                                "options": {"vocab": 48, "length": 32, "pairs": 2}
                            }
                        },
                        "64-4": {
                            "task": {
                                "name": "mqar-shared",
                                "options": {"vocab": 96, "length": 64, "pairs": 4}
                            }
                        }
                    },
                    "seed": [0]
                },
                "only": {"model": ["bayes", "gdn", "attention"]}
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "model": {"hidden_size": 64},
                    "task": {"train": 0, "test": 1000},
                    "train": {"steps": 3000, "batch": 32, "warmup": 200},
                    "evaluate": {"every": 500}
                },
                "grid": {
                    "task": {
                        "64-4": {
                            "task": {
                                "name": "mqar-shared",
                                "options": {"vocab": 256, "length": 64, "pairs": 4}
                            }
                        },
                        "64-8": {
                            "task": {
                                "name": "mqar-shared",
                                "options": {"vocab": 256, "length": 64, "pairs": 8}
                            }
                        }
                    },
                    "train.lr": [0.002, 0.006], "seed": [0, 1]
                }
            }
        }),
        [MN_PRESET_FULL] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "model": {"hidden_size": 128}, "epochs": 64,
                    "train": {"batch": 256, "warmup": 1024},
                    "evaluate": {"every": 0, "batch": 256}
                },
                "grid": {
                    "task": {
                        "64-4": {"task": {"name": "mqar-shared", "setting": "64-4"}},
                        "128-8": {"task": {"name": "mqar-shared", "setting": "128-8"}},
                        "256-16": {"task": {"name": "mqar-shared", "setting": "256-16"}},
                        "512-64": {"task": {"name": "mqar-shared", "setting": "512-64"}}
                    },
                    "train.lr": [0.00046, 0.001, 0.0022, 0.0046, 0.01], "seed": [0, 1, 2]
                }
            }
        }),
    },
    .notes = {
        "The paper leaves open: peak learning rates, epochs, and whether blocks have an "
        "MLP. Here: the grid of the zoology benchmark, 64 epochs or until 99 percent, no "
        "MLP.",
        "The paper compares with RWKV-7 and Hyena too; they are no layers of this "
        "library.",
        "The paper shows the base task as a figure: the Bayesian Layer approaches all "
        "pairs at larger widths.",
        NULL
    },
};
