/* mqar_mixed.c - one model for several lengths and numbers of pairs: the data set of the
 * zoology benchmark, trained on segments that do not mix. */
#include "experiments/experiment_internal.h"

const mn_experiment_text mn_experiment_mqar_mixed = {
    .base = &mn_base_mqar,
    .common = MN_JSON_TEXT({
        "pilot": {
            "seeds": [100], "axes": ["train.lr"], "value": "tests.64-4.example"
        },
        "grid": {
            "job": {"task": {"name": "mqar"}, "evaluate": {"metric": "example", "stop_at": 0}},
            "grid": {
                "model": {
                    "gla": {"model": {"layers": "gla", "num_heads": 4, "expand_k": 0.5,
                                      "expand_v": 1}}
                }
            }
        },
        "tables": [
            {"title": "Part of the pairs recalled, by tokens and pairs", "rows": "model",
             "values": {"32-2": "tests.32-2.example", "32-4": "tests.32-4.example",
                        "64-4": "tests.64-4.example", "64-8": "tests.64-8.example",
                        "64-16": "tests.64-16.example", "128-32": "tests.128-32.example",
                        "256-64": "tests.256-64.example", "512-128": "tests.512-128.example",
                        "1024-256": "tests.1024-256.example"},
             "percent": true, "figure": "lines"}
        ]
    }),
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "task": {
                        "options": {"vocab": 80, "length": 32, "pairs": 2}, "test": 64,
                        "segments": [
                            {"options": {"vocab": 80, "length": 32, "pairs": 2}, "train": 1600},
                            {"options": {"vocab": 80, "length": 64, "pairs": 4}, "train": 800}
                        ]
                    },
                    "train": {"steps": 600},
                    "tests": {
                        "32-2": {"options": {"vocab": 80, "length": 32, "pairs": 2}},
                        "64-4": {"options": {"vocab": 80, "length": 64, "pairs": 4}}
                    }
                },
                "grid": {"seed": [0]},
                "only": {"model": ["gdn", "gla"]}
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "task": {
                        "options": {"vocab": 160, "length": 32, "pairs": 4}, "test": 500,
                        "segments": [
                            {"options": {"vocab": 160, "length": 32, "pairs": 2}, "train": 32000},
                            {"options": {"vocab": 160, "length": 32, "pairs": 4}, "train": 32000},
                            {"options": {"vocab": 160, "length": 64, "pairs": 8}, "train": 16000}
                        ]
                    },
                    "train": {"steps": 5000, "lr": 0.003},
                    "tests": {
                        "32-2": {"options": {"vocab": 160, "length": 32, "pairs": 2}},
                        "32-4": {"options": {"vocab": 160, "length": 32, "pairs": 4}},
                        "64-4": {"options": {"vocab": 160, "length": 64, "pairs": 4}},
                        "64-8": {"options": {"vocab": 160, "length": 64, "pairs": 8}},
                        "64-16": {"options": {"vocab": 160, "length": 64, "pairs": 16}},
                        "128-32": {"options": {"vocab": 160, "length": 128, "pairs": 32}}
                    }
                },
                "grid": {"seed": [0]},
                "only": {"model": ["bayes", "gdn", "mamba2", "gla", "attention"]}
            }
        }),
        [MN_PRESET_FULL] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "task": {
                        "options": {"length": 64, "pairs": 4}, "test": 1000,
                        "segments": [
                            {"options": {"length": 64, "pairs": 4}, "train": 100000},
                            {"options": {"length": 128, "pairs": 8}, "train": 20000},
                            {"options": {"length": 256, "pairs": 16}, "train": 20000},
                            {"options": {"length": 256, "pairs": 32}, "train": 20000},
                            {"options": {"length": 256, "pairs": 64}, "train": 20000}
                        ]
                    },
                    "epochs": 32, "lr_by_epoch": true, "evaluate": {"batch": 32},
                    "train": {"warmup": 0},
                    "tests": {
                        "64-4": {"options": {"length": 64, "pairs": 4}},
                        "64-8": {"options": {"length": 64, "pairs": 8}},
                        "64-16": {"options": {"length": 64, "pairs": 16}},
                        "128-32": {"options": {"length": 128, "pairs": 32}},
                        "256-64": {"options": {"length": 256, "pairs": 64}},
                        "512-128": {"options": {"length": 512, "pairs": 128}},
                        "1024-256": {"options": {"length": 1024, "pairs": 256}}
                    }
                },
                "grid": {
                    "train.lr": [0.001, 0.0032, 0.01, 0.032], "seed": [0]
                }
            }
        }),
    },
    .notes = {
        "The columns beyond the segments trained on (more pairs, longer rows) ask for what no "
        "model was trained on.",
        "Rows of short segments are filled up to the longest; the benchmark cuts batches to "
        "their own length, which changes nothing but the time.",
        "Two layers of the mixer; the benchmark's hybrid recipe puts a gated convolution in "
        "place of the first.",
        NULL
    },
};
