/* crowding.c - more random keys than an address has dimensions. */
#include "experiments/experiment_internal.h"

const mn_experiment_text mn_experiment_crowding = {
    .common = MN_JSON_TEXT({
        "grid": {
            "job": {"kind": "addressed", "task": {"name": "crowding"}, "tests": {}},
            "grid": {"memory": ["linear", "gla", "delta", "reset", "bayes"]}
        },
        "claims": [
            {"says": "bayes has a lower cross entropy than delta at 256 keys",
             "table": 0, "cell": ["bayes", "256"], "less": ["delta", "256"], "below": 0},
            {"says": "bayes has a lower cross entropy than reset at 256 keys",
             "table": 0, "cell": ["bayes", "256"], "less": ["reset", "256"], "below": 0}
        ],
        "tables": [
            {"title": "Cross entropy at questions, by keys written", "rows": "memory",
             "values": {"96": "tests.writes-96.loss", "128": "tests.writes-128.loss",
                        "192": "tests.writes-192.loss", "256": "tests.writes-256.loss"},
             "figure": "lines"},
            {"title": "Answers that are right, by keys written", "rows": "memory",
             "values": {"96": "tests.writes-96.token", "128": "tests.writes-128.token",
                        "192": "tests.writes-192.token", "256": "tests.writes-256.token"},
             "percent": true, "figure": "lines"}
        ]
    }),
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "steps": 120, "batch": 32, "lr": 0.003,
                    "tests": {
                        "writes-96": {"options": {"writes": "96"}, "test": 64},
                        "writes-128": {"options": {"writes": "128"}, "test": 64},
                        "writes-192": {"options": {"writes": "192"}, "test": 64},
                        "writes-256": {"options": {"writes": "256"}, "test": 64}
                    }
                },
                "grid": {"seed": [0]}
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "steps": 1000, "batch": 64, "lr": 0.001,
                    "tests": {
                        "writes-96": {"options": {"writes": "96"}, "test": 512},
                        "writes-128": {"options": {"writes": "128"}, "test": 512},
                        "writes-192": {"options": {"writes": "192"}, "test": 512},
                        "writes-256": {"options": {"writes": "256"}, "test": 512}
                    }
                },
                "grid": {"seed": [0, 1, 2]}
            }
        }),
        [MN_PRESET_FULL] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "tests": {
                        "writes-96": {"options": {"writes": "96"}, "test": 2048},
                        "writes-128": {"options": {"writes": "128"}, "test": 2048},
                        "writes-192": {"options": {"writes": "192"}, "test": 2048},
                        "writes-256": {"options": {"writes": "256"}, "test": 2048}
                    }
                },
                "grid": {"seed": [0, 1, 2]}
            }
        }),
    },
    .notes = {
        "Keys of 64 dimensions are projected to addresses of 16, so that more than 16 "
        "cannot be recalled without error by any of these memories.",
        "Trained on 16 to 64 keys; everything in the tables lies beyond. Chance is 1.6 "
        "percent, or a cross entropy of 4.16.",
        "The paper shows a figure only: the Bayesian Layer has the lowest cross entropy "
        "at every number of keys.",
        NULL
    },
};
