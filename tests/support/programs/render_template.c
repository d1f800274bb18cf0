/* render_template.c - renders templates for scripts that compare: each line of the input is an
 * object
 * {"template": TEXT, "variables": {...}}, each of the output {"text": TEXT} or {"error": MESSAGE}.
 * */
#define _XOPEN_SOURCE 700
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "template/template.h"

static json_t *render(const json_t *line) {
    const json_t *given = json_object_get(line, "template");
    mn_jinja *t = NULL;
    mn_text text = { 0 };
    mn_status st = mn_jinja_parse(&t, json_string_value(given), json_string_length(given),
                                     "template");
    if (st == MN_OK) st = mn_jinja_render(&text, t, json_object_get(line, "variables"), NULL);
    json_t *out = st == MN_OK ? json_pack("{s:s%}", "text", text.bytes ? text.bytes : "", text.size)
                              : json_pack("{s:s}", "error", mn_last_error());
    mn_text_free(&text);
    mn_jinja_free(t);
    return out;
}

int main(void) {
    char *line = NULL;
    size_t room = 0;
    for (ssize_t n; (n = getline(&line, &room, stdin)) > 0;) {
        json_error_t error;
        json_t *given = json_loadb(line, (size_t)n, JSON_ALLOW_NUL, &error);
        json_t *out = given ? render(given) : json_pack("{s:s}", "error", error.text);
        char *text = out ? json_dumps(out, JSON_COMPACT | JSON_ENSURE_ASCII) : NULL;
        puts(text ? text : "{\"error\": \"no UTF-8\"}");
        fflush(stdout);
        free(text);
        json_decref(out);
        json_decref(given);
    }
    free(line);
    return 0;
}
