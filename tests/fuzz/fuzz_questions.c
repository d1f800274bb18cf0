/* fuzz_questions.c - multiple choice: what is read has at least two choices with text each and an
 * answer among them; what is refused leaves nothing behind. */
#include <stdint.h>
#include <stdlib.h>

#include "eval/choice.h"

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) abort();                                                                 \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    mn_questions all;
    if (mn_questions_parse(&all, (const char *)bytes, size, "fuzz") != MN_OK) {
        REQUIRE(!all.at && all.count == 0 && !all.name);
        return 0;
    }
    REQUIRE(all.count > 0);
    int64_t line = 0;
    for (int64_t i = 0; i < all.count; i++) {
        const mn_question *q = &all.at[i];
        REQUIRE(q->line > line && q->context && q->n_choices >= 2);
        REQUIRE(q->answer >= 0 && q->answer < q->n_choices);
        for (int64_t k = 0; k < q->n_choices; k++) REQUIRE(q->choices[k][0]);
        line = q->line;
    }
    mn_questions_free(&all);
    return 0;
}
