/* sweep.c - the queue: processes, their pipes, and the file of records. */
#include "experiments/sweep.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"
#include "experiments/lease.h"
#include "io/file.h"
#include "io/json_write.h"
#include "io/text.h"

enum { WAIT_MS = 200, KEEP_SECONDS = 20, PATH = 4096 };

/* A process and what it has said so far. */
typedef struct worker {
    pid_t pid;                   // 0: none
    int pipe;
    mn_text said;                // not yet a whole line
    json_t *record;              // NULL until it came
} worker;

typedef struct sweep {
    mn_sweep_state *state;
    const mn_sweep_options *options;
    const json_t *jobs;
    json_t *done;                // records by key
    size_t next;                 // job to look at
    int file;
    char keep[PATH];             // where running jobs save themselves
    char leases[PATH];           // who runs what, of several sweeps
    double renewed;              // seconds of mn_seconds
    worker workers[MN_SWEEP_LANES];
} sweep;

/* ---- the file -------------------------------------------------------------------------------- */

static mn_status io_failed(const char *path, const char *what) {
    return mn_fail(MN_ERR_IO, "%s: cannot %s: %s", path, what, strerror(errno));
}

/* Takes the records of whole lines; *whole is where the last of them ends. */
static mn_status read_lines(json_t *records, size_t *whole, const mn_file *file,
                            const char *path) {
    size_t at = 0;
    *whole = 0;
    for (int64_t line = 1; at < file->size; line++) {
        const char *start = (const char *)file->bytes + at;
        const char *end = memchr(start, '\n', file->size - at);
        if (!end) return MN_OK;
        json_t *record = json_loadb(start, (size_t)(end - start), 0, NULL);
        const char *key = json_string_value(json_object_get(record, "key"));
        if (!key || json_object_set(records, key, record) != 0) {
            json_decref(record);
            return mn_fail(MN_ERR_FORMAT, "%s: line %" PRId64 " is no record of a job; remove the "
                           "line, or write to another folder", path, line);
        }
        json_decref(record);
        at = *whole = (size_t)(end - (const char *)file->bytes) + 1;
    }
    return MN_OK;
}

static mn_status read_records(json_t **records, size_t *whole, const char *path) {
    mn_file file = { 0 };
    struct stat about;
    *records = json_object();
    *whole = 0;
    if (!*records) return mn_fail(MN_ERR_MEMORY, "no memory for records");
    if (stat(path, &about) != 0 && errno == ENOENT) return MN_OK;
    mn_status st = mn_file_map(&file, path);
    if (st == MN_OK) st = read_lines(*records, whole, &file, path);
    mn_file_unmap(&file);
    if (st == MN_OK) return MN_OK;
    json_decref(*records);
    *records = NULL;
    return st;
}

mn_status mn_sweep_records(json_t **records, const char *path) {
    size_t whole;
    return read_records(records, &whole, path);
}

/* One sweep at a time. The processes of one that was killed let go of the lock when they notice,
 * hence a little patience. */
static bool lock_file(int file) {
    for (int tries = 0; tries < 20; tries++) {
        if (flock(file, LOCK_EX | LOCK_NB) == 0) return true;
        poll(NULL, 0, 100);
    }
    return false;
}

/* Opens the file for one sweep at a time, reads it, and cuts off what a kill left half written. */
static mn_status open_file(sweep *s) {
    const char *path = s->options->path;
    size_t whole = 0;
    s->file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (s->file < 0) return io_failed(path, "open");
    if (!lock_file(s->file)) {
        return mn_fail(MN_ERR_IO, "%s: another sweep writes this file; wait for it or stop it",
                       path);
    }
    const mn_status st = read_records(&s->done, &whole, path);
    if (st == MN_OK && ftruncate(s->file, (off_t)whole) != 0) return io_failed(path, "cut");
    return st;
}

static mn_status append(sweep *s, const json_t *record) {
    char *text = NULL;
    const mn_status st = mn_json_text(&text, record, MN_JSON_COMPACT);
    if (st != MN_OK) return st;
    const size_t size = strlen(text);
    text[size] = '\n';           // in place of the end: the size is known
    for (size_t at = 0; at < size + 1;) {
        const ssize_t n = write(s->file, text + at, size + 1 - at);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            free(text);
            return io_failed(s->options->path, "write");
        }
        at += (size_t)n;
    }
    free(text);
    return fsync(s->file) == 0 || errno == EINVAL ? MN_OK : io_failed(s->options->path, "write");
}

/* ---- files of other sweeps ------------------------------------------------------------------- */

static bool is_done(const sweep *s, const char *key) {
    const json_t *record = json_object_get(s->done, key);
    const char *status = json_string_value(json_object_get(record, "status"));
    return status && strcmp(status, "ok") == 0;
}

static int is_shard_file(const struct dirent *entry) {
    int shard, shards, end = 0;
    return sscanf(entry->d_name, "results-%d-of-%d.jsonl%n", &shard, &shards, &end) == 2 &&
           end > 0 && entry->d_name[end] == '\0';
}

/* Takes what another sweep has done; who is the only one now writes it to its own file, too. */
static mn_status take_records(sweep *s, const char *path) {
    json_t *records, *record;
    const char *key;
    mn_status st = mn_sweep_records(&records, path);
    if (st != MN_OK) return st;
    json_object_foreach(records, key, record) {
        const char *status = json_string_value(json_object_get(record, "status"));
        if (st != MN_OK || is_done(s, key) || !status || strcmp(status, "ok") != 0) continue;
        if (s->options->shards == 0) st = append(s, record);
        json_object_set(s->done, key, record);
    }
    json_decref(records);
    return st;
}

static mn_status read_shards(sweep *s) {
    char folder[PATH], path[PATH];
    const char *slash = strrchr(s->options->path, '/');
    snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - s->options->path) : 1,
             slash ? s->options->path : ".");
    struct dirent **entries;
    const int n = scandir(folder, &entries, is_shard_file, alphasort);
    mn_status st = MN_OK;
    for (int i = 0; i < n; i++) {
        const bool fits = snprintf(path, PATH, "%s/%s", folder, entries[i]->d_name) < PATH;
        if (fits && st == MN_OK && strcmp(path, s->options->path) != 0) st = take_records(s, path);
        free(entries[i]);
    }
    if (n >= 0) free(entries);
    return st;
}

/* ---- in the worker --------------------------------------------------------------------------- */

/* Writes a value as one line. A reader that is gone ends this process. */
static void say(int pipe, json_t *value) {
    char *text = json_dumps(value, JSON_COMPACT | JSON_REAL_PRECISION(17));
    json_decref(value);
    if (!text) _exit(3);
    const size_t size = strlen(text);
    text[size] = '\n';
    for (size_t at = 0; at < size + 1;) {
        const ssize_t n = write(pipe, text + at, size + 1 - at);
        if (n < 0 && errno != EINTR) _exit(3);
        if (n > 0) at += (size_t)n;
    }
    free(text);
}

static void say_progress(void *context, const mn_job_progress *now) {
    say(*(const int *)context, json_pack("{s:I, s:I, s:o, s:o}", "step", (json_int_t)now->step,
                                         "steps", (json_int_t)now->steps, "loss",
                                         mn_json_real(now->loss), "score",
                                         mn_json_real(now->score)));
}

static volatile sig_atomic_t told_to_stop;

static void stop_soon(int signal_number) {
    (void)signal_number;
    told_to_stop = 1;
}

/* A signal makes the job keep what it has and end; a second SIGINT ends it at once. SIGTERM comes
 * twice where it went to all of a group, as the sweep passes it on. */
static void heed_signals(void) {
    struct sigaction soon = { .sa_handler = stop_soon, .sa_flags = SA_RESTART };
    sigaction(SIGTERM, &soon, NULL);
    soon.sa_flags |= (int)SA_RESETHAND;
    sigaction(SIGINT, &soon, NULL);
    signal(SIGPIPE, SIG_DFL);
}

/* Never returns. */
static void work(const sweep *s, const json_t *job, int pipe) {
    json_t *record = NULL;
    heed_signals();
    close(s->file);              // the lock is the parent's
    for (int i = 0; i < MN_SWEEP_LANES; i++) {
        if (s->workers[i].pid > 0) close(s->workers[i].pipe);
    }
    const mn_job_keeping keeping = { s->keep, KEEP_SECONDS, &told_to_stop };
    const char *device = s->options->device;
    if (mn_job_run(&record, job, &keeping, device, say_progress, &pipe) != MN_OK) _exit(3);
    if (record) say(pipe, json_pack("{s:o}", "record", record));
    _exit(0);
}

/* ---- the queue ------------------------------------------------------------------------------- */

static mn_status start(sweep *s, int lane, const json_t *job) {
    int ends[2];
    if (pipe(ends) != 0) return mn_fail(MN_ERR_IO, "no pipe for a job: %s", strerror(errno));
    fflush(NULL);                // else both processes would print what is pending
    const pid_t pid = fork();
    if (pid < 0) {
        close(ends[0]);
        close(ends[1]);
        return mn_fail(MN_ERR_IO, "cannot start a process for a job: %s", strerror(errno));
    }
    if (pid == 0) {
        close(ends[0]);
        work(s, job, ends[1]);
    }
    close(ends[1]);
    s->workers[lane] = (worker){ .pid = pid, .pipe = ends[0] };
    s->state->lanes[lane] = (mn_sweep_lane){ .job = job, .started = mn_seconds(),
                                             .now = { .loss = NAN, .score = NAN } };
    return MN_OK;
}

/* Whether a job of this key runs right now. */
static bool is_running(const sweep *s, const char *key) {
    char other[MN_JOB_KEY];
    for (int i = 0; i < s->state->n_lanes; i++) {
        const json_t *job = s->state->lanes[i].job;
        if (job && mn_job_key(other, job) == MN_OK && strcmp(other, key) == 0) return true;
    }
    return false;
}

/* The i-th job to look at: those of the own shard come first. */
static const json_t *job_at(const sweep *s, size_t i) {
    const size_t n = json_array_size(s->jobs), shards = (size_t)s->options->shards;
    if (shards == 0) return json_array_get(s->jobs, i);
    const size_t shard = (size_t)s->options->shard, own = (n + shards - 1 - shard) / shards;
    if (i < own) return json_array_get(s->jobs, shard + i * shards);
    const size_t k = i - own, round = k / (shards - 1), other = k % (shards - 1);
    return json_array_get(s->jobs, round * shards + other + (other >= shard));
}

/* Of several sweeps: whether the job is this one's now. */
static mn_status take_job(sweep *s, bool *taken, const char *key) {
    mn_lease lease = MN_LEASE_TAKEN;
    mn_status st = MN_OK;
    if (s->options->shards > 0) st = mn_lease_take(&lease, s->leases, key);
    *taken = st == MN_OK && lease == MN_LEASE_TAKEN;
    if (st == MN_OK && lease == MN_LEASE_DONE) st = read_shards(s);
    if (st == MN_OK && lease == MN_LEASE_DONE) s->state->done += is_done(s, key);
    return st;
}

/* Gives the next job that is to be run to a lane. */
static mn_status start_next(sweep *s, int lane) {
    char key[MN_JOB_KEY];
    while (s->next < json_array_size(s->jobs)) {
        const json_t *job = job_at(s, s->next++);
        bool taken = false;
        mn_status st = mn_job_key(key, job);
        if (st == MN_OK && !is_done(s, key) && !is_running(s, key)) st = take_job(s, &taken, key);
        if (st != MN_OK) return st;
        if (!taken) continue;
        st = start(s, lane, job);
        if (st != MN_OK && s->options->shards > 0) mn_lease_end(s->leases, key, false);
        return st;
    }
    return MN_OK;
}

static void renew_leases(sweep *s) {
    char key[MN_JOB_KEY];
    if (s->options->shards == 0 || mn_seconds() - s->renewed < MN_LEASE_SECONDS / 6.0) return;
    s->renewed = mn_seconds();
    for (int i = 0; i < s->state->n_lanes; i++) {
        const json_t *job = s->state->lanes[i].job;
        if (job && mn_job_key(key, job) == MN_OK) mn_lease_renew(s->leases, key);
    }
}

static double number_of(const json_t *value) {
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static void hear(sweep *s, int lane, const char *line, size_t size) {
    json_t *value = json_loadb(line, size, 0, NULL);
    json_t *record = json_object_get(value, "record");
    mn_job_progress *now = &s->state->lanes[lane].now;
    if (record) {
        json_decref(s->workers[lane].record);
        s->workers[lane].record = json_incref(record);
    } else if (value) {
        now->step = json_integer_value(json_object_get(value, "step"));
        now->steps = json_integer_value(json_object_get(value, "steps"));
        now->loss = number_of(json_object_get(value, "loss"));
        now->score = number_of(json_object_get(value, "score"));
    }
    json_decref(value);
}

/* Whole lines of what a worker said. */
static void hear_lines(sweep *s, int lane) {
    mn_text *said = &s->workers[lane].said;
    size_t from = 0;
    for (size_t i = 0; i < said->size; i++) {
        if (said->bytes[i] != '\n') continue;
        hear(s, lane, said->bytes + from, i - from);
        from = i + 1;
    }
    if (from > 0) memmove(said->bytes, said->bytes + from, said->size - from);
    said->size -= from;
}

/* What a process that died without a record leaves. */
static json_t *lost_record(const json_t *job, int status, double seconds) {
    char key[MN_JOB_KEY] = "", why[96];
    if (WIFSIGNALED(status)) {
        snprintf(why, sizeof why, "the process of this job was ended by signal %d%s",
                 WTERMSIG(status), WTERMSIG(status) == SIGKILL ? " (out of memory?)" : "");
    } else {
        snprintf(why, sizeof why, "the process of this job ended with status %d",
                 WEXITSTATUS(status));
    }
    if (mn_job_key(key, job) != MN_OK) return NULL;
    return json_pack("{s:s, s:O, s:s, s:o, s:s, s:s, s:s}", "key", key, "job", job, "status",
                     "failed", "seconds", mn_json_real(seconds), "commit", mn_build_commit(),
                     "version", mn_version(), "error", why);
}

static bool stopping(const sweep *s) {
    return s->options->stop && *s->options->stop;
}

/* The worker has closed its end: takes its record and frees the lane. */
static mn_status finish(sweep *s, int lane) {
    worker *w = &s->workers[lane];
    mn_sweep_lane *l = &s->state->lanes[lane];
    int status = 0;
    close(w->pipe);
    while (waitpid(w->pid, &status, 0) < 0 && errno == EINTR) continue;
    if (!w->record && !stopping(s)) {
        w->record = lost_record(l->job, status, mn_seconds() - l->started);
    }
    mn_status st = MN_OK;
    if (w->record) {
        const char *key = json_string_value(json_object_get(w->record, "key"));
        st = append(s, w->record);
        if (st == MN_OK) json_object_set(s->done, key, w->record);
        if (is_done(s, key)) s->state->done++;
        else s->state->failed++;
    }
    char own[MN_JOB_KEY];
    if (s->options->shards > 0 && mn_job_key(own, l->job) == MN_OK) {
        mn_lease_end(s->leases, own, w->record && is_done(s, own));
    }
    json_t *record = w->record;
    mn_text_free(&w->said);
    *w = (worker){ 0 };
    l->job = NULL;
    s->state->ended = record;
    if (st == MN_OK && record && s->options->tell) s->options->tell(s->options->context, s->state);
    s->state->ended = NULL;
    json_decref(record);
    return st;
}

/* Reads what a worker has to say; at its end, the lane is free. */
static mn_status listen_to(sweep *s, int lane) {
    worker *w = &s->workers[lane];
    mn_status st = mn_text_reserve(&w->said, 65536);
    if (st != MN_OK) return st;
    const ssize_t n = read(w->pipe, w->said.bytes + w->said.size, 65536);
    if (n < 0 && errno == EINTR) return MN_OK;
    if (n < 0) return mn_fail(MN_ERR_IO, "lost a job: %s", strerror(errno));
    if (n == 0) return finish(s, lane);
    w->said.size += (size_t)n;
    hear_lines(s, lane);
    return MN_OK;
}

static mn_status wait_for_words(sweep *s) {
    struct pollfd fds[MN_SWEEP_LANES];
    int lanes[MN_SWEEP_LANES], n = 0;
    for (int i = 0; i < s->state->n_lanes; i++) {
        if (s->workers[i].pid == 0) continue;
        fds[n] = (struct pollfd){ .fd = s->workers[i].pipe, .events = POLLIN };
        lanes[n++] = i;
    }
    if (poll(fds, (nfds_t)n, WAIT_MS) < 0 && errno != EINTR) {
        return mn_fail(MN_ERR_IO, "lost the jobs: %s", strerror(errno));
    }
    mn_status st = MN_OK;
    for (int i = 0; i < n && st == MN_OK; i++) {
        if (fds[i].revents) st = listen_to(s, lanes[i]);
    }
    return st;
}

static int busy(const sweep *s) {
    int n = 0;
    for (int i = 0; i < s->state->n_lanes; i++) n += s->workers[i].pid > 0;
    return n;
}

static mn_status run_queue(sweep *s) {
    mn_status st = MN_OK;
    bool told_to_end = false;
    for (;;) {
        for (int i = 0; i < s->state->n_lanes && st == MN_OK && !stopping(s); i++) {
            if (s->workers[i].pid == 0) st = start_next(s, i);
        }
        if ((st != MN_OK || stopping(s)) && !told_to_end) {
            for (int i = 0; i < s->state->n_lanes; i++) {
                if (s->workers[i].pid > 0) kill(s->workers[i].pid, SIGTERM);
            }
            told_to_end = true;
        }
        if (busy(s) == 0) return st;
        renew_leases(s);
        const mn_status heard = wait_for_words(s);
        if (st == MN_OK) st = heard;
        if (s->options->tell) s->options->tell(s->options->context, s->state);
    }
}

/* How many jobs there are, counted once by key, and how many of them are done. */
static mn_status count_jobs(sweep *s) {
    char key[MN_JOB_KEY];
    json_t *seen = json_object();
    mn_status st = seen ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for the keys of jobs");
    for (size_t i = 0; st == MN_OK && i < json_array_size(s->jobs); i++) {
        st = mn_job_key(key, json_array_get(s->jobs, i));
        if (st != MN_OK || json_object_get(seen, key)) continue;
        json_object_set_new(seen, key, json_true());
        s->state->jobs++;
        s->state->found += is_done(s, key);
    }
    s->state->done = s->state->found;
    json_decref(seen);
    return st;
}

/* Beside the file: a folder "unfinished" for checkpoints of jobs. */
static mn_status place_keeps(sweep *s) {
    const char *slash = strrchr(s->options->path, '/');
    const int folder = slash ? (int)(slash - s->options->path) + 1 : 0;
    const int n = snprintf(s->keep, sizeof s->keep, "%.*sunfinished", folder, s->options->path);
    const int m = snprintf(s->leases, sizeof s->leases, "%.*sleases", folder, s->options->path);
    if (n >= PATH || m >= PATH) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", s->options->path);
    }
    if (s->options->shards == 0 || mkdir(s->leases, 0777) == 0 || errno == EEXIST) return MN_OK;
    return io_failed(s->leases, "make the folder");
}

mn_status mn_sweep_run(mn_sweep_state *state, const json_t *jobs, const mn_sweep_options *options) {
    sweep *s = calloc(1, sizeof *s);
    if (!s) return mn_fail(MN_ERR_MEMORY, "no memory for a sweep");
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    const int64_t lanes = options->device ? 1 : mn_max(cores, 1);
    const int64_t wanted = options->processes > 0 ? options->processes : lanes;
    *s = (sweep){ .state = state, .options = options, .jobs = jobs, .file = -1 };
    *state = (mn_sweep_state){ .n_lanes = (int)mn_min(wanted, MN_SWEEP_LANES) };
    mn_status st = place_keeps(s);
    if (st == MN_OK) st = open_file(s);
    if (st == MN_OK) st = read_shards(s);
    if (st == MN_OK) st = count_jobs(s);
    if (st == MN_OK && options->tell) options->tell(options->context, state);
    if (st == MN_OK) st = run_queue(s);
    rmdir(s->keep);              // stays while a job in it waits to go on
    if (s->file >= 0) close(s->file);
    json_decref(s->done);
    free(s);
    return st;
}
