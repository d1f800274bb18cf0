/* mla.c - mla: softmax attention whose keys and values come from a latent of low rank.
 *
 *   c = rms(x W_c')      (k_h, v_h) = c W_kv'      r = turn(x W_r'), one for all heads
 *   q_h = (q_h, turn of its last P channels) from x W_q' or rms(x W_qa') W_qb'
 *   o_h = softmax(q_h . (k_h, r) / sqrt K) v_h      y = (o sigmoid(x W_g')) W_o', gated or not
 *
 * P = qk_rope_head_dim, K = qk_nope_head_dim + P. Keys and values are kept as heads read them. */
#include <math.h>

#include "base/util.h"
#include "layers/family.h"

static mn_status derive(mn_layer *layer, int64_t context) {
    (void)context;
    mn_layer_config *c = &layer->config;
    mn_layer_sizes *s = &layer->sizes;
    if (c->num_heads == 0) c->num_heads = mn_max(layer->width / 128, 1);
    const int64_t sizes[] = { c->num_heads, c->kv_lora_rank, c->qk_nope_head_dim, c->v_head_dim };
    static const char *const names[] = { "num_heads", "kv_lora_rank", "qk_nope_head_dim",
                                         "v_head_dim" };
    mn_status st = MN_OK;
    for (size_t i = 0; i < MN_COUNTOF(sizes) && st == MN_OK; i++) {
        st = mn_layer_require(layer, sizes[i] >= 1 && sizes[i] <= 65536, names[i],
                              "must lie in 1 .. 65536");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->rope_type == 0, "rope_type", "is built as default only");
    }
    const int64_t P = c->qk_rope_head_dim;
    if (st == MN_OK) {
        st = mn_layer_require(layer, P >= 1 && P <= 65536 && (!c->use_rope || P % 2 == 0),
                              "qk_rope_head_dim", "must be positive, and even with use_rope");
    }
    if (st == MN_OK) {
        st = mn_layer_require(layer, c->q_lora_rank <= 65536, "q_lora_rank", "is far too much");
    }
    MN_SIZE(s, 'H') = c->num_heads;
    MN_SIZE(s, 'Q') = c->q_lora_rank;
    MN_SIZE(s, 'R') = c->kv_lora_rank;
    MN_SIZE(s, 'P') = P;
    MN_SIZE(s, 'A') = c->kv_lora_rank + P;
    MN_SIZE(s, 'K') = c->qk_nope_head_dim + P;
    MN_SIZE(s, 'E') = c->qk_nope_head_dim + c->v_head_dim;
    MN_SIZE(s, 'V') = c->v_head_dim;
    return st;
}

static mn_tensor *normed(mn_forward *f, mn_tensor *x, const char *weight) {
    if (!x) return NULL;
    mn_run run;
    mn_rms_norm_args *args = mn_run_start(&run, f->tape, MN_OP_rms_norm);
    args->eps = f->layer->config.latent_norm_eps;
    mn_run_in(&run, "x", x);
    mn_run_in(&run, "w", mn_use(f, weight));
    mn_tensor *y = mn_run_out(&run, "y");
    mn_run_now(&run);
    return y;
}

static mn_tensor *turned(mn_forward *f, mn_tensor *x) {
    if (!x || !f->layer->config.use_rope) return x;
    mn_run run;
    mn_rope_args *args = mn_run_start(&run, f->tape, MN_OP_rope);
    args->kind = f->layer->config.rope_pairs ? 1 : 0;
    args->base = f->layer->config.rope_theta;
    mn_state_position(f->state, &run, &args->pos0, f->position);
    mn_run_in(&run, "x", x);
    mn_tensor *y = mn_run_out(&run, "y");
    mn_run_now(&run);
    return y;
}

static mn_tensor *query(mn_forward *f, mn_tensor *x) {
    const int64_t H = MN_OF(f, 'H'), P = MN_OF(f, 'P'), K = MN_OF(f, 'K');
    mn_tensor *q, *part[2];
    if (MN_OF(f, 'Q') > 0) {
        q = normed(f, mn_project(f, x, "q_proj.0.weight", NULL), "q_proj.1.weight");
        q = mn_project(f, q, "q_proj.2.weight", NULL);
    } else {
        q = mn_project(f, x, "q_proj.weight", NULL);
    }
    q = mn_tape_heads(f->tape, q, H);
    if (!f->layer->config.use_rope) return q;
    mn_split_heads(f, q, (int64_t[]){ K - P, P }, 2, part);
    part[1] = turned(f, part[1]);
    return mn_tape_join(f->tape, part, 2);
}

/* The latent and the keys that turn, before their norm and turn. */
static void latents(mn_forward *f, mn_tensor *x, mn_tensor **c, mn_tensor **r) {
    const int64_t R = MN_OF(f, 'R'), P = MN_OF(f, 'P');
    if (!f->layer->config.fused_latent) {
        *c = mn_project(f, x, "kv_proj.0.weight", NULL);
        *r = mn_project(f, x, "k_rope.weight", NULL);
        return;
    }
    mn_tensor *part[2];
    mn_tape_split(f->tape, mn_project(f, x, "kv_a.weight", NULL), (int64_t[]){ R, P }, 2, part);
    *c = mn_tape_join(f->tape, part, 1);
    *r = mn_tape_join(f->tape, part + 1, 1);
}

static void keys_and_values(mn_forward *f, mn_tensor *x, mn_tensor **k, mn_tensor **v) {
    mn_tape *tape = f->tape;
    const int64_t H = MN_OF(f, 'H'), V = MN_OF(f, 'V'), E = MN_OF(f, 'E');
    mn_tensor *c = NULL, *r = NULL, *part[2];
    latents(f, x, &c, &r);
    c = mn_project(f, normed(f, c, "kv_proj.1.weight"), "kv_proj.2.weight", NULL);
    mn_split_heads(f, mn_tape_heads(tape, c, H), (int64_t[]){ E - V, V }, 2, part);
    *v = part[1];
    part[1] = mn_tape_repeat(tape, turned(f, mn_tape_heads(tape, r, 1)), H);
    *k = mn_tape_join(tape, part, 2);
}

static mn_tensor *forward(mn_forward *f, mn_tensor *x) {
    mn_tape *tape = f->tape;
    mn_tensor *k = NULL, *v = NULL, *q = query(f, x);
    keys_and_values(f, x, &k, &v);
    k = mn_state_append(f->state, tape, k, "k");
    v = mn_state_append(f->state, tape, v, "v");
    if (!q || !k || !v) return NULL;
    mn_run run;
    mn_attention_args *args = mn_run_start(&run, tape, MN_OP_attention);
    args->scale = 1.0 / sqrt((double)MN_OF(f, 'K'));
    args->window = f->layer->config.window_size;
    mn_state_rows(f->state, &run);
    mn_run_in(&run, "q", q);
    mn_run_in(&run, "k", k);
    mn_run_in(&run, "v", v);
    mn_tensor *o = mn_run_out(&run, "o");
    mn_run_now(&run);
    if (mn_use(f, "g_proj.weight")) {
        mn_tensor *gate = mn_project(f, x, "g_proj.weight", NULL);
        gate = mn_tape_heads(tape, mn_tape_unary(tape, MN_UNARY_SIGMOID, gate), MN_OF(f, 'H'));
        o = mn_tape_multiply(tape, o, gate);
    }
    return mn_project_out(f, mn_tape_flat(tape, o), "o_proj.weight", NULL);
}

const mn_layer_family mn_family_mla = { derive, forward };
