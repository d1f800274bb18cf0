/* mqar.c - recall of several pairs, where keys and values come from one vocabulary. */
#include "experiments/papers/base_mqar.h"
#include "experiments/experiment_internal.h"

/* The published sizes, of which preset gpu takes some. */
static const char published[] = MN_JSON_TEXT({
    "grid": {
        "grid": {
            "task": {
                "64-4": {"task": {"name": "mqar-shared", "setting": "64-4"}},
                "128-8": {"task": {"name": "mqar-shared", "setting": "128-8"}},
                "256-16": {"task": {"name": "mqar-shared", "setting": "256-16"}},
                "512-64": {"task": {"name": "mqar-shared", "setting": "512-64"}}
            },
            "width": {
                "64": {"model": {"hidden_size": 64}},
                "128": {"model": {"hidden_size": 128}},
                "256": {"model": {"hidden_size": 256}}
            }
        }
    }
});

static const mn_experiment_text sizes = {
    .base = &mn_base_mqar,
    .preset = { [MN_PRESET_GPU] = published, [MN_PRESET_FULL] = published },
};

const mn_experiment_text mn_experiment_mqar = {
    .base = &sizes,
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "tables": [
                {"title": "Part of the pairs recalled", "rows": "model", "columns": "task",
                 "value": "example", "where": {"width": "32"}, "percent": true,
                 "figure": "lines"}
            ],
            "grid": {
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
                    "width": {"32": {"model": {"hidden_size": 32}}},
                    "seed": [0]
                },
                "only": {"model": ["bayes", "gdn", "attention"]}
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "claims": [
                {"says": "bayes recalls 95 percent of the pairs at the largest width",
                 "table": 1, "cell": ["bayes", "64"], "above": 0.95},
                {"says": "bayes is no more than five points behind gdn at the largest width",
                 "table": 1, "cell": ["bayes", "64"], "less": ["gdn", "64"], "above": -0.05,
                 "learned": 0.5}
            ],
            "tables": [
                {"title": "Part of the pairs recalled", "rows": "model", "columns": "task",
                 "value": "example", "where": {"width": "64"}, "percent": true,
                 "figure": "lines"},
                {"title": "By width of the model, 64-8", "rows": "model", "columns": "width",
                 "value": "example", "where": {"task": "64-8"}, "percent": true,
                 "figure": "lines"}
            ],
            "grid": {
                "job": {"train": {"clip": 1}},
                "grid": {
                    "task": {
                        "64-4": {
                            "task": {
                                "name": "mqar-shared",
                                "options": {"vocab": 72, "length": 64, "pairs": 4}
                            }
                        },
                        "64-8": {
                            "task": {
                                "name": "mqar-shared",
                                "options": {"vocab": 72, "length": 64, "pairs": 8}
                            }
                        }
                    },
                    "width": {
                        "32": {"model": {"hidden_size": 32}}, "64": {"model": {"hidden_size": 64}}
                    },
                    "train.lr": [0.001, 0.003], "seed": [0, 1]
                }
            }
        }),
        [MN_PRESET_GPU] = MN_JSON_TEXT({
            "pilot": {"steps": 1600, "value": "loss", "least": true},
            "claims": [
                {"says": "bayes recalls 95 percent of the pairs at the largest width",
                 "table": 1, "cell": ["bayes", "128"], "above": 0.95},
                {"says": "bayes is no more than five points behind gdn at the largest width",
                 "table": 1, "cell": ["bayes", "128"], "less": ["gdn", "128"], "above": -0.05,
                 "learned": 0.5}
            ],
            "tables": [
                {"title": "Part of the pairs recalled", "rows": "model", "columns": "task",
                 "value": "example", "where": {"width": "128"}, "percent": true,
                 "figure": "lines"},
                {"title": "By width of the model, 256-16", "rows": "model", "columns": "width",
                 "value": "example", "where": {"task": "256-16"}, "percent": true,
                 "figure": "lines"}
            ],
            "grid": {
                "job": {"train": {"clip": 1, "warmup": 256}, "task": {"test": 2560}},
                "grid": {"train.lr": [0.0005, 0.001, 0.0022], "seed": [0, 1]},
                "only": {
                    "model": ["bayes", "gdn", "mamba2", "attention"], "task": ["64-4", "256-16"],
                    "width": ["64", "128"]
                }
            }
        }),
        [MN_PRESET_FULL] = MN_JSON_TEXT({
            "claims": [
                {"says": "bayes recalls 95 percent of the pairs at the largest width",
                 "table": 2, "cell": ["bayes", "256"], "above": 0.95},
                {"says": "bayes is no more than five points behind gdn at the largest width",
                 "table": 2, "cell": ["bayes", "256"], "less": ["gdn", "256"], "above": -0.05,
                 "learned": 0.5}
            ],
            "tables": [
                {"title": "Part of the pairs recalled", "rows": "model", "columns": "task",
                 "value": "example", "where": {"width": "128"}, "percent": true,
                 "figure": "lines"},
                {"title": "By width of the model, 256-16", "rows": "model", "columns": "width",
                 "value": "example", "where": {"task": "256-16"}, "percent": true,
                 "figure": "lines"},
                {"title": "By width of the model, 512-64", "rows": "model", "columns": "width",
                 "value": "example", "where": {"task": "512-64"}, "percent": true,
                 "figure": "lines"}
            ],
            "grid": {
                "grid": {
                    "train.lr": [0.00046, 0.001, 0.0022, 0.0046, 0.01], "seed": [0, 1, 2]
                }
            }
        }),
    },
    .notes = {
        MN_MQAR_NOTES,
        "The paper shows the base task as a figure: the Bayesian Layer approaches all "
        "pairs at larger widths. Heads are as wide at every width, so that wider models have more.",
        NULL
    },
};
