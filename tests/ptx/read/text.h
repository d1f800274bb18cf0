/* text.h - pieces of PTX text. */
#ifndef PTX_TEXT_H
#define PTX_TEXT_H

#include <string_view>
#include <vector>

#include "code.h"

namespace ptx {

typedef std::string_view view;

bool is_blank(char c);
/* Letters, digits and what else names and instructions are made of: _ $ % . */
bool is_name(char c);
view trimmed(view s);
bool begins(view s, view with);

/* The parts between separators that are outside of brackets, trimmed, without empty ones. */
std::vector<view> split(view s, char by = ',');

/* Integers as in C, with U behind; 0f and 0d and the bits of a float or a double. False if s is
 * none. */
bool number(view s, s64 *to);

/* A variable as it is declared: ".align 8 .b8 name[16]", ".u32 name". */
declared declaration(view s);

}    // namespace ptx
#endif
