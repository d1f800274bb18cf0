/* device_none.c - stands in for the kernels of adamw_all.h in a build without CUDA, where no device
 * can be opened and so nothing calls them. */
#include "kernels/adamw_all.h"

int mn_adamw_squares_cuda(const mn_adamw_all *all, void *stream) {
    (void)all, (void)stream;
    return -1;
}

int mn_adamw_decide_cuda(const mn_adamw_all *all, void *stream) {
    (void)all, (void)stream;
    return -1;
}

int mn_adamw_shadows_cuda(const mn_adamw_all *all, void *stream) {
    (void)all, (void)stream;
    return -1;
}

int mn_add_cuda(float *out, const float *a, const float *b, int64_t n, void *stream) {
    (void)out, (void)a, (void)b, (void)n, (void)stream;
    return -1;
}

int mn_adamw_update_cuda(const mn_adamw_all *all, void *stream) {
    (void)all, (void)stream;
    return -1;
}

int mn_cast_bf16_cuda(void *to, const float *from, int64_t n, void *stream) {
    (void)to, (void)from, (void)n, (void)stream;
    return -1;
}
