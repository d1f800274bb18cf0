/* job.c - requests on their way through the engine: made, queued, taken from, let go. */
#include "server/engine_internal.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"

static mn_status fill_sequences(mn_job *job) {
    const mn_ask *ask = &job->ask;
    job->n_sequences = ask->n_prompts * ask->n;
    job->sequences = calloc((size_t)mn_max(job->n_sequences, 1), sizeof *job->sequences);
    if (!job->sequences) return mn_fail(MN_ERR_MEMORY, "no memory for sequences");
    for (int64_t i = 0; i < job->n_sequences; i++) {
        job->sequences[i] = (mn_sequence){ .job = job, .index = i, .stream = i % ask->n,
                                           .prompt = &ask->prompts[i / ask->n] };
    }
    return MN_OK;
}

static mn_status new_job(mn_job **out, mn_engine *engine, mn_job_kind kind) {
    static const char digits[] = "0123456789abcdef";
    uint64_t mark = (uint64_t)(mn_seconds() * 1e9);
    *out = calloc(1, sizeof **out);
    if (!*out) return mn_fail(MN_ERR_MEMORY, "no memory for a request");
    mn_job *job = *out;
    job->engine = engine;
    job->kind = kind;
    job->owners = 1;
    job->fd = -1;
    job->created = (long long)time(NULL);
    job->started = mn_seconds();
    memcpy(job->id, "cmpl-", 5);
    for (int i = 5; i < 21; i++, mark >>= 4) job->id[i] = digits[mark & 15];
    return MN_OK;
}

void mn_job_free(mn_job *job) {
    for (int64_t i = 0; i < job->n_sequences; i++) mn_sequence_free(&job->sequences[i]);
    free(job->sequences);
    mn_ask_free(&job->ask);
    mn_text_free(&job->out);
    mn_text_free(&job->answer);
    free(job);
}

mn_status mn_job_create(mn_job **out, mn_engine *engine, mn_job_kind kind, mn_ask *ask,
                        const char *into) {
    mn_status st = new_job(out, engine, kind);
    if (st != MN_OK) return st;
    (*out)->ask = *ask;
    *ask = (mn_ask){ 0 };
    if (into) strncpy((*out)->into, into, MN_STATE_ID - 1);
    st = fill_sequences(*out);
    if (st != MN_OK) {
        mn_job_free(*out);
        *out = NULL;
    }
    return st;
}

mn_status mn_job_create_call(mn_job **out, mn_engine *engine, mn_job_call call, void *data) {
    const mn_status st = new_job(out, engine, MN_JOB_CALL);
    if (st != MN_OK) return st;
    (*out)->call = call;
    (*out)->data = data;
    return MN_OK;
}

void *mn_job_data(const mn_job *job) {
    return job->data;
}

mn_status mn_job_start(mn_job *job, mn_job_wake wake, void *context, int fd) {
    mn_engine *e = job->engine;
    mn_status st = MN_OK;
    mn_engine_lock(e);
    if (e->closing || e->resting) {
        st = mn_fail(MN_ERR_UNSUPPORTED, "the server is stopping");
    } else if (e->n_queued >= e->options.queue) {
        st = mn_fail(MN_ERR_MEMORY, "%lld requests wait, which is all that may: try again later",
                     (long long)e->n_queued);
    } else {
        job->owners = 2;
        job->wake = wake;
        job->waker = context;
        job->fd = fd;
        if (e->last) e->last->next = job;
        else e->first = job;
        e->last = job;
        e->n_queued++;
        e->metrics.queued += (uint64_t)job->n_sequences;
        pthread_cond_signal(&e->work);
    }
    mn_engine_unlock(e);
    return st;
}

void mn_job_release(mn_job *job) {
    if (!job) return;
    mn_engine *e = job->engine;
    mn_engine_lock(e);
    if (!job->done && job->owners == 2) {
        job->cancelled = true;
        pthread_cond_signal(&e->work);
    }
    job->wake = NULL;
    const bool last = --job->owners == 0;
    mn_engine_unlock(e);
    if (last) mn_job_free(job);
}

bool mn_job_ready(mn_job *job) {
    const bool ready = job->done || job->out.size > job->n_taken;
    job->waits = !ready;
    return ready;
}

bool mn_job_is_done(const mn_job *job) {
    return job->done;
}

size_t mn_job_take(mn_job *job, char *out, size_t size, bool *done) {
    const size_t n = mn_min(size, job->out.size - job->n_taken);
    if (n > 0) memcpy(out, job->out.bytes + job->n_taken, n);
    job->n_taken += n;
    if (job->n_taken == job->out.size) job->out.size = job->n_taken = 0;
    *done = n == 0 && job->done;
    return n;
}

int mn_job_status(const mn_job *job) {
    return job->http_status;
}

const char *mn_job_body(const mn_job *job, size_t *size) {
    *size = job->out.size - job->n_taken;
    return job->out.bytes ? job->out.bytes + job->n_taken : "";
}

void mn_job_wake_up(mn_job *job) {
    if (!job->waits || !job->wake) return;
    job->waits = false;
    job->wake(job->waker);
}
