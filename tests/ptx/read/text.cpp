/* text.cpp - pieces of PTX text (PTX ISA: Syntax). */
#include "read/text.h"

#include <cctype>
#include <cstdlib>

namespace ptx {

bool is_blank(char c) {
    return isspace((unsigned char)c) != 0;
}

bool is_name(char c) {
    return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%' || c == '.';
}

view trimmed(view s) {
    while (!s.empty() && is_blank(s.front())) s.remove_prefix(1);
    while (!s.empty() && is_blank(s.back())) s.remove_suffix(1);
    return s;
}

bool begins(view s, view with) {
    return s.substr(0, with.size()) == with;
}

std::vector<view> split(view s, char by) {
    std::vector<view> parts;
    int depth = 0;
    size_t from = 0;
    for (size_t i = 0; i <= s.size(); i++) {
        const char c = i < s.size() ? s[i] : by;
        depth += (c == '{' || c == '[' || c == '(') - (c == '}' || c == ']' || c == ')');
        if (i < s.size() && (c != by || depth != 0)) continue;
        const view part = trimmed(s.substr(from, i - from));
        if (!part.empty()) parts.push_back(part);
        from = i + 1;
    }
    return parts;
}

static bool is_float_bits(view s) {
    if (s.size() < 2 || s[0] != '0') return false;
    const char kind = (char)tolower((unsigned char)s[1]);
    return (kind == 'f' && s.size() == 10) || (kind == 'd' && s.size() == 18);
}

bool number(view s, s64 *to) {
    const bool minus = !s.empty() && s[0] == '-';
    if (minus) s.remove_prefix(1);
    if (s.empty() || !isdigit((unsigned char)s[0])) return false;
    const bool bits = is_float_bits(s);
    const std::string text(bits ? s.substr(2) : s);
    char *end;
    const u64 v = strtoull(text.c_str(), &end, bits ? 16 : 0);
    if (*end == 'U') end++;
    if (*end) return false;
    *to = minus ? -(s64)v : (s64)v;
    return true;
}

/* [2][3]: how many elements; [] has none. Moves past what it takes. */
static size_t extents(view *s) {
    size_t n = 1;
    while (!s->empty() && (*s)[0] == '[') {
        const size_t end = s->find(']');
        s64 size = 0;
        number(trimmed(s->substr(1, end - 1)), &size);
        n *= (size_t)size;
        *s = trimmed(s->substr(end + 1));
    }
    return n;
}

declared declaration(view s) {
    declared d;
    size_t n = 1;
    for (s = trimmed(s); !s.empty();) {
        size_t length = 0;
        while (length < s.size() && is_name(s[length])) length++;
        if (length == 0) break;
        const view word = s.substr(0, length);
        s = trimmed(s.substr(length));
        if (word == ".align") d.align = atoi(std::string(s.substr(0, 8)).c_str());
        else if (word[0] == '.' && type_named(word.substr(1))) d.of = type_named(word.substr(1));
        else if (word[0] != '.' && !isdigit((unsigned char)word[0]))
            d.name = std::string(word), n = extents(&s);
    }
    d.bytes = n * (size_t)width(d.of);
    if (d.align == 0) d.align = width(d.of);
    return d;
}

}    // namespace ptx
