/* pattern.c - regular expressions by PCRE2, read as Oniguruma reads them.
 *
 * The two agree on what the patterns of published tokenizers use, except for \s and \w, which
 * PCRE2 widens and narrows; these two are spelt out. Sets within sets and intersections of sets are
 * Oniguruma's own and are refused. */
#include "tokenizer/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/utf8.h"

#define SPACES                                                                                     \
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"    \
    "\\x{205f}\\x{3000}"
/* Alphabetic, Mark, Decimal_Number and Connector_Punctuation, without properties that only recent
 * releases of PCRE2 know. */
#define WORDS                                                                                      \
    "\\p{L}\\p{Nl}\\p{M}\\p{Nd}\\p{Pc}\\x{24b6}-\\x{24e9}\\x{1f130}-\\x{1f149}"                    \
    "\\x{1f150}-\\x{1f169}\\x{1f170}-\\x{1f189}"

static mn_status put(mn_text *out, const char *piece) {
    return mn_text_add(out, piece, strlen(piece));
}

/* One escape, `c` being what follows the backslash. */
static mn_status put_escape(mn_text *out, char c, bool in_set, const mn_json *at) {
    const char *inner = c == 's' || c == 'S' ? SPACES : c == 'w' || c == 'W' ? WORDS : NULL;
    const bool negated = c == 'S' || c == 'W';
    if (!inner) {
        const char same[3] = { '\\', c, 0 };
        return put(out, same);
    }
    if (in_set && negated) {
        if (c == 'W') return mn_json_fail(at, "\\W inside a set is not supported, spell it out");
        return put(out, "\\P{Xsp}");               // differs in U+180E alone
    }
    mn_status st = MN_OK;
    if (!in_set) st = put(out, negated ? "[^" : "[");
    if (st == MN_OK) st = put(out, inner);
    if (st == MN_OK && !in_set) st = put(out, "]");
    return st;
}

static mn_status translate(mn_text *out, const char *regex, const mn_json *at) {
    bool in_set = false;
    const char *set_start = NULL;
    mn_status st = MN_OK;
    for (const char *c = regex; *c && st == MN_OK; c++) {
        if (*c == '\\' && c[1]) {
            st = put_escape(out, *++c, in_set, at);
            continue;
        }
        if (!in_set && *c == '[') {
            in_set = true;
            set_start = c + 1 + (c[1] == '^');
        } else if (in_set && *c == '[' && c[1] == ':') {
            const char *end = strstr(c + 2, ":]");
            if (!end) return mn_json_fail(at, "\"[:\" is not closed by \":]\"");
            for (; c <= end && st == MN_OK; c++) st = mn_text_add(out, c, 1);
        } else if (in_set && (*c == '[' || (*c == '&' && c[1] == '&'))) {
            return mn_json_fail(at, "sets within sets are not supported: \"%s\"", regex);
        } else if (in_set && *c == ']' && c != set_start) {
            in_set = false;
        }
        if (st == MN_OK) st = mn_text_add(out, c, 1);
    }
    return st;
}

mn_status mn_pattern_compile(mn_pattern *out, const char *regex, const mn_json *at) {
    mn_text text = { 0 };
    mn_status st = translate(&text, regex, at);
    int error = 0;
    PCRE2_SIZE offset = 0;
    *out = (mn_pattern){ 0 };
    if (st == MN_OK) {
        out->code = pcre2_compile((PCRE2_SPTR)(text.bytes ? text.bytes : ""), text.size,
                                  PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C,
                                  &error, &offset, NULL);
        if (!out->code) {
            char why[160] = "";
            pcre2_get_error_message(error, (PCRE2_UCHAR *)why, sizeof why);
            st = mn_json_fail(at, "the pattern \"%s\" does not compile: %s", regex, why);
        } else {
            out->jit = pcre2_jit_compile(out->code, PCRE2_JIT_COMPLETE) == 0;
        }
    }
    mn_text_free(&text);
    return st;
}

mn_status mn_pattern_literal(mn_pattern *out, const char *text) {
    *out = (mn_pattern){ .literal = strdup(text), .literal_size = strlen(text) };
    return out->literal ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a pattern");
}

mn_status mn_pattern_read(mn_pattern *out, const mn_json *at) {
    const mn_json regex = mn_json_member(at, "Regex"), string = mn_json_member(at, "String");
    const char *text = NULL;
    const bool is_regex = mn_json_given(&regex);
    if (is_regex == mn_json_given(&string)) {
        return mn_json_fail(at, "expected {\"Regex\": ...} or {\"String\": ...}");
    }
    const mn_status st = mn_json_read_text(&text, is_regex ? &regex : &string);
    if (st != MN_OK) return st;
    return is_regex ? mn_pattern_compile(out, text, at) : mn_pattern_literal(out, text);
}

void mn_pattern_free(mn_pattern *pattern) {
    pcre2_code_free(pattern->code);
    free(pattern->literal);
    *pattern = (mn_pattern){ 0 };
}

void mn_matcher_free(mn_matcher *matcher) {
    pcre2_match_data_free(matcher->data);
    matcher->data = NULL;
}

static mn_status find_literal(mn_matcher *m, const char *text, size_t size, size_t from,
                              size_t *start, size_t *end, bool *found) {
    const size_t n = m->pattern->literal_size;
    *found = false;
    if (n == 0) return MN_OK;
    const char *at = text + from, *const stop = text + size;
    while ((size_t)(stop - at) >= n) {
        at = memchr(at, m->pattern->literal[0], (size_t)(stop - at) - n + 1);
        if (!at) return MN_OK;
        if (memcmp(at, m->pattern->literal, n) == 0) {
            *found = true;
            *start = (size_t)(at - text);
            *end = *start + n;
            return MN_OK;
        }
        at++;
    }
    return MN_OK;
}

mn_status mn_matcher_find(mn_matcher *m, const char *text, size_t size, size_t from, size_t *start,
                          size_t *end, bool *found) {
    if (!m->pattern->code) return find_literal(m, text, size, from, start, end, found);
    if (!m->data) m->data = pcre2_match_data_create(1, NULL);
    if (!m->data) return mn_fail(MN_ERR_MEMORY, "no memory to match a pattern");
    const PCRE2_SPTR subject = (PCRE2_SPTR)text;
    int result = PCRE2_ERROR_JIT_STACKLIMIT;
    if (m->pattern->jit) {
        result = pcre2_jit_match(m->pattern->code, subject, size, from, 0, m->data, NULL);
    }
    if (result == PCRE2_ERROR_JIT_STACKLIMIT) {    // the interpreter takes memory as it needs it
        result = pcre2_match(m->pattern->code, subject, size, from,
                             PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, m->data, NULL);
    }
    *found = result >= 0;
    if (result < 0 && result != PCRE2_ERROR_NOMATCH) {
        char why[160] = "";
        pcre2_get_error_message(result, (PCRE2_UCHAR *)why, sizeof why);
        return mn_fail(MN_ERR_UNSUPPORTED, "a pattern of the tokenizer gives up on the text: %s",
                       why);
    }
    if (!*found) return MN_OK;
    const PCRE2_SIZE *ends = pcre2_get_ovector_pointer(m->data);
    *start = ends[0];
    *end = ends[1] < ends[0] ? ends[0] : ends[1];   // \K may turn them round
    return MN_OK;
}

/* The same for valid UTF-8. */
static mn_status replace_valid(mn_text *out, mn_matcher *matcher, const char *content,
                               const char *text, size_t size) {
    size_t done = 0, from = 0;
    mn_status st = MN_OK;
    while (from <= size && size > 0) {
        size_t start, end;
        bool found;
        st = mn_matcher_find(matcher, text, size, from, &start, &end, &found);
        if (st != MN_OK || !found) break;
        st = mn_text_add(out, text + done, start - done);
        if (st == MN_OK) st = put(out, content);
        if (st != MN_OK) break;
        done = from = end;
        if (end > start) continue;
        uint32_t point;                            // an empty match: on by one character
        from += from < size ? (size_t)mn_utf8_take(text + from, size - from, &point) : 1;
    }
    return st == MN_OK ? mn_text_add(out, text + done, size - done) : st;
}

mn_status mn_pattern_replace(mn_text *out, const mn_pattern *pattern, const char *content,
                             const char *text, size_t size) {
    mn_matcher matcher = { .pattern = pattern };
    mn_status st = MN_OK;
    while (size > 0 && st == MN_OK) {
        const size_t valid = mn_utf8_valid(text, size);
        if (valid > 0) st = replace_valid(out, &matcher, content, text, valid);
        if (st == MN_OK && valid < size) st = mn_text_add(out, text + valid, 1);
        text += valid + (valid < size);
        size -= valid + (valid < size);
    }
    mn_matcher_free(&matcher);
    return st;
}
