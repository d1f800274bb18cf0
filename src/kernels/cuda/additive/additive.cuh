/* additive.cuh - the parts of additive: which calls go over chunks on tensor cores, and how.
 *
 * bf16 calls of usual head sizes do: additive_chunk.cu has decays that a head's channels share,
 * or none, additive_token_chunk_sm90.cu these on Hopper, additive_channel_chunk.cu decays per
 * channel, and additive_channel_chunk_sm90.cu these on Hopper. Everything else, and decoding, is
 * the recurrence of matrix_state.cuh. */
#ifndef MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_CUH
#define MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_CUH

#include "kernels/cuda/additive/additive_mma.cuh"

namespace mneme::additive {

/* Work space of a backward pass by chunks, as counts of what lies there in this order. */
struct mn_additive_extent {
    bool by_warpgroups;       // as additive_token_chunk_sm90.cu leaves it
    int64_t slots, slices;    // chunks of all sequences; slices of K
    size_t kept;              // bf16 numbers
    size_t query, key;        // floats: q.dq and k.dk, or chunk by chunk what becomes of them
    size_t state_dots, whole;   // floats; what is inside takes as many as state_dots
    int64_t segments;         // most of a sequence
    size_t sums, cum_decays;       // floats of one scan: of segments
};

struct mn_additive_workspace {
    mn_bf16 *kept;
    float *query, *key, *state_dots, *inside, *whole, *sums, *cum_decays;
};

/* Depths of tiles that serve K and V: 64, 128 or 256. */
int mn_additive_padded_depth(int64_t width);

/* Bytes of shared memory a block may have. */
int mn_additive_smem_limit(void);

/* Tokens of a chunk, 0 where a kind of call has no kernel here. */
int mn_additive_token_chunk(int depth);
int mn_additive_channel_chunk(int depth);

/* Launch some scans of one depth over so many segments; the sums that make the gradient of a decay
 * per token or head. */
int mn_additive_token_launch(const mn_chunk_scans *scans, int count, int64_t segments, bool decays,
                             cudaStream_t stream);
/* Those of them that additive_token_chunk_sm90.cu serves on Hopper: `scans` and `count` are what is
 * left; whether it serves all, with what the gradient of a decay takes. */
bool mn_additive_token_supported_sm90(const mn_chunk_scans *scans, int count);
/* Blocks of a head in a scan of that depth and width that leaves it. */
int mn_additive_token_blocks_sm90(int64_t depth, int64_t width);
int mn_additive_token_launch_sm90(mn_chunk_scans *scans, int *count, int64_t segments, bool decays,
                                  cudaStream_t stream);
int mn_additive_channel_launch(const mn_chunk_scans *scans, int64_t segments, bool of_values,
                               cudaStream_t stream);
/* The same on Hopper by additive_channel_chunk_sm90.cu, and with it all gradients for
 * decays per channel: the scans `there` and `back` leave the states they keep.
 * cudaErrorNotSupported if these do not serve the call; nothing has been launched then. */
int mn_additive_gated_launch(const mn_chunk_scans *scans, int64_t segments, cudaStream_t stream);
int mn_additive_gated_backward(const mn_additive_args *p, const mn_chunk_scans *fwd,
                               const mn_chunk_scans *bwd, int64_t segments, bool contain,
                               cudaStream_t stream);

/* dq alone: the scan `fwd` leaves the states it keeps. */
int mn_additive_gated_query(const mn_additive_args *p, const mn_chunk_scans *fwd, int64_t segments,
                            cudaStream_t stream);

int mn_additive_token_decay_grad(const mn_additive_args *p, const mn_additive_extent *extent,
                            const mn_additive_workspace *workspace, cudaStream_t stream);

/* The backward pass. `contain`: q stands for a gradient, which must not reach what no later token
 * reads even where it is not finite: a query reaches all of its chunk through dk and dg. */
int mn_additive_backward_launch(const mn_additive_args *p, void *shared, bool contain,
                                cudaStream_t stream);

/* The scan of dq alone over chunks, with the state that it ends in (additive_column.cu); whether
 * there is one for the call. */
bool mn_additive_query_chunks(const mn_additive_args *p);
bool mn_additive_query_plan(mn_plan *plan, const mn_additive_args *p);
int mn_additive_query_launch(const mn_additive_args *p, void *shared, cudaStream_t stream);

}    // namespace mneme::additive

#endif
