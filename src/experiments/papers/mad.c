/* mad.c - the MAD tasks with one block, all layers with 2048 numbers of state. */
#include "experiments/experiment_internal.h"

const mn_experiment_text mn_experiment_mad = {
    .base = &mn_base_mad,
    .common = MN_JSON_TEXT({
        "grid": {
            "grid": {
                "model": {
                    "kla+": {
                        "model": {
                            "layers": "kla", "d_state": 8, "expand": 1, "value_rank": "conv"
                        },
                        "train": {"mc_samples": 10}
                    },
                    "gdn": {
                        "model": {"layers": "gdn", "num_heads": 4, "head_dim": 16, "expand_v": 2}
                    },
                    "gla": {
                        "model": {"layers": "gla", "num_heads": 4, "expand_k": 0.5, "expand_v": 1}
                    },
                    "mamba1": {"model": {"layers": "mamba1", "state_size": 16, "expand": 1}},
                    "mlstm": {"model": {"layers": "mlstm", "num_heads": 4}},
                    "palimpsa": {
                        "model": {
                            "layers": "palimpsa", "num_heads": 4, "expand_k": 0.25, "expand_v": 1
                        }
                    },
                    "attention": {"model": {"layers": "attention", "num_heads": 4}}
                }
            },
            "only": {"model": ["kla", "kla+", "gdn", "gla", "mamba1", "mlstm"]}
        },
        "claims": [
            {"says": "kla is ahead of gla by ten points in recall",
             "table": 0, "cell": ["kla", "recall"], "less": ["gla", "recall"], "above": 0.1,
             "learned": 0.5},
            {"says": "kla is ahead of gdn by ten points in compression",
             "table": 0, "cell": ["kla", "compress"], "less": ["gdn", "compress"], "above": 0.1,
             "learned": 0.5},
            {"says": "kla is ahead of gdn in fuzzy recall",
             "table": 0, "cell": ["kla", "fuzzy"], "less": ["gdn", "fuzzy"], "above": 0},
            {"says": "kla copies 85 percent or more",
             "table": 0, "cell": ["kla", "copy"], "above": 0.85}
        ]
    }),
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {"only": {"model": ["kla", "gdn", "mamba1"]}}
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {"job": {"steps_at_most": 1000}, "grid": {"seed": [0]}}
        }),
        [MN_PRESET_GPU] = MN_JSON_TEXT({
            "grid": {
                "grid": {"seed": [0, 1, 2]},
                "only": {"model": ["kla", "gdn", "gla", "palimpsa", "mlstm", "attention"]}
            }
        }),
    },
    .notes = {
        "The paper puts an MLP of 120 in front of the block and one of 240 and 120 behind"
        " it; here the block has one MLP of 120 and a linear head, and compression the "
        "autoencoder's head of MAD.",
        "All layers have 2,048 numbers of state and about 100,000 parameters (93,000 to 107,000): "
        "kla takes its values from the convolution (value_rank conv), mlstm has four heads, as "
        "sixteen of the paper's would hold 512 numbers.",
        "Preset gpu has the published sizes and epochs with three seeds, palimpsa (means and "
        "importances, 2,048 numbers) and attention in place of kla+ and mamba1.",
        "Selection by the lowest test loss, accuracy over the places that ask: the paper "
        "leaves both open. Each run keeps the answers at the epoch of lowest loss. Macro "
        "accuracy and this selection are what MAD itself does.",
        NULL
    },
};
