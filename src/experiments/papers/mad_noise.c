/* mad_noise.c - Kalman Linear Attention with its process noise learned, and with
 * none. */
#include "experiments/experiment_internal.h"

const mn_experiment_text mn_experiment_mad_noise = {
    .base = &mn_base_mad,
    .common = MN_JSON_TEXT({
        "claims": [
            {"says": "without process noise selective copying loses 8 points",
             "table": 0, "cell": ["kla", "copy"],
             "less": ["kla, no process noise", "copy"], "above": 0.08}
        ],
        "grid": {
            "grid": {
                "model": {
                    "kla, no process noise": {
                        "model": {
                            "layers": "kla", "d_state": 8, "expand": 1, "value_rank": "conv",
                            "process_noise": "zero"
                        }
                    }
                }
            }
        }
    }),
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({"grid": {"only": {"task": ["recall", "copy"]}}}),
        [MN_PRESET_CPU] = MN_JSON_TEXT({"grid": {"job": {"steps_at_most": 1500}}}),
    },
    .notes = {
        "The paper puts an MLP of 120 in front of the block and one of 240 and 120 behind"
        " it; here the block has one MLP of 120 and a linear head, and compression the "
        "autoencoder's head of MAD.",
        "Selection by the lowest test loss, accuracy over the places that ask: the paper "
        "leaves both open. Each run keeps the answers at the epoch of lowest loss. Macro "
        "accuracy and this selection are what MAD itself does.",
        "Without process noise the precision obeys a linear recurrence with fixed gates, "
        "and so does the mean.",
        NULL
    },
};
