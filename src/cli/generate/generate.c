/* generate.c - mneme generate: text from a model, streamed, forked, kept in files, or as a
 * conversation. */
#include "cli/generate/generate.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/command.h"
#include "cli/options.h"
#include "io/file.h"
#include "io/folder.h"
#include "io/json_write.h"

enum { MOST_NUMBERS = 16 };    // of sampling

/* "--top-k" of "top_k" */
static void option_name(char *out, size_t size, const char *field) {
    snprintf(out, size, "--%s", field);
    for (char *c = out; *c; c++) *c = *c == '_' ? '-' : *c;
}

static void print_help(void) {
    puts("usage: mneme generate --model DIR [PROMPT | --file F | -] [options]\n\n"
         "Continues a prompt with the model of a folder: config.json, model.safetensors and\n"
         "tokenizer.json. Without a prompt it talks when standard input is a terminal, and reads\n"
         "the prompt from there when it is not. The same seed gives the same text.\n\n"
         "  --model DIR             a model's folder, or a run's: then its best checkpoint\n"
         "  --file F                the prompt is what the file holds\n"
         "  --tokens N              tokens to write at most (default 256)\n"
         "  --stop STR              end before STR; may be repeated; \\n and \\t are understood\n"
         "  --ignore-eos            go on where the model ends a text");
    const mn_sampling_field *fields;
    const int n = mn_sampling_fields(&fields);
    for (int i = 0; i < n; i++) {
        char name[64];
        option_name(name, sizeof name, fields[i].name);
        printf("  %-23s %s (default %g)\n", strcat(name, " X"), fields[i].about, fields[i].value);
    }
    puts("  --belief                colour each token by how much the model's memory doubts what\n"
         "                          it answered (bayes, palimpsa: variance over its mean over all\n"
         "                          queries; kla: content held over content read); token and\n"
         "                          number as lines when piped\n"
         "  --abstain T             say \"" MN_ABSTENTION "\" where the model is right with a\n"
         "                          probability below T, by its calibrator: mneme eval\n"
         "                          --calibration --save-calibration DIR/calibration.json\n"
         "  --calibration F         another file of a calibrator\n"
         "  --fork N                N continuations of one prompt, which is read once\n"
         "  --load-state F          go on from a file: a prompt is read behind what it holds\n"
         "  --save-state F          keep the state after the last token in a file\n"
         "  --interactive           talk, also when standard input is no terminal\n"
         "  --chat                  a conversation by the model's chat template: the prompt,\n"
         "                          or each line, is what the user says\n"
         "  --system TEXT           the system message of --chat\n"
         "  --messages F            messages of --chat from a JSON file: a list, or an object of\n"
         "                          messages, tools and chat_template_kwargs\n"
         "  --chat-template NAME    one of several templates: default, tool_use (with tools)\n"
         "  --dry-run               the prompt of --chat alone; with --json its tokens too\n"
         "  --echo                  show the prompt as well\n"
         "  --json                  the result as one document\n"
         "  --prefill-chunk N       tokens of a prompt computed at once (default: by memory)\n"
         "  --draft N               guess up to N tokens from what was there before, read them at\n"
         "                          once and keep those that are drawn: the same text, sooner\n"
         "                          where it repeats itself (default 0: none; CPU)\n"
         "  --device D              cpu (default), cuda or cuda:N\n"
         "  --dtype T               f32 (default), or bf16 on a GPU\n"
         "  --threads N             default: one per core\n"
         "  --verify                check every byte of the model against its seal, not sizes and\n"
         "                          heads of files alone\n"
         "  --quiet                 no progress and no speed on standard error");
}

/* ---- options --------------------------------------------------------------------------------- */

static int mistake(const char *option, const char *what) {
    return mn_options_mistake("generate", option, what);
}

/* Adds a text that ends a continuation, \n, \t and \\ being what they stand for. */
static bool read_stop(void *to, const char *value) {
    mn_generate_options *o = to;
    char *text = malloc(strlen(value) + 1), *end = text;
    if (!text || !*value) {
        free(text);
        return false;
    }
    for (const char *at = value; *at; at++) {
        const char *known = at[0] == '\\' && at[1] ? strchr("n\nt\t\\\\", at[1]) : NULL;
        const bool escape = known && (at[1] == 'n' || at[1] == 't' || at[1] == '\\');
        *end++ = escape ? known[1] : *at;
        if (escape) at++;
    }
    *end = '\0';
    o->stops[o->n_stops++] = text;
    return true;
}

/* One of the numbers that sampling has. */
typedef struct sampling_option {
    mn_sampling *sampling;
    const mn_sampling_field *field;
    char name[64];
} sampling_option;

static bool read_sampling(void *to, const char *value) {
    const sampling_option *at = to;
    return mn_sampling_set(at->sampling, at->field, value) == MN_OK;
}

static bool read_share(void *to, const char *value) {
    char *end;
    double *out = to;
    *out = strtod(value, &end);
    return end != value && !*end && *out >= 0.0 && *out <= 1.0;
}

static int check(const mn_generate_options *o) {
    if (o->abstain > 0.0 && o->load_state) {
        return mistake("--abstain", "reads all that was said once more, and --load-state has it "
                       "not");
    }
    if (o->calibration && o->abstain == 0.0) return mistake("--calibration", "needs --abstain");
    if (!o->chat && (o->system || o->messages || o->template || o->dry_run)) {
        return mistake(o->system ? "--system" : o->messages ? "--messages"
                       : o->template ? "--chat-template" : "--dry-run", "needs --chat");
    }
    if (o->chat && (o->belief || o->load_state)) {
        return mistake("--chat", "goes without --belief and --load-state");
    }
    if (!o->model) return mistake("--model", "is missing: name a folder");
    if (o->dtype && strcmp(o->dtype, "f32") != 0 && strcmp(o->dtype, "bf16") != 0) {
        return mistake("--dtype", "is f32 or bf16");
    }
    if (o->prompt && o->file) return mistake("--file", "and a prompt are two prompts");
    if (o->interactive && (o->json || o->n_forks > 1 || o->save_state || o->prompt || o->file)) {
        return mistake("--interactive", "stands alone: /fork and /save are its commands");
    }
    if (o->save_state && o->n_forks > 1) {
        return mistake("--save-state", "and --fork: which state would be kept?");
    }
    return 0;
}

/* The numbers of sampling as options behind the `n` rows; how many there are then. */
static int add_sampling(mn_option *rows, int n, sampling_option *numbers, mn_sampling *sampling) {
    const mn_sampling_field *fields;
    const int n_fields = mn_sampling_fields(&fields);
    for (int i = 0; i < n_fields && i < MOST_NUMBERS; i++) {
        numbers[i] = (sampling_option){ sampling, &fields[i], "" };
        option_name(numbers[i].name, sizeof numbers[i].name, fields[i].name);
        rows[n++] = (mn_option){ numbers[i].name, .read = read_sampling, .to = &numbers[i] };
    }
    return n;
}

static int parse(mn_generate_options *o, int argc, char **argv) {
    const mn_option fixed[] = {
        { "--model", .text = &o->model },
        { "--file", .text = &o->file },
        { "--load-state", .text = &o->load_state },
        { "--save-state", .text = &o->save_state },
        { "--device", .text = &o->device },
        { "--dtype", .text = &o->dtype },
        { "--tokens", .count = &o->n_tokens, .low = 0, .high = 1000000000 },
        { "--fork", .count = &o->n_forks, .low = 1, .high = 1000 },
        { "--threads", .count = &o->n_threads, .low = 1, .high = 256 },
        { "--prefill-chunk", .count = &o->chunk, .low = 1, .high = 1 << 20 },
        { "--draft", .count = &o->draft, .low = 0, .high = 64 },
        { "--chat", .flag = &o->chat },
        { "--system", .text = &o->system },
        { "--messages", .text = &o->messages },
        { "--chat-template", .text = &o->template },
        { "--dry-run", .flag = &o->dry_run },
        { "--stop", .read = read_stop, .to = o, .needs = "a text" },
        { "--belief", .flag = &o->belief },
        { "--abstain", .read = read_share, .to = &o->abstain, .needs = "a probability, 0 to 1" },
        { "--calibration", .text = &o->calibration },
        { "--json", .flag = &o->json },
        { "--echo", .flag = &o->echo },
        { "--ignore-eos", .flag = &o->ignore_eos },
        { "--interactive", .flag = &o->interactive },
        { "--quiet", .flag = &o->quiet },
        { "--verify", .flag = &o->verify },
        { NULL, .text = &o->prompt },
    };
    sampling_option numbers[MOST_NUMBERS];
    mn_option rows[MN_COUNTOF(fixed) + MOST_NUMBERS];
    memcpy(rows, fixed, sizeof fixed);
    const int n = add_sampling(rows, MN_COUNTOF(fixed), numbers, &o->sampling);
    const int status = mn_options_read(rows, n, "generate", argc, argv);
    return status ? status : check(o);
}

/* ---- the prompt ------------------------------------------------------------------------------ */

static mn_status read_stdin(mn_text *text) {
    char buffer[1 << 14];
    size_t n;
    mn_status st = MN_OK;
    while (st == MN_OK && (n = fread(buffer, 1, sizeof buffer, stdin)) > 0) {
        st = mn_text_add(text, buffer, n);
    }
    if (st == MN_OK && ferror(stdin)) st = mn_fail(MN_ERR_IO, "standard input cannot be read");
    return st;
}

/* What the user says, then the prompt of the whole conversation. */
static mn_status read_turn(mn_generator *g, const char *text, size_t size) {
    mn_text prompt = { 0 };
    mn_status st = MN_OK;
    if (size) st = mn_conversation_add(g->conversation, "user", text, size);
    if (st == MN_OK) st = mn_conversation_prompt(&prompt, g->conversation);
    if (st == MN_OK) {
        st = mn_generator_read_chat(g, prompt.bytes ? prompt.bytes : "", prompt.size);
    }
    mn_text_free(&prompt);
    return st;
}

static mn_status read_given(mn_generator *g, const char *text, size_t size) {
    return g->conversation ? read_turn(g, text, size) : mn_generator_read(g, text, size);
}

static mn_status read_prompt(mn_generator *g) {
    const mn_generate_options *o = g->options;
    if (o->messages && !o->prompt && !o->file) return read_turn(g, NULL, 0);
    if (o->file) {
        mn_file file = { 0 };
        mn_status st = mn_file_map(&file, o->file);
        if (st == MN_OK) st = read_given(g, (const char *)file.bytes, file.size);
        mn_file_unmap(&file);
        return st;
    }
    if (o->prompt && strcmp(o->prompt, "-") != 0) {
        return read_given(g, o->prompt, strlen(o->prompt));
    }
    if (!o->prompt && o->load_state) return MN_OK;    // what was read before is the prompt
    mn_text text = { 0 };
    mn_status st = read_stdin(&text);
    if (st == MN_OK) st = read_given(g, text.bytes ? text.bytes : "", text.size);
    mn_text_free(&text);
    return st;
}

/* ---- results --------------------------------------------------------------------------------- */

static json_t *continuation_json(const mn_continuation *c, bool belief) {
    json_t *out = json_object(), *tokens = json_array(), *variance = json_array();
    for (int64_t i = 0; i < c->tokens.count; i++) {
        json_array_append_new(tokens, json_integer(c->tokens.ids[i]));
        if (belief) json_array_append_new(variance, mn_json_real(c->variance[i]));
    }
    json_object_set_new(out, "text", json_stringn(c->text.bytes ? c->text.bytes : "",
                                                  c->text.size));
    json_object_set_new(out, "tokens", tokens);
    json_object_set_new(out, "stopped", json_string(mn_stopped_name(c->stopped)));
    if (c->confidence >= 0.0) {
        json_object_set_new(out, "confidence", mn_json_real(c->confidence));
    }
    if (belief) json_object_set_new(out, "variance", variance);
    else json_decref(variance);
    return out;
}

static double rate(int64_t n, double seconds) {
    return seconds > 0.0 ? (double)n / seconds : 0.0;
}

static mn_status print_json(const mn_generator *g, const mn_continuation *all, int n) {
    json_t *root = json_object(), *list = json_array();
    for (int i = 0; i < n; i++) {
        json_array_append_new(list, continuation_json(&all[i], g->options->belief));
    }
    json_object_set_new(root, "model", json_string(g->options->model));
    json_object_set_new(root, "prompt_tokens", json_integer(g->n_read));
    json_object_set_new(root, "continuations", list);
    json_object_set_new(root, "state_bytes",
                        json_integer((json_int_t)mn_session_bytes(g->session)));
    json_object_set_new(root, "prompt_tokens_per_second",
                        mn_json_real(rate(g->n_read, g->read_seconds)));
    json_object_set_new(root, "tokens_per_second",
                        mn_json_real(rate(g->n_written, g->write_seconds)));
    char *text = NULL;
    const mn_status st = mn_json_text(&text, root, MN_JSON_PRETTY);
    if (st == MN_OK) puts(text);
    free(text);
    json_decref(root);
    return st;
}

static void print_speed(const mn_generator *g) {
    fprintf(stderr, "%" PRId64 " tokens read at %.0f/s, %" PRId64 " written at %.1f/s\n", g->n_read,
            rate(g->n_read, g->read_seconds), g->n_written, rate(g->n_written, g->write_seconds));
}

/* ---- the command ----------------------------------------------------------------------------- */

static mn_status write_all(mn_generator *g) {
    const mn_generate_options *o = g->options;
    mn_continuation *all = calloc((size_t)o->n_forks, sizeof *all);
    if (!all) return mn_fail(MN_ERR_MEMORY, "no memory for %d continuations", o->n_forks);
    mn_status st = read_prompt(g);
    if (st == MN_OK && o->n_forks > 1) st = mn_generator_fork(all, g, o->n_forks, !o->json);
    else if (st == MN_OK) st = mn_generator_write(&all[0], g, g->session, 0);
    const bool text = g->show.mode == MN_SHOW_TEXT || g->show.mode == MN_SHOW_COLOURS;
    if (text && st == MN_OK) putchar('\n');
    fflush(stdout);
    if (st == MN_OK && o->save_state) st = mn_folder_make_above(o->save_state);
    if (st == MN_OK && o->save_state) st = mn_session_save(g->session, o->save_state);
    if (st == MN_OK && o->json) st = print_json(g, all, o->n_forks);
    for (int i = 0; i < o->n_forks; i++) mn_continuation_free(&all[i]);
    free(all);
    return st;
}

static mn_status generate(const mn_generate_options *o) {
    mn_generator g;
    mn_conversation conversation = { 0 };
    if (o->dry_run) return mn_conversation_dry_run(o);
    mn_status st = mn_generator_open(&g, o);
    if (st == MN_OK && o->chat) st = mn_conversation_open(&conversation, o);
    if (o->chat) g.conversation = &conversation;
    const bool asked = o->prompt || o->messages || o->file || o->load_state || o->json ||
        o->n_forks > 1;
    const bool talks = o->interactive || (!asked && isatty(STDIN_FILENO));
    if (st == MN_OK) st = talks ? mn_generate_talk(&g) : write_all(&g);
    if (st == MN_OK && !o->quiet) print_speed(&g);
    mn_generator_close(&g);
    mn_conversation_free(&conversation);
    if (st == MN_OK && (fflush(stdout) != 0 || ferror(stdout))) {
        st = mn_fail(MN_ERR_IO, "standard output cannot be written");
    }
    return st;
}

int mn_command_generate(int argc, char **argv) {
    mn_generate_options o = { .n_tokens = 256, .n_forks = 1 };
    mn_sampling_defaults(&o.sampling);
    o.stops = calloc((size_t)argc, sizeof *o.stops);
    int status = o.stops ? parse(&o, argc, argv) : 2;
    if (status < 0) print_help();
    if (status == 0 && generate(&o) != MN_OK) {
        fflush(stdout);
        fprintf(stderr, "mneme generate: %s\n", mn_last_error());
        status = 1;
    }
    for (int i = 0; i < o.n_stops; i++) free(o.stops[i]);
    free(o.stops);
    return status < 0 ? 0 : status;
}
