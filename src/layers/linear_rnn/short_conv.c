/* short_conv.c - short_conv: a convolution over a few tokens between two gates; none: no mixer.
 *
 *   b, c, u = x W_in'      y = (c conv(b u)) W_out'      the convolution without activation
 *
 * `none` is the first half of a block that has only the second; the model leaves its norm out. */
#include "base/util.h"
#include "layers/family.h"

static mn_status derive(mn_layer *layer, int64_t context) {
    (void)context;
    if (layer->kind == MN_LAYER_none) return MN_OK;
    MN_SIZE(&layer->sizes, 'W') = layer->config.conv_kernel;
    return mn_layer_require(layer, layer->config.conv_kernel >= 1, "conv_kernel",
                            "must be at least 1");
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    if (f->layer->kind == MN_LAYER_none) return f->onto ? f->onto : x;
    mn_tape *tape = f->tape;
    const int64_t D = MN_OF(f, 'D');
    mn_tensor *part[3];
    mn_tensor *wide = mn_project(f, x, "in_proj.weight", "in_proj.bias");
    mn_tape_split(tape, wide, (int64_t[]){ D, D, D }, 3, part);
    mn_tensor *y = mn_tape_multiply(tape, part[0], part[2]);
    y = mn_short_conv(f, y, "conv.weight", mn_use(f, "conv.bias") ? "conv.bias" : NULL, 0, "conv");
    y = mn_tape_multiply(tape, y, part[1]);
    return mn_project_out(f, y, "out_proj.weight", "out_proj.bias");
}

const mn_layer_family mn_family_short_conv = { derive, forward };
