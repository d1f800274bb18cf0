/* forgetting.c - how far back a memory remembers, by the window N of its forgetting:
 * Palimpsa against sums and corrections that fade at the same rate. Nothing is trained. */
#include "experiments/experiment_internal.h"

const mn_experiment_text mn_experiment_forgetting = {
    .common = MN_JSON_TEXT({
        "grid": {
            "job": {"kind": "horizon"},
            "grid": {
                "memory": {
                    "palimpsa": {"memory": "palimpsa"},
                    "palimpsa, strong prior": {"memory": "palimpsa", "prior": 100},
                    "mamba2": {"memory": "mamba2"},
                    "gdn": {"memory": "gdn"}
                },
                "window": {
                    "8": {"window": 8}, "16": {"window": 16}, "32": {"window": 32},
                    "64": {"window": 64}, "128": {"window": 128}, "256": {"window": 256},
                    "512": {"window": 512}, "1024": {"window": 1024}, "none": {"window": 0}
                }
            }
        },
        "claims": [
            {"says": "a wider window remembers more keys: 64 against 8",
             "table": 0, "cell": ["palimpsa", "64"], "less": ["palimpsa", "8"], "above": 1},
            {"says": "without forgetting the newest key no longer enters",
             "table": 1, "cell": ["palimpsa", "none"], "below": 0.5},
            {"says": "with a strong prior Palimpsa is Mamba-2: same keys at window 64",
             "table": 0, "cell": ["palimpsa, strong prior", "64"],
             "less": ["mamba2", "64"], "below": 0.5}
        ],
        "tables": [
            {"title": "Keys remembered, by window", "rows": "memory", "columns": "window",
             "value": "remembered", "figure": "lines"},
            {"title": "The newest key, by window", "rows": "memory", "columns": "window",
             "value": "newest", "percent": true, "figure": "lines"},
            {"title": "Palimpsa: recall by tokens back", "rows": "window",
             "where": {"memory": "palimpsa"},
             "values": {"1": "recall.1", "2": "recall.2", "4": "recall.4", "8": "recall.8",
                        "16": "recall.16", "32": "recall.32", "64": "recall.64",
                        "128": "recall.128", "256": "recall.256"},
             "percent": true, "figure": "lines"},
            {"title": "Sum: recall by tokens back", "rows": "window", "where": {"memory": "mamba2"},
             "values": {"1": "recall.1", "2": "recall.2", "4": "recall.4", "8": "recall.8",
                        "16": "recall.16", "32": "recall.32", "64": "recall.64",
                        "128": "recall.128", "256": "recall.256"},
             "percent": true, "figure": "lines"}
        ]
    }),
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {
                "job": {"tokens": 256, "streams": 4, "keys": 16, "classes": 16},
                "grid": {"seed": [0]},
                "only": {"window": ["8", "64", "none"]}
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {
                "job": {"tokens": 1024, "streams": 8},
                "grid": {"seed": [0, 1, 2]}
            }
        }),
        [MN_PRESET_FULL] = MN_JSON_TEXT({
            "grid": {
                "job": {"tokens": 4096, "streams": 8, "keys": 64, "classes": 64},
                "grid": {"seed": [0, 1, 2, 3, 4]}
            }
        }),
    },
    .notes = {
        "Every token writes a random unit key with a label; recall is the part of right "
        "answers above chance. Keys remembered is its sum over all tokens back, and cannot "
        "pass what the memory has room for.",
        "All fade by 1 - 1/N a token, with gates fully open. A window of none forgets "
        "nothing: importances then grow without end, and the newest key no longer enters, "
        "which the paper calls catastrophic remembering.",
        "A prior far stronger than what a token brings is the limit in which Palimpsa is "
        "Mamba-2.",
        "The paper argues with the window and shows no figure of it.",
        NULL
    },
};
