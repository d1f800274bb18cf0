/* split.c - the "pre_tokenizer" of a tokenizer.json: text to pieces.
 *
 * Each stage takes one piece of the stage before: it may write another character for blanks, put
 * one in front, cut the piece by a pattern, and spell bytes as characters. Pieces are handed on as
 * they are found, so a text of any length needs no list of them. Reading is in
 * split_read.c. */
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "tokenizer/tokenizer_internal.h"
#include "base/utf8.h"

static mn_status run_stage(mn_split_visit *walk, int64_t at, mn_span piece, bool first);

/* Ranges of one piece on their way out: a behaviour joins some with the one before. */
typedef struct ranges {
    mn_split_visit *walk;
    int64_t stage;
    mn_span text;
    size_t start, end;       // the range held back
    bool held, held_matches;
    bool first;              // nothing has been handed out, and the text starts with this piece
} ranges;

/* To the next stage; a piece that spells bytes passes through a text of this stage's own. */
static mn_status hand_out(ranges *r, size_t start, size_t end) {
    if (start == end) return MN_OK;
    mn_split_visit *walk = r->walk;
    const bool first = r->first && start == 0;
    mn_span piece = { r->text.bytes + start, end - start };
    if (!walk->splitter->stages[r->stage].spell) {
        return run_stage(walk, r->stage + 1, piece, first);
    }
    mn_text *spelt = &walk->texts[2 * r->stage + 1];
    spelt->size = 0;
    const mn_status st = mn_bytes_spell(spelt, piece.bytes, piece.size);
    if (st != MN_OK) return st;
    piece = (mn_span){ spelt->bytes, spelt->size };
    return run_stage(walk, r->stage + 1, piece, first);
}

static mn_status flush(ranges *r) {
    if (!r->held) return MN_OK;
    r->held = false;
    return hand_out(r, r->start, r->end);
}

/* Takes the range [start, end): a match, or what lies between matches. */
static mn_status take_range(ranges *r, size_t start, size_t end, bool matches) {
    const mn_split_stage *stage = &r->walk->splitter->stages[r->stage];
    bool join = false;
    matches ^= stage->invert;
    switch (stage->behaviour) {
    case MN_SPLIT_REMOVED: return matches ? MN_OK : hand_out(r, start, end);
    case MN_SPLIT_ISOLATED: return hand_out(r, start, end);
    case MN_SPLIT_PREVIOUS: join = matches && !r->held_matches; break;
    case MN_SPLIT_NEXT: join = !matches && r->held_matches; break;
    case MN_SPLIT_CONTIGUOUS: join = matches == r->held_matches; break;
    }
    r->held_matches = matches;
    if (join && r->held) {
        r->end = end;
        return MN_OK;
    }
    const mn_status st = flush(r);
    r->start = start;
    r->end = end;
    r->held = true;
    return st;
}

static mn_status cut(ranges *r) {
    mn_matcher *matcher = &r->walk->matchers[r->stage];
    const char *text = r->text.bytes;
    const size_t size = r->text.size;
    size_t done = 0, from = 0;
    bool any = false;
    mn_status st = MN_OK;
    while (from <= size) {
        size_t start, end;
        bool found;
        st = mn_matcher_find(matcher, text, size, from, &start, &end, &found);
        if (st != MN_OK || !found) break;
        const bool empty = start == end;
        if (!(empty && any && start == done)) {    // an empty match right behind one is none
            if (start > done) st = take_range(r, done, start, false);
            if (st == MN_OK) st = take_range(r, start, end, true);
            if (st != MN_OK) break;
            done = end;
            any = true;
        }
        from = end;
        if (!empty) continue;
        uint32_t point;
        from += from < size ? (size_t)mn_utf8_take(text + from, size - from, &point) : 1;
    }
    if (st == MN_OK && done < size) st = take_range(r, done, size, false);
    return st == MN_OK ? flush(r) : st;
}

/* Whether `text` starts with the character that would be put in front. */
static bool has_prefix(mn_span text, const char *prefix) {
    const size_t n = strlen(prefix);
    return text.size >= n && memcmp(text.bytes, prefix, n) == 0;
}

/* The piece with other blanks and a prefix. */
static mn_status rewrite(mn_text *out, const mn_split_stage *stage, mn_span piece, bool first) {
    const char *blank = stage->spaces ? stage->spaces : " ";
    const size_t n = strlen(blank);
    mn_span start = piece;
    if (stage->spaces && piece.bytes[0] == ' ') start = (mn_span){ blank, n };
    const bool wanted = stage->prefix == MN_PREFIX_ALWAYS ||
                        (stage->prefix == MN_PREFIX_FIRST && first);
    mn_status st = MN_OK;
    out->size = 0;
    if (wanted && !has_prefix(start, blank)) st = mn_text_add(out, blank, n);
    for (size_t at = 0; at < piece.size && st == MN_OK;) {
        const char *space = stage->spaces ? memchr(piece.bytes + at, ' ', piece.size - at) : NULL;
        const size_t end = space ? (size_t)(space - piece.bytes) : piece.size;
        st = mn_text_add(out, piece.bytes + at, end - at);
        if (space && st == MN_OK) st = mn_text_add(out, blank, n);
        at = end + (space ? 1 : 0);
    }
    return st;
}

static mn_status run_stage(mn_split_visit *walk, int64_t at, mn_span piece, bool first) {
    const mn_splitter *splitter = walk->splitter;
    if (at == splitter->count) return walk->use(walk->context, piece.bytes, piece.size);
    const mn_split_stage *stage = &splitter->stages[at];
    if (stage->spaces || stage->prefix != MN_PREFIX_NEVER) {
        mn_text *text = &walk->texts[2 * at];
        const mn_status st = rewrite(text, stage, piece, first);
        if (st != MN_OK) return st;
        piece = (mn_span){ text->bytes, text->size };
    }
    ranges r = { .walk = walk, .stage = at, .text = piece, .first = first };
    return stage->cut ? cut(&r) : hand_out(&r, 0, piece.size);
}

mn_status mn_split(mn_split_visit *walk, mn_span text, bool first) {
    return text.size > 0 ? run_stage(walk, 0, text, first) : MN_OK;
}

mn_status mn_split_visit_open(mn_split_visit *walk, const mn_splitter *splitter) {
    const size_t count = (size_t)splitter->count + 1;
    walk->splitter = splitter;
    walk->matchers = calloc(count, sizeof *walk->matchers);
    walk->texts = calloc(2 * count, sizeof *walk->texts);
    if (!walk->matchers || !walk->texts) return mn_fail(MN_ERR_MEMORY, "no memory to split text");
    for (int64_t i = 0; i < splitter->count; i++) {
        walk->matchers[i].pattern = &splitter->stages[i].pattern;
    }
    return MN_OK;
}

void mn_split_visit_close(mn_split_visit *walk) {
    for (int64_t i = 0; walk->splitter && i < walk->splitter->count; i++) {
        if (walk->matchers) mn_matcher_free(&walk->matchers[i]);
        if (walk->texts) mn_text_free(&walk->texts[2 * i]);
        if (walk->texts) mn_text_free(&walk->texts[2 * i + 1]);
    }
    free(walk->matchers);
    free(walk->texts);
    *walk = (mn_split_visit){ 0 };
}
