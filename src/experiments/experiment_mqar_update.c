/* experiment_mqar_update.c - recall after some keys were given new values. */
#include "experiments/experiment_parts.h"

const mn_experiment_text mn_experiment_mqar_update = {
    .base = &mn_base_mqar,
    .common = MN_JSON_TEXT({
        "tables": [
            {"title": "Part of all keys recalled", "rows": "model", "columns": "task",
             "value": "example", "percent": true, "figure": "bars"},
            {"title": "Keys with a new value", "rows": "model", "columns": "task",
             "value": "groups.updated", "percent": true, "figure": "bars"},
            {"title": "Keys left alone", "rows": "model", "columns": "task",
             "value": "groups.untouched", "percent": true, "figure": "bars"}
        ]
    }),
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {
                "grid": {
                    "task": {
                        "32-2-1": {
                            "task": {
                                "name": "mqar-update",
                                "options": {"vocab": 48, "length": 32, "pairs": 2, "updates": 1}
                            }
                        },
                        "64-4-4": {
                            "task": {
                                "name": "mqar-update",
                                "options": {"vocab": 96, "length": 64, "pairs": 4, "updates": 4}
                            }
                        }
                    },
                    "seed": [0]
                },
                "only": {"model": ["bayes", "gdn", "mamba2"]}
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {
                "grid": {
                    "task": {
                        "64-4-4": {
                            "task": {
                                "name": "mqar-update",
                                "options": {"vocab": 256, "length": 64, "pairs": 4, "updates": 4}
                            }
                        },
                        "64-4-2": {
                            "task": {
                                "name": "mqar-update",
                                "options": {"vocab": 256, "length": 64, "pairs": 4, "updates": 2}
                            }
                        }
                    },
                    "train.lr": [0.002, 0.006], "seed": [0, 1]
                },
                "only": {"model": ["bayes", "gdn", "mamba2", "attention"]}
            }
        }),
        [MN_PRESET_FULL] = MN_JSON_TEXT({
            "grid": {
                "grid": {
                    "task": {
                        "64-4-4": {"task": {"name": "mqar-update", "setting": "64-4-4"}},
                        "64-4-2": {"task": {"name": "mqar-update", "setting": "64-4-2"}},
                        "64-4-1": {"task": {"name": "mqar-update", "setting": "64-4-1"}},
                        "128-4-4": {"task": {"name": "mqar-update", "setting": "128-4-4"}},
                        "128-4-2": {"task": {"name": "mqar-update", "setting": "128-4-2"}},
                        "128-4-1": {"task": {"name": "mqar-update", "setting": "128-4-1"}},
                        "128-16-16": {"task": {"name": "mqar-update", "setting": "128-16-16"}},
                        "128-16-8": {"task": {"name": "mqar-update", "setting": "128-16-8"}},
                        "128-16-4": {"task": {"name": "mqar-update", "setting": "128-16-4"}},
                        "128-16-2": {"task": {"name": "mqar-update", "setting": "128-16-2"}}
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
        "The paper shows figures only: its numbers are read off the text, where it says "
        "about 88 and about 60 percent.",
        "The paper trains on a mixture of lengths, pairs and updates; here each "
        "combination has a model of its own.",
        NULL
    },
};
