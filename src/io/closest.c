/* closest.c - edit distance with neighbour swaps (optimal string alignment), for suggestions. */
#include "io/closest.h"

#include <stddef.h>
#include <string.h>

enum { LONGEST = 63 };      // longer words get no suggestion; keeps the rows on the stack

static int lower(char c) {
    return c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c;
}

static int min2(int a, int b) {
    return a < b ? a : b;
}

/* d[i][j] = cost of turning the first i letters of a into the first j of b. Three rows are kept:
 * i-2 (for a swap), i-1 and i. */
static int distance(const char *a, size_t n, const char *b, size_t m) {
    int rows[3][LONGEST + 1];
    int *before = rows[0], *above = rows[1], *row = rows[2];
    for (size_t j = 0; j <= m; j++) above[j] = (int)j;
    for (size_t i = 1; i <= n; i++) {
        row[0] = (int)i;
        for (size_t j = 1; j <= m; j++) {
            const int ca = lower(a[i - 1]), cb = lower(b[j - 1]);
            int best = min2(above[j], row[j - 1]) + 1;
            best = min2(best, above[j - 1] + (ca != cb));
            if (i > 1 && j > 1 && ca == lower(b[j - 2]) && cb == lower(a[i - 2])) {
                best = min2(best, before[j - 2] + 1);
            }
            row[j] = best;
        }
        int *const spare = before;
        before = above;
        above = row;
        row = spare;
    }
    return above[m];
}

const char *mn_closest(const char *word, const char *const names[], int64_t n_names) {
    const size_t n = strlen(word);
    const char *closest = NULL;
    int least = LONGEST;
    if (n > LONGEST) return NULL;
    for (int64_t i = 0; i < n_names; i++) {
        const size_t m = strlen(names[i]);
        if (m > LONGEST) continue;
        const int d = distance(word, n, names[i], m);
        const int longer = (int)(n > m ? n : m);
        const int allowed = longer / 3 > 1 ? longer / 3 : 1;
        if (d <= allowed && d < least) {
            least = d;
            closest = names[i];
        }
    }
    return closest;
}
