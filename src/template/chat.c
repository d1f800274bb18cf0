/* chat.c - chat templates of a model folder, and conversations as variables for them. */
#define _XOPEN_SOURCE 700       // strdup under -std=c11
#include "template/chat.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "io/file.h"
#include "io/folder.h"
#include "io/json.h"
#include "template/template.h"

enum { MOST_TEMPLATES = 32 };

static const char tag[] = "CONTINUE_FINAL_MESSAGE_TAG ";

typedef struct named_template {
    char *name, *text;
    mn_jinja *parsed;        // NULL: `refusal` says why
    char *refusal;
} named_template;

struct mn_chat_templates {
    named_template all[MOST_TEMPLATES];
    int n;
    json_t *tokens;             // special tokens by name
    char *folder;
};

/* ---- reading --------------------------------------------------------------------------------- */

/* A template that cannot be parsed is kept with the reason: the model may be of use without. */
static mn_status add_template(mn_chat_templates *c, const char *name, const char *text, size_t size,
                              const char *path) {
    if (c->n == MOST_TEMPLATES) return mn_fail(MN_ERR_FORMAT, "%s: too many templates", path);
    named_template *t = &c->all[c->n++];
    t->name = strdup(name);
    t->text = malloc(size + 1);
    if (!t->name || !t->text) return mn_fail(MN_ERR_MEMORY, "%s: no memory for a template", path);
    memcpy(t->text, text, size);
    t->text[size] = '\0';
    const mn_status st = mn_jinja_parse(&t->parsed, text, size, path);
    if (st == MN_OK) return MN_OK;
    t->refusal = strdup(mn_last_error());
    return t->refusal && st != MN_ERR_MEMORY ? MN_OK : st;
}

static mn_status add_file(mn_chat_templates *c, const char *name, const char *path) {
    mn_file file = { 0 };
    mn_status st = mn_file_map(&file, path);
    if (st == MN_OK) {
        st = add_template(c, name, file.size ? (const char *)file.bytes : "", file.size, path);
    }
    mn_file_unmap(&file);
    return st;
}

static mn_status path_of(char out[MN_FOLDER_PATH], const char *folder, const char *name) {
    if (snprintf(out, MN_FOLDER_PATH, "%s/%s", folder, name) < MN_FOLDER_PATH) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", folder);
}

/* additional_chat_templates/NAME.jinja */
static mn_status add_folder(mn_chat_templates *c, const char *folder) {
    char path[MN_FOLDER_PATH];
    mn_status st = path_of(path, folder, "additional_chat_templates");
    DIR *dir = st == MN_OK ? opendir(path) : NULL;
    for (const struct dirent *e; dir && st == MN_OK && (e = readdir(dir));) {
        char file[MN_FOLDER_PATH], name[256];
        const size_t n = strlen(e->d_name);
        if (n <= 6 || n >= sizeof name || strcmp(e->d_name + n - 6, ".jinja") != 0) continue;
        snprintf(name, sizeof name, "%.*s", (int)(n - 6), e->d_name);
        st = path_of(file, path, e->d_name);
        if (st == MN_OK) st = add_file(c, name, file);
    }
    if (dir) closedir(dir);
    return st;
}

/* "chat_template": TEXT, or [{"name": NAME, "template": TEXT}, ...]. */
static mn_status add_member(mn_chat_templates *c, const mn_json *root, const char *path) {
    const mn_json at = mn_json_member(root, "chat_template");
    const char *text = NULL, *name = NULL;
    if (!mn_json_given(&at)) return MN_OK;
    if (!json_is_array(at.value)) {
        const mn_status st = mn_json_read_text(&text, &at);
        return st == MN_OK ? add_template(c, "default", text, strlen(text), path) : st;
    }
    mn_status st = MN_OK;
    for (int64_t i = 0; i < mn_json_count(&at) && st == MN_OK; i++) {
        const mn_json item = mn_json_item(&at, i);
        st = mn_json_get_text(&name, &item, "name");
        if (st == MN_OK) st = mn_json_get_text(&text, &item, "template");
        if (st == MN_OK) st = add_template(c, name, text, strlen(text), path);
    }
    return st;
}

/* Members whose names end in _token: a text, or an object with its content. */
static void add_tokens(mn_chat_templates *c, const mn_json *root) {
    for (mn_json m = { 0 }; mn_json_next(&m, root);) {
        const size_t n = strlen(m.name);
        json_t *text = json_is_object(m.value) ? json_object_get(m.value, "content") : m.value;
        const bool token = n > 6 && strcmp(m.name + n - 6, "_token") == 0;
        if (token && json_is_string(text) && !json_object_get(c->tokens, m.name)) {
            json_object_set(c->tokens, m.name, text);
        }
        if (strcmp(m.name, "extra_special_tokens") == 0 && json_is_object(m.value)) {
            add_tokens(c, &m);
        }
    }
}

/* Special tokens of a JSON file, and its templates where none were found so far. */
static mn_status add_json(mn_chat_templates *c, const char *folder, const char *name) {
    char path[MN_FOLDER_PATH];
    mn_json root = { 0 };
    mn_status st = path_of(path, folder, name);
    if (st != MN_OK || access(path, R_OK) != 0) return st;
    st = mn_json_load(&root, path, MN_JSON_PYTHON);
    if (st == MN_OK) add_tokens(c, &root);
    if (st == MN_OK && c->n == 0) st = add_member(c, &root, path);
    mn_json_free(&root);
    return st;
}

mn_status mn_chat_template_load(mn_chat_templates **out, const char *folder) {
    char path[MN_FOLDER_PATH];
    mn_chat_templates *c = calloc(1, sizeof *c);
    *out = NULL;
    if (c) c->folder = strdup(folder);
    if (c) c->tokens = json_object();
    if (!c || !c->folder || !c->tokens) {
        mn_chat_template_free(c);
        return mn_fail(MN_ERR_MEMORY, "no memory for a chat template");
    }
    mn_status st = path_of(path, folder, "chat_template.jinja");
    if (st == MN_OK && access(path, R_OK) == 0) st = add_file(c, "default", path);
    if (st == MN_OK) st = add_folder(c, folder);
    if (st == MN_OK) st = add_json(c, folder, "chat_template.json");
    if (st == MN_OK) st = add_json(c, folder, "tokenizer_config.json");
    if (st == MN_OK) st = add_json(c, folder, "special_tokens_map.json");
    if (st == MN_OK) *out = c;
    else mn_chat_template_free(c);
    return st;
}

void mn_chat_template_free(mn_chat_templates *c) {
    if (!c) return;
    for (int i = 0; i < c->n; i++) {
        mn_jinja_free(c->all[i].parsed);
        free(c->all[i].name);
        free(c->all[i].text);
        free(c->all[i].refusal);
    }
    json_decref(c->tokens);
    free(c->folder);
    free(c);
}

/* ---- choosing -------------------------------------------------------------------------------- */

static const named_template *find(const mn_chat_templates *c, const char *name) {
    for (int i = 0; i < c->n; i++) {
        if (strcmp(c->all[i].name, name) == 0) return &c->all[i];
    }
    return NULL;
}

static const named_template *choose(const mn_chat_templates *c, const char *name, bool tools) {
    if (name) return find(c, name);
    const named_template *t = tools ? find(c, "tool_use") : NULL;
    return t ? t : find(c, "default");
}

const char *mn_chat_template_text(const mn_chat_templates *c, const char *name, bool tools) {
    const named_template *t = choose(c, name, tools);
    return t ? t->text : NULL;
}

static mn_status choose_or_fail(const named_template **out, const mn_chat_templates *c,
                                const mn_chat_options *o) {
    char known[300] = "";
    *out = choose(c, o->name, o->tools != NULL);
    if (*out) {
        return (*out)->parsed ? MN_OK : mn_fail(MN_ERR_UNSUPPORTED, "%s", (*out)->refusal);
    }
    if (c->n == 0) {
        return mn_fail(MN_ERR_UNSUPPORTED, "%s: no chat template (chat_template.jinja, or "
                       "chat_template of tokenizer_config.json); give a prompt as text",
                       c->folder);
    }
    for (int i = 0; i < c->n; i++) {
        const size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", c->all[i].name);
    }
    return mn_fail(MN_ERR_ARGUMENT, "%s: no chat template is named \"%s\"; there are %s",
                   c->folder, o->name ? o->name : "default", known);
}

/* ---- conversations --------------------------------------------------------------------------- */

/* A copy with the reasoning of each message under the names that templates read. */
static json_t *copy_messages(const json_t *messages) {
    static const char *const names[] = { "reasoning_content", "thinking", "reasoning" };
    json_t *out = json_array();
    for (size_t i = 0; i < json_array_size(messages); i++) {
        json_t *from = json_array_get(messages, i), *reasoning = NULL, *to;
        for (size_t k = 0; k < MN_COUNTOF(names) && !reasoning; k++) {
            json_t *v = json_object_get(from, names[k]);
            if (v && !json_is_null(v)) reasoning = v;
        }
        if (reasoning) {
            to = json_object();
            json_object_set(to, "thinking", reasoning);
            json_object_update(to, from);
            json_object_set(to, "reasoning_content", reasoning);
        } else {
            to = json_deep_copy(from);
        }
        json_array_append_new(out, to);
    }
    return out;
}

static json_t *with_tag(const json_t *text) {
    return json_sprintf("%s%s", json_string_value(text), tag);
}

/* Puts the tag behind the text of the last message, whose text without it becomes `*last`. */
static mn_status mark_end(json_t *messages, const json_t **last) {
    const size_t n = json_array_size(messages);
    json_t *message = json_deep_copy(json_array_get(messages, n - 1));
    json_t *content = json_object_get(message, "content");
    *last = NULL;
    if (json_is_string(content)) {
        *last = json_object_get(json_array_get(messages, n - 1), "content");
        json_incref((json_t *)*last);
        json_object_set_new(message, "content", with_tag(content));
    }
    for (size_t i = json_is_array(content) ? json_array_size(content) : 0; i-- > 0 && !*last;) {
        json_t *block = json_array_get(content, i), *text = json_object_get(block, "text");
        if (!json_is_string(text)) continue;
        *last = json_incref(text);
        json_object_set_new(block, "text", with_tag(text));
    }
    json_array_set_new(messages, n - 1, message);
    if (*last) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "the final message has no text that could be continued");
}

static const char *find_text(const char *in, size_t size, const char *what, size_t n) {
    for (size_t at = 0; at + n <= size; at++) {
        if (memcmp(in + at, what, n) == 0) return in + at;
    }
    return NULL;
}

static bool is_blank(char c) {
    return c == ' ' || (c >= '\t' && c <= '\r');
}

/* Ends the text where the tag stands. */
static mn_status cut_at_tag(mn_text *text, const json_t *last) {
    const size_t n = sizeof tag - 2;                    // without its blank
    const char *wanted = json_string_value(last), *end = wanted + json_string_length(last);
    size_t at = text->size;
    while (wanted < end && is_blank(*wanted)) wanted++;
    while (end > wanted && is_blank(end[-1])) end--;
    for (size_t i = 0; i + n <= text->size; i++) {
        if (memcmp(text->bytes + i, tag, n) == 0) at = i;
    }
    if (at == text->size || !find_text(text->bytes, text->size, wanted, (size_t)(end - wanted))) {
        return mn_fail(MN_ERR_ARGUMENT, "the template does not keep the text of the final "
                       "message, so it cannot be continued");
    }
    const bool trimmed = at + n >= text->size || text->bytes[at + n] != ' ';
    text->size = at;
    while (trimmed && text->size && is_blank(text->bytes[text->size - 1])) text->size--;
    return MN_OK;
}

static json_t *variables_of(const mn_chat_templates *c, json_t *messages,
                            const mn_chat_options *o) {
    json_t *all = json_copy(c->tokens);
    json_object_set(all, "messages", messages);
    json_object_set_new(all, "tools", o->tools ? json_incref((json_t *)o->tools) : json_null());
    json_object_set_new(all, "documents",
                        o->documents ? json_incref((json_t *)o->documents) : json_null());
    json_object_set_new(all, "add_generation_prompt", json_boolean(o->add_generation_prompt));
    if (o->variables) json_object_update(all, (json_t *)o->variables);
    return all;
}

static mn_status check_messages(const json_t *messages, const mn_chat_options *o) {
    if (!json_is_array(messages) || json_array_size(messages) == 0) {
        return mn_fail(MN_ERR_ARGUMENT, "a conversation is a list of at least one message");
    }
    for (size_t i = 0; i < json_array_size(messages); i++) {
        if (json_is_object(json_array_get(messages, i))) continue;
        return mn_fail(MN_ERR_ARGUMENT, "messages[%zu] is no object with role and content", i);
    }
    if (o->continue_final_message && o->add_generation_prompt) {
        return mn_fail(MN_ERR_ARGUMENT, "a prompt either continues the final message or opens a "
                       "new one, not both");
    }
    return MN_OK;
}

mn_status mn_chat_template_render(mn_text *out, const mn_chat_templates *c, const json_t *messages,
                                  const mn_chat_options *o) {
    const named_template *t;
    const json_t *last = NULL;
    mn_text text = { 0 };
    mn_status st = check_messages(messages, o);
    if (st == MN_OK) st = choose_or_fail(&t, c, o);
    if (st != MN_OK) return st;
    json_t *copy = copy_messages(messages);
    if (o->continue_final_message) st = mark_end(copy, &last);
    json_t *variables = variables_of(c, copy, o);
    if (st == MN_OK) st = mn_jinja_render(&text, t->parsed, variables, NULL);
    if (st == MN_OK && last) st = cut_at_tag(&text, last);
    if (st == MN_OK) st = mn_text_add(out, text.bytes, text.size);
    mn_text_free(&text);
    json_decref(variables);
    json_decref(copy);
    json_decref((json_t *)last);
    return st;
}
