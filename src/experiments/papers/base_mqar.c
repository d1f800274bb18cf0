/* base_mqar.c - what the MQAR experiments share: the layers, with 8192 numbers of state each at
 * width 128, and how they are trained. The readout is the table of embeddings, as in the model of
 * the zoology benchmark: with a readout of its own a model has to learn for every word apart that
 * what it reads is what it may say, and stays at chance. */
#include "experiments/experiment_internal.h"

static const char published[] = MN_JSON_TEXT({
    "grid": {
        "job": {
            "model": {"hidden_size": 128}, "epochs": 64,
            "train": {"batch": 256, "warmup": 1024},
            "evaluate": {"every": 0, "batch": 256}
        }
    }
});

const mn_experiment_text mn_base_mqar = {
    .common = MN_JSON_TEXT({
        "pilot": {"seeds": [100], "axes": ["train.lr", "train.weight_decay"], "value": "example"},
        "grid": {
            "job": {
                "model": {"num_hidden_layers": 2, "mlp": "none", "tie_word_embeddings": true},
                "train": {
                    "weight_decay": 0.1, "beta2": 0.999, "clip": 0, "schedule": "cosine",
                    "min_lr": 0,
                    "groups": {"vector": {"decays": true}}
                },
                "evaluate": {"metric": "example", "stop_at": 0.99}
            },
            "grid": {
                "model": {
                    "bayes": {
                        "model": {
                            "layers": "bayes", "head_dim": 32, "expand_v": 1, "noise_groups": 1
                        }
                    },
                    "bayes, no conv": {
                        "model": {
                            "layers": "bayes", "head_dim": 32, "expand_v": 1, "noise_groups": 1,
                            "use_short_conv": false
                        }
                    },
                    "gdn": {"model": {"layers": "gdn", "head_dim": 32, "expand_v": 2}},
                    "gdn, no conv": {
                        "model": {
                            "layers": "gdn", "head_dim": 32, "expand_v": 2,
                            "use_short_conv": false
                        }
                    },
                    "mamba2": {
                        "model": {
                            "layers": "mamba2", "head_dim": 32, "state_size": 32, "expand": 2
                        }
                    },
                    "attention": {"model": {"layers": "attention", "head_dim": 32}}
                }
            }
        }
    }),
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "model": {"hidden_size": 32},
                    "task": {"train": 0, "test": 256},
                    "train": {"steps": 1500, "batch": 32, "warmup": 100, "lr": 0.005},
                    "evaluate": {"every": 250}
                }
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "model": {"hidden_size": 64},
                    "task": {"train": 0, "test": 1000},
                    "train": {"steps": 4000, "batch": 32, "warmup": 200},
                    "evaluate": {"every": 500}
                }
            }
        }),
        [MN_PRESET_GPU] = published,
        [MN_PRESET_FULL] = published,
    },
};
