/* tensor_map.cpp - cuTensorMapEncodeTiled: checked as the driver does, kept as a ptx_tensor_map. */
#include <cstdio>
#include <cstring>

#include "cudart/runtime.h"

namespace cudart {

/* 0: packed types, which nobody needs yet. */
static unsigned element_bytes(CUtensorMapDataType type) {
    switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ:
    case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32:
    case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ: return 4;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return 8;
    default: return 0;
    }
}

static bool is_float(CUtensorMapDataType type) {
    return type >= CU_TENSOR_MAP_DATA_TYPE_FLOAT16 && type <= CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ;
}

/* How many bytes a row of a box may have. */
static unsigned swizzle_span(CUtensorMapSwizzle swizzle) {
    switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_NONE: return 256 * 8;
    case CU_TENSOR_MAP_SWIZZLE_32B: return 32;
    case CU_TENSOR_MAP_SWIZZLE_64B: return 64;
    default: return 128;
    }
}

static bool dims_fit(unsigned rank, const cuuint64_t *dims, const cuuint64_t *strides) {
    for (unsigned i = 0; i < rank; i++) {
        if (dims[i] == 0 || dims[i] > UINT32_MAX) return false;    // the driver takes 2^32 too
    }
    for (unsigned i = 0; i + 1 < rank; i++) {
        if (strides[i] % 16 != 0 || strides[i] >= (cuuint64_t)1 << 40) return false;
    }
    return true;
}

static bool box_fits(unsigned rank, const cuuint32_t *box, const cuuint32_t *steps, unsigned bytes,
                     unsigned span) {
    for (unsigned i = 0; i < rank; i++) {
        if (box[i] == 0 || box[i] > 256 || steps[i] == 0 || steps[i] > 8) return false;
    }
    return box[0] * bytes % 16 == 0 && box[0] * bytes <= span;
}

CUresult encode_tiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                      const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                      const cuuint32_t *steps, CUtensorMapInterleave interleave,
                      CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                      CUtensorMapFloatOOBfill fill) {
    if (!map || (uintptr_t)map % 64 != 0 || rank < 1 || rank > 5) return CUDA_ERROR_INVALID_VALUE;
    if (!dims || (!strides && rank > 1) || !box || !steps) return CUDA_ERROR_INVALID_VALUE;
    if (!address || (uintptr_t)address % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
    if (swizzle < CU_TENSOR_MAP_SWIZZLE_NONE || swizzle > CU_TENSOR_MAP_SWIZZLE_128B_ATOM_64B ||
        promotion < CU_TENSOR_MAP_L2_PROMOTION_NONE ||
        promotion > CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const unsigned bytes = element_bytes(type);
    if (bytes == 0 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) {
        fprintf(stderr, "cudart: tensor maps have no packed types and no interleaving here\n");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE && !is_float(type))
        return CUDA_ERROR_INVALID_VALUE;
    if (!dims_fit(rank, dims, strides) ||
        !box_fits(rank, box, steps, bytes, swizzle_span(swizzle))) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    ptx_tensor_map made = {};
    made.magic = PTX_TENSOR_MAP, made.address = (uint64_t)(uintptr_t)address;
    made.rank = (uint8_t)rank, made.element_bytes = (uint8_t)bytes;
    made.swizzle = (uint8_t)swizzle, made.type = (uint8_t)type, made.fill = (uint8_t)fill;
    for (unsigned i = 0; i < rank; i++) {
        made.dims[i] = (uint32_t)dims[i], made.box[i] = box[i], made.step[i] = (uint8_t)steps[i];
        if (i + 1 < rank) made.strides[i] = strides[i];
    }
    static_assert(sizeof made <= sizeof *map, "ptx_tensor_map is within a CUtensorMap");
    memset((void *)map, 0, sizeof *map);
    memcpy((void *)map, &made, sizeof made);
    return CUDA_SUCCESS;
}

}    // namespace cudart
