/* hyper_layout.c - the parts of HyperMLP and HyperGLU, taken away one by one. */
#include "experiments/experiment_internal.h"

const mn_experiment_text mn_experiment_hyper_layout = {
    .base = &mn_base_mad_tasks,
    .common = MN_JSON_TEXT({
        "grid": {
            "job": {
                "model": {
                    "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 352,
                    "num_heads": 2, "tie_word_embeddings": false
                },
                "train": {
                    "beta2": 0.999, "clip": 0, "warmup": 0, "schedule": "cosine", "min_lr": 1e-06,
                    "groups": {"vector": {"decays": true}}
                },
                "evaluate": {"metric": "macro", "select": "loss", "stop_at": 0.999}
            },
            "grid": {
                "model": {
                    "attention": {"model": {"layers": "attention"}},
                    "relu_attention": {"model": {"layers": "relu_attention"}},
                    "hypermlp": {"model": {"layers": "hypermlp"}},
                    "hypermlp, no lag layout": {
                        "model": {"layers": "hypermlp", "layout": "position"}
                    },
                    "bare, lags": {
                        "model": {
                            "layers": "hypermlp", "use_kv_conv": false, "use_qk_gate": false,
                            "use_vo_gate": false, "qk_rank": 64
                        }
                    },
                    "bare, places": {
                        "model": {
                            "layers": "hypermlp", "use_kv_conv": false, "use_qk_gate": false,
                            "use_vo_gate": false, "qk_rank": 64, "layout": "position"
                        }
                    },
                    "hypermlp, first mix": {"model": {"layers": "hypermlp", "op2_rank": 0}},
                    "hypermlp, second mix": {"model": {"layers": "hypermlp", "op1_rank": 0}},
                    "hypermlp, narrow values": {
                        "model": {"layers": "hypermlp", "qk_rank": 64, "vo_rank": 16}
                    },
                    "hypermlp, no mix": {
                        "model": {"layers": "hypermlp", "op1_rank": 0, "op2_rank": 0}
                    },
                    "hypermlp, no gates": {
                        "model": {
                            "layers": "hypermlp", "use_qk_gate": false, "use_vo_gate": false
                        }
                    },
                    "hypermlp, no conv": {"model": {"layers": "hypermlp", "use_kv_conv": false}},
                    "hyperglu": {"model": {"layers": "hyperglu"}},
                    "hyperglu, no lag layout": {
                        "model": {"layers": "hyperglu", "layout": "position"}
                    },
                    "hyperglu, no mix": {
                        "model": {"layers": "hyperglu", "op1_rank": 0, "op2_rank": 0}
                    },
                    "hyperglu, no conv": {"model": {"layers": "hyperglu", "use_kv_conv": false}}
                }
            }
        },
        "claims": [
            {"says": "without the lag layout recall falls (no gates, no convolutions)",
             "table": 0, "cell": ["bare, lags", "recall"],
             "less": ["bare, places", "recall"], "above": 0.1},
            {"says": "without the lag layout noisy recall falls (no gates, no convolutions)",
             "table": 0, "cell": ["bare, lags", "noisy"],
             "less": ["bare, places", "noisy"], "above": 0.1},
            {"says": "without the lag layout fuzzy recall falls",
             "table": 0, "cell": ["hypermlp", "fuzzy"],
             "less": ["hypermlp, no lag layout", "fuzzy"], "above": 0.05},
            {"says": "mixing lags on both sides beats none in copying",
             "table": 0, "cell": ["hypermlp", "copy"],
             "less": ["hypermlp, no mix", "copy"], "above": 0}
        ],
        "tables": [
            {"title": "Accuracy on the MAD tasks", "rows": "model", "columns": "task",
             "value": "macro", "percent": true, "figure": "bars"}
        ]
    }),
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {
                "job": {"model": {"hidden_size": 32, "intermediate_size": 64}},
                "only": {
                    "model": ["attention", "hypermlp", "hyperglu, no mix"],
                    "task": ["recall", "copy"]
                }
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "model": {"hidden_size": 64, "intermediate_size": 128},
                    "train": {"batch": 32, "lr": 0.001}, "lr_by_epoch": false,
                    "steps_at_most": 1000
                },
                "grid": {
                    "model": {
                        "bare, lags": {"steps_at_most": 3000},
                        "bare, places": {"steps_at_most": 3000}
                    }
                },
                "only": {
                    "model": [
                        "attention", "bare, lags", "bare, places", "hypermlp",
                        "hypermlp, no lag layout", "hypermlp, first mix",
                        "hypermlp, second mix", "hypermlp, narrow values", "hypermlp, no mix",
                        "hyperglu", "hyperglu, no lag layout"
                    ]
                }
            }
        }),
        [MN_PRESET_FULL] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "epochs": 200, "lr_by_epoch": true, "train": {"batch": 128},
                    "evaluate": {"batch": 128}
                },
                "grid": {
                    "model": {
                        "bare, lags": {"model": {"qk_rank": 128}},
                        "bare, places": {"model": {"qk_rank": 128}},
                        "hypermlp, narrow values": {"model": {"qk_rank": 128, "vo_rank": 32}}
                    },
                    "train.lr": [0.0001, 0.0005, 0.001], "train.weight_decay": [0, 0.1],
                    "seed": [0]
                }
            }
        }),
    },
    .notes = {
        "Without the lag layout a weight of the mixes belongs to a place of the sequence. "
        "Rows bare are the paper's R-12o! and R-12!: no gates, no convolutions, queries and "
        "keys of full width. In the others only what their name says differs.",
        "The paper averages a sweep of settings of each task; here each task has its "
        "baseline setting, so its numbers are harder ones.",
        NULL
    },
};
