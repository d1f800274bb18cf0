/* mqar_update.c - recall after some keys were given new values. */
#include "experiments/papers/base_mqar.h"
#include "experiments/experiment_internal.h"

const mn_experiment_text mn_experiment_mqar_update = {
    .base = &mn_base_mqar,
    .common = MN_JSON_TEXT({
        "claims": [
            {"says": "bayes is ahead of gdn by 20 points where every key has a new value",
             "table": 0, "cell": ["bayes", "64-8-8"], "less": ["gdn", "64-8-8"], "above": 0.2},
            {"says": "bayes is ahead of gdn by 20 points with four pairs",
             "table": 0, "cell": ["bayes", "32-4-4"], "less": ["gdn", "32-4-4"], "above": 0.2}
        ],
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
                "job": {
                    "task": {"test": 1000}, "train": {"steps": 2500, "clip": 1},
                    "evaluate": {"every": 500}
                },
                "grid": {
                    "model": {
                        "bayes": {"model": {"head_dim": 16}},
                        "gdn": {"model": {"head_dim": 16}},
                        "bayes, no gate": {
                            "model": {
                                "layers": "bayes", "head_dim": 16, "expand_v": 1,
                                "noise_groups": 1, "use_gate": false
                            }
                        }
                    },
                    "task": {
                        "32-4-4": {
                            "task": {
                                "name": "mqar-update",
                                "options": {"vocab": 64, "length": 32, "pairs": 4, "updates": 4}
                            }
                        },
                        "64-8-8": {
                            "task": {
                                "name": "mqar-update",
                                "options": {"vocab": 72, "length": 64, "pairs": 8, "updates": 8}
                            }
                        }
                    },
                    "train.lr": [0.001, 0.003], "seed": [0, 1, 2]
                },
                "only": {"model": ["bayes", "bayes, no gate", "gdn"]}
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
        MN_MQAR_NOTES,
        "The paper shows figures only: its numbers are read off the text, where it says "
        "about 88 and about 60 percent.",
        "The paper trains on a mixture of lengths, pairs and updates; here each "
        "combination has a model of its own.",
        NULL
    },
};
