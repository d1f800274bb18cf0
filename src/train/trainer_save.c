/* trainer_save.c - checkpoints: OUT/checkpoints/step-N, complete or not there. Of several ranks
 * each writes its moments, rank 0 the rest; after each stage all know whether all went well.
 *
 *   written into .step-N.new, each file and the folder brought to the disk, "done" last, then
 *   renamed. OUT/last and OUT/best are links that change in one step. Read by trainer_resume.c. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "io/json_write.h"
#include "model/checkpoint.h"
#include "train/run/run_folder.h"
#include "train/trainer_internal.h"

enum { PATH = MN_RUN_PATH };

static json_t *hash_text(uint64_t hash) {
    char text[32];
    snprintf(text, sizeof text, "%016" PRIx64, hash);
    return json_string(text);
}

static mn_status save_progress(const mn_trainer *t, const char *path) {
    json_t *recent = json_array();
    for (int i = 0; i < MN_SPIKE_WINDOW && i < t->n_recent; i++) {
        json_array_append_new(recent, mn_json_real(t->recent[i]));
    }
    json_t *root = json_pack("{s:I, s:I, s:o, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:I}",
                             "step", (json_int_t)t->step, "tokens", (json_int_t)t->tokens,
                             "best_loss", mn_json_real(t->best),
                             "best_step", (json_int_t)t->best_step, "worse", (json_int_t)t->worse,
                             "n_recent", (json_int_t)t->n_recent, "recent", recent,
                             "data", hash_text(t->train ? mn_corpus_fingerprint(t->train) : 0),
                             "valid", hash_text(t->valid ? mn_corpus_fingerprint(t->valid) : 0),
                             "tokenizer", hash_text(mn_trainer_tokenizer_mark(t)),
                             "seed", (json_int_t)t->options.seed);
    const mn_status st = root ? mn_json_save(path, root)
                              : mn_fail(MN_ERR_MEMORY, "no memory to write %s", path);
    json_decref(root);
    return st;
}

/* What all ranks have alike. */
static mn_status write_common(mn_trainer *t, const char *folder) {
    char path[PATH];
    mn_status st = mn_checkpoint_save(t->model, folder);
    if (st == MN_OK && t->tokenizer) {
        st = mn_run_join(path, folder, "tokenizer.json");
        if (st == MN_OK) st = mn_tokenizer_save(t->tokenizer, path);
        if (st == MN_OK) st = mn_tokenizer_save_ends(t->tokenizer, folder);
    }
    if (st == MN_OK) st = mn_run_join(path, folder, "progress.json");
    return st == MN_OK ? save_progress(t, path) : st;
}

static mn_status write_all(mn_trainer *t, const char *folder) {
    const bool first = mn_comm_rank(t->comm) == 0;
    mn_status st = first ? write_common(t, folder) : MN_OK;
    if (st == MN_OK) st = mn_trainer_save_moments(t, folder);
    st = mn_comm_agree(t->comm, st);
    if (st == MN_OK && first) st = mn_run_seal(folder);
    return st == MN_OK && first ? mn_run_sync_folder(folder) : st;
}

/* Puts `fresh` in the place of FOLDER/NAME; one that is there already is moved aside first. */
static mn_status put_in_place(const char *folder, const char *fresh, const char *name) {
    char final[PATH], aside[PATH], hidden[MN_RUN_STEP + 8];
    snprintf(hidden, sizeof hidden, ".%s.old", name);
    mn_status st = mn_run_join(final, folder, name);
    if (st == MN_OK) st = mn_run_join(aside, folder, hidden);
    if (st != MN_OK) return st;
    mn_run_remove_folder(aside);
    const bool stale = access(final, F_OK) == 0;
    if (stale && rename(final, aside) != 0) return mn_run_io_fail("move aside", final);
    if (rename(fresh, final) != 0) {
        st = mn_run_io_fail("put in place", final);
        if (stale) rename(aside, final);
        return st;
    }
    st = mn_run_sync_folder(folder);
    mn_run_remove_folder(aside);
    return st;
}

static mn_status make_fresh(const mn_trainer *t, const char *folder, const char *fresh) {
    mn_status st = mn_run_make_folder(t->options.out);
    if (st == MN_OK) st = mn_run_make_folder(folder);
    if (st != MN_OK) return st;
    mn_run_remove_folder(fresh);
    return mn_run_make_folder(fresh);
}

static mn_status save_step(mn_trainer *t) {
    const bool first = mn_comm_rank(t->comm) == 0;
    char folder[PATH], fresh[PATH], name[MN_RUN_STEP], hidden[MN_RUN_STEP + 8];
    mn_run_step_name(name, t->step);
    snprintf(hidden, sizeof hidden, ".%s.new", name);
    mn_status st = mn_run_join(folder, t->options.out, "checkpoints");
    if (st == MN_OK) st = mn_run_join(fresh, folder, hidden);
    if (st == MN_OK && first) st = make_fresh(t, folder, fresh);
    st = mn_comm_agree(t->comm, st);
    if (st == MN_OK) st = write_all(t, fresh);
    if (st == MN_OK && first) st = put_in_place(folder, fresh, name);
    if (st == MN_OK) return st;
    char why[1024];
    snprintf(why, sizeof why, "%s", mn_last_error());
    if (first) mn_run_remove_folder(fresh);
    return mn_fail(st, "%s; the checkpoints before it are as they were", why);
}

mn_status mn_trainer_save(mn_trainer *t, bool best) {
    const char *out = t->options.out;
    const bool first = mn_comm_rank(t->comm) == 0;
    mn_status st = MN_OK;
    /* the same on all ranks: which of them wrote it is rank 0 */
    st = mn_trainer_whole(t);
    if (st != MN_OK) return st;
    if (t->saved != t->step || (mn_comm_world(t->comm) == 1 && !mn_run_has(out, t->step))) {
        st = save_step(t);
    }
    if (st == MN_OK && first) st = mn_run_point(out, "last", t->step);
    if (st == MN_OK && first && best) st = mn_run_point(out, "best", t->step);
    st = mn_comm_agree(t->comm, st);
    if (st != MN_OK) return st;
    t->saved = t->step;
    if (first) mn_run_prune(out, t->options.keep_every);
    return MN_OK;
}
