/* chat.c - conversations by roles: messages, and the prompt that the model's template makes. */
#include "template/chat.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "cli/generate/generate.h"
#include "io/json.h"
#include "io/json_write.h"

mn_status mn_conversation_add(mn_conversation *c, const char *role, const char *text, size_t size) {
    json_t *content = json_stringn(text, size);
    if (!content) return mn_fail(MN_ERR_ARGUMENT, "the text of the %s is not UTF-8", role);
    json_t *message = json_pack("{s:s, s:o}", "role", role, "content", content);
    if (!message || json_array_append_new(c->messages, message) != 0) {
        return mn_fail(MN_ERR_MEMORY, "no memory for a message");
    }
    return MN_OK;
}

/* A list of messages, or an object that holds one with what belongs to it. */
static mn_status read_messages(mn_conversation *c, const char *path) {
    mn_json root = { 0 };
    mn_status st = mn_json_load(&root, path, MN_JSON_PYTHON);
    if (st != MN_OK) return st;
    const bool list = json_is_array(root.value);
    const mn_json messages = list ? root : mn_json_member(&root, "messages");
    const mn_json tools = mn_json_member(&root, "tools");
    const mn_json more = mn_json_member(&root, "chat_template_kwargs");
    st = mn_json_expect_list(&messages);
    if (st == MN_OK && mn_json_given(&tools)) st = mn_json_expect_list(&tools);
    if (st == MN_OK && mn_json_given(&more)) st = mn_json_expect_object(&more);
    if (st == MN_OK) json_array_extend(c->messages, messages.value);
    if (st == MN_OK && mn_json_given(&tools)) c->tools = json_incref(tools.value);
    if (st == MN_OK && mn_json_given(&more)) c->variables = json_incref(more.value);
    if (st == MN_OK && !list) {
        st = mn_json_opt_bool(&c->continues, &root, "continue_final_message");
    }
    mn_json_free(&root);
    return st;
}

mn_status mn_conversation_open(mn_conversation *c, const mn_generate_options *o) {
    *c = (mn_conversation){ .messages = json_array(), .name = o->template };
    if (!c->messages) return mn_fail(MN_ERR_MEMORY, "no memory for a conversation");
    mn_status st = mn_chat_template_load(&c->templates, o->model);
    if (st == MN_OK && !mn_chat_template_text(c->templates, o->template, false) &&
        !mn_chat_template_text(c->templates, o->template, true)) {
        st = mn_fail(MN_ERR_ARGUMENT, "%s: no chat template%s%s (chat_template.jinja, or "
                     "chat_template of tokenizer_config.json)", o->model,
                     o->template ? " is named " : "", o->template ? o->template : "");
    }
    if (st == MN_OK && o->system) {
        st = mn_conversation_add(c, "system", o->system, strlen(o->system));
    }
    if (st == MN_OK && o->messages) st = read_messages(c, o->messages);
    return st;
}

void mn_conversation_free(mn_conversation *c) {
    mn_chat_template_free(c->templates);
    json_decref(c->messages);
    json_decref(c->tools);
    json_decref(c->variables);
    *c = (mn_conversation){ 0 };
}

mn_status mn_conversation_prompt(mn_text *out, const mn_conversation *c) {
    const mn_chat_options how = { .tools = c->tools, .variables = c->variables, .name = c->name,
                                  .add_generation_prompt = !c->continues,
                                  .continue_final_message = c->continues };
    return mn_chat_template_render(out, c->templates, c->messages, &how);
}

static mn_status print_prompt(const mn_text *prompt, const mn_generate_options *o) {
    if (!o->json) {
        if (prompt->size) fwrite(prompt->bytes, 1, prompt->size, stdout);
        return MN_OK;
    }
    mn_tokenizer *tokenizer = NULL;
    mn_token_list tokens = { 0 };
    char *text = NULL;
    mn_status st = mn_tokenizer_load(&tokenizer, o->model);
    if (st == MN_OK) st = mn_tokenizer_encode_bare(tokenizer, prompt->bytes ? prompt->bytes : "",
                                                   prompt->size, &tokens);
    json_t *ids = json_array();
    for (int64_t i = 0; i < tokens.count; i++) {
        json_array_append_new(ids, json_integer(tokens.ids[i]));
    }
    json_t *root = json_object();
    json_object_set_new(root, "prompt", json_stringn(prompt->bytes ? prompt->bytes : "",
                                                     prompt->size));
    json_object_set_new(root, "tokens", ids);
    if (st == MN_OK) st = mn_json_text(&text, root, MN_JSON_PRETTY);
    if (st == MN_OK) puts(text);
    free(text);
    json_decref(root);
    mn_token_list_free(&tokens);
    mn_tokenizer_destroy(tokenizer);
    return st;
}

mn_status mn_conversation_dry_run(const mn_generate_options *o) {
    mn_conversation c = { 0 };
    mn_text prompt = { 0 };
    mn_status st = mn_conversation_open(&c, o);
    if (st == MN_OK && o->prompt) {
        st = mn_conversation_add(&c, "user", o->prompt, strlen(o->prompt));
    }
    if (st == MN_OK) st = mn_conversation_prompt(&prompt, &c);
    if (st == MN_OK) st = print_prompt(&prompt, o);
    mn_text_free(&prompt);
    mn_conversation_free(&c);
    return st;
}
