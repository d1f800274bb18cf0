/* stack_depth.c - stacked Kalman layers on selective copying: exact Ornstein-Uhlenbeck
 * steps against zero-order hold. */
#include "experiments/experiment_internal.h"

/* The published sizes but for the deepest stack. */
static const char published[] = MN_JSON_TEXT({
    "grid": {
        "job": {
            "task": {"setting": "baseline"}, "train": {"batch": 172},
            "evaluate": {"every": 0, "patience": 70, "batch": 172}
        },
        "grid": {
            "depth": {
                "1": {"model": {"num_hidden_layers": 1}},
                "2": {"model": {"num_hidden_layers": 2}},
                "4": {"model": {"num_hidden_layers": 4}},
                "8": {"model": {"num_hidden_layers": 8}},
                "12": {"model": {"num_hidden_layers": 12}}
            }
        }
    }
});

static const mn_experiment_text sizes = {
    .common = MN_JSON_TEXT({
        "grid": {
            "job": {
                "task": {"name": "mad-copy"},
                "model": {
                    "hidden_size": 128, "layers": "kla", "d_state": 8, "expand": 1, "mlp": "gelu",
                    "intermediate_size": 120, "tie_word_embeddings": false
                },
                "train": {
                    "lr": 0.001, "weight_decay": 0, "beta2": 0.999, "clip": 3, "warmup": 0,
                    "schedule": "constant", "min_lr": 0
                },
                "evaluate": {"metric": "token", "select": "loss"}
            },
            "grid": {
                "steps": {
                    "ou": {"model": {"discretisation": "ou"}},
                    "zoh": {"model": {"discretisation": "zoh"}}
                }
            }
        },
        "claims": [
            {"says": "exact steps are no worse than zero-order hold at eight blocks",
             "table": 0, "cell": ["ou", "8"], "less": ["zoh", "8"], "above": 0}
        ],
        "tables": [
            {"title": "Accuracy by depth", "rows": "steps", "columns": "depth", "value": "token",
             "percent": true, "figure": "lines"}
        ]
    }),
    .preset = { [MN_PRESET_GPU] = published, [MN_PRESET_FULL] = published },
};

const mn_experiment_text mn_experiment_stack_depth = {
    .base = &sizes,
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "model": {"hidden_size": 32, "intermediate_size": 64},
                    "task": {"options": {"length": 32, "to_copy": 4}, "train": 3200, "test": 128},
                    "train": {"steps": 2000, "batch": 32, "lr": 0.003},
                    "evaluate": {"every": 100, "stop_at": 0.999}
                },
                "grid": {
                    "depth": {
                        "1": {"model": {"num_hidden_layers": 1}},
                        "4": {"model": {"num_hidden_layers": 4}}
                    },
                    "seed": [0]
                }
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "model": {"hidden_size": 64, "intermediate_size": 64},
                    "task": {
                        "options": {"length": 64, "to_copy": 8}, "train": 12800, "test": 640
                    },
                    "train": {"steps": 1000, "batch": 32}, "evaluate": {"every": 200}
                },
                "grid": {
                    "depth": {
                        "1": {"model": {"num_hidden_layers": 1}},
                        "2": {"model": {"num_hidden_layers": 2}},
                        "4": {"model": {"num_hidden_layers": 4}},
                        "8": {"model": {"num_hidden_layers": 8}}
                    },
                    "seed": [0, 1, 2]
                }
            }
        }),
        [MN_PRESET_GPU] = MN_JSON_TEXT({
            "grid": {"job": {"epochs": 100}, "grid": {"seed": [0, 1]}}
        }),
        [MN_PRESET_FULL] = MN_JSON_TEXT({
            "grid": {
                "job": {"epochs": 750},
                "grid": {
                    "depth": {"24": {"model": {"num_hidden_layers": 24}}}, "seed": [0, 1, 2, 3, 4]
                }
            }
        }),
    },
    .notes = {
        "A run whose loss is no longer finite counts as failed, and is named below.",
        "Preset gpu has the published sizes for 100 of the 750 epochs, up to twelve blocks.",
        "The paper shows a figure only: Ornstein-Uhlenbeck steps are more accurate and "
        "more stable, above all in deep models.",
        NULL
    },
};
