/* fuzzy.c - recall with motifs: keys and values of several tokens.
 *
 *   V = vocab, pad V-1, keys from [0, (V-1)/2), values from the rest below V-1
 *   a motif of size s: s distinct tokens in order, all of them equally likely
 *   sizes: values 1 .. value_motif evenly; keys 1 .. key_motif evenly in training, else key_motif
 *
 * One pair is the probe: drawn first, put in where the sequence has reached a drawn place (unless
 * chance brought its key before), and asked for at the end. The sequence stands at the right end
 * of the row. Training asks for every next token, pads too; valid and test for the values of
 * keys
 * shown before and of the probe. */
#include <stdlib.h>
#include <string.h>

#include "tasks/task_internal.h"

enum { MOST = 4 };    // tokens of a motif

typedef struct motif {
    int size;
    uint16_t token[MOST];
} motif;

/* What a key stands for in this sequence. An open-addressed table has room for twice the pairs. */
typedef struct binding {
    uint64_t key;         // code of the motif; 0: free
    motif value;
    bool shown;
} binding;

typedef struct fuzzy {
    int64_t n_keys, n_values, n_slots;    // slots: a power of two
    binding *bindings;
    int32_t *x, *y;                       // tokens, and what is asked at each of them
    int64_t n;
} fuzzy;

static void close_fuzzy(mn_task *task) {
    fuzzy *f = task->own;
    free(f->bindings);
    free(f->x);
    free(f->y);
}

static mn_status open_fuzzy(mn_task *task) {
    const mn_task_values *v = &task->values;
    const int64_t plain = v->vocab - 1, longest = v->key_motif + v->value_motif;
    mn_status st = mn_task_require(task, v->vocab <= 65535, "vocab", "65535 are the most");
    if (st == MN_OK) {
        st = mn_task_require(task, plain / 2 >= v->key_motif && plain - plain / 2 >= v->value_motif,
                             "vocab", "half of it must hold a whole motif of different tokens");
    }
    if (st == MN_OK) {
        st = mn_task_require(task, v->length > 2 * longest, "length",
                             "it must exceed twice the longest key and value");
    }
    if (st == MN_OK) st = mn_task_own(task, sizeof(fuzzy));
    if (st != MN_OK) return st;
    fuzzy *f = task->own;
    f->n_keys = plain / 2;
    f->n_values = plain - f->n_keys;
    for (f->n_slots = 4; f->n_slots < v->length + 4;) f->n_slots *= 2;    // pairs have two tokens
    task->shape = (mn_task_shape){ .vocab = v->vocab, .classes = v->vocab, .length = v->length };
    st = mn_task_memory(&f->bindings, task, f->n_slots, sizeof *f->bindings);
    if (st == MN_OK) st = mn_task_memory(&f->x, task, v->length + 1, sizeof *f->x);
    if (st == MN_OK) st = mn_task_memory(&f->y, task, v->length + 1, sizeof *f->y);
    return st;
}

/* `size` distinct tokens of [first, first + n). */
static motif draw_motif(mn_draws *d, int64_t size, int64_t first, int64_t n) {
    motif m = { .size = (int)size };
    for (int i = 0; i < m.size;) {
        m.token[i] = (uint16_t)(first + mn_draw_below(d, n));
        bool fresh = true;
        for (int j = 0; j < i; j++) fresh = fresh && m.token[j] != m.token[i];
        i += fresh;
    }
    return m;
}

/* A number for each motif, sizes apart. */
static uint64_t code_of(const motif *m) {
    uint64_t code = 0;
    for (int i = 0; i < m->size; i++) code = code << 16 | (uint64_t)(m->token[i] + 1);
    return code;
}

/* The place of a key: its binding, or the free slot for it. */
static binding *find(const fuzzy *f, uint64_t key) {
    uint64_t at = (key * UINT64_C(0x9E3779B97F4A7C15)) >> 32;
    for (;; at++) {
        binding *b = &f->bindings[at & (uint64_t)(f->n_slots - 1)];
        if (b->key == key || b->key == 0) return b;
    }
}

static void put(fuzzy *f, const motif *m, bool asked) {
    for (int i = 0; i < m->size; i++, f->n++) {
        f->x[f->n] = m->token[i];
        f->y[f->n] = asked ? m->token[i] : MN_NO_TARGET;
    }
}

/* Everything in front of the final question. */
static void put_pairs(const mn_task *task, mn_sample_row *row, const motif *probe_key,
                      const motif *probe_value) {
    fuzzy *f = task->own;
    const mn_task_values *v = &task->values;
    const bool train = row->split == MN_SPLIT_TRAIN;
    const int64_t s = probe_key->size + probe_value->size;
    const int64_t place = mn_draw_below(&row->draws, v->length - 2 * s);
    const int64_t end = v->length - s - v->key_motif - v->value_motif;
    const uint64_t probe = code_of(probe_key);
    bool put_probe = false;
    while (f->n < end) {
        const bool now = !put_probe && f->n >= place;
        const int64_t size = train ? 1 + mn_draw_below(&row->draws, v->key_motif) : v->key_motif;
        const motif key = now ? *probe_key : draw_motif(&row->draws, size, 0, f->n_keys);
        binding *b = find(f, code_of(&key));
        const bool shown = b->shown;
        if (b->key == 0) {
            const int64_t length = 1 + mn_draw_below(&row->draws, v->value_motif);
            b->key = code_of(&key);
            b->value = b->key == probe ? *probe_value
                                       : draw_motif(&row->draws, length, f->n_keys, f->n_values);
        }
        b->shown = true;
        put_probe = put_probe || b->key == probe;
        put(f, &key, false);
        put(f, &b->value, shown && !now);
    }
}

static mn_status draw_fuzzy(mn_task *task, mn_sample_row *row) {
    fuzzy *f = task->own;
    const mn_task_values *v = &task->values;
    const bool train = row->split == MN_SPLIT_TRAIN;
    mn_draws *d = &row->draws;
    memset(f->bindings, 0, (size_t)f->n_slots * sizeof *f->bindings);
    f->n = 0;
    const int64_t a = train ? 1 + mn_draw_below(d, v->key_motif) : v->key_motif;
    const int64_t b = 1 + mn_draw_below(d, v->value_motif);
    const motif key = draw_motif(d, a, 0, f->n_keys);
    const motif value = draw_motif(d, b, f->n_keys, f->n_values);
    put_pairs(task, row, &key, &value);
    put(f, &key, false);
    put(f, &value, true);
    const int64_t pads = v->length + 1 - f->n;    // at least two
    for (int64_t t = 0; t < v->length; t++) {
        row->input[t] = t < pads ? (int32_t)(v->vocab - 1) : f->x[t - pads];
        if (train) row->target[t] = t + 1 < pads ? (int32_t)(v->vocab - 1) : f->x[t + 1 - pads];
        else if (t + 1 >= pads) row->target[t] = f->y[t + 1 - pads];
    }
    return MN_OK;
}

const mn_generator mn_generator_fuzzy = { .open = open_fuzzy, .draw = draw_fuzzy,
                                          .close = close_fuzzy };
