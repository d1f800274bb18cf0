/* calls.h - calls of tools in what a model wrote, as templates teach models to write them.
 *
 * Understood: <tool_call>{"name", "arguments"}</tool_call>, any number of them behind a text (Qwen,
 * Hermes and many others); and an answer that is, as a whole, such an object or a list of them,
 * with `parameters` for `arguments` where a template says so (Llama 3). A call names one of the
 * tools of the request; anything else stays text. */
#ifndef MN_SERVER_CALLS_H
#define MN_SERVER_CALLS_H

#include <jansson.h>
#include <stddef.h>

/* The calls as tool_calls of a message, arguments as text; `id` is the request's. NULL: there are
 * none. `*before` is how many bytes of text stand in front of them. NULL tools: there are none. */
json_t *mn_calls_parse(const json_t *tools, const char *text, size_t size, const char *id,
                       size_t *before);

/* How many bytes of a text that is still written can no longer become calls. */
size_t mn_calls_settled(const char *text, size_t size);

/* Messages as templates expect them: arguments of tool_calls as objects instead of the text that
 * clients send, and contents that are parts of text as one text. A new reference; NULL when memory
 * is short. */
json_t *mn_calls_unfold(const json_t *messages);

#endif
