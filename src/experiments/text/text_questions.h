/* text_questions.h - what a model that was trained on text is asked, by length: "ask" of a job.
 *
 *   lengths   {name: tokens}: perplexity of the text held out, in windows of so many
 *   tokens    of the text held out at most so many; 0: all
 *   tasks     {name: options}: tasks of text, asked in the model's own tokens
 *   budgets   {name: tokens}: each task once for each, as its option "budget"
 *   rows      samples of each (64); batch: of a pass (8)
 *   essays    file or folder of text, for tasks whose haystack is made of it
 *
 * Adds "perplexity": {length: {...}} and "tasks": {task: {budget: answers}} to the result; where a
 * budget is too short for a task it has "left_out", why. */
#ifndef MN_EXPERIMENTS_TEXT_QUESTIONS_H
#define MN_EXPERIMENTS_TEXT_QUESTIONS_H

#include "data/corpus.h"
#include "experiments/job_internal.h"

typedef struct mn_text_asked {
    mn_context *context;
    mn_model *model;
    const mn_corpus *held_out;       // NULL: nothing is
    const mn_job_call *call;
} mn_text_asked;

/* Whether "ask" of the job can be read and names tasks that there are. */
mn_status mn_text_questions_check(const mn_json *job);

/* Whether they can be asked, before a model is trained for nothing: the text held out is long
 * enough, the tasks have what they need. */
mn_status mn_text_questions_open(const mn_text_asked *at, const mn_json *job);

/* Asks all of them; *stopped: the job is to stop, and the result is not whole. */
mn_status mn_text_questions_ask(json_t *result, bool *stopped, const mn_text_asked *at,
                                const mn_json *job);

#endif
