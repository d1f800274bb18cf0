/* experiment_mad.c - five of the MAD tasks with one block, all layers with 2048 numbers of
 * state. */
#include "experiments/experiment_parts.h"

const mn_experiment_text mn_experiment_mad = {
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
                    "kla": {"model": {"layers": "kla", "d_state": 8, "expand": 1}},
                    "kla+": {
                        "model": {"layers": "kla", "d_state": 8, "expand": 1},
                        "train": {"mc_samples": 10}
                    },
                    "gdn": {
                        "model": {"layers": "gdn", "num_heads": 4, "head_dim": 16, "expand_v": 2}
                    },
                    "gla": {
                        "model": {"layers": "gla", "num_heads": 4, "expand_k": 0.5, "expand_v": 1}
                    },
                    "mamba1": {"model": {"layers": "mamba1", "state_size": 16, "expand": 1}},
                    "mlstm": {"model": {"layers": "mlstm", "num_heads": 16}}
                }
            }
        },
        "tables": [
            {"title": "Accuracy on the MAD tasks", "rows": "model", "columns": "task",
             "value": "token", "percent": true, "figure": "bars"}
        ]
    }),
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "model": {"hidden_size": 64}, "task": {"test": 256},
                    "train": {"steps": 2000, "batch": 32, "lr": 0.003},
                    "evaluate": {"every": 100, "stop_at": 0.999}
                },
                "grid": {
                    "task": {
                        "recall": {
                            "task": {
                                "name": "mad-recall", "options": {"length": 32}, "train": 3200
                            }
                        },
                        "copy": {
                            "task": {
                                "name": "mad-copy",
                                "options": {"length": 32, "to_copy": 4}, "train": 3200
                            }
                        },
                        "noisy": {
                            "task": {
                                "name": "mad-noisy", "options": {"length": 32}, "train": 3200
                            }
                        }
                    },
                    "seed": [0]
                },
                "only": {"model": ["kla", "gdn", "mamba1"]}
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "task": {"test": 640}, "train": {"batch": 64}, "steps_at_most": 1000,
                    "epochs": 400,
                    "evaluate": {"every": 150, "stop_at": 0.999}
                },
                "grid": {
                    "task": {
                        "memorise": {"task": {"name": "mad-memorise", "train": 256}},
                        "recall": {
                            "task": {
                                "name": "mad-recall", "options": {"length": 64}, "train": 12800
                            }
                        },
                        "noisy": {
                            "task": {
                                "name": "mad-noisy", "options": {"length": 64}, "train": 12800
                            }
                        },
                        "fuzzy": {
                            "task": {
                                "name": "mad-fuzzy", "options": {"length": 64}, "train": 12800
                            }
                        },
                        "copy": {
                            "task": {
                                "name": "mad-copy",
                                "options": {"length": 64, "to_copy": 8}, "train": 12800
                            }
                        }
                    },
                    "seed": [0]
                }
            }
        }),
        [MN_PRESET_FULL] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "epochs": 750, "train": {"batch": 172},
                    "evaluate": {"every": 0, "patience": 70, "batch": 172}
                },
                "grid": {
                    "task": {
                        "memorise": {"task": {"name": "mad-memorise", "setting": "baseline"}},
                        "recall": {"task": {"name": "mad-recall", "setting": "baseline"}},
                        "noisy": {"task": {"name": "mad-noisy", "setting": "baseline"}},
                        "fuzzy": {"task": {"name": "mad-fuzzy", "setting": "baseline"}},
                        "copy": {"task": {"name": "mad-copy", "setting": "baseline"}}
                    },
                    "seed": [0, 1, 2, 3, 4]
                }
            }
        }),
    },
    .notes = {
        "Compression is left out: it needs the decoder of an autoencoder behind the last "
        "state.",
        "The paper puts an MLP of 120 in front of the block and one of 240 and 120 behind"
        " it; here the block has one MLP of 120 and a linear head.",
        "Selection by the lowest test loss, accuracy over the places that ask: the paper "
        "leaves both open. Each run keeps the answers at the epoch of lowest loss.",
        NULL
    },
};
