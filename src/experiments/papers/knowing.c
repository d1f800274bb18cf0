/* knowing.c - whether memories know what they know: does the variance of the posterior tell wrong
 * answers from right ones, and better than the entropy of the prediction does. */
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "experiments/experiment_internal.h"

/* The tables of one way of training. */
static const char *const table_text = MN_JSON_TEXT([
    {"title": "AUROC of telling wrong answers from right ones", "rows": "model",
     "values": {"wrong": "knowing.error", "entropy": "knowing.auroc.entropy",
                "chosen statistic": "knowing.auroc.chosen", "both": "knowing.auroc.both",
                "all statistics": "knowing.auroc.all", "chosen less entropy": "knowing.gain",
                "both less entropy": "knowing.gain_both"},
     "percent": true, "figure": "bars"},
    {"title": "Area under the risk-coverage curve: the less the better", "rows": "model",
     "values": {"no order": "knowing.error", "entropy": "knowing.aurc.entropy",
                "chosen statistic": "knowing.aurc.chosen", "both": "knowing.aurc.both",
                "all statistics": "knowing.aurc.all"},
     "percent": true},
    {"title": "AUROC of each statistic, mean over units and layers", "rows": "model",
     "values": {"variance": "knowing.auroc.variance", "prior": "knowing.auroc.prior",
                "direction": "knowing.auroc.direction", "logdet": "knowing.auroc.logdet",
                "noise": "knowing.auroc.noise", "gated": "knowing.auroc.gated",
                "content": "knowing.auroc.content"},
     "percent": true, "figure": "bars"},
    {"title": "AUROC of each statistic at the layer and head that the validation split chooses",
     "rows": "model",
     "values": {"variance": "knowing.unit.variance", "prior": "knowing.unit.prior",
                "direction": "knowing.unit.direction", "logdet": "knowing.unit.logdet",
                "noise": "knowing.unit.noise", "gated": "knowing.unit.gated",
                "content": "knowing.unit.content"},
     "percent": true},
    {"title": "Seeds for which the validation split chooses this statistic", "rows": "model",
     "values": {"variance": "knowing.carried.variance", "prior": "knowing.carried.prior",
                "direction": "knowing.carried.direction", "logdet": "knowing.carried.logdet",
                "noise": "knowing.carried.noise", "gated": "knowing.carried.gated",
                "content": "knowing.carried.content"},
     "percent": true},
    {"title": "Right answers by kind of question, and calibration error of the probability",
     "rows": "model",
     "values": {"never said": "knowing.kinds.never.right", "once": "knowing.kinds.once.right",
                "overwritten": "knowing.kinds.overwritten.right",
                "long ago": "knowing.kinds.long_ago.right",
                "calibration error": "knowing.calibration.ece"},
     "percent": true},
    {"title": "AUROC of telling a kind of question from right answers to others", "rows": "model",
     "values": {"never: entropy": "knowing.kinds.never.doubt.entropy",
                "never: chosen": "knowing.kinds.never.doubt.chosen",
                "long ago: entropy": "knowing.kinds.long_ago.doubt.entropy",
                "long ago: chosen": "knowing.kinds.long_ago.doubt.chosen"},
     "percent": true}
]);

static const char *const rows[] = { "bayes", "kla", "kla+", "palimpsa" };

static const struct {
    const char *label, *says;
} trainings[] = { { "answerable", "trained on what can be answered" },
                  { "all", "trained on all kinds of questions" } };

enum { TABLES_EACH = 7 };

static mn_status add_tables(json_t *tables, int training) {
    mn_json list = { 0 };
    mn_status st = mn_json_parse(&list, table_text, strlen(table_text), "tables", MN_JSON_STANDARD);
    for (size_t i = 0; st == MN_OK && i < json_array_size(list.value); i++) {
        json_t *table = json_array_get(list.value, i);
        const char *title = json_string_value(json_object_get(table, "title"));
        json_t *where = json_pack("{s:s}", "training", trainings[training].label);
        json_object_set_new(table, "title",
                            json_sprintf("%s (%s)", title, trainings[training].says));
        json_object_set_new(table, "where", where);
        if (json_array_append(tables, table) != 0) {
            st = mn_fail(MN_ERR_MEMORY, "no memory for tables");
        }
    }
    mn_json_free(&list);
    return st;
}

static json_t *claim_of(const char *row, int training, const char *column, const char *what) {
    return json_pack("{s:o, s:i, s:[s, s], s:f}", "says",
                     json_sprintf("%s: %s tells wrong answers better than entropy alone, %s", row,
                                  what, trainings[training].says),
                     "table", training * TABLES_EACH, "cell", row, column, "above", 0.0);
}

static mn_status add(json_t *plan) {
    json_t *tables = json_array(), *claims = json_array();
    mn_status st = MN_OK;
    for (int k = 0; st == MN_OK && k < (int)MN_COUNTOF(trainings); k++) {
        st = add_tables(tables, k);
        for (size_t r = 0; r < MN_COUNTOF(rows); r++) {
            json_array_append_new(claims, claim_of(rows[r], k, "chosen less entropy",
                                                   "the chosen statistic"));
            json_array_append_new(claims, claim_of(rows[r], k, "both less entropy",
                                                   "entropy with the chosen statistic"));
        }
    }
    json_object_set_new(plan, "tables", tables);
    json_object_set_new(plan, "claims", claims);
    return st;
}

const mn_experiment_text mn_experiment_knowing = {
    .common = MN_JSON_TEXT({
        "pilot": {
            "seeds": [100], "axes": ["train.lr"], "value": "token"
        },
        "grid": {
            "job": {
                "task": {"name": "knowing"},
                "model": {"num_hidden_layers": 2, "mlp": "none", "tie_word_embeddings": false},
                "train": {
                    "weight_decay": 0.1, "clip": 1, "schedule": "cosine", "min_lr": 0
                },
                "evaluate": {"metric": "token", "select": "last"},
                "look": {"knowing": {}}
            },
            "grid": {
                "training": {
                    "answerable": {"task": {"options": {"train_unknown": false}}},
                    "all": {"task": {"options": {"train_unknown": true}}}
                },
                "model": {
                    "bayes": {
                        "model": {
                            "layers": "bayes", "num_heads": 4, "expand_v": 1, "noise_groups": 1
                        }
                    },
                    "kla": {"model": {"layers": "kla", "d_state": 16, "expand": 2}},
                    "kla+": {
                        "model": {"layers": "kla", "d_state": 16, "expand": 2},
                        "train": {"mc_samples": 4}
                    },
                    "palimpsa": {"model": {"layers": "palimpsa", "num_heads": 4, "expand_v": 1}},
                    "gdn": {"model": {"layers": "gdn", "num_heads": 4, "expand_v": 1}},
                    "attention": {"model": {"layers": "attention", "num_heads": 4}}
                }
            }
        }
    }),
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "task": {
                        "options": {"vocab": 64, "length": 48, "old_after": 8}, "test": 128
                    },
                    "model": {"hidden_size": 32, "num_hidden_layers": 1},
                    "train": {"steps": 600, "batch": 32, "warmup": 50, "lr": 0.008},
                    "evaluate": {"every": 200}, "look": {"knowing": {"rows": 128}}
                },
                "grid": {
                    "model": {"gdn": {"model": {"head_dim": 8}}}, "seed": [0]
                },
                "only": {"model": ["bayes", "gdn"]}
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "task": {
                        "options": {"vocab": 128, "length": 96, "old_after": 16}, "test": 256
                    },
                    "model": {"hidden_size": 64},
                    "train": {"steps": 3000, "batch": 32, "warmup": 100},
                    "evaluate": {"every": 500}, "look": {"knowing": {"rows": 256}}
                },
                "grid": {
                    "model": {"gdn": {"model": {"head_dim": 16}}}, "train.lr": [0.002, 0.006],
                    "seed": [0, 1, 2]
                }
            }
        }),
        [MN_PRESET_GPU] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "task": {
                        "options": {"vocab": 512, "length": 256, "old_after": 32}, "test": 256
                    },
                    "model": {"hidden_size": 128},
                    "train": {"steps": 4000, "batch": 64, "warmup": 200},
                    "evaluate": {"every": 1000}, "look": {"knowing": {"rows": 256}}
                },
                "grid": {
                    "model": {"gdn": {"model": {"head_dim": 32}}}, "train.lr": [0.001, 0.004],
                    "seed": [0, 1, 2, 3]
                }
            }
        }),
        [MN_PRESET_FULL] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "task": {
                        "options": {"vocab": 2048, "length": 1024, "old_after": 128}, "test": 512
                    },
                    "model": {"hidden_size": 256, "num_hidden_layers": 4},
                    "train": {"steps": 20000, "batch": 64, "warmup": 1000},
                    "evaluate": {"every": 2000}, "look": {"knowing": {"rows": 512}}
                },
                "grid": {
                    "model": {"gdn": {"model": {"head_dim": 64}}},
                    "train.lr": [0.0005, 0.001, 0.002], "seed": [0, 1, 2, 3, 4]
                }
            }
        }),
    },
    .notes = {
        "Questions are asked in one stream with what is said: about keys never said, said once, "
        "overwritten, and said long ago; targets of the first are drawn evenly, so that they are "
        "right by chance alone. Trained on what can be answered, a model sees no such question "
        "before the test.",
        "chosen statistic: of all statistics, layers and heads the one of largest AUROC on the "
        "validation split, reported on the test split; both and all: logistic regressions fitted "
        "on the validation split. AUROC counts wrong answers of all kinds of questions together.",
        "Where the posterior does not beat entropy: with all kinds of questions in training the "
        "entropy itself was taught what an unknown key looks like; logdet does not know the "
        "query; variance and prior fall with every token wherever it wrote, which direction "
        "divides out; diagonal precisions (kla, palimpsa) see coordinates, not directions; and a "
        "model that has not learned the task (column wrong) has nothing to be sure of.",
        "Statistics of the posterior: docs/math/knowing.md. All memories have 4,096 numbers of "
        "state at width 128; covariances and precisions come on top. gdn and attention have no "
        "posterior: their entropy is what the others have to beat.",
        NULL
    },
    .add = add,
};
