/* chat.c - chat templates: found, and refused in words until a renderer is in this build. */
#include "server/chat.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"

struct mn_chat {
    char *text;
};

mn_status mn_chat_open(mn_chat **out, const char *folder) {
    char path[4096];
    mn_json root = { 0 };
    *out = calloc(1, sizeof **out);
    if (!*out) return mn_fail(MN_ERR_MEMORY, "no memory for a chat template");
    snprintf(path, sizeof path, "%s/tokenizer_config.json", folder);
    if (access(path, R_OK) != 0) return MN_OK;
    mn_status st = mn_json_load(&root, path, MN_JSON_PYTHON);
    const char *text = NULL;
    const mn_json member = mn_json_member(&root, "chat_template");
    if (st == MN_OK && json_is_string(member.value)) text = json_string_value(member.value);
    if (text) {
        (*out)->text = strdup(text);
        if (!(*out)->text) st = mn_fail(MN_ERR_MEMORY, "no memory for a chat template");
    }
    mn_json_free(&root);
    if (st != MN_OK) {
        mn_chat_close(*out);
        *out = NULL;
    }
    return st;
}

void mn_chat_close(mn_chat *chat) {
    if (!chat) return;
    free(chat->text);
    free(chat);
}

const char *mn_chat_template(const mn_chat *chat) {
    return chat->text;
}

const char *mn_chat_refusal(const mn_chat *chat) {
    if (!chat->text) {
        return "this checkpoint has no chat template (chat_template of tokenizer_config.json); "
               "use /v1/completions";
    }
    return "this build cannot render the checkpoint's chat template; render the prompt yourself "
           "and use /v1/completions";
}

mn_status mn_chat_render(mn_text *out, const mn_chat *chat, const json_t *messages,
                         const json_t *tools) {
    (void)out;
    (void)messages;
    (void)tools;
    return mn_fail(MN_ERR_UNSUPPORTED, "%s", mn_chat_refusal(chat));
}
