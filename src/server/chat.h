/* chat.h - from the messages of a conversation to the text of a prompt.
 *
 * The one place where the server meets the renderer of chat templates. */
#ifndef MN_SERVER_CHAT_H
#define MN_SERVER_CHAT_H

#include "io/json.h"
#include "io/text.h"
#include "template/chat.h"

typedef struct mn_chat mn_chat;

/* Reads the template of a model folder; a folder without one gives a chat that renders nothing. */
mn_status mn_chat_open(mn_chat **out, const char *folder);
void mn_chat_close(mn_chat *chat);    // NULL accepted

/* The template's text, NULL if there is none. */
const char *mn_chat_template(const mn_chat *chat);

/* Why mn_chat_render would fail whatever it is given; NULL if it may succeed. */
const char *mn_chat_refusal(const mn_chat *chat);

/* Appends the prompt of `messages` to `out`. MN_ERR_ARGUMENT where the conversation and the
 * template
 * do not go together, in words. Safe to call from many threads. */
mn_status mn_chat_render(mn_text *out, const mn_chat *chat, const json_t *messages,
                         const mn_chat_options *options);

#endif
