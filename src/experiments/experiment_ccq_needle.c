/* experiment_ccq_needle.c - one needle in a haystack, at the length trained on and beyond: queries
 * with and without curvature conditioning. */
#include "experiments/experiment_parts.h"

const mn_experiment_text mn_experiment_ccq_needle = {
    .common = MN_JSON_TEXT({
        "grid": {
            "job": {
                "task": {"name": "s-niah-1"},
                "model": {"num_hidden_layers": 2, "tie_word_embeddings": false},
                "train": {
                    "weight_decay": 0.1, "clip": 1, "warmup": 200, "schedule": "cosine", "min_lr": 0
                },
                "evaluate": {"metric": "sequence", "select": "last"}, "tests": {}
            },
            "grid": {
                "model": {
                    "gla": {"model": {"layers": "gla"}},
                    "gla+ccq": {"model": {"layers": "gla+ccq"}},
                    "gdn": {"model": {"layers": "gdn"}},
                    "gdn+ccq": {"model": {"layers": "gdn+ccq"}}
                }
            }
        },
        "tables": [
            {"title": "Numbers said without an error, by length of the haystack", "rows": "model",
             "values": {"as trained": "sequence", "1.5x": "tests.x1h.sequence",
                        "2x": "tests.x2.sequence", "4x": "tests.x4.sequence",
                        "8x": "tests.x8.sequence"},
             "percent": true, "figure": "lines"},
            {"title": "Digits that are right", "rows": "model",
             "values": {"as trained": "token", "1.5x": "tests.x1h.token",
                        "2x": "tests.x2.token", "4x": "tests.x4.token", "8x": "tests.x8.token"},
             "percent": true, "figure": "lines"},
            {"title": "Loss of the answers, in nats a token", "rows": "model",
             "values": {"as trained": "loss", "1.5x": "tests.x1h.loss",
                        "2x": "tests.x2.loss", "4x": "tests.x4.loss", "8x": "tests.x8.loss"},
             "figure": "lines"}
        ]
    }),
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "model": {"hidden_size": 32}, "task": {"options": {"budget": 640}, "test": 16},
                    "train": {"steps": 60, "batch": 4, "lr": 0.003, "warmup": 20},
                    "evaluate": {"batch": 4},
                    "tests": {"x1h": {"options": {"budget": 960}, "test": 8}}
                },
                "grid": {"seed": [0]},
                "only": {"model": ["gdn", "gdn+ccq"]}
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "model": {"hidden_size": 64}, "task": {"options": {"budget": 640}, "test": 200},
                    "train": {"steps": 2000, "batch": 8, "lr": 0.003},
                    "evaluate": {"every": 250, "batch": 8, "stop_at": 0.995},
                    "tests": {
                        "x1h": {"options": {"budget": 960}, "test": 200},
                        "x2": {"options": {"budget": 1280}, "test": 200},
                        "x4": {"options": {"budget": 2560}, "test": 100},
                        "x8": {"options": {"budget": 5120}, "test": 50}
                    }
                },
                "grid": {"seed": [0, 1, 2]}
            }
        }),
        [MN_PRESET_FULL] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "model": {"hidden_size": 256, "num_hidden_layers": 4},
                    "task": {"options": {"budget": 4096}, "test": 500},
                    "train": {"steps": 10000, "batch": 32, "lr": 0.001, "warmup": 1024},
                    "evaluate": {"every": 1000, "batch": 8},
                    "tests": {
                        "x1h": {"options": {"budget": 6144}, "test": 500},
                        "x2": {"options": {"budget": 8192}, "test": 500},
                        "x4": {"options": {"budget": 16384}, "test": 500},
                        "x8": {"options": {"budget": 32768}, "test": 200}
                    }
                },
                "grid": {"seed": [0, 1, 2]}
            }
        }),
    },
    .notes = {
        "S-NIAH-1 in bytes: one seven-digit number in repeated noise, asked for at the end. "
        "Models are trained on this task from nothing, so that a length tells how far a memory "
        "reaches and nothing of language; the paper's 500M parameters and 15B tokens are out of "
        "reach.",
        "A number counts when every byte of it is the likeliest one given those before, which is "
        "what greedy generation says.",
        "The paper's 500M models at 8K, trained at 4K: GLA 5.2, CCQ-GLA 20.6, GDN 100, CCQ-GDN "
        "99.6 percent on S-NIAH-1; at 4K 11.0, 56.4, 100 and 100.",
        NULL
    },
};
