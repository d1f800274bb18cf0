/* recompute.c - parts of a step whose light results share memory and are made again going back.
 *
 *   forward     part 1 makes its results in the shared memory, part 2 in the same, ...
 *   backward    before the first node of part i goes back, what the part had there is made again,
 *               in its order, from what was kept; the last part's is there still */
#include "base/dtype.h"
#include "tape/tape_internal.h"

/* One result, or several of one operator, that can be made again. */
typedef struct again {
    struct again *next;
    mn_back_fn make;
    void *payload;
} again;

struct mn_part {
    again *first, **end;
};

/* Shared memory, in pieces. */
struct mn_light {
    mn_light *next;
    void *memory;
    size_t bytes;
    bool taken;    // by the part at hand
};

void mn_tape_recompute(mn_tape *tape, bool light) {
    tape->part = NULL;
    tape->lighter = false;
    if (!light || !mn_tape_records(tape) || mn_tape_dead(tape)) return;
    mn_part *part = mn_tape_note(tape, sizeof *part);
    if (!part) return;
    part->end = &part->first;
    tape->part = tape->present = part;
    for (mn_light *at = tape->light; at; at = at->next) at->taken = false;
}

void mn_tape_recompute_more(mn_tape *tape, bool lighter) {
    tape->lighter = lighter && tape->part;
}

/* The smallest free piece that is large enough, or a new one. */
static void *light_bytes(mn_tape *tape, size_t bytes) {
    mn_light *best = NULL;
    for (mn_light *at = tape->light; at; at = at->next) {
        const bool fits = !at->taken && at->bytes >= bytes;
        if (fits && (!best || at->bytes < best->bytes)) best = at;
    }
    if (!best) {
        best = mn_tape_note(tape, sizeof *best);
        void *memory = mn_tape_bytes_of(tape, bytes);
        if (!best || !memory) return NULL;
        *best = (mn_light){ tape->light, memory, bytes, true };
        tape->light = best;
    }
    best->taken = true;
    return best->memory;
}

mn_tensor *mn_tape_result_of(mn_tape *tape, mn_dtype dtype, const int64_t shape[4], bool light) {
    if (!light) return mn_tape_new_of(tape, dtype, shape);
    void *data = light_bytes(tape, (size_t)mn_count4(shape) * mn_dtype_bytes(dtype));
    return data ? mn_tape_over(tape, data, dtype, shape, true) : NULL;
}

void mn_tape_make_again(mn_tape *tape, mn_back_fn make, void *payload) {
    again *a = mn_tape_note(tape, sizeof *a);
    if (!a) return;
    *a = (again){ NULL, make, payload };
    *tape->part->end = a;
    tape->part->end = &a->next;
}

void mn_part_present(mn_tape *tape, mn_part *part) {
    if (!part || part == tape->present) return;
    for (again *a = part->first; a && !mn_tape_dead(tape); a = a->next) a->make(tape, a->payload);
    tape->present = part;
}
