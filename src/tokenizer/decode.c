/* decode.c - tokens back to text: the steps of "decoder" in a tokenizer.json.
 *
 * Tokens start as one piece each, spelt as in the vocabulary; each step rewrites the list. The rows
 * of decoders.def name the types; "Sequence" is flattened while reading. Token by token
 * (streaming) the same steps run on a list of one: bytes stay bytes until they make a character,
 * and what a step does to the start of the text it does to the first token only. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "tokenizer/tokenizer_internal.h"
#include "base/utf8.h"

/* ---- pieces ---------------------------------------------------------------------------------- */

/* Ends a piece where the text ends now. */
static mn_status end_piece(mn_pieces *out) {
    if (out->count == out->capacity) {
        const int64_t capacity = out->capacity > 0 ? 2 * out->capacity : 16;
        size_t *ends = realloc(out->ends, (size_t)capacity * sizeof *ends);
        if (!ends) return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " pieces", capacity);
        out->ends = ends;
        out->capacity = capacity;
    }
    out->ends[out->count++] = out->text.size;
    return MN_OK;
}

static mn_status add_piece(mn_pieces *out, const char *bytes, size_t size) {
    const mn_status st = mn_text_add(&out->text, bytes, size);
    return st == MN_OK ? end_piece(out) : st;
}

static mn_span piece_at(const mn_pieces *in, int64_t i) {
    const size_t start = i > 0 ? in->ends[i - 1] : 0;
    return (mn_span){ in->text.bytes + start, in->ends[i] - start };
}

static void free_pieces(mn_pieces *pieces) {
    mn_text_free(&pieces->text);
    free(pieces->ends);
}

/* ---- what the steps do ----------------------------------------------------------------------- */

static mn_status apply_bytes(mn_pieces *out, const mn_decode_step *step, const mn_pieces *in,
                             bool first, bool streaming) {
    mn_status st = MN_OK;
    (void)step, (void)first, (void)streaming;
    for (int64_t i = 0; i < in->count && st == MN_OK; i++) {
        const mn_span piece = piece_at(in, i);
        bool all;
        st = mn_bytes_unspell(&out->text, &all, piece.bytes, piece.size);
        if (st == MN_OK && !all) st = mn_text_add(&out->text, piece.bytes, piece.size);
    }
    return st == MN_OK ? end_piece(out) : st;
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The byte of "<0x0A>", -1 for any other piece. */
static int byte_of(mn_span piece) {
    if (piece.size != 6 || memcmp(piece.bytes, "<0x", 3) != 0 || piece.bytes[5] != '>') return -1;
    const int high = hex_digit(piece.bytes[3]), low = hex_digit(piece.bytes[4]);
    return high < 0 || low < 0 ? -1 : high * 16 + low;
}

/* Runs of byte tokens become their text; a run that is no text, one U+FFFD per byte. */
static mn_status apply_fallback(mn_pieces *out, const mn_decode_step *step, const mn_pieces *in,
                                bool first, bool streaming) {
    mn_status st = MN_OK;
    (void)step, (void)first;
    for (int64_t i = 0; i < in->count && st == MN_OK;) {
        const size_t start = out->text.size;
        int64_t end = i;
        for (int byte; end < in->count && (byte = byte_of(piece_at(in, end))) >= 0; end++) {
            const char one = (char)byte;
            st = mn_text_add(&out->text, &one, 1);
            if (st != MN_OK) return st;
        }
        const size_t run = out->text.size - start;
        if (end == i) {
            const mn_span piece = piece_at(in, i++);
            st = add_piece(out, piece.bytes, piece.size);
            continue;
        }
        if (!streaming && mn_utf8_valid(out->text.bytes + start, run) < run) {
            out->text.size = start;
            for (; i < end && st == MN_OK; i++) st = add_piece(out, MN_UTF8_REPLACEMENT, 3);
            continue;
        }
        i = end;
        st = end_piece(out);
    }
    return st;
}

static mn_status apply_fuse(mn_pieces *out, const mn_decode_step *step, const mn_pieces *in,
                            bool first, bool streaming) {
    (void)step, (void)first, (void)streaming;
    return add_piece(out, in->text.bytes, in->text.size);
}

static mn_status apply_strip(mn_pieces *out, const mn_decode_step *step, const mn_pieces *in,
                             bool first, bool streaming) {
    const size_t n = strlen(step->content);
    const bool partial = streaming && step->fused;
    mn_status st = MN_OK;
    for (int64_t i = 0; i < in->count && st == MN_OK; i++) {
        mn_span piece = piece_at(in, i);
        const int64_t start = partial && !first ? 0 : step->start, stop = partial ? 0 : step->stop;
        for (int64_t k = 0; k < start && piece.size >= n; k++) {
            if (memcmp(piece.bytes, step->content, n) != 0) break;
            piece.bytes += n;
            piece.size -= n;
        }
        for (int64_t k = 0; k < stop && piece.size >= n; k++) {
            if (memcmp(piece.bytes + piece.size - n, step->content, n) != 0) break;
            piece.size -= n;
        }
        st = add_piece(out, piece.bytes, piece.size);
    }
    return st;
}

static mn_status apply_replace(mn_pieces *out, const mn_decode_step *step, const mn_pieces *in,
                               bool first, bool streaming) {
    mn_status st = MN_OK;
    (void)first, (void)streaming;
    for (int64_t i = 0; i < in->count && st == MN_OK; i++) {
        const mn_span piece = piece_at(in, i);
        st = mn_pattern_replace(&out->text, &step->pattern, step->content, piece.bytes, piece.size);
        if (st == MN_OK) st = end_piece(out);
    }
    return st;
}

/* The replacement character becomes a blank again; in the first piece, nothing. */
static mn_status apply_metaspace(mn_pieces *out, const mn_decode_step *step, const mn_pieces *in,
                                 bool first, bool streaming) {
    mn_status st = MN_OK;
    (void)streaming;
    for (int64_t i = 0; i < in->count && st == MN_OK; i++) {
        const mn_span piece = piece_at(in, i);
        const char *blank = first && i == 0 && !step->keep_first ? "" : " ";
        st = mn_pattern_replace(&out->text, &step->pattern, blank, piece.bytes, piece.size);
        if (st == MN_OK) st = end_piece(out);
    }
    return st;
}

/* Copies it without the blanks that clean-up takes out, before punctuation and contractions. */
static mn_status add_clean(mn_text *out, mn_span piece) {
    static const struct {
        const char *from, *to;
    } rules[] = {
        { " .", "." }, { " ?", "?" }, { " !", "!" }, { " ,", "," }, { " ' ", "'" },
        { " n't", "n't" }, { " 'm", "'m" }, { " do not", " don't" }, { " 's", "'s" },
        { " 've", "'ve" }, { " 're", "'re" },
    };
    mn_text now = { 0 }, next = { 0 };
    mn_status st = mn_text_add(&now, piece.bytes, piece.size);
    for (size_t r = 0; r < MN_COUNTOF(rules) && st == MN_OK; r++) {
        const size_t n = strlen(rules[r].from);
        next.size = 0;
        for (size_t at = 0; at < now.size && st == MN_OK;) {
            const bool found = now.size - at >= n && memcmp(now.bytes + at, rules[r].from, n) == 0;
            st = found ? mn_text_add(&next, rules[r].to, strlen(rules[r].to))
                       : mn_text_add(&next, now.bytes + at, 1);
            at += found ? n : 1;
        }
        const mn_text swap = now;
        now = next;
        next = swap;
    }
    if (st == MN_OK && now.size > 0) st = mn_text_add(out, now.bytes, now.size);
    mn_text_free(&now);
    mn_text_free(&next);
    return st;
}

/* "##ing" continues the word before it, anything else begins one. */
static mn_status apply_wordpiece(mn_pieces *out, const mn_decode_step *step, const mn_pieces *in,
                                 bool first, bool streaming) {
    const size_t n = strlen(step->content);
    mn_text word = { 0 };
    mn_status st = MN_OK;
    (void)streaming;
    for (int64_t i = 0; i < in->count && st == MN_OK; i++) {
        mn_span piece = piece_at(in, i);
        word.size = 0;
        st = mn_text_reserve(&word, 1);
        if (!(first && i == 0)) {
            const bool inside = piece.size >= n && memcmp(piece.bytes, step->content, n) == 0;
            if (inside) piece = (mn_span){ piece.bytes + n, piece.size - n };
            else if (st == MN_OK) st = mn_text_add(&word, " ", 1);
        }
        if (st == MN_OK) st = mn_text_add(&word, piece.bytes, piece.size);
        const mn_span whole = { word.bytes, word.size };
        if (st == MN_OK) {
            st = step->cleanup ? add_clean(&out->text, whole)
                               : mn_text_add(&out->text, whole.bytes, whole.size);
        }
        if (st == MN_OK) st = end_piece(out);
    }
    mn_text_free(&word);
    return st;
}

/* ---- reading --------------------------------------------------------------------------------- */

static mn_status copy_text(char **out, const mn_json *at, const char *key) {
    const char *text = NULL;
    const mn_status st = mn_json_get_text(&text, at, key);
    if (st != MN_OK) return st;
    *out = strdup(text);
    return *out ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a decoder");
}

static mn_status read_bytes(mn_decode_step *step, const mn_json *at) {
    (void)step, (void)at;
    return MN_OK;
}

static mn_status read_fallback(mn_decode_step *step, const mn_json *at) {
    (void)step, (void)at;
    return MN_OK;
}

static mn_status read_fuse(mn_decode_step *step, const mn_json *at) {
    (void)step, (void)at;
    return MN_OK;
}

static mn_status read_strip(mn_decode_step *step, const mn_json *at) {
    mn_status st = copy_text(&step->content, at, "content");
    if (st == MN_OK) st = mn_json_get_i64(&step->start, at, "start");
    if (st == MN_OK) st = mn_json_get_i64(&step->stop, at, "stop");
    if (st == MN_OK && !*step->content) st = mn_json_fail(at, "content is empty");
    return st;
}

static mn_status read_replace(mn_decode_step *step, const mn_json *at) {
    const mn_json pattern = mn_json_member(at, "pattern");
    const mn_status st = mn_pattern_read(&step->pattern, &pattern);
    return st == MN_OK ? copy_text(&step->content, at, "content") : st;
}

static mn_status read_metaspace(mn_decode_step *step, const mn_json *at) {
    const char *replacement = "\xE2\x96\x81", *scheme = NULL;
    bool prefix = true;
    mn_status st = mn_json_opt_text(&replacement, at, "replacement");
    if (st == MN_OK) st = mn_json_opt_text(&scheme, at, "prepend_scheme");
    if (st == MN_OK) st = mn_json_opt_bool(&prefix, at, "add_prefix_space");
    step->keep_first = scheme ? strcmp(scheme, "never") == 0 : !prefix;
    return st == MN_OK ? mn_pattern_literal(&step->pattern, replacement) : st;
}

static mn_status read_wordpiece(mn_decode_step *step, const mn_json *at) {
    const char *prefix = "##";
    step->cleanup = true;
    mn_status st = mn_json_opt_text(&prefix, at, "prefix");
    if (st == MN_OK) st = mn_json_opt_bool(&step->cleanup, at, "cleanup");
    if (st == MN_OK) step->content = strdup(prefix);
    if (st != MN_OK) return st;
    return step->content ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a decoder");
}

static const struct {
    const char *type;
    mn_status (*read)(mn_decode_step *step, const mn_json *at);
    mn_status (*apply)(mn_pieces *out, const mn_decode_step *step, const mn_pieces *in, bool first,
                       bool streaming);
    bool fuses;
} kinds[] = {
#define DECODER(type, what, fuses) { #type, read_##what, apply_##what, fuses },
#include "tokenizer/decoders.def"
#undef DECODER
};

static bool is_fused(const mn_decoder *decoder) {
    for (int64_t i = 0; i < decoder->count; i++) {
        for (size_t k = 0; k < MN_COUNTOF(kinds); k++) {
            if (kinds[k].fuses && kinds[k].apply == decoder->steps[i].apply) return true;
        }
    }
    return false;
}

static mn_status read_step(mn_decoder *out, const mn_json *at, const char *type) {
    size_t kind = 0;
    while (kind < MN_COUNTOF(kinds) && strcmp(kinds[kind].type, type) != 0) kind++;
    if (kind == MN_COUNTOF(kinds)) {
        return mn_unknown_type(at, "decoder", type, &kinds[0].type, MN_COUNTOF(kinds),
                               sizeof kinds[0]);
    }
    mn_decode_step *steps = realloc(out->steps, (size_t)(out->count + 1) * sizeof *steps);
    if (!steps) return mn_fail(MN_ERR_MEMORY, "no memory for a decoder");
    out->steps = steps;
    const bool fused = is_fused(out);
    mn_decode_step *step = &steps[out->count++];
    *step = (mn_decode_step){ .apply = kinds[kind].apply, .fused = fused };
    return kinds[kind].read(step, at);
}

static mn_status read_steps(mn_decoder *out, const mn_json *at) {
    const char *type = NULL;
    mn_status st = mn_json_get_text(&type, at, "type");
    if (st != MN_OK) return st;
    if (strcmp(type, "Sequence") != 0) return read_step(out, at, type);
    const mn_json list = mn_json_member(at, "decoders");
    st = mn_json_expect_list(&list);
    for (int64_t i = 0; i < mn_json_count(&list) && st == MN_OK; i++) {
        const mn_json item = mn_json_item(&list, i);
        st = read_steps(out, &item);
    }
    return st;
}

mn_status mn_decoder_read(mn_decoder *out, const mn_json *at) {
    out->joins_by_blank = !mn_json_given(at);
    return out->joins_by_blank ? MN_OK : read_steps(out, at);
}

void mn_decoder_free(mn_decoder *decoder) {
    for (int64_t i = 0; i < decoder->count; i++) {
        mn_pattern_free(&decoder->steps[i].pattern);
        free(decoder->steps[i].content);
    }
    free(decoder->steps);
    *decoder = (mn_decoder){ 0 };
}

/* ---- decoding -------------------------------------------------------------------------------- */

static mn_status check_id(const mn_tokenizer *t, int32_t id) {
    if (id >= 0 && id < t->vocab.size && t->vocab.tokens[id].text.bytes) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "token %d is not in the vocabulary; ids are below %" PRId64,
                   (int)id, t->vocab.size);
}

/* Runs the steps over `pieces`, with `spare` as the other hand; the result is in `*pieces`. */
static mn_status run_steps(const mn_decoder *decoder, mn_pieces *pieces, mn_pieces *spare,
                           bool first, bool streaming) {
    mn_status st = MN_OK;
    for (int64_t i = 0; i < decoder->count && st == MN_OK; i++) {
        spare->text.size = 0;
        spare->count = 0;
        st = mn_text_reserve(&spare->text, 1);
        const mn_decode_step *step = &decoder->steps[i];
        if (st == MN_OK) st = step->apply(spare, step, pieces, first, streaming);
        const mn_pieces swap = *pieces;
        *pieces = *spare;
        *spare = swap;
    }
    return st;
}

mn_status mn_tokenizer_decode(const mn_tokenizer *t, const int32_t *ids, int64_t count,
                              bool special, char **text, size_t *size) {
    mn_pieces pieces = { 0 }, spare = { 0 };
    if (text) *text = NULL;
    if (!text || !size || !t || count < 0 || (count > 0 && !ids)) {
        return mn_fail(MN_ERR_ARGUMENT,
                       "mn_tokenizer_decode: an argument is NULL, or count is negative");
    }
    *size = 0;
    mn_status st = mn_text_reserve(&pieces.text, 1);
    for (int64_t i = 0; i < count && st == MN_OK; i++) {
        st = check_id(t, ids[i]);
        if (st != MN_OK) break;
        const mn_token *token = &t->vocab.tokens[ids[i]];
        if (!special && (token->flags & MN_TOKEN_SPECIAL)) continue;
        if (t->decoder.joins_by_blank && pieces.count > 0) st = mn_text_add(&pieces.text, " ", 1);
        if (st == MN_OK) st = add_piece(&pieces, token->text.bytes, token->text.size);
    }
    if (st == MN_OK) st = run_steps(&t->decoder, &pieces, &spare, true, false);
    if (st == MN_OK) st = mn_text_add(&pieces.text, "", 1);
    if (st == MN_OK) {
        *text = pieces.text.bytes;
        *size = pieces.text.size - 1;
        pieces.text.bytes = NULL;
    }
    free_pieces(&pieces);
    free_pieces(&spare);
    return st;
}

/* ---- streaming ------------------------------------------------------------------------------- */

/* Bytes at the end of `text` that may still become a character. */
static size_t unfinished(const char *text, size_t size) {
    for (size_t back = size < 3 ? size : 3; back > 0; back--) {
        uint32_t point;
        const uint8_t lead = (uint8_t)text[size - back];
        const int wanted = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC2 ? 2 : 1;
        const int length = mn_utf8_take(text + size - back, back, &point);
        if (point == MN_UTF8_BAD && (size_t)length == back && (size_t)wanted > back) return back;
    }
    return 0;
}

/* What is pending and what token `id` adds, as bytes. */
static mn_status next_bytes(mn_text *out, const mn_tokenizer *t, const mn_stream_decoder *decoder,
                            int32_t id) {
    mn_pieces pieces = { 0 }, spare = { 0 };
    const mn_span text = t->vocab.tokens[id].text;
    mn_status st = mn_text_reserve(&pieces.text, 1);
    if (t->decoder.joins_by_blank && decoder->started) st = mn_text_add(&pieces.text, " ", 1);
    if (st == MN_OK) st = add_piece(&pieces, text.bytes, text.size);
    if (st == MN_OK) st = run_steps(&t->decoder, &pieces, &spare, !decoder->started, true);
    if (st == MN_OK) st = mn_text_add(out, pieces.text.bytes, pieces.text.size);
    free_pieces(&pieces);
    free_pieces(&spare);
    return st;
}

mn_status mn_tokenizer_stream(const mn_tokenizer *t, mn_stream_decoder *decoder, int32_t id,
                              char *out, size_t capacity, size_t *size) {
    mn_text bytes = { 0 }, clean = { 0 };
    const bool at_end = id == -1;
    mn_status st = at_end ? MN_OK : check_id(t, id);
    if (st != MN_OK) return st;
    if (!at_end && (t->vocab.tokens[id].flags & MN_TOKEN_SPECIAL)) return MN_OK;
    st = mn_text_add(&bytes, decoder->pending, (size_t)decoder->n_pending);
    if (st == MN_OK && !at_end) st = next_bytes(&bytes, t, decoder, id);
    const size_t held = at_end || st != MN_OK ? 0 : unfinished(bytes.bytes, bytes.size);
    if (st == MN_OK) st = mn_text_add_utf8(&clean, bytes.bytes, bytes.size - held);
    if (st == MN_OK && clean.size > capacity - *size) {
        st = mn_fail(MN_ERR_ARGUMENT, "the text of token %d needs %zu bytes, %zu are left", (int)id,
                     clean.size, capacity - *size);
    }
    if (st == MN_OK) {
        if (clean.size > 0) memcpy(out + *size, clean.bytes, clean.size);
        *size += clean.size;
        if (held > 0) memcpy(decoder->pending, bytes.bytes + bytes.size - held, held);
        decoder->n_pending = (int)held;
        decoder->started = !at_end;
    }
    mn_text_free(&bytes);
    mn_text_free(&clean);
    return st;
}
