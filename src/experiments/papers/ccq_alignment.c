/* ccq_alignment.c - whether keys of needles lie off the directions in which keys vary
 * most, which is what curvature-conditioned queries rely on. */
#include "experiments/experiment_internal.h"

const mn_experiment_text mn_experiment_ccq_alignment = {
    .common = MN_JSON_TEXT({
        "grid": {
            "job": {
                "task": {"name": "s-niah-1", "options": {"tokenizer": "words"}},
                "model": {"num_hidden_layers": 2, "tie_word_embeddings": false},
                "train": {
                    "weight_decay": 0.1, "clip": 1, "warmup": 200, "schedule": "cosine", "min_lr": 0
                },
                "evaluate": {"metric": "sequence", "select": "last"},
                "look": {"alignment": {"top": 4}}
            },
            "grid": {
                "model": {
                    "gla": {"model": {"layers": "gla"}},
                    "gdn": {"model": {"layers": "gdn"}},
                    "attention": {"model": {"layers": "attention"}}
                }
            }
        },
        "claims": [
            {"says": "needle keys of gdn lie off the main directions",
             "table": 0, "cell": ["gdn", "rare tokens"], "below": 0},
            {"says": "needle keys of gla lie off the main directions",
             "table": 0, "cell": ["gla", "rare tokens"], "below": 0}
        ],
        "tables": [
            {"title": "Gap: needle less the rest, part of a key along the main directions",
             "rows": "model",
             "values": {"rare tokens": "alignment.gap", "whole sentence": "alignment.whole_gap"},
             "figure": "bars"},
            {"title": "Layers with a negative gap", "rows": "model",
             "values": {"part of the layers": "alignment.negative"}, "percent": true}
        ]
    }),
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "model": {"hidden_size": 32}, "task": {"options": {"budget": 384}, "test": 16},
                    "train": {"steps": 40, "batch": 4, "lr": 0.003, "warmup": 20},
                    "evaluate": {"batch": 4}
                },
                "grid": {"seed": [0]},
                "only": {"model": ["gla", "gdn"]}
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "model": {"hidden_size": 64}, "task": {"options": {"budget": 384}, "test": 64},
                    "train": {"steps": 600, "batch": 8, "lr": 0.003},
                    "evaluate": {"every": 200, "batch": 8}
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
                    "evaluate": {"every": 1000, "batch": 8}, "look": {"alignment": {"top": 16}}
                },
                "grid": {"seed": [0, 1, 2]}
            }
        }),
    },
    .notes = {
        "Keys are what the key projection gives, at unit length, a head at a time; a token's "
        "number is the part of its centred key that lies in the span of the first eigenvectors "
        "of the covariance of all keys of the prompt. Rare tokens are those of the needle whose "
        "id occurs at most twice.",
        "Models trained here read words and digits, with prompts of their own task, which small "
        "ones have not learned after the steps of preset cpu: their layers say what rare tokens "
        "do, as the paper says of first layers. --checkpoint DIR asks any model folder with a "
        "tokenizer, with six needles among 120 sentences and 16 directions, as Appendix H does.",
        "The paper finds a negative gap in all 21 layers of a Gated DeltaNet of 500M parameters "
        "and all 36 of Qwen3-4B; its numbers are figures.",
        NULL
    },
};
