/* nccl_abi.h - what ranks use of NCCL's binary interface, version 2.18 and later: libnccl.so.2 is
 * opened at run time, so that one binary serves machines without it. */
#ifndef MN_RANKS_NCCL_ABI_H
#define MN_RANKS_NCCL_ABI_H

#include <limits.h>
#include <stddef.h>

typedef enum mn_nccl_result {
    MN_NCCL_SUCCESS = 0,
    MN_NCCL_IN_PROGRESS = 7
} mn_nccl_result;

enum { MN_NCCL_ID = 128, MN_NCCL_BYTES = 0, MN_NCCL_LEAST = 21800, MN_NCCL_UNSET = INT_MIN };

typedef struct mn_nccl_id {
    char bytes[MN_NCCL_ID];
} mn_nccl_id;

/* The library reads as many bytes as `size` says, which ends with the last field: what pads the
 * struct would be fields of later versions. */
typedef struct mn_nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking;              // 0: calls return before they are done
    int cga_cluster, least_ctas, most_ctas;
    const char *net;
    int splits_share;
} mn_nccl_config;

#define MN_NCCL_CONFIG                                                                         \
    { offsetof(mn_nccl_config, splits_share) + sizeof(int), 0xcafebeefu, MN_NCCL_LEAST, 0,     \
      MN_NCCL_UNSET, MN_NCCL_UNSET, MN_NCCL_UNSET, NULL, MN_NCCL_UNSET }

typedef struct mn_nccl_calls {
    int (*version)(int *version);
    int (*unique_id)(mn_nccl_id *id);
    int (*init)(void **comm, int world, mn_nccl_id id, int rank, mn_nccl_config *config);
    int (*async_error)(void *comm, int *error);
    int (*group_start)(void);
    int (*group_end)(void);
    int (*send)(const void *data, size_t count, int type, int peer, void *comm, void *stream);
    int (*receive)(void *data, size_t count, int type, int peer, void *comm, void *stream);
    int (*finalize)(void *comm);
    int (*destroy)(void *comm);
    int (*abort)(void *comm);
    const char *(*error_text)(int result);
    const char *(*last_error)(void *comm);
} mn_nccl_calls;

#endif
