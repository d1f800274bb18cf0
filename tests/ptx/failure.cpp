/* failure.cpp - sentences of any length. */
#include "failure.h"

#include <cstdarg>
#include <cstdio>

namespace ptx {

static std::string formatted(const char *format, va_list args) {
    va_list again;
    va_copy(again, args);
    const int length = vsnprintf(nullptr, 0, format, again);
    va_end(again);
    std::string text((size_t)length + 1, '\0');
    vsnprintf(&text[0], text.size(), format, args);
    text.pop_back();
    return text;
}

void fail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    failure f{ formatted(format, args), "" };
    va_end(args);
    throw f;
}

std::string sentence(const char *format, ...) {
    va_list args;
    va_start(args, format);
    std::string text = formatted(format, args);
    va_end(args);
    return text;
}

}    // namespace ptx
