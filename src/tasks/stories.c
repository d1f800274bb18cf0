/* stories.c - small stories from a probabilistic grammar.
 *
 *   story    = placing { sentence } END         END with p_end after each sentence, and at the cap
 *   sentence = question                         question / (update + filler + question)
 *            | placing | moving | filler        update against filler; placing with p_new
 *   placing  = NAME puts the OBJECT in the PLACE .      object not in the story yet, any place
 *   moving   = NAME takes the OBJECT to the PLACE .     object of the story, another place
 *   filler   = NAME ALONE . | NAME PASSING past the PLACE . | NAME TOGETHER NAME .
 *   question = where is the OBJECT ? PLACE .            object of the story, its latest place
 *
 * Words of a class are equally likely. All choices between two tokens show in the second one: the
 * first word of a sentence tells questions from the rest, the second all the others. Hence the
 * token's information is the sum of -log2 p over the choices made since the one before it. */
#include "tasks/stories.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/rng.h"
#include "base/status.h"
#include "base/util.h"

/* ---- words ----------------------------------------------------------------------------------- */

enum glue {
#define GLUE(id, text) id,
#include "tasks/stories.def"
    N_GLUE
};

enum {
#define NAME(word) +1
    N_NAMES = 0
#include "tasks/stories.def"
    ,
#define OBJECT(word) +1
    N_OBJECTS = 0
#include "tasks/stories.def"
    ,
#define PLACE(word) +1
    N_PLACES = 0
#include "tasks/stories.def"
    ,
#define ALONE(word) +1
    N_ALONE = 0
#include "tasks/stories.def"
    ,
#define PASSING(word) +1
    N_PASSING = 0
#include "tasks/stories.def"
    ,
#define TOGETHER(word) +1
    N_TOGETHER = 0
#include "tasks/stories.def"
};

enum {
    FIRST_NAME = N_GLUE,
    FIRST_OBJECT = FIRST_NAME + N_NAMES,
    FIRST_PLACE = FIRST_OBJECT + N_OBJECTS,
    FIRST_VERB = FIRST_PLACE + N_PLACES,
    FIRST_PASSING = FIRST_VERB + N_ALONE,
    FIRST_TOGETHER = FIRST_PASSING + N_PASSING,
    N_WORDS = FIRST_TOGETHER + N_TOGETHER,
    N_VERBS = N_WORDS - FIRST_VERB,
};

static const char *const words[N_WORDS] = {
#define GLUE(id, text) text,
#define NAME(word) #word,
#define OBJECT(word) #word,
#define PLACE(word) #word,
#define ALONE(word) #word,
#define PASSING(word) #word,
#define TOGETHER(word) #word,
#include "tasks/stories.def"
};

static const struct {
    int32_t first, count;
} classes[MN_STORIES_CLASSES] = {
    [MN_STORIES_GLUE] = { 0, N_GLUE },
    [MN_STORIES_NAME] = { FIRST_NAME, N_NAMES },
    [MN_STORIES_OBJECT] = { FIRST_OBJECT, N_OBJECTS },
    [MN_STORIES_PLACE] = { FIRST_PLACE, N_PLACES },
    [MN_STORIES_ALONE] = { FIRST_VERB, N_ALONE },
    [MN_STORIES_PASSING] = { FIRST_PASSING, N_PASSING },
    [MN_STORIES_TOGETHER] = { FIRST_TOGETHER, N_TOGETHER },
};

/* ---- growing arrays -------------------------------------------------------------------------- */

/* A mn_stories with room to grow. */
typedef struct shelf {
    mn_stories stories;
    int64_t token_room, question_room;
} shelf;

/* Room for one element more; `*room` counts elements. */
static bool make_room(void **array, int64_t *room, int64_t used, size_t element) {
    if (used < *room) return true;
    size_t bytes;
    int64_t wanted;
    if (!mn_mul_i64(&wanted, 2, *room) || !mn_add_i64(&wanted, wanted, 256)) return false;
    if (!mn_mul_size(&bytes, (size_t)wanted, element)) return false;
    void *grown = realloc(*array, bytes);
    if (!grown) return false;
    *array = grown;
    *room = wanted;
    return true;
}

/* tokens and bits grow together */
static bool make_token_room(shelf *s) {
    int64_t room = s->token_room;
    void *tokens = s->stories.tokens, *bits = s->stories.bits;
    bool fits = make_room(&tokens, &room, s->stories.n_tokens, sizeof *s->stories.tokens);
    s->stories.tokens = tokens;
    if (!fits) return false;
    fits = make_room(&bits, &s->token_room, s->stories.n_tokens, sizeof *s->stories.bits);
    s->stories.bits = bits;
    return fits;
}

/* ---- one story ------------------------------------------------------------------------------- */

/* What is true so far, and the draws so far. */
typedef struct story {
    const mn_stories_config *config;
    shelf *to;
    uint64_t seed, stream, n_draws;
    double bits;                     // of the choices since the last token
    bool no_memory;
    int64_t n_placed;
    int32_t cast[N_OBJECTS];         // objects in the order they came in
    bool placed[N_OBJECTS];
    int32_t place[N_OBJECTS];        // where each is
    int64_t said_at[N_OBJECTS];      // position of the token that said so
    int64_t n_updates[N_OBJECTS];
} story;

static double draw(story *s) {
    return mn_rng_uniform(s->seed, s->stream, s->n_draws++);
}

/* True with probability p. */
static bool chance(story *s, double p) {
    const bool yes = draw(s) < p;
    s->bits -= log2(yes ? p : 1.0 - p);
    return yes;
}

/* One of n, equally likely. */
static int32_t one_of(story *s, int64_t n) {
    const int64_t i = mn_min((int64_t)(draw(s) * (double)n), n - 1);
    s->bits += log2((double)n);
    return (int32_t)i;
}

static void say(story *s, int32_t token) {
    mn_stories *to = &s->to->stories;
    s->no_memory = s->no_memory || !make_token_room(s->to);
    if (s->no_memory) return;
    to->tokens[to->n_tokens] = token;
    to->bits[to->n_tokens++] = s->bits;
    s->bits = 0.0;
}

static void note_question(story *s, int32_t object) {
    mn_stories *to = &s->to->stories;
    void *questions = to->questions;
    s->no_memory = s->no_memory || !make_room(&questions, &s->to->question_room, to->n_questions,
                                              sizeof *to->questions);
    to->questions = questions;
    if (s->no_memory) return;
    to->questions[to->n_questions++] = (mn_stories_question){
        .at = to->n_tokens,
        .distance = to->n_tokens - s->said_at[object],
        .n_updates = s->n_updates[object],
        .object = FIRST_OBJECT + object,
        .answer = FIRST_PLACE + s->place[object],
    };
}

static int32_t new_object(story *s) {
    int32_t skip = one_of(s, s->config->n_objects - s->n_placed), object = 0;
    while (s->placed[object] || skip-- > 0) object++;
    s->placed[object] = true;
    s->cast[s->n_placed++] = object;
    return object;
}

static int32_t other_place(story *s, int32_t place) {
    const int32_t other = one_of(s, s->config->n_places - 1);
    return other + (other >= place);
}

/* ... puts the OBJECT in the PLACE . */
static void say_placing(story *s) {
    say(s, PUTS);
    say(s, THE);
    const int32_t object = new_object(s);
    say(s, FIRST_OBJECT + object);
    say(s, IN);
    say(s, THE);
    s->place[object] = one_of(s, s->config->n_places);
    s->said_at[object] = s->to->stories.n_tokens;
    s->n_updates[object] = 1;
    say(s, FIRST_PLACE + s->place[object]);
}

/* ... takes the OBJECT to the PLACE . */
static void say_moving(story *s) {
    say(s, TAKES);
    say(s, THE);
    const int32_t object = s->cast[one_of(s, s->n_placed)];
    say(s, FIRST_OBJECT + object);
    say(s, TO);
    say(s, THE);
    s->place[object] = other_place(s, s->place[object]);
    s->said_at[object] = s->to->stories.n_tokens;
    s->n_updates[object]++;
    say(s, FIRST_PLACE + s->place[object]);
}

static void say_filler(story *s, int32_t name) {
    const int32_t verb = FIRST_VERB + one_of(s, N_VERBS);
    say(s, verb);
    if (verb >= FIRST_TOGETHER) {
        const int32_t other = one_of(s, s->config->n_names - 1);
        say(s, FIRST_NAME + other + (other >= name));
    } else if (verb >= FIRST_PASSING) {
        say(s, PAST);
        say(s, THE);
        say(s, FIRST_PLACE + one_of(s, s->config->n_places));
    }
}

static void say_question(story *s) {
    say(s, WHERE);
    say(s, IS);
    say(s, THE);
    const int32_t object = s->cast[one_of(s, s->n_placed)];
    say(s, FIRST_OBJECT + object);
    say(s, ASK);
    note_question(s, object);
    say(s, FIRST_PLACE + s->place[object]);
}

/* The probabilities of a sentence when `n_placed` objects are in the story: of a question, then of
 * an update among the rest, then of a new object among updates. */
typedef struct odds {
    double question, update, fresh;
} odds;

static odds odds_of(const mn_stories_config *c, int64_t n_placed) {
    if (n_placed == 0) return (odds){ 0.0, 1.0, 1.0 };
    const double rest = c->update + c->filler;
    return (odds){
        .question = c->question / (rest + c->question),
        .update = rest > 0.0 ? c->update / rest : 0.0,
        .fresh = n_placed < c->n_cast ? c->p_new : 0.0,
    };
}

static void say_sentence(story *s) {
    const odds p = odds_of(s->config, s->n_placed);
    if (chance(s, p.question)) {
        say_question(s);
    } else {
        const int32_t name = one_of(s, s->config->n_names);
        say(s, FIRST_NAME + name);
        if (!chance(s, p.update)) say_filler(s, name);
        else if (chance(s, p.fresh)) say_placing(s);
        else say_moving(s);
    }
    say(s, DOT);
}

static bool say_story(shelf *to, const mn_stories_config *config, uint64_t seed, int64_t index) {
    story s = { .config = config, .to = to, .seed = seed };
    s.stream = UINT64_C(0x73746F72) << 32 ^ (uint64_t)index;    // "stor"
    say_sentence(&s);
    for (int64_t n = 1; n < config->n_sentences && !chance(&s, config->p_end); n++) {
        if (s.no_memory) return false;
        say_sentence(&s);
    }
    say(&s, END);
    return !s.no_memory;
}

/* ---- public ---------------------------------------------------------------------------------- */

mn_stories_config mn_stories_default(void) {
    return (mn_stories_config){
        .n_names = N_NAMES,
        .n_objects = N_OBJECTS,
        .n_places = N_PLACES,
        .n_cast = 8,
        .n_sentences = 200,
        .p_end = 1.0 / 40.0,
        .p_new = 0.3,
        .update = 0.35,
        .filler = 0.30,
        .question = 0.35,
    };
}

static mn_status check_count(const char *field, int64_t n, int64_t low, int64_t high) {
    if (n >= low && n <= high) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "stories: %s is %" PRId64 ", from %" PRId64 " to %" PRId64
                   " is possible", field, n, low, high);
}

static mn_status check_share(const char *field, double p) {
    if (p >= 0.0 && p <= 1.0) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "stories: %s is %g, from 0 to 1 is possible", field, p);
}

mn_status mn_stories_check(const mn_stories_config *c) {
    mn_status st = check_count("n_names", c->n_names, 2, N_NAMES);
    if (st == MN_OK) st = check_count("n_objects", c->n_objects, 1, N_OBJECTS);
    if (st == MN_OK) st = check_count("n_places", c->n_places, 2, N_PLACES);
    if (st == MN_OK) st = check_count("n_cast", c->n_cast, 1, c->n_objects);
    if (st == MN_OK) st = check_count("n_sentences", c->n_sentences, 1, 1000000);
    if (st == MN_OK) st = check_share("p_end", c->p_end);
    if (st == MN_OK) st = check_share("p_new", c->p_new);
    if (st == MN_OK) st = check_share("update", c->update);
    if (st == MN_OK) st = check_share("filler", c->filler);
    if (st == MN_OK) st = check_share("question", c->question);
    if (st == MN_OK && !(c->update + c->filler + c->question >= 1e-6)) {
        return mn_fail(MN_ERR_ARGUMENT, "stories: update, filler and question are all 0; give one "
                                        "of them weight");
    }
    return st;
}

mn_status mn_stories_tokens(mn_stories *out, const mn_stories_config *config, uint64_t seed,
                            int64_t first, int64_t count) {
    *out = (mn_stories){ 0 };
    const int64_t most = (int64_t)1 << 32;    // as far as the stream of random numbers counts
    mn_status st = mn_stories_check(config);
    if (st == MN_OK) st = check_count("first", first, 0, most);
    if (st == MN_OK) st = check_count("count", count, 0, most - first);
    if (st != MN_OK) return st;
    shelf s = { 0 };
    size_t bytes;
    const bool fits = mn_mul_size(&bytes, (size_t)count + 1, sizeof *s.stories.borders);
    s.stories.borders = fits ? malloc(bytes) : NULL;
    bool written = s.stories.borders && make_token_room(&s);
    for (int64_t i = 0; i < count && written; i++) {
        s.stories.borders[i] = s.stories.n_tokens;
        written = say_story(&s, config, seed, first + i);
    }
    if (!written) {
        mn_stories_free(&s.stories);
        return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " stories: ask for fewer at a time",
                       count);
    }
    s.stories.borders[count] = s.stories.n_tokens;
    s.stories.n_stories = count;
    *out = s.stories;
    return MN_OK;
}

void mn_stories_free(mn_stories *stories) {
    if (!stories) return;
    free(stories->tokens);
    free(stories->bits);
    free(stories->borders);
    free(stories->questions);
    *stories = (mn_stories){ 0 };
}

int64_t mn_stories_words(void) {
    return N_WORDS;
}

const char *mn_stories_word(int32_t id) {
    return id >= 0 && id < N_WORDS ? words[id] : NULL;
}

int32_t mn_stories_find(const char *text, size_t size) {
    for (int32_t id = 0; id < N_WORDS; id++) {
        if (strlen(words[id]) == size && memcmp(words[id], text, size) == 0) return id;
    }
    return -1;
}

int32_t mn_stories_first(mn_stories_class class) {
    return classes[class].first;
}

int64_t mn_stories_count(mn_stories_class class) {
    return classes[class].count;
}

/* ---- text ------------------------------------------------------------------------------------ */

/* Marks follow the word before them; lines do not start with a blank. */
static bool has_blank_before(int32_t token, bool line_start) {
    return !line_start && token != DOT && token != ASK && token != END;
}

mn_status mn_stories_text(char **out, size_t *size, const int32_t *tokens, int64_t count) {
    *out = NULL;
    *size = 0;
    size_t n = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!mn_stories_word(tokens[i])) {
            return mn_fail(MN_ERR_ARGUMENT, "stories: token %" PRId64 " is %" PRId32
                           ", words are 0 to %d", i, tokens[i], N_WORDS - 1);
        }
        if (!mn_add_size(&n, n, strlen(words[tokens[i]]) + 1)) n = SIZE_MAX;
    }
    char *text = n < SIZE_MAX ? malloc(n + 1) : NULL;
    if (!text) return mn_fail(MN_ERR_MEMORY, "no memory for the text of %" PRId64 " tokens", count);
    n = 0;
    for (int64_t i = 0; i < count; i++) {
        const size_t length = strlen(words[tokens[i]]);
        if (has_blank_before(tokens[i], i == 0 || tokens[i - 1] == END)) text[n++] = ' ';
        memcpy(text + n, words[tokens[i]], length);
        n += length;
    }
    text[n] = '\0';
    *out = text;
    *size = n;
    return MN_OK;
}

static bool is_mark(char c) {
    return c == '.' || c == '?' || c == '\n';
}

mn_status mn_stories_encode(int32_t **out, int64_t *count, const char *text, size_t size) {
    *out = NULL;
    *count = 0;
    size_t bytes;
    int32_t *tokens = mn_mul_size(&bytes, size, sizeof *tokens) ? malloc(bytes + 1) : NULL;
    if (!tokens) return mn_fail(MN_ERR_MEMORY, "no memory for the tokens of %zu bytes", size);
    int64_t n = 0;
    for (size_t at = 0; at < size;) {
        size_t end = at + 1;
        if (text[at] == ' ') {
            at = end;
            continue;
        }
        while (!is_mark(text[at]) && end < size && text[end] != ' ' && !is_mark(text[end])) end++;
        tokens[n] = mn_stories_find(text + at, end - at);
        if (tokens[n++] < 0) {
            free(tokens);
            return mn_fail(MN_ERR_FORMAT, "stories: \"%.*s\" at byte %zu is no word of a story",
                           (int)mn_min((int64_t)(end - at), 40), text + at, at);
        }
        at = end;
    }
    *out = tokens;
    *count = n;
    return MN_OK;
}

/* ---- means ----------------------------------------------------------------------------------- */

/* Entropy of a yes or no, in bits. */
static double entropy(double p) {
    return p > 0.0 && p < 1.0 ? -p * log2(p) - (1.0 - p) * log2(1.0 - p) : 0.0;
}

/* Adds `weight` times the mean sentence told when m objects are in the story; returns the
 * probability that it brings in another. */
static double add_sentence(mn_stories_means *to, const mn_stories_config *c, int64_t m,
                           double weight) {
    enum { QUESTION = 7, UPDATE = 8 };                     // tokens
    const double filler = (3.0 * N_ALONE + 6.0 * N_PASSING + 4.0 * N_TOGETHER) / N_VERBS;
    const odds p = odds_of(c, m);
    const double told = weight * (1.0 - p.question);       // by someone
    const double updates = told * p.update, fillers = told - updates;
    const double fresh = updates * p.fresh, moves = updates - fresh;
    const double places = log2((double)c->n_places);
    to->sentences += weight;
    to->questions += weight * p.question;
    to->tokens += weight * p.question * QUESTION + updates * UPDATE + fillers * filler;
    to->bits += weight * entropy(p.question);
    to->bits += told * (log2((double)c->n_names) + entropy(p.update));
    if (m > 0) to->bits += (weight * p.question + moves) * log2((double)m);
    to->bits += updates * entropy(p.fresh) + moves * log2((double)c->n_places - 1.0);
    if (fresh > 0.0) to->bits += fresh * (log2((double)(c->n_objects - m)) + places);
    to->bits += fillers * (log2(N_VERBS) + (N_PASSING * places +
                           N_TOGETHER * log2((double)c->n_names - 1.0)) / N_VERBS);
    return weight > 0.0 ? fresh / weight : 0.0;
}

/* Follows the distribution of the number of objects in the story, sentence by sentence. */
mn_status mn_stories_expect(mn_stories_means *out, const mn_stories_config *c) {
    double reached[N_OBJECTS + 2] = { 0 };     // P(the story goes on with m objects)
    *out = (mn_stories_means){ 0 };
    const mn_status st = mn_stories_check(c);
    if (st != MN_OK) return st;
    reached[0] = 1.0;
    for (int64_t n = 0; n < c->n_sentences; n++) {
        double alive = 0.0, carried = 0.0;
        for (int64_t m = 0; m <= c->n_cast; m++) alive += reached[m];
        if (n > 0) out->bits += alive * entropy(c->p_end);
        for (int64_t m = 0; m <= c->n_cast; m++) {
            const double goes_on = reached[m] * (n > 0 ? 1.0 - c->p_end : 1.0);
            const double fresh = goes_on * add_sentence(out, c, m, goes_on);
            reached[m] = goes_on - fresh + carried;
            carried = fresh;
        }
    }
    out->tokens += 1.0;                        // END
    return MN_OK;
}
