/* mqar_block.c - recall when a block of keys is followed by the block of their
 * values. */
#include "experiments/papers/base_mqar.h"
#include "experiments/experiment_internal.h"

const mn_experiment_text mn_experiment_mqar_block = {
    .base = &mn_base_mqar,
    .common = MN_JSON_TEXT({
        "claims": [
            {"says": "bayes without convolutions recalls 90 percent of blocks of two",
             "table": 0, "cell": ["bayes, no conv", "block-2"], "above": 0.9},
            {"says": "gdn without convolutions recalls 90 percent of blocks of two",
             "table": 0, "cell": ["gdn, no conv", "block-2"], "above": 0.9},
            {"says": "bayes without convolutions is ahead of attention by 20 points",
             "table": 0, "cell": ["bayes, no conv", "block-2"], "less": ["attention", "block-2"],
             "above": 0.2, "learned": 0.2}
        ],
        "tables": [
            {"title": "Part of the pairs recalled", "rows": "model", "columns": "task",
             "value": "example", "percent": true, "figure": "bars"}
        ]
    }),
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {
                "grid": {
                    "task": {
                        "block-2": {
                            "task": {
                                "name": "mqar-block",
                                "options": {"vocab": 48, "length": 32, "block": 2, "blocks": 1}
                            }
                        },
                        "block-2, 4 blocks": {
                            "task": {
                                "name": "mqar-block",
                                "options": {"vocab": 96, "length": 64, "block": 2, "blocks": 4}
                            }
                        }
                    },
                    "seed": [0]
                },
                "only": {"model": ["bayes, no conv", "gdn, no conv", "mamba2"]}
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {
                "job": {"train": {"clip": 1}},
                "grid": {
                    "task": {
                        "block-2": {
                            "task": {
                                "name": "mqar-block",
                                "options": {"vocab": 72, "length": 64, "block": 2, "blocks": 4}
                            }
                        }
                    },
                    "train.lr": [0.001, 0.003], "seed": [0, 1]
                }
            }
        }),
        [MN_PRESET_GPU] = MN_JSON_TEXT({
            "pilot": {"steps": 1600, "value": "loss", "least": true},
            "grid": {
                "job": {
                    "train": {"clip": 1, "warmup": 256}, "task": {"test": 2560},
                    "evaluate": {"every": 391}
                },
                "grid": {
                    "task": {"block-2": {"task": {"name": "mqar-block", "setting": "block-2"}}},
                    "train.lr": [0.0005, 0.001, 0.0022], "seed": [0, 1]
                },
                "only": {"model": ["bayes, no conv", "gdn, no conv", "mamba2", "attention"]}
            }
        }),
        [MN_PRESET_FULL] = MN_JSON_TEXT({
            "grid": {
                "grid": {
                    "task": {
                        "block-2": {"task": {"name": "mqar-block", "setting": "block-2"}},
                        "block-4": {"task": {"name": "mqar-block", "setting": "block-4"}},
                        "block-8": {"task": {"name": "mqar-block", "setting": "block-8"}}
                    },
                    "train.lr": [0.00046, 0.001, 0.0022, 0.0046, 0.01], "seed": [0, 1, 2]
                }
            }
        }),
    },
    .notes = {
        MN_MQAR_NOTES,
        "The paper says that the Bayesian Layer and Gated DeltaNet solve this without "
        "convolutions, and that models which need local mixing do not. Its block size is "
        "2; 4 and 8 are added here.",
        NULL
    },
};
