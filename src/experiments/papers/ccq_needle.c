/* ccq_needle.c - one needle in a haystack, at the length trained on and beyond: queries
 * with and without curvature conditioning. */
#include "experiments/experiment_internal.h"

const mn_experiment_text mn_experiment_ccq_needle = {
    .common = MN_JSON_TEXT({
        "grid": {
            "job": {
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
        "claims": [
            {"says": "gla+ccq finds more than gla at twice the length",
             "table": 0, "cell": ["gla+ccq", "2x"], "less": ["gla", "2x"], "above": 0},
            {"says": "gdn+ccq finds more than gdn at four times the length",
             "table": 0, "cell": ["gdn+ccq", "4x"], "less": ["gdn", "4x"], "above": 0}
        ],
        "tables": [
            {"title": "Needles found without an error, by length of the haystack", "rows": "model",
             "values": {"as trained": "sequence", "1.5x": "tests.x1h.sequence",
                        "2x": "tests.x2.sequence", "4x": "tests.x4.sequence",
                        "8x": "tests.x8.sequence"},
             "percent": true, "figure": "lines"},
            {"title": "Answers that are right", "rows": "model",
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
                    "model": {"hidden_size": 32}, "task": {
                        "name": "s-niah-1", "options": {"tokenizer": "words", "budget": 384},
                        "test": 16
                    },
                    "train": {"steps": 60, "batch": 4, "lr": 0.003, "warmup": 20},
                    "evaluate": {"batch": 4},
                    "tests": {"x1h": {"options": {"budget": 512, "tokenizer": "words"}, "test": 8}}
                },
                "grid": {"seed": [0]},
                "only": {"model": ["gdn", "gdn+ccq"]}
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "model": {"hidden_size": 64},
                    "task": {
                        "name": "mqar", "train": 0, "test": 320,
                        "options": {"vocab": 544, "length": 64, "pairs": 4, "alpha": 1}
                    },
                    "train": {
                        "steps": 3000, "batch": 32, "lr": 0.004, "weight_decay": 0, "warmup": 100
                    },
                    "evaluate": {"every": 150, "batch": 32, "stop_at": 0.995},
                    "tests": {
                        "x1h": {
                            "options": {"vocab": 544, "length": 96, "pairs": 4, "alpha": 1}
                        },
                        "x2": {
                            "options": {"vocab": 544, "length": 128, "pairs": 4, "alpha": 1}
                        },
                        "x4": {
                            "options": {"vocab": 544, "length": 256, "pairs": 4, "alpha": 1}
                        },
                        "x8": {
                            "options": {"vocab": 544, "length": 512, "pairs": 4, "alpha": 1}
                        }
                    }
                },
                "grid": {
                    "model": {
                        "gla": {"model": {"use_short_conv": true}},
                        "gla+ccq": {"model": {"use_short_conv": true}}
                    },
                    "seed": [0, 1, 2]
                }
            }
        }),
        [MN_PRESET_FULL] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "model": {"hidden_size": 256, "num_hidden_layers": 4},
                    "task": {
                        "name": "s-niah-1", "options": {"tokenizer": "words", "budget": 4096},
                        "test": 500
                    },
                    "train": {"steps": 10000, "batch": 32, "lr": 0.001, "warmup": 1024},
                    "evaluate": {"every": 1000, "batch": 8},
                    "tests": {
                        "x1h": {"options": {"budget": 6144, "tokenizer": "words"}, "test": 500},
                        "x2": {"options": {"budget": 8192, "tokenizer": "words"}, "test": 500},
                        "x4": {"options": {"budget": 16384, "tokenizer": "words"}, "test": 500},
                        "x8": {"options": {"budget": 32768, "tokenizer": "words"}, "test": 200}
                    }
                },
                "grid": {"seed": [0, 1, 2]}
            }
        }),
    },
    .notes = {
        "Preset full: S-NIAH-1 in words and digits, one seven-digit number in repeated noise, "
        "asked for at the end; models are trained on this task from nothing, so that a length "
        "tells how far a memory reaches and nothing of language. The paper's 500M parameters and "
        "15B tokens are out of reach. A number counts when every digit of it is the likeliest "
        "one given those before, which is what greedy generation says.",
        "Preset cpu: small models do not learn to copy seven digits in an hour (the loss stays at "
        "that of guessing digits for 1,500 steps), so their needles are four pairs of key and "
        "value in front of random tokens, each asked for at any distance, trained at 64 tokens; "
        "gla has short convolutions there.",
        "The paper's 500M models at 8K, trained at 4K: GLA 5.2, CCQ-GLA 20.6, GDN 100, CCQ-GDN "
        "99.6 percent on S-NIAH-1; at 4K 11.0, 56.4, 100 and 100.",
        NULL
    },
};
