/* text.c - text files of any size as pieces that can be tokenised apart. */
#define _GNU_SOURCE    // memmem
#include "data/text.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "data/jsonl.h"
#include "data/text_cut.h"
#include "base/utf8.h"

enum { PIECE_BYTES = 256 << 10, WINDOW_BYTES = 64 << 10, N_CODE_POINTS = 0x110000,
       REPLACEMENT = 0xFFFD };    // what stands for bytes that are not UTF-8

/* ---- reading --------------------------------------------------------------------------------- */

static mn_status reserve(mn_text_buffer *buffer, int64_t size, const char *path) {
    if ((size_t)size < buffer->room) return MN_OK;
    char *grown = realloc(buffer->bytes, (size_t)size + 1);
    if (!grown) {
        return mn_fail(MN_ERR_MEMORY,
                       "%s: no memory for %" PRId64 " bytes of text that cannot be cut; a "
                       "separator or shorter lines would help",
                       path, size);
    }
    *buffer = (mn_text_buffer){ grown, (size_t)size + 1 };
    return MN_OK;
}

/* Reads exactly bytes [at, at + size) of the file and closes them with a zero. */
static mn_status read_bytes(mn_text_buffer *buffer, const mn_data_file *file, int64_t at,
                            int64_t size) {
    const mn_status st = reserve(buffer, size, file->path);
    if (st != MN_OK) return st;
    const int fd = open(file->path, O_RDONLY | O_CLOEXEC);
    int64_t done = 0;
    ssize_t n = fd < 0 ? -1 : 1;
    while (done < size && n > 0) {
        n = pread(fd, buffer->bytes + done, (size_t)(size - done), (off_t)(at + done));
        if (n < 0 && errno == EINTR) n = 1;
        else if (n > 0) done += n;
    }
    const int error = errno;
    if (fd >= 0) close(fd);
    if (n < 0) return mn_fail(MN_ERR_IO, "%s: cannot read: %s", file->path, strerror(error));
    if (done < size) return mn_fail(MN_ERR_IO, "%s: shrank while it was read", file->path);
    buffer->bytes[size] = '\0';
    return MN_OK;
}

/* The first good place in [from, to) of a file, or -1, looked for in windows. */
static mn_status find_cut(int64_t *cut, bool *border, const mn_data_file *file, int64_t from,
                          int64_t to, const mn_cut_rule *rule, mn_text_buffer *buffer) {
    *cut = -1;
    for (int64_t at = from; at < to && *cut < 0; at += WINDOW_BYTES) {
        const int64_t end = mn_min(at + WINDOW_BYTES, to);
        const int64_t begin = mn_max(at - MN_CUT_CONTEXT, 0);
        const int64_t size = mn_min(end + MN_CUT_CONTEXT, file->bytes) - begin;
        const mn_status st = read_bytes(buffer, file, begin, size);
        if (st != MN_OK) return st;
        *cut = mn_cut_find(border, buffer->bytes, size, at - begin, end - begin, rule);
        if (*cut >= 0) *cut += begin;
    }
    return MN_OK;
}

/* ---- planning -------------------------------------------------------------------------------- */

/* Where validation begins; file -1: nowhere. */
typedef struct held_out_place {
    int64_t file, at;
} held_out_place;

static mn_cut_rule rule_for(const mn_text_plan *plan, const mn_data_file *file,
                            const mn_tokenizer *tokenizer) {
    const bool lines = file->format == MN_CORPUS_JSONL;
    return (mn_cut_rule){ .lines = lines, .separator = lines ? NULL : plan->separator,
                          .tokenizer = tokenizer };
}

/* Inside the last text when no document begins in the part held out. */
static mn_status hold_out_inside(held_out_place *out, const mn_text_plan *plan, int64_t file,
                                 int64_t at, double share, mn_text_buffer *buffer) {
    const mn_data_file *last = &plan->files->items[file];
    bool border;
    if (last->format == MN_CORPUS_JSONL) {
        return mn_fail(MN_ERR_ARGUMENT,
                       "%s: no line begins in the last %g of the input; hold out more for "
                       "validation",
                       last->path, share);
    }
    const mn_cut_rule anywhere = { .separator = plan->separator };
    mn_status st = find_cut(&out->at, &border, last, at, last->bytes, &anywhere, buffer);
    out->file = file;
    if (st == MN_OK && out->at <= 0) {
        st = mn_fail(MN_ERR_ARGUMENT, "%s: %" PRId64 " bytes are too few to hold %g of them out",
                     last->path, last->bytes, share);
    }
    return st;
}

static mn_status hold_out(held_out_place *out, const mn_text_plan *plan, double share,
                          mn_text_buffer *buffer) {
    *out = (held_out_place){ .file = -1 };
    if (share <= 0) return MN_OK;
    int64_t before = 0, file = 0;
    const int64_t place = mn_min((int64_t)((double)plan->bytes * (1.0 - share)), plan->bytes - 1);
    while (before + plan->files->items[file].bytes <= place) {
        before += plan->files->items[file++].bytes;
    }
    const mn_data_file *in = &plan->files->items[file];
    if (before == place && file > 0) {
        *out = (held_out_place){ file, 0 };
        return MN_OK;
    }
    mn_cut_rule rule = rule_for(plan, in, NULL);
    rule.borders_only = true;
    if (rule.lines || rule.separator) {
        bool border;
        const mn_status st = find_cut(&out->at, &border, in, mn_max(place - before, 1), in->bytes,
                                      &rule, buffer);
        if (st != MN_OK) return st;
        if (out->at >= 0) {
            out->file = file;
            return MN_OK;
        }
    }
    for (int64_t next = file + 1; next < plan->files->count; next++) {
        if (plan->files->items[next].bytes == 0) continue;
        *out = (held_out_place){ next, 0 };
        return MN_OK;
    }
    return hold_out_inside(out, plan, file, place - before, share, buffer);
}

static mn_status add_piece(mn_text_plan *plan, mn_text_piece piece) {
    if (piece.end <= piece.begin) return MN_OK;
    if (plan->n_pieces == plan->capacity) {
        const int64_t capacity = 2 * plan->capacity + 64;
        mn_text_piece *grown = realloc(plan->pieces, (size_t)capacity * sizeof *grown);
        if (!grown) return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " pieces", capacity);
        plan->pieces = grown;
        plan->capacity = capacity;
    }
    plan->pieces[plan->n_pieces++] = piece;
    return MN_OK;
}

/* Adds the stretch up to `end`, in two pieces when validation begins inside it. */
static mn_status add_stretch(mn_text_plan *plan, mn_text_piece *next, int64_t end, bool closes,
                             const held_out_place *held) {
    mn_status st = MN_OK;
    if (held->file == next->file && held->at <= next->begin) next->held_out = true;
    if (held->file == next->file && held->at > next->begin && held->at < end) {
        mn_text_piece front = *next;
        front.end = held->at;
        front.closes = true;
        st = add_piece(plan, front);
        next->begin = held->at;
        next->before += front.end - front.begin;
        next->held_out = true;
    }
    next->end = end;
    next->closes = closes || (held->file == next->file && held->at == end);
    if (st == MN_OK) st = add_piece(plan, *next);
    next->before += end - next->begin;
    next->begin = end;
    return st;
}

static mn_status plan_file(mn_text_plan *plan, int64_t index, int64_t before,
                           const held_out_place *held, const mn_tokenizer *tokenizer,
                           mn_text_buffer *buffer) {
    const mn_data_file *file = &plan->files->items[index];
    const mn_cut_rule rule = rule_for(plan, file, tokenizer);
    mn_text_piece next = { .file = index, .before = before,
                           .held_out = held->file >= 0 && held->file < index };
    mn_status st = MN_OK;
    for (int64_t at = PIECE_BYTES; at < file->bytes && st == MN_OK; at += PIECE_BYTES) {
        int64_t cut;
        bool border;
        st = find_cut(&cut, &border, file, at, mn_min(at + PIECE_BYTES, file->bytes), &rule,
                      buffer);
        if (st == MN_OK && cut > next.begin) st = add_stretch(plan, &next, cut, border, held);
    }
    return st == MN_OK ? add_stretch(plan, &next, file->bytes, true, held) : st;
}

mn_status mn_text_plan_make(mn_text_plan *out, const mn_data_files *files, const char *text_key,
                            const char *separator, double held_out,
                            const mn_tokenizer *tokenizer) {
    mn_text_plan plan = { .files = files, .text_key = text_key ? text_key : "text",
                          .separator = separator && *separator ? separator : NULL };
    *out = (mn_text_plan){ 0 };
    if (plan.separator && strlen(plan.separator) > MN_CUT_CONTEXT) {
        return mn_fail(MN_ERR_ARGUMENT, "a separator of %zu bytes; %d are the most",
                       strlen(plan.separator), MN_CUT_CONTEXT);
    }
    for (int64_t i = 0; i < files->count; i++) plan.bytes += files->items[i].bytes;
    if (plan.bytes == 0) {
        return mn_fail(MN_ERR_FORMAT, "%s: there is no text in it", files->items[0].path);
    }
    mn_text_buffer buffer = { 0 };
    held_out_place held;
    mn_status st = hold_out(&held, &plan, held_out, &buffer);
    int64_t before = 0;
    for (int64_t i = 0; i < files->count && st == MN_OK; i++) {
        st = plan_file(&plan, i, before, &held, tokenizer, &buffer);
        before += files->items[i].bytes;
    }
    free(buffer.bytes);
    if (st == MN_OK) *out = plan;
    else mn_text_plan_free(&plan);
    return st;
}

void mn_text_plan_free(mn_text_plan *plan) {
    free(plan->pieces);
    *plan = (mn_text_plan){ 0 };
}

/* ---- visiting -------------------------------------------------------------------------------- */

static mn_status visit_plain(const char *text, size_t size, const char *separator, bool closes,
                             mn_text_visitor visit, void *context) {
    const size_t n = separator ? strlen(separator) : 0;
    for (size_t at = 0; n > 0;) {
        const char *found = memmem(text + at, size - at, separator, n);
        if (!found) {
            text += at;
            size -= at;
            break;
        }
        const size_t end = (size_t)(found - text);
        const mn_status st = visit(context, text + at, end - at, true);
        if (st != MN_OK) return st;
        at = end + n;
    }
    return size > 0 || closes ? visit(context, text, size, closes) : MN_OK;
}

/* The number of the line that begins at `at`, from 1; 0 when it cannot be found out. */
static int64_t line_number(const mn_data_file *file, int64_t at) {
    mn_text_buffer buffer = { 0 };
    int64_t line = 1;
    for (int64_t from = 0; from < at && line > 0; from += WINDOW_BYTES) {
        const int64_t size = mn_min(WINDOW_BYTES, at - from);
        if (read_bytes(&buffer, file, from, size) != MN_OK) line = 0;
        for (int64_t i = 0; i < size && line > 0; i++) line += buffer.bytes[i] == '\n';
    }
    free(buffer.bytes);
    return line;
}

static mn_status visit_line(const mn_data_file *file, int64_t at, const char *line, size_t size,
                            const char *key, mn_text_visitor visit, void *context) {
    mn_json root = { 0 };
    const char *text;
    size_t text_size;
    if (mn_jsonl_blank(line, size)) return MN_OK;
    mn_status st = mn_jsonl_text(&root, &text, &text_size, line, size, key, "");
    if (st == MN_OK) st = visit(context, text, text_size, true);
    mn_json_free(&root);
    if (st == MN_OK) return MN_OK;
    char why[512];
    const char *reason = mn_last_error();
    while (*reason == ':' || *reason == ' ') reason++;    // the document has no name
    snprintf(why, sizeof why, "%s", reason);
    return mn_fail(st, "%s: line %" PRId64 ": %s", file->path, line_number(file, at), why);
}

static mn_status visit_lines(const mn_data_file *file, int64_t begin, const char *text, size_t size,
                             const char *key, mn_text_visitor visit, void *context) {
    size_t at = begin == 0 && size >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    while (at < size) {
        const char *end = memchr(text + at, '\n', size - at);
        const size_t n = end ? (size_t)(end - (text + at)) : size - at;
        const mn_status st = visit_line(file, begin + (int64_t)at, text + at, n, key, visit,
                                        context);
        if (st != MN_OK) return st;
        at += n + 1;
    }
    return MN_OK;
}

mn_status mn_text_visit(const mn_text_plan *plan, int64_t index, mn_text_buffer *buffer,
                        mn_text_visitor visit, void *context) {
    const mn_text_piece *piece = &plan->pieces[index];
    const mn_data_file *file = &plan->files->items[piece->file];
    const int64_t size = piece->end - piece->begin;
    mn_status st = read_bytes(buffer, file, piece->begin, size);
    if (st != MN_OK) return st;
    if (file->format == MN_CORPUS_JSONL) {
        return visit_lines(file, piece->begin, buffer->bytes, (size_t)size, plan->text_key, visit,
                           context);
    }
    st = visit_plain(buffer->bytes, (size_t)size, plan->separator, piece->closes, visit, context);
    if (st == MN_OK) return MN_OK;
    char why[512];
    snprintf(why, sizeof why, "%s", mn_last_error());
    if (piece->begin == 0) return mn_fail(st, "%s: %s", file->path, why);
    return mn_fail(st, "%s: in the text from byte %" PRId64 ": %s", file->path, piece->begin, why);
}

/* ---- alphabet -------------------------------------------------------------------------------- */

typedef struct alphabet {
    uint8_t seen[N_CODE_POINTS / 8];
} alphabet;

static mn_status note_characters(void *context, const char *text, size_t size, bool closes) {
    (void)closes;
    alphabet *letters = context;
    for (size_t at = 0; at < size;) {
        uint32_t point;
        at += (size_t)mn_utf8_take(text + at, size - at, &point);
        if (point == MN_UTF8_BAD) point = REPLACEMENT;
        letters->seen[point / 8] |= (uint8_t)(1u << (point % 8));
    }
    return MN_OK;
}

mn_status mn_text_alphabet(char **text, size_t *size, const mn_text_plan *plan,
                           bool (*progress)(void *context, int64_t done, int64_t all),
                           void *context) {
    mn_text_buffer buffer = { 0 };
    mn_status st = MN_OK;
    *text = NULL;
    *size = 0;
    alphabet *letters = calloc(1, sizeof *letters);
    if (!letters) return mn_fail(MN_ERR_MEMORY, "no memory for the alphabet");
    for (int64_t i = 0; i < plan->n_pieces && st == MN_OK; i++) {
        st = mn_text_visit(plan, i, &buffer, note_characters, letters);
        const mn_text_piece *piece = &plan->pieces[i];
        const int64_t done = piece->before + piece->end - piece->begin;
        if (st == MN_OK && progress && !progress(context, done, plan->bytes)) {
            st = mn_fail(MN_ERR_ARGUMENT, "stopped");
        }
    }
    free(buffer.bytes);
    size_t count = 0;
    for (uint32_t value = 0; value < N_CODE_POINTS; value++) {
        count += letters->seen[value / 8] >> (value % 8) & 1;
    }
    if (st == MN_OK && !(*text = malloc(4 * count + 1))) {
        st = mn_fail(MN_ERR_MEMORY, "no memory for the alphabet");
    }
    for (uint32_t value = 0; value < N_CODE_POINTS && st == MN_OK; value++) {
        const bool seen = letters->seen[value / 8] >> (value % 8) & 1;
        if (seen) *size += (size_t)mn_utf8_put(*text + *size, value);
    }
    free(letters);
    return st;
}
