/* engine.c - the queue, and the thread that reads and steps.
 *
 * One turn of the thread: calls run, waiting sequences take free places, one chunk of one prompt is
 * read, every sequence that writes draws a token, and one batch step reads the drawn tokens. The
 * lock is held for the queue and for handing out, never while the model computes. */
#define _GNU_SOURCE    // POLLRDHUP
#include "io/folder.h"
#include "server/engine_internal.h"

#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"

static void *run(void *context);

/* ---- opening --------------------------------------------------------------------------------- */

void mn_engine_defaults(mn_engine_options *options) {
    *options = (mn_engine_options){ .streams = 64, .queue = 256, .chunk = 128, .context = 131072,
                                    .states = 1024, .draft = 8, .patience = 60, .seconds = 3600,
                                    .cache_bytes = (size_t)256 << 20,
                                    .state_bytes = (size_t)1 << 30 };
}

/* Layers whose parameters end at a length end every sequence there. */
static int64_t context_of(const mn_engine *e) {
    const mn_model_config *config = mn_model_describe(e->model);
    int64_t context = e->options.context;
    for (int i = 0; i < config->n_layers; i++) {
        const mn_layer *layer = mn_model_layer(e->model, i);
        const bool bounded = layer->kind == MN_LAYER_hypermlp || layer->kind == MN_LAYER_hyperglu;
        if (bounded) context = mn_min(context, MN_SIZE(&layer->sizes, 'P'));
    }
    return context;
}

static mn_status open_model(mn_engine *e) {
    const mn_context_options how = { .n_threads = e->options.n_threads,
                                     .device = e->options.device };
    char folder[MN_FOLDER_PATH];
    mn_status st = mn_folder_of_model(folder, e->folder);
    if (st == MN_OK) st = mn_context_create(&e->context, &how);
    if (st == MN_OK) st = mn_model_open(&e->model, folder);
    if (st == MN_OK) st = mn_tokenizer_load(&e->tokenizer, folder);
    if (st == MN_OK) st = mn_chat_open(&e->chat, folder);
    const mn_session_options reads = { .prefill_chunk = e->options.chunk,
                                       .dtype = e->options.dtype };
    if (st == MN_OK) st = mn_session_create(&e->probe, e->context, e->model, &reads);
    if (st == MN_OK) st = mn_batch_create(&e->batch, e->context, e->model);
    if (st != MN_OK) return st;
    e->n_beliefs = mn_session_beliefs(e->probe);
    e->limits = (mn_ask_limits){
        .tokenizer = e->tokenizer, .chat = e->chat, .most_tokens = 4096, .belief = e->n_beliefs > 0,
        .n_ids = mn_min(mn_model_vocabulary(e->model), mn_tokenizer_size(e->tokenizer)),
        .context = context_of(e) };
    return mn_sampler_create(&e->sampler, mn_model_vocabulary(e->model));
}

static void free_snapshot(void *value) {
    mn_snapshot_destroy(value);
}

static void keep_file(void *value) {
    mn_snapshot_stay(value);
}

/* A snapshot to the host's memory, or to a file. */
static bool move_snapshot(void *context, const mn_cache_moved *moved) {
    mn_engine *e = context;
    const bool host = moved->level == 1 && e->options.cache_host_bytes > 0 && e->options.device;
    if (host) return mn_snapshot_to_host(moved->value) == MN_OK;
    char path[MN_FOLDER_PATH], id[MN_DISK_ID];
    const mn_state_notes notes = { .tokens = moved->tokens, .n_tokens = moved->count };
    return mn_disk_new_id(id) == MN_OK && mn_disk_path(path, &e->cache_disk, id) &&
           mn_snapshot_to_file(moved->value, &notes, path) == MN_OK;
}

/* A file that an earlier server has left; one that is broken has no other use. */
static void find_snapshot(void *context, const char *id, const char *path) {
    mn_engine *e = context;
    int32_t *tokens = NULL;
    int64_t count = 0;
    char *words = NULL;
    mn_snapshot *snapshot = NULL;
    struct stat about;
    (void)id;
    mn_status st = mn_model_state_notes(&tokens, &count, &words, e->model, path);
    if (st == MN_OK && stat(path, &about) != 0) st = MN_ERR_IO;
    if (st == MN_OK) st = mn_snapshot_open(&snapshot, e->model, (size_t)about.st_size, path);
    if (st == MN_OK) mn_cache_put_away(e->cache, tokens, count, snapshot, (size_t)about.st_size);
    else unlink(path);
    free(tokens);
    free(words);
}

/* A state of the cache serves the same weights, computed in the same way, or texts would depend on
 * what was there before: chunks, types, machines and programs round in ways of their own. */
static mn_status open_cache_disk(mn_engine *e, const char *folder) {
    const mn_engine_options *o = &e->options;
    char how[512];
    uint64_t mark = 0;
    const char *machine = e->context->device ? mn_device_facts(e->context->device)->name
                                             : mn_context_target(e->context);
    snprintf(how, sizeof how, "%s, %s, %s, chunks of %lld", machine, mn_dtype_name(o->dtype),
             mn_version(), (long long)o->chunk);
    mn_disk_mark_text(&mark, how);
    mn_status st = mn_disk_mark_program(&mark);
    if (st == MN_OK) st = mn_disk_mark_model(&mark, folder);
    if (st == MN_OK) st = mn_disk_open(&e->cache_disk, o->cache_disk, "cache", mark);
    if (st != MN_OK) return st;
    mn_cache_add_level(e->cache, o->cache_disk_bytes, move_snapshot, e);
    return mn_disk_each(&e->cache_disk, find_snapshot, e);
}

static mn_status open_states(mn_engine *e, const char *folder) {
    const mn_engine_options *o = &e->options;
    uint64_t mark = 0;
    mn_status st = mn_states_create(&e->states, o->states, o->state_bytes);
    if (st != MN_OK || !o->states_disk) return st;
    st = mn_disk_mark_model(&mark, folder);
    if (st == MN_OK) st = mn_disk_open(&e->states_disk, o->states_disk, "state", mark);
    return st == MN_OK ? mn_states_keep(e->states, &e->states_disk, e->model) : st;
}

static mn_status open_stores(mn_engine *e) {
    const mn_engine_options *o = &e->options;
    char folder[MN_FOLDER_PATH];
    mn_status st = mn_folder_of_model(folder, e->folder);
    if (st == MN_OK) st = mn_cache_create(&e->cache, o->cache_bytes, free_snapshot);
    if (st != MN_OK) return st;
    if (o->cache_host_bytes > 0 && o->device) {
        mn_cache_add_level(e->cache, o->cache_host_bytes, move_snapshot, e);
    }
    if (o->cache_disk) st = open_cache_disk(e, folder);
    return st == MN_OK ? open_states(e, folder) : st;
}

/* What the cache holds is found again by the next server. */
static void close_cache(mn_engine *e) {
    if (e->cache && e->cache_disk.folder) {
        mn_cache_flush(e->cache);
        mn_cache_each(e->cache, keep_file);
    }
    mn_cache_destroy(e->cache);
}

static mn_status open_tables(mn_engine *e) {
    const mn_engine_options *o = &e->options;
    const size_t n = (size_t)o->streams;
    e->active = calloc(n, sizeof *e->active);
    e->stepping = calloc(n, sizeof *e->stepping);
    e->stepped = calloc(n, sizeof *e->stepped);
    e->turn = calloc(n, sizeof *e->turn);
    e->tokens = calloc(n, sizeof *e->tokens);
    e->reading = calloc(n, sizeof *e->reading);
    e->chunks = calloc(n, sizeof *e->chunks);
    e->counts = calloc(n, sizeof *e->counts);
    e->hearers = calloc(n, sizeof *e->hearers);
    const bool there = e->active && e->stepping && e->stepped && e->turn && e->tokens &&
                       e->reading && e->chunks && e->counts && e->hearers;
    if (!there) {
        return mn_fail(MN_ERR_MEMORY, "no memory for %zu streams", n);
    }
    return open_stores(e);
}

/* The last part of a folder's path. */
static char *name_of(const char *folder) {
    size_t end = strlen(folder), start;
    while (end > 1 && folder[end - 1] == '/') end--;
    for (start = end; start > 0 && folder[start - 1] != '/'; start--) {}
    return strndup(folder + start, end - start);
}

mn_status mn_engine_open(mn_engine **out, const mn_engine_options *options) {
    *out = NULL;
    if (options->streams < 1 || options->queue < 0 || options->chunk < 1 || options->context < 2 ||
        options->states < 0) {
        return mn_fail(MN_ERR_ARGUMENT, "a server needs 1 stream, chunks of 1 and a context of 2 "
                       "tokens, or more");
    }
    mn_engine *e = calloc(1, sizeof *e);
    if (!e) return mn_fail(MN_ERR_MEMORY, "no memory for a server");
    e->options = *options;
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->work, NULL);
    pthread_cond_init(&e->idle, NULL);
    e->folder = strdup(options->model);
    e->name = options->name ? strdup(options->name) : name_of(options->model);
    mn_status st = e->folder && e->name ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a name");
    if (st == MN_OK) st = open_model(e);
    if (st == MN_OK) st = open_tables(e);
    if (st == MN_OK && pthread_create(&e->thread, NULL, run, e) != 0) {
        st = mn_fail(MN_ERR_MEMORY, "the system gives no thread for the model");
    }
    e->started = st == MN_OK;
    if (st != MN_OK) {
        mn_engine_close(e);
        return st;
    }
    *out = e;
    return MN_OK;
}

void mn_engine_close(mn_engine *e) {
    if (!e) return;
    pthread_mutex_lock(&e->lock);
    e->closing = true;
    pthread_cond_broadcast(&e->work);
    pthread_mutex_unlock(&e->lock);
    if (e->started) pthread_join(e->thread, NULL);
    mn_states_destroy(e->states);
    close_cache(e);
    mn_batch_destroy(e->batch);
    mn_sampler_destroy(e->sampler);
    mn_session_destroy(e->probe);
    mn_chat_close(e->chat);
    mn_tokenizer_destroy(e->tokenizer);
    mn_model_close(e->model);
    mn_context_destroy(e->context);
    free(e->active);
    free(e->stepping);
    free(e->stepped);
    free(e->turn);
    free(e->tokens);
    free(e->reading);
    free(e->chunks);
    free(e->counts);
    free(e->hearers);
    free(e->folder);
    free(e->name);
    pthread_cond_destroy(&e->work);
    pthread_cond_destroy(&e->idle);
    pthread_mutex_destroy(&e->lock);
    free(e);
}

const mn_ask_limits *mn_engine_limits(const mn_engine *engine) {
    return &engine->limits;
}

const char *mn_engine_name(const mn_engine *engine) {
    return engine->name;
}

const char *mn_engine_folder(const mn_engine *engine) {
    return engine->folder;
}

void mn_engine_lock(mn_engine *engine) {
    pthread_mutex_lock(&engine->lock);
}

void mn_engine_unlock(mn_engine *engine) {
    pthread_mutex_unlock(&engine->lock);
}

mn_metrics mn_engine_metrics(mn_engine *e) {
    mn_engine_lock(e);
    const mn_metrics metrics = e->metrics;
    mn_engine_unlock(e);
    return metrics;
}

void mn_engine_count(mn_engine *e, const mn_metrics *more, const mn_metrics *less) {
    mn_engine_lock(e);
    mn_metrics_add(&e->metrics, more, less);
    mn_engine_unlock(e);
}

void mn_engine_answered(mn_engine *e, int http_status) {
    mn_engine_lock(e);
    e->metrics.requests++;
    if (http_status >= 400) e->metrics.refused++;
    if (http_status == 429) e->metrics.overloaded++;
    mn_engine_unlock(e);
}

/* ---- answers --------------------------------------------------------------------------------- */

void mn_job_answer(mn_job *job, int http_status, json_t *body) {
    char *text = body ? json_dumps(body, JSON_COMPACT) : NULL;
    json_decref(body);
    job->answer.size = 0;
    job->answered = true;
    job->http_status = text ? http_status : 500;
    if (text) mn_text_add(&job->answer, text, strlen(text));
    free(text);
}

void mn_job_fail(mn_job *job, int http_status, const char *kind, const char *message) {
    mn_job_answer(job, http_status, mn_reply_error(http_status, kind, message));
}

/* The engine is through with the job, and lets go of it at the end of the turn: until then its
 * sequences may still be looked at. */
static void finish_job(mn_engine *e, mn_job *job) {
    mn_engine_lock(e);
    if (job->cancelled) e->metrics.cancelled++;
    if (job->answered) {    // instead of what there was
        const mn_text before = job->out;
        job->out = job->answer;
        job->answer = before;
        job->n_taken = 0;
    }
    job->done = true;
    mn_job_wake_up(job);
    mn_engine_unlock(e);
    job->next = e->finished;
    e->finished = job;
}

static void let_go(mn_engine *e) {
    while (e->finished) {
        mn_job *job = e->finished;
        e->finished = job->next;
        mn_engine_lock(e);
        const bool last = --job->owners == 0;
        mn_engine_unlock(e);
        if (last) mn_job_free(job);
    }
}

/* What events there are, to be sent; the text of a job that is not streamed is told at the end. */
static void send_events(mn_engine *e, mn_job *job, mn_sequence *s, bool last) {
    mn_text text = { 0 };
    mn_status st = mn_reply_events(&text, job, s);
    if (st == MN_OK && last) st = mn_reply_last(&text, job);
    mn_engine_lock(e);
    job->http_status = 200;
    if (st == MN_OK && text.size > 0) st = mn_text_add(&job->out, text.bytes, text.size);
    if (st != MN_OK) job->cancelled = true;    // no memory for what it has to be told
    if (job->out.size > job->n_taken) mn_job_wake_up(job);
    mn_engine_unlock(e);
    mn_text_free(&text);
}

/* A failure as the whole answer, or where answering has begun as the last event. */
static void tell_failure(mn_engine *e, mn_job *job, mn_status status, const char *message) {
    const char *kind;
    const int http_status = mn_reply_status(status, &kind);
    if (!job->ask.stream || !job->opened) {
        mn_engine_lock(e);
        mn_job_fail(job, http_status, kind, message);
        job->ask.stream = false;
        mn_engine_unlock(e);
        return;
    }
    char *text = NULL;
    json_t *body = mn_reply_error(http_status, kind, message);
    if (body) text = json_dumps(body, JSON_COMPACT);
    mn_engine_lock(e);
    if (text) {
        mn_text_add(&job->out, "data: ", 6);
        mn_text_add(&job->out, text, strlen(text));
        mn_text_add(&job->out, "\n\n", 2);
    }
    mn_engine_unlock(e);
    json_decref(body);
    free(text);
}

/* ---- sequences ------------------------------------------------------------------------------- */

static void forget_sequence(mn_engine *e, mn_sequence *s) {
    for (int64_t i = 0; i < e->n_active; i++) {
        if (e->active[i] != s) continue;
        memmove(e->active + i, e->active + i + 1,
                (size_t)(--e->n_active - i) * sizeof *e->active);
        return;
    }
}

static bool is_cancelled(mn_engine *e, mn_job *job) {
    mn_engine_lock(e);
    const bool cancelled = job->cancelled;
    mn_engine_unlock(e);
    return cancelled;
}

/* Under the lock. */
static void unqueue(mn_engine *e, mn_job *job) {
    mn_job **at = &e->first, *before = NULL;
    while (*at && *at != job) {
        before = *at;
        at = &before->next;
    }
    if (!*at) return;
    *at = job->next;
    if (e->last == job) e->last = before;
    e->n_queued--;
}

/* Ends the whole job: with the failure of one sequence, or because nobody waits for it. */
static void give_up(mn_engine *e, mn_job *job, mn_status status, const char *message) {
    for (int64_t i = 0; i < job->n_sequences; i++) {
        mn_sequence *s = &job->sequences[i];
        if (s->stage == MN_STAGE_READING || s->stage == MN_STAGE_WRITING) forget_sequence(e, s);
        s->stage = MN_STAGE_DONE;
        mn_sequence_let_go(e, s);
    }
    mn_engine_lock(e);
    unqueue(e, job);
    e->metrics.failures += status != MN_OK;
    e->metrics.queued -= (uint64_t)(job->n_sequences - job->n_admitted);
    job->n_admitted = job->n_sequences;
    mn_engine_unlock(e);
    if (status != MN_OK) tell_failure(e, job, status, message);
}

/* The same from the sentence of the last failure on this thread. */
static void fail_job(mn_engine *e, mn_job *job, mn_status status) {
    char message[512];
    strncpy(message, mn_last_error(), sizeof message - 1);
    message[sizeof message - 1] = '\0';
    give_up(e, job, status, message);
    finish_job(e, job);
}

static void count_first(mn_engine *e, mn_job *job) {
    if (job->said_first) return;
    job->said_first = true;
    mn_engine_lock(e);
    mn_histogram_add(&e->metrics.first_token, mn_seconds() - job->started);
    mn_engine_unlock(e);
}

/* The answer of a job whose sequences have all ended; false: the job has failed instead. */
static bool answer_whole(mn_engine *e, mn_job *job) {
    json_t *whole = mn_reply_whole(job);
    const mn_sequence *s = &job->sequences[0];
    const mn_status st = s->inside ? mn_inside_tell(whole, s->inside, job->ask.rows,
                                                    job->ask.n_rows) : MN_OK;
    if (st != MN_OK) {
        json_decref(whole);
        fail_job(e, job, st);
        return false;
    }
    mn_engine_lock(e);
    mn_job_answer(job, 200, whole);
    mn_engine_unlock(e);
    return true;
}

static void tell_gauges(mn_engine *e);

static void end_sequence(mn_engine *e, mn_sequence *s) {
    mn_job *job = s->job;
    const mn_status st = mn_sequence_end(e, s);
    forget_sequence(e, s);
    s->stage = MN_STAGE_DONE;
    tell_gauges(e);    // whoever is answered finds it in the metrics
    if (st != MN_OK) {
        fail_job(e, job, st);
        return;
    }
    const bool last = ++job->n_done == job->n_sequences;
    mn_engine_lock(e);
    e->metrics.written_tokens += (uint64_t)s->n_written;
    mn_engine_unlock(e);
    if (job->ask.stream) {
        send_events(e, job, s, last);
    } else if (last && !answer_whole(e, job)) {
        return;
    }
    if (last) finish_job(e, job);
}

/* ---- one turn -------------------------------------------------------------------------------- */

/* The first job of the queue that is a call, or has a sequence for the place that is free. */
static mn_job *take_job(mn_engine *e, bool *whole) {
    mn_job *job = e->first;
    if (!job || (job->kind != MN_JOB_CALL && e->n_active == e->options.streams)) return NULL;
    *whole = job->kind == MN_JOB_CALL || job->cancelled ||
             job->n_admitted + 1 >= job->n_sequences;
    if (!*whole) return job;
    unqueue(e, job);
    return job;
}

static void admit(mn_engine *e, mn_job *job) {
    mn_sequence *s = &job->sequences[job->n_admitted];
    e->active[e->n_active++] = s;
    const mn_status st = mn_sequence_begin(e, s);
    mn_engine_lock(e);
    job->n_admitted++;
    e->metrics.queued--;
    e->metrics.prompt_tokens += (uint64_t)s->prompt->tokens.count;
    mn_engine_unlock(e);
    if (st != MN_OK) fail_job(e, job, st);
}

static void start_jobs(mn_engine *e) {
    for (;;) {
        bool whole = false;
        mn_engine_lock(e);
        mn_job *job = take_job(e, &whole);
        const bool cancelled = job && job->cancelled;
        mn_engine_unlock(e);
        if (!job) return;
        if (cancelled) {
            give_up(e, job, MN_OK, "");
            finish_job(e, job);
        } else if (job->kind == MN_JOB_CALL) {
            job->call(job, e);
            tell_gauges(e);
            finish_job(e, job);
        } else {
            admit(e, job);
        }
    }
}

/* Whether the client has closed its connection; nothing is read from it. */
static bool has_left(const mn_job *job) {
    struct pollfd at = { .fd = job->fd, .events = POLLRDHUP };
    return job->fd >= 0 && poll(&at, 1, 0) == 1 &&
           (at.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL));
}

/* Whether a request has had all the time there is for one. */
static bool is_late(const mn_engine *e, const mn_job *job) {
    return e->options.seconds > 0 && mn_seconds() - job->started > (double)e->options.seconds;
}

/* Ends the jobs nobody waits for, and those whose time is over. */
static void drop_cancelled(mn_engine *e) {
    for (int64_t i = 0; i < e->n_active;) {
        mn_job *job = e->active[i]->job;
        if (is_late(e, job)) {
            fail_job(e, job, mn_fail(MN_ERR_MEMORY, "the request took longer than the %lld seconds "
                                     "that this server has for one",
                                     (long long)e->options.seconds));
            i = 0;
            continue;
        }
        mn_engine_lock(e);
        if (!job->cancelled && job->wake && e->looks && has_left(job)) job->cancelled = true;
        mn_engine_unlock(e);
        if (!is_cancelled(e, job)) {
            i++;
            continue;
        }
        give_up(e, job, MN_OK, "");
        finish_job(e, job);
        i = 0;
    }
}

/* Whether the sequence may read: other continuations of a prompt that is being read wait, and find
 * it in the cache. */
static bool may_read(const mn_engine *e, const mn_sequence *s) {
    for (int64_t i = 0; i < e->n_active; i++) {
        const mn_sequence *other = e->active[i];
        if (other == s) return s->stage == MN_STAGE_READING;
        if (other->prompt == s->prompt && other->stage == MN_STAGE_READING) return false;
    }
    return false;
}

/* Of the sequences that read, the one that has waited longest and is not among the first n of
 * `reading` yet. */
static mn_sequence *next_reader(const mn_engine *e, int64_t n) {
    mn_sequence *best = NULL;
    for (int64_t i = 0; i < e->n_active; i++) {
        mn_sequence *s = e->active[i];
        if (s->stage != MN_STAGE_READING) continue;
        bool taken = !may_read(e, s) || (best && s->served >= best->served);
        for (int64_t k = 0; k < n && !taken; k++) taken = e->reading[k] == s;
        if (!taken) best = s;
    }
    return best;
}

/* Chunks of as many prompts as are together a chunk, at least one; how many prompts. */
static int64_t gather_chunks(mn_engine *e) {
    int64_t n = 0, total = 0;
    while (n < e->options.streams) {
        mn_sequence *s = next_reader(e, n);
        if (!s) break;
        const mn_status st = mn_sequence_look(e, s);
        if (st != MN_OK) {
            mn_job *job = s->job;
            fail_job(e, job, st);
            int64_t kept = 0;
            for (int64_t k = 0; k < n; k++) {
                if (e->reading[k]->job != job) e->reading[kept++] = e->reading[k];
            }
            n = kept;
            continue;
        }
        const int64_t count = mn_sequence_chunk(e, s);
        if (n > 0 && total + count > e->options.chunk) break;
        e->reading[n++] = s;
        total += count;
    }
    return n;
}

/* One pass reads the chunks of 2 tokens and more; a token by itself is a step, and a sequence that
 * is looked into has a pass of its own. */
static mn_status feed_chunks(mn_engine *e, int64_t n) {
    int64_t fed = 0;
    mn_status st = MN_OK;
    for (int64_t i = 0; i < n && st == MN_OK; i++) {
        mn_sequence *s = e->reading[i];
        const int64_t count = mn_sequence_chunk(e, s);
        const int32_t *tokens = count > 0 ? s->prompt->tokens.ids + s->n_read : NULL;
        if (s->inside) {
            if (count > 0) st = mn_inside_feed(s->inside, tokens, count);
        } else if (count > 1) {
            e->stepping[fed] = s->session;
            e->chunks[fed] = tokens;
            e->counts[fed] = count;
            e->hearers[fed++] = mn_sequence_hearer(s);
        } else if (count == 1) {
            st = mn_session_feed_heard(s->session, tokens, 1, mn_sequence_hearer(s));
        }
    }
    if (st != MN_OK) return st;
    return mn_batch_feed_heard(e->batch, e->stepping, e->chunks, e->counts, fed, e->hearers);
}

static void read_chunks(mn_engine *e) {
    const int64_t n = gather_chunks(e);
    if (n == 0) return;
    const mn_status st = feed_chunks(e, n);
    for (int64_t i = 0; i < n; i++) {
        mn_sequence *s = e->reading[i];
        if (s->stage != MN_STAGE_READING) continue;    // its job has failed meanwhile
        const int64_t count = mn_sequence_chunk(e, s);
        const mn_status mine = st == MN_OK ? mn_sequence_fed(e, s, count) : st;
        mn_engine_lock(e);
        e->metrics.read_tokens += (uint64_t)count;
        mn_engine_unlock(e);
        if (mine != MN_OK) fail_job(e, s->job, mine);
    }
}

enum { MOST_UNSENT = 1 << 20 };    // bytes of events that a client may leave lying

/* A client that does not read its events is not written for. */
static bool is_behind(mn_engine *e, mn_job *job) {
    mn_engine_lock(e);
    const bool behind = job->ask.stream && job->out.size - job->n_taken > MOST_UNSENT;
    if (behind && job->behind > 0.0 && mn_seconds() - job->behind > (double)e->options.patience) {
        job->cancelled = true;
    }
    if (!behind) job->behind = 0.0;
    else if (!(job->behind > 0.0)) job->behind = mn_seconds();
    mn_engine_unlock(e);
    return behind;
}

/* Whether a token is told when it is drawn: its variance is known only when it was read. */
static bool tells_at_once(const mn_sequence *s) {
    return s->job->ask.stream && !s->job->ask.belief;
}

/* On a GPU sequences that step are told of while it works. */
static bool tells_meanwhile(const mn_engine *e) {
    return e->options.device != NULL && e->options.streams > 1;
}

/* Draws for every sequence that writes; how many go on to a step. Whether any ended. */
static int64_t draw_all(mn_engine *e, bool *ended) {
    const int64_t n_active = e->n_active;
    int64_t n = 0;
    memcpy(e->turn, e->active, (size_t)n_active * sizeof *e->turn);    // places move as some end
    for (int64_t i = 0; i < n_active; i++) {
        mn_sequence *s = e->turn[i];
        bool steps = false;
        if (s->stage != MN_STAGE_WRITING || is_behind(e, s->job)) continue;
        const int64_t written = s->n_written;
        mn_status st = mn_sequence_draw(e, s, &steps);
        if (st == MN_OK && !(steps && tells_meanwhile(e))) st = mn_sequence_write(e, s, &steps);
        if (s->n_written > written) count_first(e, s->job);
        if (st != MN_OK) fail_job(e, s->job, st);
        else if (steps) e->stepped[n++] = s;
        else end_sequence(e, s);
        *ended |= !steps;
        if (steps && tells_at_once(s) && !s->tells) send_events(e, s->job, s, false);
    }
    return n;
}

/* The text of what the first n of `stepped` read now. */
static void write_all(mn_engine *e, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        mn_sequence *s = e->stepped[i];
        bool steps = true;
        if (s->stage != MN_STAGE_WRITING || !s->tells) continue;
        const mn_status st = mn_sequence_write(e, s, &steps);
        if (st != MN_OK) fail_job(e, s->job, st);
        else if (tells_at_once(s)) send_events(e, s->job, s, false);
    }
}

/* Begins a step of the first n of `stepped`. A sequence by itself may guess what follows: rows of a
 * pass that are guesses cost it little, while those of company do the same for each. The only
 * stream of a GPU takes the fastest way of one sequence, which has bits of its own. */
static mn_status begin_step(mn_engine *e, int64_t n) {
    mn_sequence *s = e->stepped[0];
    const bool device = e->context->device != NULL;
    if (n == 1 && e->n_active == 1 && e->options.draft > 0 && !s->job->ask.belief && !device) {
        const mn_status st = mn_sequence_expect(e, s, e->options.draft);
        return st == MN_OK ? mn_session_step(s->session, s->drawn) : st;
    }
    if (device && e->options.streams == 1 && n == 1) {
        return mn_session_step(e->stepping[0], e->tokens[0]);
    }
    return mn_batch_begin(e->batch, e->stepping, e->tokens, n);
}

static void step_all(mn_engine *e, int64_t drawn) {
    int64_t n = 0;
    for (int64_t i = 0; i < drawn; i++) {
        mn_sequence *s = e->stepped[i];
        if (s->stage != MN_STAGE_WRITING) continue;    // its job has failed meanwhile
        e->stepped[n] = s;
        e->stepping[n] = s->session;
        e->tokens[n++] = s->drawn;
    }
    const double start = mn_seconds();
    mn_status st = begin_step(e, n);
    write_all(e, n);
    if (st == MN_OK) st = mn_batch_wait(e->batch);
    mn_engine_lock(e);
    mn_histogram_add(&e->metrics.step, mn_seconds() - start);
    e->metrics.steps++;
    mn_engine_unlock(e);
    for (int64_t i = 0; i < n; i++) {
        mn_sequence *s = e->stepped[i];
        if (s->stage != MN_STAGE_WRITING) continue;
        const mn_status mine = st == MN_OK ? mn_sequence_after(e, s) : st;
        if (mine != MN_OK) fail_job(e, s->job, mine);
        else if (s->finish) end_sequence(e, s);
        else if (s->job->ask.stream && !tells_at_once(s)) send_events(e, s->job, s, false);
    }
}

/* The layers of hundreds of sessions are megabytes, which are not gone through in every step of a
 * GPU; to ask a session takes back what it read ahead. */
static uint64_t count_bytes(mn_engine *e) {
    uint64_t bytes = 0;
    for (int64_t i = 0; i < e->n_active; i++) {
        mn_sequence *s = e->active[i];
        const bool asks = e->looks || s->bytes == 0 || s->stage != MN_STAGE_WRITING;
        if (asks && !mn_session_is_ahead(s->session)) s->bytes = mn_session_bytes(s->session);
        bytes += s->bytes;
    }
    return bytes;
}

static void tell_gauges(mn_engine *e) {
    const mn_cache_stats cache = mn_cache_describe(e->cache);
    const uint64_t bytes = count_bytes(e);
    mn_engine_lock(e);
    mn_metrics *m = &e->metrics;
    m->active = (uint64_t)e->n_active;
    m->session_bytes = bytes;
    m->states = (uint64_t)mn_states_count(e->states);
    m->state_bytes = mn_states_bytes(e->states);
    m->cache_entries = (uint64_t)cache.entries;
    m->cache_bytes = cache.bytes;
    m->cache_lookups += cache.lookups - e->told.lookups;
    m->cache_hits += cache.hits - e->told.hits;
    m->cache_tokens += cache.tokens_found - e->told.tokens_found;
    m->cache_evictions += cache.evictions - e->told.evictions;
    e->told = cache;
    m->cache_away_bytes = cache.level_bytes[1] + cache.level_bytes[2];
    mn_engine_unlock(e);
}

/* Waits for work; false at the end. */
static bool wait_for_work(mn_engine *e) {
    bool goes_on = true;
    mn_engine_lock(e);
    while (!e->closing && !e->first && e->n_active == 0) {
        e->busy = false;
        pthread_cond_broadcast(&e->idle);
        pthread_cond_wait(&e->work, &e->lock);
    }
    e->busy = true;
    if (e->closing) {
        goes_on = e->first || e->n_active > 0;
        for (mn_job *job = e->first; job; job = job->next) job->cancelled = true;
        for (int64_t i = 0; i < e->n_active; i++) e->active[i]->job->cancelled = true;
    }
    mn_engine_unlock(e);
    return goes_on;
}

static void nap(void) {
    const struct timespec little = { .tv_nsec = 2000000 };
    nanosleep(&little, NULL);
}

/* Asking every client each turn whether it is there would cost more than what it is told. */
static void look_around(mn_engine *e) {
    const double now = mn_seconds(), pause = 0.01;
    e->looks = now - e->looked > pause;
    if (e->looks) e->looked = now;
}

static void *run(void *context) {
    mn_engine *e = context;
    while (wait_for_work(e)) {
        start_jobs(e);
        look_around(e);
        drop_cancelled(e);
        const uint64_t ticks = e->ticks;
        read_chunks(e);
        bool ended = false;
        const int64_t n = draw_all(e, &ended);
        if (n > 0) step_all(e, n);
        else if (e->n_active > 0 && !ended && ticks == e->ticks) nap();    // clients are behind
        tell_gauges(e);
        let_go(e);
    }
    return NULL;
}

void mn_engine_drain(mn_engine *e, double seconds) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)ceil(seconds);
    mn_engine_lock(e);
    e->resting = true;
    int rc = 0;
    while (rc == 0 && (e->first || e->busy)) {
        rc = pthread_cond_timedwait(&e->idle, &e->lock, &until);
    }
    e->closing = true;
    pthread_cond_broadcast(&e->work);
    mn_engine_unlock(e);
}
