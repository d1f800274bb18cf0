/* task_text.c - whether a written answer holds what was asked for. */
#include <stdbool.h>
#include <stddef.h>

#include "tasks/task.h"

/* ASCII letters in lower case, control characters as line ends. */
static int plain(char c) {
    const unsigned char byte = (unsigned char)c;
    if (byte >= 'A' && byte <= 'Z') return byte + ('a' - 'A');
    return byte < 0x20 ? '\n' : byte;
}

static bool holds(const char *text, const char *piece) {
    for (; *text; text++) {
        size_t i = 0;
        while (piece[i] && text[i] && plain(text[i]) == plain(piece[i])) i++;
        if (piece[i] == '\0') return true;
    }
    return *piece == '\0';
}

double mn_task_text_score(const mn_task_text *text, const char *prediction) {
    int found = 0;
    for (int i = 0; i < text->n_answers; i++) found += holds(prediction, text->answers[i]);
    return text->n_answers > 0 ? (double)found / text->n_answers : 0.0;
}
