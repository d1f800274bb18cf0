/* kla_maps.c - Kalman attention matrices and posterior variances of one trained block,
 * over one example of three MAD tasks. */
#include "experiments/experiment_internal.h"

const mn_experiment_text mn_experiment_kla_maps = {
    .common = MN_JSON_TEXT({
        "grid": {
            "job": {
                "model": {
                    "layers": "kla", "hidden_size": 128, "num_hidden_layers": 1, "mlp": "gelu",
                    "intermediate_size": 120, "tie_word_embeddings": false, "d_state": 8,
                    "expand": 1
                },
                "train": {
                    "lr": 0.001, "weight_decay": 0, "beta2": 0.999, "clip": 5, "warmup": 0,
                    "schedule": "constant", "min_lr": 0
                },
                "evaluate": {"metric": "token", "select": "last", "stop_at": 0.999},
                "look": {"maps": {"channels": 4}}
            },
            "grid": {
                "task": {
                    "copy": {"task": {"name": "mad-copy"}},
                    "recall": {"task": {"name": "mad-recall"}},
                    "memorise": {"task": {"name": "mad-memorise"}}
                }
            }
        },
        "claims": [
            {"says": "variance of a cell falls while copying",
             "table": 1, "cell": ["copy", "last token"],
             "less": ["copy", "first token"], "below": 0},
            {"says": "outputs of copying look at the answer more than chance",
             "table": 0, "cell": ["copy", "on the answer"],
             "less": ["copy", "if all weighed the same"], "above": 0}
        ],
        "tables": [
            {"title": "Where outputs look: weight on places that hold the answer", "rows": "task",
             "values": {"accuracy": "token", "on the answer": "maps.aimed",
                        "in the channel that aims best": "maps.best",
                        "if all weighed the same": "maps.by_chance"},
             "percent": true, "figure": "bars"},
            {"title": "Variance of a cell (1 before the first token)", "rows": "task",
             "values": {"first token": "maps.variance_first", "last token": "maps.variance_last"},
             "figure": "bars"},
            {"title": "The matrices times the values are the layer's own output", "rows": "task",
             "values": {"digits that agree": "maps.digits"}}
        ]
    }),
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "model": {"hidden_size": 64}, "task": {"test": 256},
                    "train": {"steps": 1200, "batch": 32, "lr": 0.003}, "evaluate": {"every": 100}
                },
                "grid": {
                    "task": {
                        "copy": {"task": {"options": {"length": 32, "to_copy": 4}, "train": 3200}},
                        "recall": {"task": {"options": {"length": 32}, "train": 3200}},
                        "memorise": {"task": {"options": {"vocab": 32}, "train": 256}}
                    },
                    "seed": [0]
                }
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "task": {"test": 640}, "train": {"batch": 64, "steps": 1500},
                    "evaluate": {"every": 150}
                },
                "grid": {
                    "task": {
                        "copy": {"task": {"options": {"length": 64, "to_copy": 8}, "train": 12800}},
                        "recall": {"task": {"options": {"length": 64}, "train": 12800}},
                        "memorise": {"task": {"train": 256}}
                    },
                    "seed": [0, 1, 2]
                }
            }
        }),
        [MN_PRESET_FULL] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "epochs": 750, "train": {"batch": 172},
                    "evaluate": {"every": 0, "patience": 70, "batch": 172}
                },
                "grid": {
                    "task": {
                        "copy": {"task": {"setting": "baseline"}},
                        "recall": {"task": {"setting": "baseline"}},
                        "memorise": {"task": {"setting": "baseline"}}
                    },
                    "seed": [0, 1, 2, 3, 4]
                }
            }
        }),
    },
    .notes = {
        "A channel's matrix says how much of the value of each place is in its output at each "
        "place; results.json and maps-N.csv hold those of the four channels with most weight, "
        "for the first test example.",
        "The paper describes its maps (Figures 11 to 13): sparse vertical bands at the places "
        "to be copied, pointers in recall, even decay in memorising; and variance that falls "
        "as evidence comes in, with spikes at tokens that matter (Figure 5b).",
        "In memorising the answer never stands in the input, so that nothing can lie on it.",
        NULL
    },
};
