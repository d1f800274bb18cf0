/* mqar_long.c - recall over 2048 tokens: state against width. */
#include "experiments/experiment_internal.h"

/* The published sizes, of which preset gpu takes some. */
static const char published[] = MN_JSON_TEXT({
    "grid": {
        "job": {"task": {"setting": "baseline"}, "evaluate": {"every": 0, "batch": 16}},
        "parts": [
            {"grid": {
                "model": {
                    "kla": {"model": {"layers": "kla", "d_state": 16, "expand": 1}},
                    "mamba1": {
                        "model": {"layers": "mamba1", "state_size": 16, "expand": 2}
                    }
                },
                "width": {
                    "64": {
                        "model": {"hidden_size": 64, "intermediate_size": 128},
                        "train": {"batch": 64}
                    },
                    "128": {
                        "model": {"hidden_size": 128, "intermediate_size": 256},
                        "train": {"batch": 32}
                    },
                    "256": {
                        "model": {"hidden_size": 256, "intermediate_size": 512},
                        "train": {"batch": 16}
                    }
                }
            }},
            {"grid": {
                "model": {
                    "gdn": {"model": {"layers": "gdn", "expand_v": 2}}
                },
                "width": {
                    "64": {
                        "model": {
                            "hidden_size": 64, "intermediate_size": 128, "num_heads": 2
                        },
                        "train": {"batch": 64}
                    },
                    "128": {
                        "model": {
                            "hidden_size": 128, "intermediate_size": 256, "num_heads": 4
                        },
                        "train": {"batch": 32}
                    },
                    "256": {
                        "model": {
                            "hidden_size": 256, "intermediate_size": 512, "num_heads": 8
                        },
                        "train": {"batch": 16}
                    }
                }
            }},
            {"grid": {
                "model": {
                    "gla": {"model": {"layers": "gla", "num_heads": 4, "expand_v": 1}}
                },
                "width": {
                    "64": {
                        "model": {
                            "hidden_size": 64, "intermediate_size": 128, "expand_k": 1
                        },
                        "train": {"batch": 64}
                    },
                    "128": {
                        "model": {
                            "hidden_size": 128, "intermediate_size": 256, "expand_k": 0.5
                        },
                        "train": {"batch": 32}
                    },
                    "256": {
                        "model": {
                            "hidden_size": 256, "intermediate_size": 512, "expand_k": 0.25
                        },
                        "train": {"batch": 16}
                    }
                }
            }}
        ]
    }
});

static const mn_experiment_text sizes = {
    .preset = { [MN_PRESET_GPU] = published, [MN_PRESET_FULL] = published },
};

const mn_experiment_text mn_experiment_mqar_long = {
    .base = &sizes,
    .common = MN_JSON_TEXT({
        "pilot": {"seeds": [100], "axes": ["train.lr", "train.weight_decay"], "value": "token"},
        "grid": {
            "job": {
                "task": {"name": "mqar-long"},
                "model": {"num_hidden_layers": 2, "mlp": "gelu", "tie_word_embeddings": false},
                "train": {
                    "lr": 0.001, "weight_decay": 0, "beta2": 0.999, "clip": 5, "warmup": 0,
                    "schedule": "constant", "min_lr": 0
                },
                "evaluate": {"metric": "token", "select": "loss"}
            }
        },
        "tables": [
            {"title": "Accuracy by width of the model", "rows": "model", "columns": "width",
             "value": "token", "percent": true, "figure": "lines"}
        ]
    }),
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "task": {"options": {"length": 64, "vocab": 32}, "train": 3200, "test": 64},
                    "train": {"steps": 4000, "batch": 16, "lr": 0.003},
                    "evaluate": {"every": 250, "stop_at": 0.99}
                },
                "grid": {"seed": [0]},
                "parts": [
                    {"grid": {
                        "model": {
                            "kla": {"model": {"layers": "kla", "d_state": 16, "expand": 1}},
                            "mamba1": {
                                "model": {"layers": "mamba1", "state_size": 16, "expand": 2}
                            }
                        },
                        "width": {
                            "32": {"model": {"hidden_size": 32, "intermediate_size": 64}}
                        }
                    }},
                    {"grid": {
                        "model": {
                            "gdn": {"model": {"layers": "gdn", "expand_v": 2}}
                        },
                        "width": {
                            "32": {
                                "model": {
                                    "hidden_size": 32, "intermediate_size": 64, "num_heads": 1
                                }
                            }
                        }
                    }},
                    {"grid": {
                        "model": {
                            "gla": {"model": {"layers": "gla", "num_heads": 4, "expand_v": 1}}
                        },
                        "width": {
                            "32": {
                                "model": {"hidden_size": 32, "intermediate_size": 64, "expand_k": 2}
                            }
                        }
                    }}
                ],
                "only": {"model": ["kla", "gdn"]}
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "claims": [
                {"says": "gdn is ahead of kla at width 32",
                 "table": 0, "cell": ["gdn", "32"], "less": ["kla", "32"], "above": 0,
                 "learned": 0.1},
                {"says": "kla is ahead of mamba1 at width 64",
                 "table": 0, "cell": ["kla", "64"], "less": ["mamba1", "64"], "above": 0,
                 "learned": 0.1},
                {"says": "gla does not begin: kla is ahead by 50 points at width 64",
                 "table": 0, "cell": ["kla", "64"], "less": ["gla", "64"], "above": 0.5,
                 "learned": 0.5}
            ],
            "grid": {
                "job": {
                    "task": {"options": {"length": 128, "vocab": 48}, "train": 3200, "test": 128},
                    "train": {"steps": 4000, "batch": 16},
                    "evaluate": {"every": 500, "batch": 16, "stop_at": 0.99}
                },
                "grid": {"train.lr": [0.001, 0.003], "seed": [0, 1]},
                "parts": [
                    {"grid": {
                        "model": {
                            "kla": {"model": {"layers": "kla", "d_state": 16, "expand": 1}},
                            "mamba1": {
                                "model": {"layers": "mamba1", "state_size": 16, "expand": 2}
                            }
                        },
                        "width": {
                            "32": {"model": {"hidden_size": 32, "intermediate_size": 64}},
                            "64": {"model": {"hidden_size": 64, "intermediate_size": 128}}
                        }
                    }},
                    {"grid": {
                        "model": {
                            "gdn": {"model": {"layers": "gdn", "expand_v": 2}}
                        },
                        "width": {
                            "32": {
                                "model": {
                                    "hidden_size": 32, "intermediate_size": 64, "num_heads": 1
                                }
                            },
                            "64": {
                                "model": {
                                    "hidden_size": 64, "intermediate_size": 128, "num_heads": 2
                                }
                            }
                        }
                    }},
                    {"grid": {
                        "model": {
                            "gla": {"model": {"layers": "gla", "num_heads": 4, "expand_v": 1}}
                        },
                        "width": {
                            "32": {
                                "model": {"hidden_size": 32, "intermediate_size": 64, "expand_k": 2}
                            },
                            "64": {
                                "model": {
                                    "hidden_size": 64, "intermediate_size": 128, "expand_k": 1
                                }
                            }
                        }
                    }}
                ]
            }
        }),
        [MN_PRESET_GPU] = MN_JSON_TEXT({
            "claims": [
                {"says": "gdn is ahead of kla at width 64",
                 "table": 0, "cell": ["gdn", "64"], "less": ["kla", "64"], "above": 0,
                 "learned": 0.1},
                {"says": "kla is ahead of mamba1 at width 128",
                 "table": 0, "cell": ["kla", "128"], "less": ["mamba1", "128"], "above": 0,
                 "learned": 0.1},
                {"says": "gla does not begin: kla is ahead by 50 points at width 128",
                 "table": 0, "cell": ["kla", "128"], "less": ["gla", "128"], "above": 0.5,
                 "learned": 0.5}
            ],
            "grid": {
                "job": {"epochs": 40, "evaluate": {"patience": 10}},
                "grid": {"seed": [0, 1]},
                "only": {"width": ["64", "128"]}
            }
        }),
        [MN_PRESET_FULL] = MN_JSON_TEXT({
            "claims": [
                {"says": "kla recalls 95 percent at width 256",
                 "table": 0, "cell": ["kla", "256"], "above": 0.95},
                {"says": "gdn is ahead of kla at width 64",
                 "table": 0, "cell": ["gdn", "64"], "less": ["kla", "64"], "above": 0,
                 "learned": 0.1},
                {"says": "kla is ahead of mamba1 at width 256",
                 "table": 0, "cell": ["kla", "256"], "less": ["mamba1", "256"], "above": 0,
                 "learned": 0.1},
                {"says": "gla does not begin: kla is ahead by 50 points at width 256",
                 "table": 0, "cell": ["kla", "256"], "less": ["gla", "256"], "above": 0.5,
                 "learned": 0.5}
            ],
            "grid": {
                "job": {"epochs": 750, "evaluate": {"patience": 70}},
                "grid": {"seed": [0, 1, 2, 3, 4]}
            }
        }),
    },
    .notes = {
        "The paper calls this task an MQAR of zoology, which needs more tokens in its "
        "vocabulary than in a sequence. Counts and harness are those of the in-context "
        "recall of MAD with 256 tokens at length 2048, which is what runs here.",
        "Preset gpu has widths 64 and 128 for 40 of the 750 epochs, two seeds.",
        "States are the paper's: gdn has heads of 24 keys and 48 values (2,304, 4,608 and 9,216 "
        "numbers), gla keys of 16 in all four heads, kla means and precisions of 16 slots.",
        NULL
    },
};
