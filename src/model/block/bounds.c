/* bounds.c - least gates of layers, from one parameter (L,n) of the model. */
#include <stdlib.h>

#include "base/status.h"
#include "layers/family.h"
#include "model/model_internal.h"

void mn_model_bounds(mn_model *model, mn_tape *tape, mn_tensor **bounds) {
    const int L = model->config.n_layers;
    for (int l = 0; l < L; l++) bounds[l] = NULL;
    if (model->bounds < 0 || mn_tape_status(tape) != MN_OK) return;
    const mn_model_param *p = &model->params[model->bounds];
    mn_tensor *w = mn_tape_shaped(tape, model->leaves[model->bounds],
                                  (int64_t[]){ 1, L, 1, p->info.shape[1] });
    mn_tensor *rows[MN_MAX_LAYERS];
    for (int l = 0; l < L; l++) {
        rows[l] = mn_tape_pick(tape, w, model->rows + l, 1);
    }
    mn_gate_bounds(tape, rows, L, bounds);
}
