/* tree.c - which nodes of a binary tree may be added when. */
#include "ranks/tree.h"

#include "base/util.h"

void mn_tree_push(mn_tree *tree, int64_t first, int level) {
    tree->first[tree->n] = first;
    tree->level[tree->n++] = level;
}

bool mn_tree_join(mn_tree *tree, bool all) {
    if (tree->n < 2) return false;
    const int b = tree->n - 1, a = b - 1;
    const int64_t both = INT64_C(2) << tree->level[a];
    const bool pair = tree->level[a] == tree->level[b] && tree->first[a] % both == 0;
    if (!pair && !all) return false;
    tree->level[a] += 1;
    tree->n--;
    return true;
}

void mn_tree_of(mn_tree *tree, int64_t first, int64_t end) {
    tree->n = 0;
    for (int64_t i = first; i < end; i++) {
        mn_tree_push(tree, i, 0);
        while (mn_tree_join(tree, false)) continue;
    }
}

int mn_tree_slots(int64_t first, int64_t end) {
    mn_tree tree = { .n = 0 };
    int most = 0;
    for (int64_t i = first; i < end; i++) {
        if (tree.n > most) most = tree.n;
        mn_tree_push(&tree, i, 0);
        while (mn_tree_join(&tree, false)) continue;
    }
    return most;
}

int mn_tree_plan(mn_tree_sum *sums, const mn_tree *nodes, int n_lists, int last) {
    mn_tree tree = { .n = 0 };
    int row_of[MN_TREE_DEPTH], row = 0, n = 0;
    for (int k = 0; k < n_lists; k++) {
        for (int i = 0; i < nodes[k].n; i++) {
            mn_tree_push(&tree, nodes[k].first[i], nodes[k].level[i]);
            row_of[tree.n - 1] = row++;
            while (mn_tree_join(&tree, false)) {
                const int a = row_of[tree.n - 1];
                sums[n++] = (mn_tree_sum){ a, a, row_of[tree.n] };
            }
        }
    }
    while (mn_tree_join(&tree, true)) {
        const int a = row_of[tree.n - 1];
        sums[n++] = (mn_tree_sum){ a, a, row_of[tree.n] };
    }
    if (n > 0) sums[n - 1].to = last;
    return n;
}

void mn_tree_add(float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i++) a[i] += b[i];
}

void mn_tree_sum_rows(float *rows_of, int64_t rows, int64_t n) {
    for (int64_t span = 1; span < rows; span *= 2) {
        for (int64_t r = 0; r + span < rows; r += 2 * span) {
            mn_tree_add(rows_of + r * n, rows_of + (r + span) * n, n);
        }
    }
}
