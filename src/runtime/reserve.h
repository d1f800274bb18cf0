/* reserve.h - addresses without memory behind them, and how much memory is left.
 *
 * A model that is only planned has tensors that nobody reads: they need addresses, not pages. */
#ifndef MN_RUNTIME_RESERVE_H
#define MN_RUNTIME_RESERVE_H

#include <stddef.h>

#include "mneme.h"

/* `bytes` of addresses that trap when they are touched; NULL when there are none left. */
void *mn_reserve_take(size_t bytes);
void mn_reserve_give(void *address, size_t bytes);    // NULL accepted

/* Bytes that new work may take: what the system says is available, or what the limit of the
 * process's control group leaves, if that is less. Fails where neither can be read. */
mn_status mn_memory_available(size_t *bytes);

/* Fails with a sentence unless `need` bytes are available for `what`; passes where that cannot be
 * known, and where the environment variable MN_MEMORY is "any". */
mn_status mn_memory_check(size_t need, const char *what);

#endif
