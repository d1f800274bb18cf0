/* collision_learned.c - a network that learns everything but its addresses, on memories
 * that others write over. */
#include "experiments/experiment_internal.h"

const mn_experiment_text mn_experiment_collision_learned = {
    .common = MN_JSON_TEXT({
        "grid": {
            "job": {"kind": "addressed", "task": {"name": "collision"}, "tests": {}},
            "grid": {"memory": ["linear", "gla", "delta", "reset", "bayes"]}
        },
        "claims": [
            {"says": "bayes keeps its margin at 256 writes of each flooding key",
             "table": 1, "cell": ["bayes", "256"], "above": 0},
            {"says": "bayes keeps its margin at overlap 0.95",
             "table": 3, "cell": ["bayes", "0.95"], "above": 0},
            {"says": "delta loses its margin at 256 writes",
             "table": 1, "cell": ["delta", "256"], "below": 0},
            {"says": "delta loses its margin at overlap 0.95",
             "table": 3, "cell": ["delta", "0.95"], "below": 0},
            {"says": "reset loses its margin at overlap 0.95",
             "table": 3, "cell": ["reset", "0.95"], "below": 0}
        ],
        "tables": [
            {"title": "Answers that are right, by writes of each flooding key (overlap 0.8)",
             "rows": "memory",
             "values": {"16": "tests.floods-16.token", "32": "tests.floods-32.token",
                        "64": "tests.floods-64.token", "128": "tests.floods-128.token",
                        "256": "tests.floods-256.token"},
             "percent": true, "figure": "lines"},
            {"title": "Margin of the answer over the flooding one, by writes of each flooding key",
             "rows": "memory",
             "values": {"16": "tests.floods-16.margin", "32": "tests.floods-32.margin",
                        "64": "tests.floods-64.margin", "128": "tests.floods-128.margin",
                        "256": "tests.floods-256.margin"},
             "figure": "lines"},
            {"title": "Answers that are right, by overlap (64 writes)", "rows": "memory",
             "values": {"0.6": "tests.rho-60.token", "0.7": "tests.rho-70.token",
                        "0.8": "tests.rho-80.token", "0.85": "tests.rho-85.token",
                        "0.9": "tests.rho-90.token", "0.95": "tests.rho-95.token"},
             "percent": true, "figure": "lines"},
            {"title": "Margin of the answer over the flooding one, by overlap", "rows": "memory",
             "values": {"0.6": "tests.rho-60.margin", "0.7": "tests.rho-70.margin",
                        "0.8": "tests.rho-80.margin", "0.85": "tests.rho-85.margin",
                        "0.9": "tests.rho-90.margin", "0.95": "tests.rho-95.margin"},
             "figure": "lines"}
        ]
    }),
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "steps": 80, "batch": 32, "lr": 0.003,
                    "tests": {
                        "floods-16": {
                            "options": {"floods": "16", "rho_low": 0.8, "rho_high": 0.8},
                            "test": 64
                        },
                        "floods-32": {
                            "options": {"floods": "32", "rho_low": 0.8, "rho_high": 0.8},
                            "test": 64
                        },
                        "floods-64": {
                            "options": {"floods": "64", "rho_low": 0.8, "rho_high": 0.8},
                            "test": 64
                        },
                        "rho-80": {
                            "options": {"floods": "64", "rho_low": 0.8, "rho_high": 0.8},
                            "test": 64
                        },
                        "rho-95": {
                            "options": {"floods": "64", "rho_low": 0.95, "rho_high": 0.95},
                            "test": 64
                        }
                    }
                },
                "grid": {"seed": [0]}
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "steps": 600, "batch": 64, "lr": 0.001,
                    "tests": {
                        "floods-16": {
                            "options": {"floods": "16", "rho_low": 0.8, "rho_high": 0.8},
                            "test": 256
                        },
                        "floods-32": {
                            "options": {"floods": "32", "rho_low": 0.8, "rho_high": 0.8},
                            "test": 256
                        },
                        "floods-64": {
                            "options": {"floods": "64", "rho_low": 0.8, "rho_high": 0.8},
                            "test": 256
                        },
                        "floods-128": {
                            "options": {"floods": "128", "rho_low": 0.8, "rho_high": 0.8},
                            "test": 256
                        },
                        "floods-256": {
                            "options": {"floods": "256", "rho_low": 0.8, "rho_high": 0.8},
                            "test": 256
                        },
                        "rho-60": {
                            "options": {"floods": "64", "rho_low": 0.6, "rho_high": 0.6},
                            "test": 256
                        },
                        "rho-70": {
                            "options": {"floods": "64", "rho_low": 0.7, "rho_high": 0.7},
                            "test": 256
                        },
                        "rho-80": {
                            "options": {"floods": "64", "rho_low": 0.8, "rho_high": 0.8},
                            "test": 256
                        },
                        "rho-85": {
                            "options": {"floods": "64", "rho_low": 0.85, "rho_high": 0.85},
                            "test": 256
                        },
                        "rho-90": {
                            "options": {"floods": "64", "rho_low": 0.9, "rho_high": 0.9},
                            "test": 256
                        },
                        "rho-95": {
                            "options": {"floods": "64", "rho_low": 0.95, "rho_high": 0.95},
                            "test": 256
                        }
                    }
                },
                "grid": {"seed": [0, 1, 2]}
            }
        }),
        [MN_PRESET_FULL] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "tests": {
                        "floods-16": {
                            "options": {"floods": "16", "rho_low": 0.8, "rho_high": 0.8},
                            "test": 2048
                        },
                        "floods-32": {
                            "options": {"floods": "32", "rho_low": 0.8, "rho_high": 0.8},
                            "test": 2048
                        },
                        "floods-64": {
                            "options": {"floods": "64", "rho_low": 0.8, "rho_high": 0.8},
                            "test": 2048
                        },
                        "floods-128": {
                            "options": {"floods": "128", "rho_low": 0.8, "rho_high": 0.8},
                            "test": 2048
                        },
                        "floods-256": {
                            "options": {"floods": "256", "rho_low": 0.8, "rho_high": 0.8},
                            "test": 2048
                        },
                        "rho-60": {
                            "options": {"floods": "64", "rho_low": 0.6, "rho_high": 0.6},
                            "test": 2048
                        },
                        "rho-70": {
                            "options": {"floods": "64", "rho_low": 0.7, "rho_high": 0.7},
                            "test": 2048
                        },
                        "rho-80": {
                            "options": {"floods": "64", "rho_low": 0.8, "rho_high": 0.8},
                            "test": 2048
                        },
                        "rho-85": {
                            "options": {"floods": "64", "rho_low": 0.85, "rho_high": 0.85},
                            "test": 2048
                        },
                        "rho-90": {
                            "options": {"floods": "64", "rho_low": 0.9, "rho_high": 0.9},
                            "test": 2048
                        },
                        "rho-95": {
                            "options": {"floods": "64", "rho_low": 0.95, "rho_high": 0.95},
                            "test": 2048
                        }
                    }
                },
                "grid": {"seed": [0, 1, 2]}
            }
        }),
    },
    .notes = {
        "Trained on 1, 2, 4 or 8 writes of each flooding key at overlaps of 0.6 to 0.8; "
        "everything in the tables lies beyond.",
        "The margin is 2 p - 1 of a softmax over the two labels of a pair; results.json "
        "has that over all labels as well.",
        "Questions do not write: their step only forgets or predicts. The paper leaves "
        "that open.",
        "The paper shows figures only: the margin of the Bayesian Layer stays positive "
        "and flat along both axes, delta and reset level off along the writes and turn "
        "negative along the overlap, linear and gla fall with the writes. Chance is 6.25 "
        "percent.",
        NULL
    },
};
