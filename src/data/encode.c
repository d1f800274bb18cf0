/* encode.c - the tokens of a planned text, piece after piece, worked out on several threads.
 *
 * A round encodes a few pieces per thread at once and hands them on in order; memory is bounded by
 * the pieces of a round. */
#include "data/encode.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/status.h"
#include "base/util.h"

enum { PIECES_PER_THREAD = 8 };

/* One encoded piece: documents end behind the first closes[i] tokens of it. */
typedef struct encoded {
    mn_token_list tokens;
    int64_t *closes;
    int64_t n_closes, room;
    mn_text_buffer buffer;
    mn_carried failure;
    const mn_tokenizer *tokenizer;
} encoded;

typedef struct encode_round {
    const mn_text_plan *plan;
    encoded *pieces;
    int64_t first;
} encode_round;

void mn_carry(mn_carried *out, mn_status status) {
    out->status = status;
    snprintf(out->message, sizeof out->message, "%s", status == MN_OK ? "" : mn_last_error());
}

mn_status mn_carried_fail(const mn_carried *carried) {
    return carried->status == MN_OK ? MN_OK : mn_fail(carried->status, "%s", carried->message);
}

static mn_status encode_text(void *context, const char *text, size_t size, bool closes) {
    encoded *piece = context;
    const mn_status st = mn_tokenizer_encode(piece->tokenizer, text, size, false, &piece->tokens);
    if (st != MN_OK || !closes) return st;
    if (piece->n_closes == piece->room) {
        const int64_t room = 2 * piece->room + 16;
        int64_t *grown = realloc(piece->closes, (size_t)room * sizeof *grown);
        if (!grown) return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " documents", room);
        piece->closes = grown;
        piece->room = room;
    }
    piece->closes[piece->n_closes++] = piece->tokens.count;
    return MN_OK;
}

static void encode_piece(void *context, int64_t item, int worker) {
    (void)worker;
    const encode_round *round = context;
    encoded *piece = &round->pieces[item];
    piece->tokens.count = piece->n_closes = 0;
    mn_carry(&piece->failure, mn_text_visit(round->plan, round->first + item, &piece->buffer,
                                            encode_text, piece));
}

static mn_status hand_on(const encoded *piece, int64_t index, const mn_token_sink *sink) {
    mn_status st = mn_carried_fail(&piece->failure);
    if (st == MN_OK && sink->piece_begins) st = sink->piece_begins(sink->context, index);
    int64_t at = 0;
    for (int64_t i = 0; i <= piece->n_closes && st == MN_OK; i++) {
        const int64_t end = i < piece->n_closes ? piece->closes[i] : piece->tokens.count;
        if (end > at) st = sink->put(sink->context, piece->tokens.ids + at, end - at);
        if (st == MN_OK && i < piece->n_closes) st = sink->close(sink->context);
        at = end;
    }
    return st;
}

mn_status mn_encode_pieces(const mn_text_plan *plan, const mn_tokenizer *tokenizer, int64_t first,
                           mn_threads *threads, const mn_token_sink *sink) {
    const int64_t width = PIECES_PER_THREAD * (threads ? mn_threads_count(threads) : 1);
    encoded *pieces = calloc((size_t)width, sizeof *pieces);
    if (!pieces) return mn_fail(MN_ERR_MEMORY, "no memory to encode text");
    for (int64_t i = 0; i < width; i++) pieces[i].tokenizer = tokenizer;
    mn_status st = MN_OK;
    for (int64_t at = first; at < plan->n_pieces && st == MN_OK; at += width) {
        encode_round round = { plan, pieces, at };
        const int64_t n = mn_min(width, plan->n_pieces - at);
        if (threads) mn_threads_run(threads, n, encode_piece, &round);
        for (int64_t i = 0; i < n && st == MN_OK; i++) {
            if (!threads) encode_piece(&round, i, 0);
            st = hand_on(&pieces[i], at + i, sink);
        }
    }
    for (int64_t i = 0; i < width; i++) {
        mn_token_list_free(&pieces[i].tokens);
        free(pieces[i].closes);
        free(pieces[i].buffer.bytes);
    }
    free(pieces);
    return st;
}
