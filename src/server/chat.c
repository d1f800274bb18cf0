/* chat.c - the server's chat template: that of the model folder, asked for what is possible. */
#include "server/chat.h"

#include <stdlib.h>

#include "base/status.h"

struct mn_chat {
    mn_chat_templates *template;
};

mn_status mn_chat_open(mn_chat **out, const char *folder) {
    *out = calloc(1, sizeof **out);
    if (!*out) return mn_fail(MN_ERR_MEMORY, "no memory for a chat template");
    const mn_status st = mn_chat_template_load(&(*out)->template, folder);
    if (st != MN_OK) {
        mn_chat_close(*out);
        *out = NULL;
    }
    return st;
}

void mn_chat_close(mn_chat *chat) {
    if (!chat) return;
    mn_chat_template_free(chat->template);
    free(chat);
}

const char *mn_chat_template(const mn_chat *chat) {
    return mn_chat_template_text(chat->template, NULL, false);
}

const char *mn_chat_refusal(const mn_chat *chat) {
    if (mn_chat_template(chat) || mn_chat_template_text(chat->template, NULL, true)) return NULL;
    return "this checkpoint has no chat template (chat_template.jinja, or chat_template of "
           "tokenizer_config.json); use /v1/completions";
}

mn_status mn_chat_render(mn_text *out, const mn_chat *chat, const json_t *messages,
                         const mn_chat_options *options) {
    const char *refusal = mn_chat_refusal(chat);
    if (refusal) return mn_fail(MN_ERR_ARGUMENT, "%s", refusal);
    const mn_status st = mn_chat_template_render(out, chat->template, messages, options);
    return st == MN_ERR_UNSUPPORTED ? MN_ERR_ARGUMENT : st;
}
