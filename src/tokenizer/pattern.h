/* pattern.h - the patterns of a tokenizer.json: {"Regex": ...} or {"String": ...}. */
#ifndef MN_TOKENIZER_PATTERN_H
#define MN_TOKENIZER_PATTERN_H

#include "io/json.h"
#include "io/text.h"

/* A compiled pattern; all zeros is none. Shared by threads. */
typedef struct mn_pattern {
    void *code;       // of PCRE2; NULL for a literal
    bool jit;
    char *literal;
    size_t literal_size;
} mn_pattern;

/* Compiles a regular expression; `at` is named in messages. What it means is what Oniguruma, the
 * engine behind tokenizer.json, takes it to mean. */
mn_status mn_pattern_compile(mn_pattern *out, const char *regex, const mn_json *at);
mn_status mn_pattern_literal(mn_pattern *out, const char *text);
mn_status mn_pattern_read(mn_pattern *out, const mn_json *at);
void mn_pattern_free(mn_pattern *pattern);

/* One walk over one text after the other; belongs to one thread. */
typedef struct mn_matcher {
    const mn_pattern *pattern;
    void *data;       // PCRE2's; made on first use
} mn_matcher;

void mn_matcher_free(mn_matcher *matcher);

/* The first match at or behind `from` in valid UTF-8. Without one `*found` is false. */
mn_status mn_matcher_find(mn_matcher *matcher, const char *text, size_t size, size_t from,
                          size_t *start, size_t *end, bool *found);

/* Appends `text` with `content` for each match. Bytes that are not UTF-8 pass. */
mn_status mn_pattern_replace(mn_text *out, const mn_pattern *pattern, const char *content,
                             const char *text, size_t size);

#endif
