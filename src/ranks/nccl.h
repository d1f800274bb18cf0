/* nccl.h - messages between the memories of GPUs, through NCCL, in the order of a stream.
 *
 *   mn_nccl_create(&n, comm);                     all ranks of `comm`, each with a GPU of its own
 *   mn_nccl_exchange(n, transfers, count, stream);    puts messages on the stream, does not wait
 *   mn_nccl_check(n);                             while the stream is waited for, again and again
 *   mn_nccl_destroy(n);
 *
 * NCCL is opened at run time: MNEME_NCCL names the library, else libnccl.so.2 is looked for. `comm`
 * stays for what the host says. A rank that dies leaves the others' GPUs waiting: mn_nccl_check
 * finds out, and mn_nccl_abort lets their streams end. NVLink multicast stays off unless
 * NCCL_NVLS_ENABLE says otherwise. */
#ifndef MN_RANKS_NCCL_H
#define MN_RANKS_NCCL_H

#include "ranks/comm.h"

typedef struct mn_nccl mn_nccl;

/* Opens the library and no more: fails with a sentence where it is not here or too old. */
mn_status mn_nccl_find(int *version);

/* The GPU is that of the calling thread (mn_device_use). Called by all ranks of `comm`, which is
 * borrowed; NULL: one rank. With `local` all of them are on this machine, and the library listens
 * on the loopback interface only, unless NCCL_SOCKET_IFNAME says otherwise. */
mn_status mn_nccl_create(mn_nccl **out, mn_comm *comm, bool local);

/* All ranks' work on streams has been waited for. NULL accepted. */
void mn_nccl_destroy(mn_nccl *nccl);

/* As mn_comm_exchange, between addresses on the GPUs, none to this rank itself; that both ends
 * agree on sizes is not checked. Peers count from rank `first`: 0, or the first of a part. */
mn_status mn_nccl_exchange(mn_nccl *nccl, const mn_transfer *transfers, int n, int first,
                           void *stream);

/* Whether NCCL and all ranks are well. */
mn_status mn_nccl_check(mn_nccl *nccl);

/* Work that waits for other ranks ends, undone. Later calls fail. */
void mn_nccl_abort(mn_nccl *nccl);

int mn_nccl_version(const mn_nccl *nccl);    // 22809: 2.28.9

#endif
