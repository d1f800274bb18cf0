/* tokenizer_internal.h - what a tokenizer is made of. Only the tokenizer*.c files look in here.
 *
 * Text goes through four stages, one file each:
 *
 *   added tokens (added.c)      cuts out tokens that are matched as text
 *   normaliser   (normalise.c)  rewrites what lies between them
 *   splitter     (split.c)      cuts that into pieces
 *   model        (bpe.c, unigram.c, wordpiece.c)    turns a piece into tokens
 *
 * and ids come back as text through the steps of decode.c. */
#ifndef MN_TOKENIZER_TOKENIZER_INTERNAL_H
#define MN_TOKENIZER_TOKENIZER_INTERNAL_H

#include "io/json.h"
#include "io/text.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/pattern.h"
#include "tokenizer/unicode/bert.h"

enum { MN_TOKEN_ENDS = 16 };
enum { MN_TOKEN_IDS_MAX = 1 << 22 };    // ids lie below: tables are as long as the largest

/* ---- vocabulary (vocab.c) ---------------------------------------------------------- */

typedef struct mn_span {
    const char *bytes;
    size_t size;
} mn_span;

enum {
    MN_TOKEN_MODEL = 1,      // in the vocabulary of the merges
    MN_TOKEN_ADDED = 2,      // matched as text
    MN_TOKEN_SPECIAL = 4,    // added, and left out of decoded text
    MN_TOKEN_WHOLE = 8,      // its own text merges to it alone
};

typedef struct mn_token {
    mn_span text;     // as spelt in the file; bytes NULL: no such token
    mn_span piece;    // as it stands in a piece: bytes if the pieces are bytes, else the text
    unsigned flags;
} mn_token;

/* Ids by text: open addressing, empty slots hold -1. */
typedef struct mn_id_map {
    int32_t *ids;
    uint32_t *hashes;
    size_t mask;         // slots - 1
    bool by_piece;       // the key is `piece`, else `text`
} mn_id_map;

/* 64-bit keys to pairs of numbers; key UINT64_MAX is an empty slot. */
typedef struct mn_pair_map {
    struct mn_pair_slot { uint64_t key; int32_t rank, id; } *slots;
    size_t mask, count;
} mn_pair_map;

typedef struct mn_vocab {
    mn_token *tokens;
    int64_t size;        // one more than the largest id
    mn_id_map by_text, by_piece;
    struct mn_block *blocks;    // memory of texts
} mn_vocab;

static inline uint64_t mn_pair_key(int32_t left, int32_t right) {
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

/* A copy that lives as long as the vocabulary; NULL: no memory. */
const char *mn_vocab_copy(mn_vocab *vocab, const void *bytes, size_t size);
void mn_vocab_free(mn_vocab *vocab);

/* Room for `count` keys. */
mn_status mn_id_map_make(mn_id_map *map, int64_t count, bool by_piece);
void mn_id_map_free(mn_id_map *map);
int32_t mn_id_map_find(const mn_id_map *map, const mn_token *tokens, const char *text, size_t size);

/* Adds token `id` unless its key is there; the map must have been made large enough. */
void mn_id_map_add(mn_id_map *map, const mn_token *tokens, int32_t id);

mn_status mn_pair_map_make(mn_pair_map *map, int64_t count);
void mn_pair_map_free(mn_pair_map *map);
void mn_pair_map_put(mn_pair_map *map, uint64_t key, int32_t rank, int32_t id);
const struct mn_pair_slot *mn_pair_map_find(const mn_pair_map *map, uint64_t key);

/* ---- bytes as characters (bytes.c) ------------------------------------------------- */

/* The code point that stands for a byte in byte-level vocabularies, and back (-1: none). */
uint32_t mn_byte_char(uint8_t byte);
int mn_char_byte(uint32_t point);

/* Appends `text` with each byte as its character. */
mn_status mn_bytes_spell(mn_text *out, const char *text, size_t size);

/* Appends the bytes that the characters of `text` stand for; false, and nothing is added, if one
 * of them stands for none. */
mn_status mn_bytes_unspell(mn_text *out, bool *all, const char *text, size_t size);

/* ---- merges (bpe.c) ---------------------------------------------------------------- */

enum { MN_LOW_POINTS = 2048 };    // code points of one and two bytes are looked up in a table

typedef struct mn_bpe {
    mn_pair_map merges;            // (left, right) -> rank, merged id
    mn_pair_map borders;           // (symbol, symbol) that some merge can join
    int32_t byte_id[256];          // pieces of bytes: the token of each; -1: none
    int32_t fallback_id[256];      // "<0x00>" ...: the token of each; -1: none
    int32_t low_id[MN_LOW_POINTS];
    int32_t unk_id;                // -1: none
    int64_t n_merges;
    size_t longest;                // piece in the vocabulary
    bool byte_pieces, byte_fallback, fuse_unk, ignore_merges;
    bool strict;                   // a character without token is an error
} mn_bpe;

/* Scratch memory of one call. */
typedef struct mn_bpe_room {
    int32_t *symbols;
    int64_t capacity;
    struct mn_bpe_node *nodes;
    int64_t n_nodes;
    uint64_t *heap;
    int64_t n_heap, heap_capacity;
    mn_span text;        // what the pieces are cut from, so that messages can say where
} mn_bpe_room;

void mn_bpe_room_free(mn_bpe_room *room);

/* Appends the tokens of one piece. */
mn_status mn_bpe_encode(const mn_bpe *bpe, const mn_vocab *vocab, mn_bpe_room *room,
                        const char *piece, size_t size, mn_token_list *out);

/* What is derived from vocabulary and merges: byte and character tables, borders, WHOLE flags. */
mn_status mn_bpe_prepare(mn_bpe *bpe, mn_vocab *vocab);

/* ---- other models (unigram.c, wordpiece.c) ----------------------------------------- */

typedef enum mn_token_model {
    MN_TOKEN_BPE, MN_TOKEN_UNIGRAM, MN_TOKEN_WORDPIECE,
} mn_token_model;

typedef struct mn_unigram {
    double *scores;          // log probability of each id
    double least;            // of them
    int32_t *order;          // ids by their text; count
    int64_t count;
    int32_t bytes[256];      // "<0x00>" ...; -1: none
    int32_t unk_id;          // -1: none
    bool fallback;           // unknown characters become bytes
} mn_unigram;

typedef struct mn_wordpiece {
    mn_span prefix;          // of tokens inside of words, "##"
    int64_t most_characters; // longer words are unknown
    int32_t unk_id;
    size_t longest;          // token
} mn_wordpiece;

/* The best way to the end of a stretch of a piece, by its last token. */
typedef struct mn_best {
    double score;
    size_t start, next;      // of the last token; end of the token that begins here
    int32_t id;
} mn_best;

/* Scratch memory of one call. */
typedef struct mn_word_room {
    mn_best *best;
    size_t capacity;
    mn_text text;
} mn_word_room;

mn_status mn_unigram_prepare(mn_unigram *unigram, const mn_vocab *vocab);
void mn_unigram_free(mn_unigram *unigram);
mn_status mn_unigram_encode(const mn_unigram *unigram, const mn_vocab *vocab, mn_word_room *room,
                            const char *piece, size_t size, mn_token_list *out);
void mn_wordpiece_prepare(mn_wordpiece *wordpiece, const mn_vocab *vocab);
mn_status mn_wordpiece_encode(const mn_wordpiece *wordpiece, const mn_vocab *vocab,
                              mn_word_room *room, const char *word, size_t size,
                              mn_token_list *out);

/* ---- stages ---------------------------------------------------------------------------------- */

typedef struct mn_normal_step {
    mn_status (*apply)(mn_text *out, const struct mn_normal_step *step, const char *text,
                       size_t size);
    mn_pattern pattern;
    char *content;
    bool left, right;
    int form;
    mn_bert_rules bert;
} mn_normal_step;

typedef struct mn_normaliser {
    mn_normal_step *steps;
    int64_t count;
} mn_normaliser;

mn_status mn_normaliser_read(mn_normaliser *out, const mn_json *at);
void mn_normaliser_free(mn_normaliser *normaliser);

/* The normal form of `text` (valid UTF-8) in `a` or `b`, or `text` itself; `*result` says which. */
mn_status mn_normalise(const mn_normaliser *normaliser, mn_text *a, mn_text *b, mn_span text,
                       mn_span *result);

typedef enum mn_split_behaviour {
    MN_SPLIT_ISOLATED, MN_SPLIT_REMOVED, MN_SPLIT_PREVIOUS, MN_SPLIT_NEXT, MN_SPLIT_CONTIGUOUS,
} mn_split_behaviour;

typedef enum mn_prefix { MN_PREFIX_NEVER, MN_PREFIX_FIRST, MN_PREFIX_ALWAYS } mn_prefix;

/* What is done to each piece of the stage before, in this order. */
typedef struct mn_split_stage {
    char *spaces;            // written for each blank; NULL: blanks stay
    mn_prefix prefix;        // put in front unless it is there: `spaces`, or a blank
    bool cut;                // by `pattern`
    bool invert;
    bool spell;              // bytes become characters
    mn_split_behaviour behaviour;
    mn_pattern pattern;
} mn_split_stage;

enum { MN_SPLIT_STAGES_MAX = 64 };    // a walk through them recurses

typedef struct mn_splitter {
    mn_split_stage *stages;
    int64_t count;
    bool byte_level;         // one of the stages spells bytes
    bool byte_pieces;        // as the last thing, so it is left out and pieces are bytes
} mn_splitter;

mn_status mn_splitter_read(mn_splitter *out, const mn_json *at);
void mn_splitter_free(mn_splitter *splitter);

/* One walk of text through the stages. */
typedef struct mn_split_visit {
    const mn_splitter *splitter;
    mn_status (*use)(void *context, const char *piece, size_t size);
    void *context;
    mn_matcher *matchers;    // one per stage
    mn_text *texts;          // one per stage
} mn_split_visit;

mn_status mn_split_visit_open(mn_split_visit *walk, const mn_splitter *splitter);
void mn_split_visit_close(mn_split_visit *walk);

/* Hands the pieces of `text` (valid UTF-8) to `use`, in order. `first`: the text starts here. */
mn_status mn_split(mn_split_visit *walk, mn_span text, bool first);

typedef struct mn_added {
    int32_t id;
    mn_span match;           // the text looked for
    bool single_word, lstrip, rstrip, normalized, special;
} mn_added;

/* Added tokens by first byte, longest first. */
typedef struct mn_added_set {
    const mn_added **rows;
    int64_t first[257];
} mn_added_set;

typedef struct mn_added_tokens {
    mn_added *rows;
    int64_t count;
    mn_added_set plain, normalized;
    mn_pattern word;         // one character of a word; for single_word
} mn_added_tokens;

/* One added token in a text, with the blanks it swallows. Blanks swallowed behind one may still be
 * a token themselves, so `start` may lie before the `end` of the match before. */
typedef struct mn_added_match {
    size_t start, end;
    int32_t id;
} mn_added_match;

/* A walk over the added tokens of a text. */
typedef struct mn_added_visit {
    const mn_added_tokens *tokens;
    const mn_added_set *set;
    mn_matcher *word;
    bool special;            // special tokens too
    mn_span text;
    size_t at, done;         // where to look on; what is used up
} mn_added_visit;

mn_status mn_added_next(mn_added_visit *walk, mn_added_match *match, bool *found);
mn_status mn_added_prepare(mn_added_tokens *tokens, const mn_normaliser *normaliser,
                           mn_vocab *vocab);
void mn_added_free(mn_added_tokens *tokens);

typedef struct mn_template {
    mn_token_list before, after;
} mn_template;

mn_status mn_template_read(mn_template *out, const mn_json *at, int64_t n_ids);
void mn_template_free(mn_template *out);

/* Tokens on their way to text: one text with the places where they end. */
typedef struct mn_pieces {
    mn_text text;
    size_t *ends;
    int64_t count, capacity;
} mn_pieces;

typedef struct mn_decode_step {
    mn_status (*apply)(mn_pieces *out, const struct mn_decode_step *step, const mn_pieces *in,
                       bool first, bool streaming);
    mn_pattern pattern;
    char *content;
    int64_t start, stop;
    bool keep_first;         // of Metaspace: the first piece keeps its blank
    bool fused;              // a step before has made one piece of all
    bool cleanup;            // of WordPiece: no blank before punctuation
} mn_decode_step;

typedef struct mn_decoder {
    mn_decode_step *steps;
    int64_t count;
    bool joins_by_blank;     // without decoder, tokens are words
} mn_decoder;

mn_status mn_decoder_read(mn_decoder *out, const mn_json *at);
void mn_decoder_free(mn_decoder *decoder);

/* ---- all of it ------------------------------------------------------------------------------- */

struct mn_tokenizer {
    mn_vocab vocab;
    mn_token_model model;
    mn_bpe bpe;
    mn_unigram unigram;
    mn_wordpiece wordpiece;
    mn_added_tokens added;
    mn_normaliser normaliser;
    mn_splitter splitter;
    mn_template template;
    mn_decoder decoder;
    char *source;            // the file as it was read; what saving writes
    size_t source_size;
    uint64_t fingerprint;
    int32_t bos, eos;
    int32_t ends[MN_TOKEN_ENDS];    // eos and others that end a text
    int n_ends;
    char *config;            // tokenizer_config.json as it was read; NULL: there was none
    size_t config_size;
};

/* Model and added tokens of a document (read.c). */
mn_status mn_tokenizer_read_model(mn_tokenizer *t, const mn_json *root);
mn_status mn_tokenizer_read_added(mn_tokenizer *t, const mn_json *root);

/* Sets bos and eos from the added tokens, or from the tokenizer_config.json at `config_path` if it
 * is there, and all that end a text from the generation_config.json beside it (ends.c). */
mn_status mn_tokenizer_find_ends(mn_tokenizer *t, const char *config_path,
                                 const char *generation_path);

/* How training cuts text into pieces: a row of patterns.def (make.c). */
typedef struct mn_training_pattern {
    const char *name, *regex;
    bool nfc;
} mn_training_pattern;

/* NULL, with a message, if there is none of that name; without a name, gpt2. */
const mn_training_pattern *mn_training_pattern_find(const char *name);

/* The splitter and normaliser that the trained tokenizer will have. */
mn_status mn_training_splitter(mn_splitter *splitter, mn_normaliser *normaliser,
                               const mn_training_pattern *pattern);

/* A tokenizer of byte-level pieces from its vocabulary in the order of the ids, each text closed by
 * a zero byte. The first `n_special` tokens are special; `merges` holds pairs of ids. */
mn_status mn_tokenizer_assemble(mn_tokenizer **out, const mn_span *tokens, int64_t n_tokens,
                                int64_t n_special, const int32_t (*merges)[2], int64_t n_merges,
                                const mn_training_pattern *pattern);

/* Fails for a component of tokenizer.json ("decoder" ...) whose type is none of `n` kinds, and
 * lists those. The names lie `step` bytes apart, `first` being that of the first kind. */
mn_status mn_unknown_type(const mn_json *at, const char *component, const char *type,
                          const char *const *first, size_t n, size_t step);

#endif
