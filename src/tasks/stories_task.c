/* stories_task.c - the stories (stories.h) as a task: stories one after the other until the row is
 * full.
 *
 *   target  every next word, in training; the answers to questions in valid and test, or, with
 *           `answers_only`, always */
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "tasks/stories.h"
#include "tasks/task_internal.h"

static mn_stories_config config_of(const mn_task_values *v) {
    return (mn_stories_config){
        .n_names = v->names, .n_objects = v->objects, .n_places = v->places, .n_cast = v->cast,
        .n_sentences = v->sentences, .p_end = v->p_end, .p_new = v->p_new, .update = v->update,
        .filler = v->filler, .question = v->question,
    };
}

static mn_status open_stories(mn_task *task) {
    const mn_stories_config config = config_of(&task->values);
    const mn_status st = mn_stories_check(&config);
    task->shape = (mn_task_shape){ .vocab = mn_stories_words(), .classes = mn_stories_words(),
                                   .length = task->values.length };
    return st;
}

static void put_story(mn_sample_row *row, const mn_stories *s, int64_t at, int64_t T, bool all) {
    for (int64_t i = 0; i < s->n_tokens && at + i <= T; i++) {
        if (at + i < T) row->input[at + i] = s->tokens[i];
        if (all && at + i > 0) row->target[at + i - 1] = s->tokens[i];
    }
    for (int64_t q = 0; !all && q < s->n_questions; q++) {
        const int64_t t = at + s->questions[q].at - 1;    // where the answer is to be said
        if (t < T) row->target[t] = s->questions[q].answer;
    }
}

static mn_status draw_stories(mn_task *task, mn_sample_row *row) {
    const int64_t T = task->shape.length;
    const mn_stories_config config = config_of(&task->values);
    const bool all = row->split == MN_SPLIT_TRAIN && !task->values.answers_only;
    const uint64_t seed = mn_draw_bits(&row->draws);
    mn_status st = MN_OK;
    for (int64_t at = 0, n = 0; st == MN_OK && at <= T; n++) {
        mn_stories story;
        st = mn_stories_tokens(&story, &config, seed, n, 1);
        if (st != MN_OK) break;
        put_story(row, &story, at, T, all);
        at += story.n_tokens;
        mn_stories_free(&story);
    }
    return st;
}

const mn_generator mn_generator_stories = { .open = open_stories, .draw = draw_stories };
