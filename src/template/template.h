/* template.h - chat templates: a text with expressions, rendered over values of JSON.
 *
 * The language is Jinja as transformers sets it up for apply_chat_template: blocks trimmed and
 * stripped, loop controls, immutable values, tojson without escapes of HTML, raise_exception,
 * strftime_now and {% generation %}. Values behave and print as those of Python. What a template
 * can do is bounded by limits, so one of unknown origin can be rendered. */
#ifndef MN_TEMPLATE_TEMPLATE_H
#define MN_TEMPLATE_TEMPLATE_H

#include <jansson.h>
#include <stdint.h>

#include "io/text.h"
#include "mneme.h"

typedef struct mn_jinja mn_jinja;

/* What rendering may take; 0: the default. */
typedef struct mn_jinja_limits {
    int64_t steps;          // nodes evaluated, and 64 bytes looked at count as one
    size_t bytes;           // of memory for values
    size_t output;          // of text
} mn_jinja_limits;

/* Reads a template of `size` bytes of UTF-8, which are not needed afterwards. `name` (copied) opens
 * every message, followed by the line. On failure `*out` is NULL. */
mn_status mn_jinja_parse(mn_jinja **out, const char *text, size_t size, const char *name);

void mn_jinja_free(mn_jinja *t);    // NULL accepted

/* Appends what the template makes of the members of `variables`, an object. A failure leaves `out`
 * as it was: MN_ERR_ARGUMENT where the template itself refuses (raise_exception) or its values do
 * not fit, MN_ERR_UNSUPPORTED beyond a limit. `limits` may be NULL. Safe to call from many
 * threads. */
mn_status mn_jinja_render(mn_text *out, const mn_jinja *t, const json_t *variables,
                             const mn_jinja_limits *limits);

#endif
