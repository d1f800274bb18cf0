/* tree.h - sums in the order of a binary tree over items, whoever holds which of them.
 *
 *   sum [lo, hi) = sum [lo, mid) + sum [mid, hi),   mid = lo + largest power of two < hi - lo
 *
 * Whoever has items [first, end) can add those pairs of the tree that lie inside; what is left is a
 * list of whole subtrees, in order. Putting the lists of all holders one after the other and adding
 * on gives the bits of one holder that has all. */
#ifndef MN_RANKS_TREE_H
#define MN_RANKS_TREE_H

#include <stdbool.h>
#include <stdint.h>

enum { MN_TREE_DEPTH = 64 };

/* Subtrees added up so far, in order: node i covers [first[i], first[i] + 2^level[i]). */
typedef struct mn_tree {
    int64_t first[MN_TREE_DEPTH];
    int level[MN_TREE_DEPTH];
    int n;
} mn_tree;

/* Puts a node of 2^level items from `first` at the end. */
void mn_tree_push(mn_tree *tree, int64_t first, int level);

/* Whether the last two nodes are children of one node; the join of both takes their place. With
 * `all` no item is to come, and the last two always are. */
bool mn_tree_join(mn_tree *tree, bool all);

/* The subtrees that holders of [first, end) have left. */
void mn_tree_of(mn_tree *tree, int64_t first, int64_t end);

/* Most nodes that a holder of [first, end) has beside the item it is at. */
int mn_tree_slots(int64_t first, int64_t end);

/* row[to] = row[a] + row[b] */
typedef struct mn_tree_sum {
    int to, a, b;
} mn_tree_sum;

/* What adds up the nodes of all holders, listed holder after holder in order: row[i] is the i-th of
 * them. Writes the sums in the order in which they are done, one fewer than there are nodes, and
 * returns their number. The last one goes to row[last], the others spoil row[to]. */
int mn_tree_plan(mn_tree_sum *sums, const mn_tree *nodes, int n_lists, int last);

/* a = a + b over n numbers, the order of every sum here. */
void mn_tree_add(float *a, const float *b, int64_t n);

/* Row 0 of (rows, n) becomes the sum of all rows. */
void mn_tree_sum_rows(float *rows_of, int64_t rows, int64_t n);

#endif
