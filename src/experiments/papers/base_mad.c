/* base_mad.c - one block on the tasks of MAD, trained as the paper of Kalman Linear Attention
 * does. */
#include "experiments/experiment_internal.h"

static const char published[] = MN_JSON_TEXT({
    "grid": {
        "job": {
            "epochs": 750, "train": {"batch": 172}, "evaluate": {"patience": 70, "batch": 172}
        }
    }
});

const mn_experiment_text mn_base_mad = {
    .base = &mn_base_mad_tasks,
    .common = MN_JSON_TEXT({
        "grid": {
            "job": {
                "model": {
                    "hidden_size": 128, "num_hidden_layers": 1, "mlp": "gelu",
                    "intermediate_size": 120, "tie_word_embeddings": false
                },
                "train": {
                    "lr": 0.001, "weight_decay": 0, "beta2": 0.999, "clip": 5, "warmup": 0,
                    "schedule": "constant", "min_lr": 0
                },
                "evaluate": {"metric": "token", "select": "loss"}
            },
            "grid": {
                "model": {
                    "kla": {
                        "model": {
                            "layers": "kla", "d_state": 8, "expand": 1, "value_rank": "conv"
                        }
                    }
                }
            }
        },
        "tables": [
            {"title": "Accuracy on the MAD tasks", "rows": "model", "columns": "task",
             "value": "token", "percent": true, "figure": "bars"},
            {"title": "Macro accuracy, as MAD counts", "rows": "model", "columns": "task",
             "value": "macro", "percent": true, "figure": "bars"}
        ]
    }),
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {"job": {"model": {"hidden_size": 64}, "train": {"lr": 0.003}}}
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {"job": {"train": {"batch": 64}}}
        }),
        [MN_PRESET_GPU] = published,
        [MN_PRESET_FULL] = published,
    },
};
