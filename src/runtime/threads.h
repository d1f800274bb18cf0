/* threads.h - a pool that runs independent items on a few threads.
 *
 * Items share nothing but what their caller arranged, so which thread runs which item never shows
 * in the result. The calling thread works too. */
#ifndef MN_RUNTIME_THREADS_H
#define MN_RUNTIME_THREADS_H

#include <stdbool.h>

#include "mneme.h"

typedef struct mn_threads mn_threads;

/* Runs item `item`; `worker` in [0, n_threads) says whose scratch memory to use. */
typedef void (*mn_item_fn)(void *context, int64_t item, int worker);

/* n_threads 0: one per core this process may run on. */
mn_status mn_threads_create(mn_threads **out, int n_threads);
/* Whether this process is a child that was forked from the one that made them: there are none then.
 * Items of a child run on the caller alone, with the same bits. */
bool mn_threads_forked(const mn_threads *threads);

void mn_threads_destroy(mn_threads *threads);    // NULL accepted
int mn_threads_count(const mn_threads *threads);

/* Runs fn(context, 0 .. n_items-1) and returns when all are done. Items begin in order, so an item
 * may wait for one before it. Threads keep looking for work for some 50 microseconds after a call,
 * then sleep. */
void mn_threads_run(mn_threads *threads, int64_t n_items, mn_item_fn fn, void *context);

/* While resting, mn_threads_run does nothing: for code that is walked through only to count the
 * memory it would take. */
void mn_threads_rest(mn_threads *threads, bool resting);

#endif
