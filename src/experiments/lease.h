/* lease.h - which of several sweeps over one folder runs a job.
 *
 *   FOLDER/KEY.lease    host and process of who runs it; its time is renewed while that goes on
 *   FOLDER/KEY.done     somebody has run it
 *
 * A lease whose process is gone (on this machine), or that nobody has renewed for
 * MN_LEASE_SECONDS, may be taken over by one other, so that jobs of a machine that was lost are run.
 * The folder may be on a network file system: only the making and renaming of files is relied on. */
#ifndef MN_EXPERIMENTS_LEASE_H
#define MN_EXPERIMENTS_LEASE_H

#include "mneme.h"

enum { MN_LEASE_SECONDS = 180 };

typedef enum mn_lease { MN_LEASE_TAKEN, MN_LEASE_OTHERS, MN_LEASE_DONE } mn_lease;

/* Tries to take the job called `key`. */
mn_status mn_lease_take(mn_lease *out, const char *folder, const char *key);

/* Says that the job still runs; a few times in MN_LEASE_SECONDS. */
void mn_lease_renew(const char *folder, const char *key);

/* Gives the job back, as done or for somebody to run. */
void mn_lease_end(const char *folder, const char *key, bool done);

#endif
