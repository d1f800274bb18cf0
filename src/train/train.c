/* train.c - training for programs: the entry points mn_train_* of mneme.h over trainer.h. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "io/json_write.h"
#include "train/run/run_folder.h"
#include "train/trainer.h"

struct mn_train {
    mn_json root;                  // the trainer borrows it
    mn_trainer *trainer;
    mn_source train, valid;
    bool best;                     // the last evaluation was
};

static mn_source source_of(const mn_train_batches *batches, const mn_train_options *o) {
    return (mn_source){ .context = batches->context, .fill = batches->fill, .rows = o->batch,
                        .length = o->context, .epoch = batches->epoch > 0 ? batches->epoch : 1 };
}

/* Batches have the rows and the length that the configuration says. */
static mn_status create_from(mn_train *t, mn_context *context, const mn_train_batches *train,
                             const mn_train_batches *valid) {
    mn_train_options options;
    mn_status st = mn_train_options_read(&options, &t->root);
    if (st != MN_OK) return st;
    if (!train->fill || (valid && !valid->fill)) {
        return mn_fail(MN_ERR_ARGUMENT, "batches need a fill function");
    }
    t->train = source_of(train, &options);
    mn_train_data data = { .train_source = &t->train };
    if (valid) {
        t->valid = source_of(valid, &options);
        data.valid_source = &t->valid;
    }
    return mn_trainer_create_from(&t->trainer, &t->root, &data, context);
}

static mn_status create(mn_train **out, mn_context *context, const char *config,
                        const mn_train_batches *train, const mn_train_batches *valid) {
    if (!out) return mn_fail(MN_ERR_ARGUMENT, "mn_train_create: out is NULL");
    *out = NULL;
    if (!context || !config) {
        return mn_fail(MN_ERR_ARGUMENT, "mn_train_create: %s is NULL",
                       context ? "config" : "context");
    }
    mn_train *t = calloc(1, sizeof *t);
    if (!t) return mn_fail(MN_ERR_MEMORY, "no memory for a training run");
    mn_status st = mn_json_parse(&t->root, config, strlen(config), "config", MN_JSON_STANDARD);
    if (st == MN_OK) st = mn_json_expect_object(&t->root);
    if (st == MN_OK) {
        st = train ? create_from(t, context, train, valid)
                   : mn_trainer_create(&t->trainer, &t->root, context);
    }
    if (st != MN_OK) {
        mn_train_destroy(t);
        return st;
    }
    *out = t;
    return MN_OK;
}

mn_status mn_train_create(mn_train **out, mn_context *context, const char *config) {
    return create(out, context, config, NULL, NULL);
}

mn_status mn_train_create_from(mn_train **out, mn_context *context, const char *config,
                               const mn_train_batches *train, const mn_train_batches *valid) {
    if (out) *out = NULL;
    if (!train) return mn_fail(MN_ERR_ARGUMENT, "mn_train_create_from: train is NULL");
    return create(out, context, config, train, valid);
}

void mn_train_destroy(mn_train *train) {
    if (!train) return;
    mn_trainer_destroy(train->trainer);
    mn_json_free(&train->root);
    free(train);
}

mn_status mn_train_step(mn_train *train, mn_train_result *result) {
    mn_step_result r = { 0 };
    if (!train) return mn_fail(MN_ERR_ARGUMENT, "mn_train_step: train is NULL");
    const mn_status st = mn_trainer_step(train->trainer, &r);
    if (st == MN_OK && result) {
        *result = (mn_train_result){ .step = r.step, .loss = r.loss, .grad_norm = r.grad_norm,
                                     .lr = r.lr, .tokens = r.tokens, .skipped = r.skipped };
    }
    return st;
}

mn_status mn_train_evaluate(mn_train *train, double *loss) {
    if (!train || !loss) {
        return mn_fail(MN_ERR_ARGUMENT, "mn_train_evaluate: an argument is NULL");
    }
    return mn_trainer_evaluate(train->trainer, loss, &train->best);
}

mn_status mn_train_save(mn_train *train) {
    char path[MN_RUN_PATH];
    if (!train) return mn_fail(MN_ERR_ARGUMENT, "mn_train_save: train is NULL");
    const char *out = mn_trainer_options(train->trainer)->out;
    mn_status st = mn_run_make_folders(out);
    if (st == MN_OK) st = mn_run_join(path, out, "train.json");
    if (st == MN_OK) st = mn_json_save(path, train->root.value);
    return st == MN_OK ? mn_trainer_save(train->trainer, train->best) : st;
}

mn_status mn_train_resume(mn_train *train, const char *checkpoint) {
    if (!train) return mn_fail(MN_ERR_ARGUMENT, "mn_train_resume: train is NULL");
    return mn_trainer_resume(train->trainer, checkpoint);
}

int64_t mn_train_steps(const mn_train *train) {
    return train ? mn_trainer_step_number(train->trainer) : 0;
}
