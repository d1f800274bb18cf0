/* base_mad_tasks.c - the six tasks of MAD at the size of each preset. Compression has the head of
 * an autoencoder behind its last state. */
#include "experiments/experiment_internal.h"

static const char published[] = MN_JSON_TEXT({
    "grid": {
        "job": {"evaluate": {"every": 0}},
        "grid": {
            "task": {
                "memorise": {"task": {"name": "mad-memorise", "setting": "baseline"}},
                "recall": {"task": {"name": "mad-recall", "setting": "baseline"}},
                "noisy": {"task": {"name": "mad-noisy", "setting": "baseline"}},
                "fuzzy": {"task": {"name": "mad-fuzzy", "setting": "baseline"}},
                "copy": {"task": {"name": "mad-copy", "setting": "baseline"}},
                "compress": {
                    "task": {"name": "mad-compress", "setting": "baseline"},
                    "model": {"decoder": "places"}
                }
            },
            "seed": [0, 1, 2, 3, 4]
        }
    }
});

const mn_experiment_text mn_base_mad_tasks = {
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "task": {"test": 256}, "train": {"steps": 2000, "batch": 32, "lr": 0.003},
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
                        },
                        "compress": {
                            "task": {
                                "name": "mad-compress",
                                "options": {"length": 8, "vocab": 8}, "train": 3200
                            },
                            "model": {"decoder": "places"}
                        }
                    },
                    "seed": [0]
                }
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "task": {"test": 640}, "epochs": 400,
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
                        },
                        "compress": {
                            "task": {
                                "name": "mad-compress", "options": {"length": 32}, "train": 12800
                            },
                            "model": {"decoder": "places"}
                        }
                    },
                    "seed": [0, 1, 2]
                }
            }
        }),
        [MN_PRESET_GPU] = published,
        [MN_PRESET_FULL] = published,
    },
};
