/* unicode.h - the four normal forms and lower case, from tables of our own (unicode_*.def). */
#ifndef MN_TOKENIZER_UNICODE_UNICODE_H
#define MN_TOKENIZER_UNICODE_UNICODE_H

#include <stdbool.h>
#include <stdint.h>

#include "io/text.h"

typedef enum mn_normal_form { MN_NFC, MN_NFD, MN_NFKC, MN_NFKD } mn_normal_form;

/* Appends the normal form of `text`, which is UTF-8. */
mn_status mn_unicode_normalise(mn_text *out, const char *text, size_t size, mn_normal_form form);

/* Appends `text` with each code point in lower case, without regard to its neighbours. */
mn_status mn_unicode_lower(mn_text *out, const char *text, size_t size);

/* White_Space of the Unicode character database. */
bool mn_unicode_is_space(uint32_t point);

#endif
