/* generate.h - the parts of mneme generate: what is asked for, a model opened for text, what a
 * continuation is, and how tokens are shown. */
#ifndef MN_CLI_GENERATE_GENERATE_H
#define MN_CLI_GENERATE_GENERATE_H

#include <stdbool.h>
#include <stdint.h>

#include <jansson.h>

#include "infer/session.h"
#include "io/text.h"
#include "tokenizer/tokenizer.h"

typedef struct mn_generate_options {
    const char *model, *prompt, *file, *save_state, *load_state;
    const char *device, *dtype;     // NULL: cpu, f32
    const char *system, *messages, *template;   // of --chat; messages: a file
    const char *calibration;        // file of a calibrator; NULL: that of the model's folder
    double abstain;                 // say nothing below this probability of being right; 0: always
    char **stops;                   // n_stops texts that end a continuation
    int n_stops;
    int n_tokens, n_forks, n_threads, chunk, draft;
    bool belief, json, echo, ignore_eos, interactive, quiet, verify, chat, dry_run;
    mn_sampling sampling;
} mn_generate_options;

/* ---- showing tokens: show.c --------------------------------------------------------- */

typedef enum mn_show_mode {
    MN_SHOW_NOTHING,
    MN_SHOW_TEXT,
    MN_SHOW_COLOURS,     // text on a colour from certain to uncertain
    MN_SHOW_LINES,       // token, tab, variance
} mn_show_mode;

enum { MN_SHADES = 8 };
#define MN_ABSTENTION "I do not know"    // said below --abstain

typedef struct mn_show {
    mn_show_mode mode;
    bool truecolor;
    double *sorted;      // variances so far, rising
    int64_t n, capacity;
} mn_show;

/* Colours on a terminal without NO_COLOR, else lines; without `belief` plain text. */
mn_show_mode mn_show_choose(bool belief, bool json);
void mn_show_start(mn_show *show, mn_show_mode mode);
void mn_show_free(mn_show *show);

/* Makes a variance known; what is shown from then on is ranked among all of those. */
mn_status mn_show_note(mn_show *show, double variance);

/* The shade of a variance: its rank among those so far, 0 certain to MN_SHADES - 1. */
int mn_show_shade(const mn_show *show, double variance);

/* Prints text, the byte i on the colour of shades[i] in colour mode. Then flushes. */
void mn_show_text(const mn_show *show, const char *text, size_t size, const uint8_t *shades);

/* Prints the line of one token in line mode; nothing in others. */
void mn_show_line(const mn_show *show, const char *text, size_t size, double variance);

/* One line that says what the colours mean; `layers` such as "2, 5". */
void mn_show_legend(const mn_show *show, const char *layers);

/* ---- conversations by roles: chat.c ------------------------------------------------- */

typedef struct mn_chat_templates mn_chat_templates;

/* Messages so far, and the template that makes a prompt of them. All zeros is nothing. */
typedef struct mn_conversation {
    mn_chat_templates *templates;
    json_t *messages, *tools, *variables;
    const char *name;               // of the template, or NULL
    bool continues;                 // ends with an answer that is to go on
} mn_conversation;

/* Reads the template of --model, and the messages of --messages and --system. Free in any case. */
mn_status mn_conversation_open(mn_conversation *c, const mn_generate_options *options);
void mn_conversation_free(mn_conversation *c);

mn_status mn_conversation_add(mn_conversation *c, const char *role, const char *text, size_t size);

/* The prompt of all messages. */
mn_status mn_conversation_prompt(mn_text *out, const mn_conversation *c);

/* Prints the prompt, and with --json its tokens, without a model. */
mn_status mn_conversation_dry_run(const mn_generate_options *options);

/* ---- a model that reads and writes: text.c ------------------------------------------ */

typedef struct mn_generator {
    const mn_generate_options *options;
    mn_context *context;
    mn_model *model;
    mn_tokenizer *tokenizer;
    mn_session *session;
    mn_sampling sampling;
    int64_t guessed, agreed;        // of the last guesses
    int64_t draft;                  // how many to guess
    int64_t rest, rest_after;       // tokens without guesses: now, and after the last in vain
    int64_t n_ids;                  // ids that model and tokenizer both know
    mn_token_list seen;             // tokens read and written, for the penalty
    mn_show show;
    mn_conversation *conversation;      // of --chat, else NULL
    const volatile int *interrupted;    // not 0: stop writing; NULL: never
    int64_t n_read, n_written;
    double read_seconds, write_seconds;
} mn_generator;

typedef enum mn_stopped {
#define STOPPED(id, name) MN_STOPPED_##id,
#include "cli/generate/stopped.def"
#undef STOPPED
    MN_STOPPED_COUNT
} mn_stopped;

const char *mn_stopped_name(mn_stopped stopped);

typedef struct mn_continuation {
    mn_text text;
    mn_token_list tokens;
    double *variance;               // of each token, with --belief
    double confidence;              // with --abstain: of being right, before the first token
    int64_t variance_capacity;
    mn_stopped stopped;
} mn_continuation;

void mn_continuation_free(mn_continuation *c);    // leaves all zeros

/* On failure close it all the same. */
mn_status mn_generator_open(mn_generator *g, const mn_generate_options *options);
void mn_generator_close(mn_generator *g);

/* Reads text into the session. At the start of a sequence the tokenizer's own beginning is put in
 * front, and an empty text is that beginning alone; later an empty text is nothing. */
mn_status mn_generator_read(mn_generator *g, const char *text, size_t size);

/* Writes on from `session` (the generator's or a fork of it) with the draws of `stream`, showing
 * what is settled. */
mn_status mn_generator_write(mn_continuation *out, mn_generator *g, mn_session *session,
                             uint64_t stream);

/* The probability that what the model says next is right, by its calibrator. */
mn_status mn_generator_confidence(double *out, mn_generator *g);

/* `n` continuations of what was read; the session stays where it is. With `headers` a line between
 * them. */
mn_status mn_generator_fork(mn_continuation *out, mn_generator *g, int n, bool headers);

/* Forgets what was read; and goes on from a file. */
mn_status mn_generator_reset(mn_generator *g);
mn_status mn_generator_load(mn_generator *g, const char *path);

/* Reads a prompt that a chat template made: its special tokens are tokens, nothing is put in front.
 * What of it was read already stays; where it differs, all is read again. */
mn_status mn_generator_read_chat(mn_generator *g, const char *text, size_t size);

/* ---- a conversation: talk.c --------------------------------------------------------- */

/* Lines from standard input: text to read and continue, or commands. Returns when they end. */
mn_status mn_generate_talk(mn_generator *g);

#endif
