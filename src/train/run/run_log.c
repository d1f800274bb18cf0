/* run_log.c - metrics.jsonl through one descriptor in append mode, a write per line. */
#define _XOPEN_SOURCE 700       // ftruncate, fsync under -std=c11
#include "train/run/run_log.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/status.h"
#include "io/file.h"
#include "io/json_write.h"
#include "train/run/event_file.h"
#include "train/run/run_read.h"

struct mn_run_log {
    int fd;
    char *path;
    mn_event_file *events;    // NULL: not asked for
    int64_t step;             // of the last line
};

/* ---- opening --------------------------------------------------------------------------------- */

static mn_status fail_errno(const mn_run_log *log, const char *doing) {
    return mn_fail(MN_ERR_IO, "%s: %s: %s", log->path, doing, strerror(errno));
}

static mn_status set_path(mn_run_log *log, const char *folder) {
    size_t room;
    if (!mn_add_size(&room, strlen(folder), sizeof "/" MN_RUN_METRICS) ||
        !(log->path = malloc(room))) {
        return mn_fail(MN_ERR_MEMORY, "%s: out of memory", folder);
    }
    snprintf(log->path, room, "%s/" MN_RUN_METRICS, folder);
    return MN_OK;
}

/* How much of the file stays: bytes up to the resumed step; all of them must be none when new. */
static mn_status size_kept(size_t *size, const mn_run_log *log, int64_t resumed_step) {
    mn_file file = { 0 };
    int64_t n_lines = 0;
    *size = 0;
    if (access(log->path, F_OK) != 0 && errno == ENOENT) return MN_OK;
    mn_status st = mn_file_map(&file, log->path);
    if (st == MN_OK && resumed_step < 0 && file.size > 0) {
        st = mn_fail(MN_ERR_ARGUMENT, "%s: holds the metrics of another run; resume that run, or "
                     "choose another folder, or remove the file", log->path);
    } else if (st == MN_OK) {
        st = mn_run_lines_until(&n_lines, size, resumed_step, file.bytes, file.size, log->path);
    }
    mn_file_unmap(&file);
    return st;
}

static mn_status open_metrics(mn_run_log *log, const char *folder, int64_t resumed_step) {
    size_t size;
    mn_status st = set_path(log, folder);
    if (st == MN_OK) st = size_kept(&size, log, resumed_step);
    if (st != MN_OK) return st;
    log->fd = open(log->path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (log->fd < 0) return fail_errno(log, "cannot open");
    if (ftruncate(log->fd, (off_t)size) != 0) return fail_errno(log, "cannot cut");
    log->step = resumed_step < 0 ? 0 : resumed_step;
    return MN_OK;
}

mn_status mn_run_log_open(mn_run_log **out, const char *folder, int64_t resumed_step, bool events) {
    *out = NULL;
    mn_run_log *log = calloc(1, sizeof *log);
    if (!log) return mn_fail(MN_ERR_MEMORY, "%s: out of memory", folder);
    log->fd = -1;
    mn_status st = open_metrics(log, folder, resumed_step);
    if (st == MN_OK && events) st = mn_event_file_create(&log->events, folder, resumed_step);
    if (st == MN_OK) {
        *out = log;
        return MN_OK;
    }
    if (log->fd >= 0) close(log->fd);
    free(log->path);
    free(log);
    return st;
}

/* ---- writing --------------------------------------------------------------------------------- */

/* A whole number, a fractional one, or null. */
static json_t *number(double value) {
    const double most = 9007199254740992.0;            // 2^53
    if (value == floor(value) && fabs(value) <= most) return json_integer((json_int_t)value);
    return mn_json_real(value);
}

/* Sets text (to be freed) to the line with its newline. */
static mn_status line_of(char **text, int64_t step, const mn_run_value *values, int64_t n_values) {
    mn_status st = MN_OK;
    json_t *object = json_object();
    bool fits = object && json_object_set_new(object, "step", json_integer(step)) == 0;
    *text = NULL;
    for (int64_t i = 0; i < n_values && fits && st == MN_OK; i++) {
        if (json_object_get(object, values[i].name)) {
            st = mn_fail(MN_ERR_ARGUMENT, "step %" PRId64 ": \"%s\" is given twice", step,
                         values[i].name);
        } else {
            json_t *value = number(values[i].value);
            fits = value && json_object_set_new(object, values[i].name, value) == 0;
        }
    }
    if (!fits) st = mn_fail(MN_ERR_MEMORY, "no memory for the metrics of step %" PRId64, step);
    if (st == MN_OK) st = mn_json_text(text, object, MN_JSON_COMPACT);
    json_decref(object);
    if (st == MN_OK) (*text)[strlen(*text)] = '\n';    // over the closing zero
    return st;
}

static mn_status append(mn_run_log *log, const char *text, size_t size) {
    while (size > 0) {
        const ssize_t n = write(log->fd, text, size);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return fail_errno(log, "cannot write");
        text += n;
        size -= (size_t)n;
    }
    return MN_OK;
}

mn_status mn_run_log_write(mn_run_log *log, int64_t step, const mn_run_value *values,
                           int64_t n_values) {
    if (step < log->step) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: step %" PRId64 " comes after step %" PRId64,
                       log->path, step, log->step);
    }
    char *text;
    mn_status st = line_of(&text, step, values, n_values);
    if (st == MN_OK) {
        const char *end = strchr(text, '\n');
        st = append(log, text, (size_t)(end - text) + 1);
    }
    free(text);
    if (st == MN_OK && log->events) st = mn_event_file_write(log->events, step, values, n_values);
    if (st == MN_OK) log->step = step;
    return st;
}

mn_status mn_run_log_close(mn_run_log *log) {
    if (!log) return MN_OK;
    mn_status st = mn_event_file_close(log->events);
    if (fsync(log->fd) != 0 && errno != EINVAL && errno != ENOTSUP) {
        st = fail_errno(log, "cannot write");
    }
    if (close(log->fd) != 0) st = fail_errno(log, "cannot write");
    free(log->path);
    free(log);
    return st;
}
