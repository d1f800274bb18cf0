/* data.c - the stories that the models of the demo are trained and asked on. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/demo/demo.h"

enum { TRAIN_STORIES = 20000, HELD_STORIES = 400, HELD_FIRST = 1 << 30 };

/* Small enough to be learnt in a minute: 20 sentences a story on average, 8 names, objects and
 * places, up to 5 objects at a time. */
static mn_stories_config small_source(void) {
    mn_stories_config c = mn_stories_default();
    c.n_names = 8;
    c.n_objects = 8;
    c.n_places = 8;
    c.n_cast = 5;
    c.n_sentences = 60;
    c.p_end = 1.0 / 20.0;
    return c;
}

/* A story as a document: the end of the one before, which asks for a story, and the story. */
static mn_status corpus_of(mn_corpus **out, const mn_stories *s) {
    const int64_t n = s->n_tokens + s->n_stories;
    int32_t *tokens = malloc((size_t)n * sizeof *tokens);
    int64_t *borders = malloc(((size_t)s->n_stories + 1) * sizeof *borders);
    mn_status st = tokens && borders ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for the stories");
    for (int64_t i = 0; i < s->n_stories && st == MN_OK; i++) {
        const int64_t from = s->borders[i], count = s->borders[i + 1] - from;
        borders[i] = from + i;
        tokens[borders[i]] = mn_stories_first(MN_STORIES_GLUE);    // the end of a story
        memcpy(tokens + borders[i] + 1, s->tokens + from, (size_t)count * sizeof *tokens);
    }
    if (st == MN_OK) borders[s->n_stories] = n;
    if (st == MN_OK) st = mn_corpus_from_tokens(out, tokens, n, borders, s->n_stories);
    free(tokens);
    free(borders);
    return st;
}

mn_status mn_demo_data_make(mn_demo_data *out, uint64_t seed) {
    *out = (mn_demo_data){ .source = small_source() };
    mn_stories train = { 0 };
    mn_stories_means means = { 0 };
    mn_status st = mn_stories_expect(&means, &out->source);
    if (st == MN_OK) st = mn_stories_tokens(&train, &out->source, seed, 0, TRAIN_STORIES);
    if (st == MN_OK) st = corpus_of(&out->train, &train);
    mn_stories_free(&train);
    if (st == MN_OK) {
        st = mn_stories_tokens(&out->held, &out->source, seed, HELD_FIRST, HELD_STORIES);
    }
    if (st == MN_OK) st = mn_stories_tokenizer(&out->tokenizer);
    if (st == MN_OK) out->floor = means.bits / means.tokens;
    return st;
}

double mn_demo_chance(const mn_demo_data *data) {
    return 1.0 / (double)data->source.n_places;
}

void mn_demo_data_free(mn_demo_data *data) {
    mn_stories_free(&data->held);
    mn_corpus_destroy(data->train);
    mn_tokenizer_destroy(data->tokenizer);
    *data = (mn_demo_data){ 0 };
}
