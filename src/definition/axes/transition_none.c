/* transition_none.c - a memory that stays as it is. */
#include "definition/axes.h"

static void predict(mn_head *head) {
    (void)head;
}

const mn_transition mn_transition_none = {
    .name = "none",
    .equation = "S~ = S",
    .predict = predict,
};
