/* tokenizer_train.c - byte-level BPE: merge the most frequent pair of neighbours, again and again.
 *
 * Counts are kept up to date instead of taken anew: a merge visits only the words its pair occurs
 * in. The next pair comes from a heap by (count, then the smaller ids), whose entries may be out of
 * date: counts only fall behind an entry's back, and a pair whose count rises gets a new entry.
 * Ids: special tokens, the 256 bytes in the order of their characters, then merges. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "tokenizer/tokenizer_internal.h"
#include "tokenizer/words.h"
#include "base/utf8.h"

enum { MERGES_PER_REPORT = 64 };

/* Symbols of a word; they shrink in place. */
typedef struct chain {
    int32_t *ids;
    int32_t size;
    int64_t count;           // of the word in the texts
} chain;

typedef struct pair {
    uint64_t key;
    int64_t count;
    int32_t *where;          // chains it was seen in; some may have lost it
    int32_t n_where, where_capacity;
    int64_t risen_in;        // the merge that raised it last
} pair;

typedef struct candidate {
    int64_t count;
    uint64_t key;
    int32_t at;              // in pairs
} candidate;

typedef struct trainer {
    chain *chains;
    int64_t n_chains;
    int32_t *symbols;        // memory of all chains
    pair *pairs;
    int64_t n_pairs, pairs_capacity;
    int32_t *slots;          // indices of pairs by key; -1: empty
    size_t mask;
    candidate *heap;
    int64_t n_heap, heap_capacity;
    int32_t *risen;          // pairs that the current merge has raised
    int64_t n_risen, risen_capacity;
    mn_vocab vocab;          // tokens so far
    int64_t n_tokens;
    int32_t (*merges)[2];
    int64_t n_merges, merges_capacity;
} trainer;

static mn_status no_memory(void) {
    return mn_fail(MN_ERR_MEMORY, "no memory to train a tokenizer");
}

/* Room for one more element of `size` bytes in an array that doubles. */
static mn_status make_room(void *array, int64_t count, int64_t *capacity, size_t size) {
    if (count < *capacity) return MN_OK;
    void *old;
    memcpy(&old, array, sizeof old);
    const int64_t wanted = *capacity > 0 ? 2 * *capacity : 256;
    void *bytes = realloc(old, (size_t)wanted * size);
    if (!bytes) return no_memory();
    memcpy(array, &bytes, sizeof bytes);
    *capacity = wanted;
    return MN_OK;
}

/* ---- heap of candidates ---------------------------------------------------------------------- */

static bool goes_first(const candidate *a, const candidate *b) {
    return a->count != b->count ? a->count > b->count : a->key < b->key;
}

static mn_status push(trainer *t, int32_t at) {
    const mn_status st = make_room(&t->heap, t->n_heap, &t->heap_capacity, sizeof *t->heap);
    if (st != MN_OK) return st;
    const candidate fresh = { t->pairs[at].count, t->pairs[at].key, at };
    int64_t i = t->n_heap++;
    for (; i > 0 && goes_first(&fresh, &t->heap[(i - 1) / 2]); i = (i - 1) / 2) {
        t->heap[i] = t->heap[(i - 1) / 2];
    }
    t->heap[i] = fresh;
    return MN_OK;
}

static candidate pop(trainer *t) {
    const candidate top = t->heap[0], last = t->heap[--t->n_heap];
    int64_t i = 0;
    for (int64_t child; (child = 2 * i + 1) < t->n_heap; i = child) {
        if (child + 1 < t->n_heap && goes_first(&t->heap[child + 1], &t->heap[child])) child++;
        if (!goes_first(&t->heap[child], &last)) break;
        t->heap[i] = t->heap[child];
    }
    t->heap[i] = last;
    return top;
}

/* ---- pairs ----------------------------------------------------------------------------------- */

static size_t slot_of(const trainer *t, uint64_t key) {
    size_t at = (size_t)(((key ^ key >> 29) * 0x9E3779B97F4A7C15u) >> 32) & t->mask;
    while (t->slots[at] >= 0 && t->pairs[t->slots[at]].key != key) at = (at + 1) & t->mask;
    return at;
}

static mn_status grow_slots(trainer *t) {
    const size_t slots = t->slots ? 2 * (t->mask + 1) : 1 << 12;
    int32_t *fresh = malloc(slots * sizeof *fresh);
    if (!fresh || t->n_pairs >= INT32_MAX / 2) {
        free(fresh);
        return no_memory();
    }
    for (size_t i = 0; i < slots; i++) fresh[i] = -1;
    free(t->slots);
    t->slots = fresh;
    t->mask = slots - 1;
    for (int64_t i = 0; i < t->n_pairs; i++) t->slots[slot_of(t, t->pairs[i].key)] = (int32_t)i;
    return MN_OK;
}

/* Adds `change` to the count of the pair (a, b), seen in chain `where`. */
static mn_status change_pair(trainer *t, int32_t a, int32_t b, int64_t change, int32_t where) {
    mn_status st = MN_OK;
    if (!t->slots || 2 * (size_t)t->n_pairs > t->mask) st = grow_slots(t);
    if (st == MN_OK) st = make_room(&t->pairs, t->n_pairs, &t->pairs_capacity, sizeof *t->pairs);
    if (st != MN_OK) return st;
    const uint64_t key = mn_pair_key(a, b);
    const size_t slot = slot_of(t, key);
    if (t->slots[slot] < 0) {
        t->slots[slot] = (int32_t)t->n_pairs;
        t->pairs[t->n_pairs++] = (pair){ .key = key };
    }
    const int32_t at = t->slots[slot];
    pair *p = &t->pairs[at];
    p->count += change;
    if (change < 0) return MN_OK;
    if (p->n_where == 0 || p->where[p->n_where - 1] != where) {
        int64_t capacity = p->where_capacity;
        st = make_room(&p->where, p->n_where, &capacity, sizeof *p->where);
        p->where_capacity = (int32_t)capacity;
        if (st == MN_OK) p->where[p->n_where++] = where;
    }
    if (st != MN_OK || p->risen_in == t->n_merges) return st;
    p->risen_in = t->n_merges;
    st = make_room(&t->risen, t->n_risen, &t->risen_capacity, sizeof *t->risen);
    if (st == MN_OK) t->risen[t->n_risen++] = at;
    return st;
}

/* A new candidate for each pair that has risen. */
static mn_status push_risen(trainer *t) {
    mn_status st = MN_OK;
    for (int64_t i = 0; i < t->n_risen && st == MN_OK; i++) {
        if (t->pairs[t->risen[i]].count > 0) st = push(t, t->risen[i]);
    }
    t->n_risen = 0;
    return st;
}

/* ---- tokens and words ------------------------------------------------------------------------ */

static mn_status add_token(trainer *t, const char *text, size_t size, int32_t *id) {
    *id = mn_id_map_find(&t->vocab.by_text, t->vocab.tokens, text, size);
    if (*id >= 0) return MN_OK;
    *id = (int32_t)t->n_tokens++;
    mn_token *token = &t->vocab.tokens[*id];
    token->text = (mn_span){ mn_vocab_copy(&t->vocab, text, size), size };
    if (!token->text.bytes) return no_memory();
    mn_id_map_add(&t->vocab.by_text, t->vocab.tokens, *id);
    return MN_OK;
}

/* Special tokens and bytes. */
static mn_status start_vocab(trainer *t, const mn_tokenizer_training *how, int32_t byte_id[256]) {
    int64_t n_special = 0;
    while (how->special && how->special[n_special]) n_special++;
    if (how->vocab_size < 256 + n_special || how->vocab_size > MN_TOKEN_IDS_MAX) {
        return mn_fail(MN_ERR_ARGUMENT, "vocabulary size %" PRId64 " is not between %" PRId64
                       " (256 bytes and the special tokens) and %d", how->vocab_size,
                       256 + n_special, MN_TOKEN_IDS_MAX);
    }
    t->vocab.tokens = calloc((size_t)how->vocab_size, sizeof *t->vocab.tokens);
    t->vocab.size = how->vocab_size;
    if (!t->vocab.tokens) return no_memory();
    mn_status st = mn_id_map_make(&t->vocab.by_text, how->vocab_size, false);
    int32_t id;
    for (int64_t i = 0; i < n_special && st == MN_OK; i++) {
        const char *text = how->special[i];
        st = add_token(t, text, strlen(text), &id);
        if (st == MN_OK && (id != i || !*text)) {
            st = mn_fail(MN_ERR_ARGUMENT, "special token \"%s\" is given twice or empty", text);
        }
    }
    for (uint32_t point = 0; point < 0x200 && st == MN_OK; point++) {
        char bytes[4];
        const int byte = mn_char_byte(point);
        if (byte < 0) continue;
        const int64_t before = t->n_tokens;
        st = add_token(t, bytes, (size_t)mn_utf8_put(bytes, point), &byte_id[byte]);
        if (st == MN_OK && t->n_tokens == before) {
            st = mn_fail(MN_ERR_ARGUMENT, "special token \"%.*s\" is a byte; choose a longer one",
                         mn_utf8_put(bytes, point), bytes);
        }
    }
    return st;
}

static mn_status start_chains(trainer *t, const mn_words *words, const int32_t byte_id[256]) {
    size_t n_symbols = 0;
    for (int64_t i = 0; i < words->count; i++) n_symbols += words->rows[i].text.size;
    t->chains = malloc(((size_t)words->count + 1) * sizeof *t->chains);
    t->symbols = malloc((n_symbols + 1) * sizeof *t->symbols);
    if (!t->chains || !t->symbols) return no_memory();
    if (words->count > INT32_MAX) {
        return mn_fail(MN_ERR_ARGUMENT, "the texts have too many distinct pieces");
    }
    mn_status st = MN_OK;
    int32_t *ids = t->symbols;
    for (int64_t i = 0; i < words->count && st == MN_OK; i++) {
        const mn_word *word = &words->rows[i];
        if (word->text.size > INT32_MAX) {
            return mn_fail(MN_ERR_ARGUMENT, "a piece of %zu bytes is too long", word->text.size);
        }
        t->chains[i] = (chain){ ids, (int32_t)word->text.size, word->count };
        for (size_t k = 0; k < word->text.size; k++) ids[k] = byte_id[(uint8_t)word->text.bytes[k]];
        for (size_t k = 1; k < word->text.size && st == MN_OK; k++) {
            st = change_pair(t, ids[k - 1], ids[k], word->count, (int32_t)i);
        }
        ids += word->text.size;
        t->n_chains++;
    }
    t->n_risen = 0;
    for (int64_t i = 0; i < t->n_pairs && st == MN_OK; i++) st = push(t, (int32_t)i);
    return st;
}

/* Writes `id` for each (a, b) in chain `where`, from the left. */
static mn_status merge_chain(trainer *t, int32_t where, int32_t a, int32_t b, int32_t id) {
    chain *c = &t->chains[where];
    int32_t n = 0;
    mn_status st = MN_OK;
    for (int32_t i = 0; i < c->size && st == MN_OK; i++) {
        if (i + 1 >= c->size || c->ids[i] != a || c->ids[i + 1] != b) {
            c->ids[n++] = c->ids[i];
            continue;
        }
        if (n > 0) {
            st = change_pair(t, c->ids[n - 1], a, -c->count, where);
            if (st == MN_OK) st = change_pair(t, c->ids[n - 1], id, c->count, where);
        }
        if (i + 2 < c->size && st == MN_OK) {
            st = change_pair(t, b, c->ids[i + 2], -c->count, where);
            if (st == MN_OK) st = change_pair(t, id, c->ids[i + 2], c->count, where);
        }
        c->ids[n++] = id;
        i++;
    }
    c->size = n;
    return st;
}

static mn_status merge(trainer *t, int32_t at, mn_text *both) {
    const int32_t a = (int32_t)(t->pairs[at].key >> 32), b = (int32_t)(uint32_t)t->pairs[at].key;
    const mn_span left = t->vocab.tokens[a].text, right = t->vocab.tokens[b].text;
    int32_t id;
    both->size = 0;
    mn_status st = mn_text_add(both, left.bytes, left.size);
    if (st == MN_OK) st = mn_text_add(both, right.bytes, right.size);
    if (st == MN_OK) st = add_token(t, both->bytes, both->size, &id);
    if (st == MN_OK) {
        st = make_room(&t->merges, t->n_merges, &t->merges_capacity, sizeof *t->merges);
    }
    if (st != MN_OK) return st;
    t->merges[t->n_merges][0] = a;
    t->merges[t->n_merges++][1] = b;
    for (int32_t i = 0; i < t->pairs[at].n_where && st == MN_OK; i++) {
        st = merge_chain(t, t->pairs[at].where[i], a, b, id);
    }
    t->pairs[at].count = 0;                        // merged everywhere
    free(t->pairs[at].where);
    t->pairs[at].where = NULL;
    t->pairs[at].n_where = t->pairs[at].where_capacity = 0;
    return st == MN_OK ? push_risen(t) : st;
}

static mn_status merge_all(trainer *t, const mn_tokenizer_training *how) {
    const int64_t least = how->min_count > 0 ? how->min_count : 2, start = t->n_tokens;
    mn_text both = { 0 };
    mn_status st = MN_OK;
    while (t->n_tokens < how->vocab_size && t->n_heap > 0 && st == MN_OK) {
        const candidate top = pop(t);
        const int64_t count = t->pairs[top.at].count;
        if (top.count != count) {                  // out of date
            if (count > 0 && count < top.count) st = push(t, top.at);
            continue;
        }
        if (count < least) break;
        st = merge(t, top.at, &both);
        if (st == MN_OK && how->progress && t->n_merges % MERGES_PER_REPORT == 0 &&
            !how->progress(how->context, t->n_tokens - start, how->vocab_size - start)) {
            st = mn_fail(MN_ERR_ARGUMENT, "training was stopped");
        }
    }
    if (st == MN_OK && how->progress) {
        how->progress(how->context, how->vocab_size - start, how->vocab_size - start);
    }
    mn_text_free(&both);
    return st;
}

static mn_status assemble(mn_tokenizer **out, const trainer *t, const mn_tokenizer_training *how,
                          const mn_training_pattern *pattern) {
    int64_t n_special = 0;
    while (how->special && how->special[n_special]) n_special++;
    mn_span *texts = malloc((size_t)t->n_tokens * sizeof *texts);
    if (!texts) return no_memory();
    for (int64_t i = 0; i < t->n_tokens; i++) texts[i] = t->vocab.tokens[i].text;
    const mn_status st = mn_tokenizer_assemble(out, texts, t->n_tokens, n_special,
                                               (const int32_t (*)[2])t->merges, t->n_merges,
                                               pattern);
    free(texts);
    return st;
}

static void free_trainer(trainer *t) {
    for (int64_t i = 0; i < t->n_pairs; i++) free(t->pairs[i].where);
    free(t->chains);
    free(t->symbols);
    free(t->pairs);
    free(t->slots);
    free(t->heap);
    free(t->risen);
    free(t->merges);
    mn_vocab_free(&t->vocab);
}

mn_status mn_tokenizer_train(mn_tokenizer **out, const mn_tokenizer_training *how,
                             const char *const *texts, const size_t *sizes, int64_t n_texts) {
    trainer t = { 0 };
    mn_words words = { 0 };
    int32_t byte_id[256];
    *out = NULL;
    const mn_training_pattern *pattern = mn_training_pattern_find(how->pattern);
    if (!pattern) return MN_ERR_ARGUMENT;
    mn_status st = start_vocab(&t, how, byte_id);
    for (int64_t i = 0; i < n_texts && st == MN_OK; i++) {
        st = mn_words_count(&words, how, pattern, (mn_span){ texts[i], sizes[i] });
    }
    if (st == MN_OK) st = start_chains(&t, &words, byte_id);
    if (st == MN_OK) st = merge_all(&t, how);
    if (st == MN_OK) st = assemble(out, &t, how, pattern);
    mn_words_free(&words);
    free_trainer(&t);
    return st;
}
