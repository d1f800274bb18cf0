/* chat.h - the chat template of a model folder: from the messages of a conversation to a prompt. */
#ifndef MN_TEMPLATE_CHAT_H
#define MN_TEMPLATE_CHAT_H

#include <jansson.h>
#include <stdbool.h>

#include "io/text.h"
#include "mneme.h"

typedef struct mn_chat_templates mn_chat_templates;

/* What a conversation is rendered with besides its messages; borrowed. */
typedef struct mn_chat_options {
    const json_t *tools;            // a list, or NULL
    const json_t *documents;        // a list, or NULL
    const json_t *variables;        // an object of more variables, or NULL
    const char *name;               // of the template; NULL: tool_use with tools, else default
    bool add_generation_prompt;     // open the assistant's answer
    bool continue_final_message;    // end within the last message, which is to go on
} mn_chat_options;

/* Reads the templates of a model folder and the special tokens they may name: chat_template.jinja
 * and additional_chat_templates/NAME.jinja, else chat_template.json, else chat_template of
 * tokenizer_config.json. A folder without any gives a template that fails to render. */
mn_status mn_chat_template_load(mn_chat_templates **out, const char *folder);

void mn_chat_template_free(mn_chat_templates *chat);    // NULL accepted

/* The text of a template, NULL where there is none. `name` as above. */
const char *mn_chat_template_text(const mn_chat_templates *chat, const char *name, bool tools);

/* Appends the prompt of `messages`, a list of objects, to `out`; a failure leaves it as it was. The
 * message of a template that refuses (raise_exception) is its own, behind file and line. Safe to
 * call from many threads. */
mn_status mn_chat_template_render(mn_text *out, const mn_chat_templates *chat,
                                  const json_t *messages, const mn_chat_options *options);

#endif
