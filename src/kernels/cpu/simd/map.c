/* map.c - elementary functions over arrays: whole vectors, then one masked vector. */
#include "kernels/cpu/simd/map.h"

#include "kernels/cpu/simd/vec.h"

#define MAP(name)                                                              \
    void MN_T(mn_map_##name)(float *y, const float *x, int64_t n) {            \
        int64_t i = 0;                                                         \
        for (; i + MN_VW <= n; i += MN_VW) vf_store(y + i, vf_##name(vf_load(x + i))); \
        const int left = (int)(n - i);                                         \
        if (left > 0) vf_store_n(y + i, vf_##name(vf_load_n(x + i, left)), left); \
    }

MAP(exp)
MAP(expm1)
MAP(log)
MAP(log1p)
MAP(sigmoid)
MAP(softplus)
MAP(tanh)

float MN_T(mn_map_sum)(const float *x, int64_t n) {
    vf sum = vf_zero();
    for (int64_t i = 0; i < n; i += MN_VW) sum = vf_add(sum, vf_load_n(x + i, vf_lanes(n - i)));
    return vf_sum(sum);
}

float MN_T(mn_map_max)(const float *x, int64_t n) {
    const vf lowest = vf_set1(-INFINITY);
    vf top = lowest;
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        top = vf_max(top, vf_select(vm_first(lanes), vf_load_n(x + i, lanes), lowest));
    }
    return vf_max_lanes(top);
}
