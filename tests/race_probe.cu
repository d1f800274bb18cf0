/* race_probe.cu - what compute-sanitizer's racecheck follows, for reading what tests/sanitize.sh
 * finds: two groups of warps hand a slot of shared memory to and fro by mbarriers and look at the
 * values.
 *
 *   nvcc -arch=sm_90 -o race_probe tests/race_probe.cu
 *   compute-sanitizer --tool racecheck ./race_probe direct | elected | none
 *
 * direct: every lane arrives. elected: lane 0 does, after __syncwarp, as the kernels of curvature
 * have it; this is ordered and 0 values are wrong, but racecheck (CUDA 13.0) reports 8 hazards.
 * none: no order at all, which is to be reported. */
#include <cstdint>
#include <cstdio>
#include <cstring>

enum { ROUNDS = 64, GROUP = 128 };

__device__ static uint32_t shared_at(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ static void open(uint64_t *barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_at(barrier)), "r"(arrivals)
                 : "memory");
}

__device__ static void arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_at(barrier)) : "memory");
}

__device__ static void wait(uint64_t *barrier, int phase) {
    asm volatile("{\n\t.reg .pred done;\n"
                 "again:\n\t"
                 "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n\t"
                 "@!done bra again;\n\t}" ::"r"(shared_at(barrier)), "r"(phase) : "memory");
}

template <bool ELECTED, bool ORDERED>
__global__ static void hand_over(int *wrong) {
    __shared__ float slot[GROUP];
    __shared__ uint64_t full, empty;
    const int i = (int)threadIdx.x % GROUP, from = (i + 37) % GROUP;
    const bool writes = threadIdx.x < GROUP;
    uint64_t *mine = writes ? &full : &empty;
    if (threadIdx.x == 0) {
        open(&full, ELECTED ? GROUP / 32 : GROUP);
        open(&empty, ELECTED ? GROUP / 32 : GROUP);
    }
    __syncthreads();
    for (int r = 0; r < ROUNDS; r++) {
        if (ORDERED) wait(writes ? &empty : &full, writes ? (r & 1) ^ 1 : r & 1);
        if (writes) slot[i] = (float)(r * GROUP + i);
        else if (slot[from] != (float)(r * GROUP + from)) atomicAdd(wrong, 1);
        if (ELECTED) __syncwarp();
        if (!ELECTED || threadIdx.x % 32 == 0) arrive(mine);
    }
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "direct";
    int *wrong, found = -1;
    cudaMalloc(&wrong, sizeof *wrong);
    cudaMemset(wrong, 0, sizeof *wrong);
    if (!strcmp(what, "direct")) hand_over<false, true><<<4, 2 * GROUP>>>(wrong);
    if (!strcmp(what, "elected")) hand_over<true, true><<<4, 2 * GROUP>>>(wrong);
    if (!strcmp(what, "none")) hand_over<false, false><<<4, 2 * GROUP>>>(wrong);
    const cudaError_t code = cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost);
    printf("%s: %s, %d values wrong\n", what, cudaGetErrorString(code), found);
    return code != cudaSuccess;
}
