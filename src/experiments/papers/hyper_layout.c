/* hyper_layout.c - the parts of HyperMLP and HyperGLU, taken away one by one. */
#include <string.h>

#include "base/status.h"
#include "experiments/experiment_internal.h"
#include "experiments/job_internal.h"
#include "tasks/task.h"

/* The axis of tasks from what the plan names under "sweep": "mad-memorise" is all of MAD's settings
 * of this task, "mad-recall: length-512" one of them. Labels are "memorise: vocab-512". */
static mn_status add_setting(json_t *axis, const mn_task_setting *s) {
    json_t *job = json_pack("{s:{s:s, s:s}}", "task", "name", s->task, "setting", s->name);
    char label[96];
    snprintf(label, sizeof label, "%s: %s", s->task + strlen("mad-"), s->name);
    if (strcmp(s->task, "mad-compress") == 0) {
        json_object_set_new(job, "model", json_pack("{s:s}", "decoder", "places"));
    }
    return json_object_set_new(axis, label, job) == 0
               ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for the settings of MAD");
}

static mn_status add(json_t *plan) {
    const json_t *sweep = json_object_get(plan, "sweep"), *name;
    if (!sweep) return MN_OK;
    json_t *axis = json_object();
    mn_status st = MN_OK;
    size_t k;
    json_array_foreach((json_t *)(uintptr_t)sweep, k, name) {
        for (int i = 0; st == MN_OK && i < mn_task_setting_count(); i++) {
            const mn_task_setting s = mn_task_setting_row(i);
            char whole[96];
            snprintf(whole, sizeof whole, "%s: %s", s.task, s.name);
            const bool wanted = strcmp(s.task, json_string_value(name)) == 0 ||
                                strcmp(whole, json_string_value(name)) == 0;
            if (strcmp(s.suite, "mad") == 0 && wanted) st = add_setting(axis, &s);
        }
    }
    if (st != MN_OK) {
        json_decref(axis);
        return st;
    }
    json_object_del(plan, "sweep");
    json_object_del(mn_spec_get(plan, "grid.grid"), "task");
    return mn_spec_set(plan, "grid.grid.task", axis);
}

const mn_experiment_text mn_experiment_hyper_layout = {
    .base = &mn_base_mad_tasks,
    .common = MN_JSON_TEXT({
        "pilot": {"seeds": [100], "axes": ["train.lr", "train.weight_decay"], "value": "macro"},
        "grid": {
            "job": {
                "model": {
                    "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 352,
                    "num_heads": 2, "tie_word_embeddings": false
                },
                "train": {
                    "beta2": 0.999, "clip": 0, "warmup": 0, "schedule": "cosine", "min_lr": 1e-06,
                    "groups": {"vector": {"decays": true}}
                },
                "evaluate": {"metric": "macro", "select": "loss", "stop_at": 0.999}
            },
            "grid": {
                "model": {
                    "attention": {"model": {"layers": "attention"}},
                    "relu_attention": {"model": {"layers": "relu_attention"}},
                    "hypermlp": {"model": {"layers": "hypermlp"}},
                    "hypermlp, no lag layout": {
                        "model": {"layers": "hypermlp", "layout": "position"}
                    },
                    "bare, lags": {
                        "model": {
                            "layers": "hypermlp", "use_kv_conv": false, "use_qk_gate": false,
                            "use_vo_gate": false, "qk_rank": 64
                        }
                    },
                    "bare, places": {
                        "model": {
                            "layers": "hypermlp", "use_kv_conv": false, "use_qk_gate": false,
                            "use_vo_gate": false, "qk_rank": 64, "layout": "position"
                        }
                    },
                    "bare, places, second mix": {
                        "model": {
                            "layers": "hypermlp", "use_kv_conv": false, "use_qk_gate": false,
                            "use_vo_gate": false, "qk_rank": 64, "layout": "position",
                            "op1_rank": 0
                        }
                    },
                    "attention, no positions": {
                        "model": {"layers": "attention", "use_rope": false}
                    },
                    "hypermlp, first mix": {"model": {"layers": "hypermlp", "op2_rank": 0}},
                    "hypermlp, second mix": {"model": {"layers": "hypermlp", "op1_rank": 0}},
                    "hypermlp, narrow values": {
                        "model": {"layers": "hypermlp", "qk_rank": 64, "vo_rank": 16}
                    },
                    "hypermlp, no mix": {
                        "model": {"layers": "hypermlp", "op1_rank": 0, "op2_rank": 0}
                    },
                    "hypermlp, no gates": {
                        "model": {
                            "layers": "hypermlp", "use_qk_gate": false, "use_vo_gate": false
                        }
                    },
                    "hypermlp, no conv": {"model": {"layers": "hypermlp", "use_kv_conv": false}},
                    "hyperglu": {"model": {"layers": "hyperglu"}},
                    "hyperglu, no lag layout": {
                        "model": {"layers": "hyperglu", "layout": "position"}
                    },
                    "hyperglu, no mix": {
                        "model": {"layers": "hyperglu", "op1_rank": 0, "op2_rank": 0}
                    },
                    "hyperglu, no conv": {"model": {"layers": "hyperglu", "use_kv_conv": false}}
                }
            }
        },
        "claims": [
            {"says": "without the lag layout memorising falls (no gates, no convolutions)",
             "table": 0, "cell": ["bare, lags", "memorise"],
             "less": ["bare, places", "memorise"], "above": 0.1, "learned": 0.1},
            {"says": "without the lag layout recall falls (no gates, no convolutions)",
             "table": 0, "cell": ["bare, lags", "recall"],
             "less": ["bare, places", "recall"], "above": 0.1, "learned": 0.1},
            {"says": "without the lag layout noisy recall falls (no gates, no convolutions)",
             "table": 0, "cell": ["bare, lags", "noisy"],
             "less": ["bare, places", "noisy"], "above": 0.1, "learned": 0.1},
            {"says": "without the lag layout fuzzy recall falls",
             "table": 0, "cell": ["hypermlp", "fuzzy"],
             "less": ["hypermlp, no lag layout", "fuzzy"], "above": 0.05},
            {"says": "mixing lags on both sides beats none in copying",
             "table": 0, "cell": ["hypermlp", "copy"],
             "less": ["hypermlp, no mix", "copy"], "above": 0}
        ],
        "tables": [
            {"title": "Accuracy on the MAD tasks", "rows": "model", "columns": "task",
             "columns_until": ":", "value": "macro", "percent": true, "figure": "bars"}
        ]
    }),
    .add = add,
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {
                "job": {"model": {"hidden_size": 32, "intermediate_size": 64}},
                "only": {
                    "model": ["attention", "hypermlp", "hyperglu, no mix"],
                    "task": ["recall", "copy"]
                }
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "model": {"hidden_size": 64, "intermediate_size": 128},
                    "train": {"batch": 32, "lr": 0.001}, "lr_by_epoch": false,
                    "steps_at_most": 1000
                },
                "only": {
                    "model": [
                        "attention", "bare, lags", "bare, places", "hypermlp",
                        "hypermlp, no lag layout", "hypermlp, first mix",
                        "hypermlp, second mix", "hypermlp, narrow values", "hypermlp, no mix",
                        "hyperglu", "hyperglu, no lag layout"
                    ]
                }
            }
        }),
        [MN_PRESET_GPU] = MN_JSON_TEXT({
            "tables": [
                {"title": "Memorising by size of the vocabulary, recall by length",
                 "rows": "model", "columns": "task", "value": "macro", "percent": true,
                 "figure": "bars"}
            ],
            "claims": [
                {"says": "without the lag layout memorising falls by ten points at 2048 tokens",
                 "table": 0, "cell": ["bare, lags", "memorise: vocab-2048"],
                 "less": ["bare, places", "memorise: vocab-2048"], "above": 0.1, "learned": 0.1},
                {"says": "without the lag layout memorising falls by ten points at 8192 tokens",
                 "table": 0, "cell": ["bare, lags", "memorise: vocab-8192"],
                 "less": ["bare, places", "memorise: vocab-8192"], "above": 0.1, "learned": 0.1},
                {"says": "without the lag layout recall falls by ten points at 1024 tokens",
                 "table": 0, "cell": ["bare, lags", "recall: length-1024"],
                 "less": ["bare, places", "recall: length-1024"], "above": 0.1, "learned": 0.1}
            ],
            "sweep": [
                "mad-memorise", "mad-recall: length-256", "mad-recall: length-512",
                "mad-recall: length-1024"
            ],
            "grid": {
                "job": {
                    "epochs": 200, "lr_by_epoch": true, "train": {"batch": 128, "lr": 0.001},
                    "evaluate": {"batch": 128}
                },
                "grid": {
                    "model": {
                        "bare, lags": {"model": {"qk_rank": 128}},
                        "bare, places": {"model": {"qk_rank": 128}},
                        "bare, places, second mix": {"model": {"qk_rank": 128}}
                    },
                    "seed": [0, 1]
                },
                "only": {
                    "model": [
                        "attention", "attention, no positions", "bare, lags", "bare, places",
                        "bare, places, second mix", "hypermlp", "hypermlp, no lag layout"
                    ]
                }
            }
        }),
        [MN_PRESET_FULL] = MN_JSON_TEXT({
            "sweep": [
                "mad-compress", "mad-fuzzy", "mad-recall", "mad-memorise", "mad-noisy",
                "mad-copy"
            ],
            "grid": {
                "job": {
                    "epochs": 200, "lr_by_epoch": true, "train": {"batch": 128},
                    "evaluate": {"batch": 128}
                },
                "grid": {
                    "model": {
                        "bare, lags": {"model": {"qk_rank": 128}},
                        "bare, places": {"model": {"qk_rank": 128}},
                        "bare, places, second mix": {"model": {"qk_rank": 128}},
                        "hypermlp, narrow values": {"model": {"qk_rank": 128, "vo_rank": 32}}
                    },
                    "train.lr": [0.0001, 0.0005, 0.001], "train.weight_decay": [0, 0.1],
                    "seed": [0]
                }
            }
        }),
    },
    .notes = {
        "Without the lag layout a weight of the mixes belongs to a place of the sequence. "
        "Rows bare are the paper's R-12o! and R-12!: no gates, no convolutions, queries and "
        "keys of full width. In the others only what their name says differs.",
        "Preset full averages the 66 settings of MAD's difficulty sweep by task, as the paper "
        "does, with MAD's steps for every row; gpu has memorising at its six vocabularies and "
        "recall at its three lengths. The smaller presets have the baseline setting of each task, "
        "and their numbers are easier.",
        NULL
    },
};
