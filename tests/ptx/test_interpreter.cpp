/* test_interpreter.cpp - the interpreter by itself: kernels written as PTX, results known
 * without it.
 *
 * Run plainly, and with PTX_LATE=1 PTX_SEED=1, which may change what is read before a wait and
 * nothing else. */
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "ptx.h"

static int n_failed;

#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (condition) break;                                                                      \
        n_failed++;                                                                                \
        fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                            \
        fprintf(stderr, __VA_ARGS__);                                                              \
        fputc('\n', stderr);                                                                       \
    } while (0)

static bool late() {
    return getenv("PTX_LATE") && atoi(getenv("PTX_LATE")) != 0;
}

/* ---- launches ---- */

static const char HEAD[] = ".version 8.0\n.target sm_90a\n.address_size 64\n";

/* Memory of the device, of 32-bit words. */
struct memory {
    std::vector<uint32_t> words;

    explicit memory(size_t n) : words(n, 0xffffffffu) {
        ptx_memory_add(words.data(), n * 4);
    }
    ~memory() {
        ptx_memory_remove(words.data());
    }
    memory(const memory &) = delete;
    memory &operator=(const memory &) = delete;

    void *at() {
        return words.data();
    }
    float number(size_t i) const {
        float y;
        memcpy(&y, &words[i], 4);
        return y;
    }
};

/* Runs kernel `k` of a body and its parameters; returns what ptx_run does, with what it wrote to
 * stderr in *said. */
static int run(const std::string &parameters, const std::string &body, unsigned threads,
               std::vector<void *> args, std::string *said = nullptr, unsigned cluster = 1) {
    const std::string text = HEAD + std::string(".visible .entry k(") + parameters + ")\n{\n" +
                             body + "\nret;\n}\n";
    ptx_module *module = ptx_module_load(text.c_str());
    ptx_kernel *kernel = module ? ptx_module_kernel(module, "k") : nullptr;
    CHECK(kernel, "the module is read");
    if (!kernel) {
        ptx_module_free(module);
        return -1;
    }
    const ptx_launch launch = {
        { cluster, 1, 1 }, { threads, 1, 1 }, { cluster, 1, 1 }, 0, args.data()
    };
    FILE *file = tmpfile();
    fflush(stderr);
    const int kept = dup(STDERR_FILENO);
    dup2(fileno(file), STDERR_FILENO);
    const int code = ptx_run(kernel, &launch);
    ptx_module_free(module);
    fflush(stderr);
    dup2(kept, STDERR_FILENO);
    close(kept);
    char line[4096];
    rewind(file);
    std::string all;
    while (fgets(line, sizeof line, file)) all += line;
    fclose(file);
    if (said) *said = all;
    else fputs(all.c_str(), stderr);
    return code;
}

static bool says(const std::string &text, const std::vector<std::string> &words) {
    for (const std::string &word : words) {
        if (text.find(word) == std::string::npos) return false;
    }
    return true;
}

/* What is said of a kernel with a parameter `out` that must fail. */
static std::string refused(const std::string &body, unsigned threads) {
    memory out(threads);
    void *at = out.at();
    std::string said;
    const int code = run(".param .u64 out", body, threads, { &at }, &said);
    CHECK(code != 0, "the kernel runs");
    return said;
}

static std::string replaced(std::string text, const std::string &what, const std::string &by) {
    for (size_t i = 0; (i = text.find(what, i)) != std::string::npos; i += by.size()) {
        text.replace(i, what.size(), by);
    }
    return text;
}

/* %r1: the thread; %rd1: where its `bytes` of out are. */
static std::string opening(int bytes) {
    return replaced(R"(
        .reg .pred %p<8>;
        .reg .b32 %r<64>;
        .reg .f32 %f<32>;
        .reg .b64 %rd<32>;
        mov.u32 %r1, %tid.x;
        ld.param.u64 %rd1, [out];
        mad.wide.u32 %rd1, %r1, BYTES, %rd1;
)",
                    "BYTES", std::to_string(bytes));
}

/* ---- numbers ---- */

static float drawn() {
    static uint32_t seed = 1;
    seed = seed * 1664525u + 1013904223u;
    return (float)((int)(seed >> 24) - 128) /
           64.0f;    // 8 bits: exact in bf16, and so are products in float
}

static uint16_t bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)(bits >> 16);
}

static uint32_t bf16_pair(float low, float high) {
    return bf16(low) | (uint32_t)bf16(high) << 16;
}

struct matrix {
    int columns;
    std::vector<float> x;

    matrix(int rows, int of) : columns(of), x((size_t)(rows * of)) {
        for (float &v : x) v = drawn();
    }
    float operator()(int r, int c) const {
        return x[(size_t)(r * columns + c)];
    }
};

static float product(const matrix &a, const matrix &b, int r, int c) {
    float sum = 0;
    for (int k = 0; k < a.columns; k++) sum += a(r, k) * b(k, c);
    return sum;
}

/* ---- warps ---- */

/* Odd lanes loop as often as their number says, even ones do not; all meet again. */
static void test_divergence() {
    memory out(64);
    void *at = out.at();
    const int code = run(".param .u64 out", opening(8) + R"(
        and.b32 %r2, %r1, 1;
        setp.eq.s32 %p1, %r2, 0;
        mov.u32 %r3, 0;
        @%p1 bra EVEN;
        mov.u32 %r4, 0;
    LOOP:
        add.s32 %r3, %r3, 3;
        add.s32 %r4, %r4, 1;
        setp.lt.u32 %p2, %r4, %r1;
        @%p2 bra LOOP;
        bra MEET;
    EVEN:
        add.s32 %r3, %r1, 100;
    MEET:
        activemask.b32 %r5;
        st.global.v2.u32 [%rd1], {%r3, %r5};
    )",
                         32, { &at });
    CHECK(code == 0, "the kernel runs");
    for (uint32_t l = 0; l < 32; l++) {
        CHECK(out.words[2 * l] == (l % 2 ? 3 * l : 100 + l), "lane %u: %u", l, out.words[2 * l]);
        CHECK(out.words[2 * l + 1] == 0xffffffffu, "lane %u meets 0x%x", l, out.words[2 * l + 1]);
    }
}

/* A butterfly, the lane before and whether there is one, and the next within eight. */
static void test_shuffles() {
    memory out(128);
    void *at = out.at();
    const int code = run(".param .u64 out", opening(16) + R"(
        shfl.sync.bfly.b32 %r2, %r1, 5, 31, -1;
        shfl.sync.up.b32 %r3|%p1, %r1, 1, 0, -1;
        selp.u32 %r4, 1, 0, %p1;
        shfl.sync.down.b32 %r5, %r1, 1, 0x181f, -1;
        st.global.v4.u32 [%rd1], {%r2, %r3, %r4, %r5};
    )",
                         32, { &at });
    CHECK(code == 0, "the kernel runs");
    for (uint32_t l = 0; l < 32; l++) {
        const uint32_t *y = &out.words[4 * l];
        CHECK(y[0] == (l ^ 5), "lane %u: %u", l, y[0]);
        CHECK(y[1] == (l ? l - 1 : 0) && y[2] == (l > 0), "lane %u: %u, %u", l, y[1], y[2]);
        CHECK(y[3] == (l % 8 == 7 ? l : l + 1), "lane %u: %u", l, y[3]);
    }
}

/* A shuffle for which lanes are named that took another way. */
static void test_shuffle_of_some() {
    const std::string said = refused(opening(4) + R"(
        setp.lt.u32 %p1, %r1, 16;
        @%p1 bra END;
        shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;
        st.global.u32 [%rd1], %r2;
    END:
    )",
                                     32);
    CHECK(says(said, { "shfl of lanes", "elsewhere" }), "%s", said.c_str());
}

/* ---- what is reported ---- */

static void test_barrier_that_never_comes() {
    const std::string said = refused(opening(4) + R"(
        setp.ge.u32 %p1, %r1, 32;
        @%p1 bra END;
        bar.sync 1, 64;
        st.global.u32 [%rd1], %r1;
    END:
    )",
                                     64);
    CHECK(
        says(said, { "ptx: k:", "wait for ever", "block (0,0,0) warp 0", "barrier 1 (32 of 64)" }),
        "%s", said.c_str());
}

/* The last of 32 threads goes beyond its memory, or all do. */
static void test_bounds() {
    static const struct {
        const char *instruction;
        std::vector<std::string> said;
    } wrong[] = {
        { "ld.global.u32 %r2, [%rd1+4];", { "access of 4 bytes", "no memory" } },
        { "ld.global.u16 %r2, [%rd1+1];", { "not aligned for 2 bytes" } },
        { "st.shared.u32 [buffer+64], %r1;",
          { "access of 4 bytes at 64 of shared memory, which ends at 64" } },
        { "bar.sync 1, 7;", { "barrier of 7 threads" } },
        { "setmaxnreg.dec.sync.aligned.u32 72;", { "setmaxnreg.dec of 64 registers to 72" } },
        { "setmaxnreg.inc.sync.aligned.u32 56;", { "setmaxnreg.inc of 64 registers to 56" } },
        { "trap;", { "trap" } },
        { "frobnicate.b32 %r2, %r1;", { "unknown instruction" } },
    };
    for (const auto &w : wrong) {
        const std::string body = opening(4) + ".shared .align 16 .b8 buffer[64];\n" + w.instruction;
        const std::string said = refused(body, 32);
        CHECK(says(said, w.said), "%s: %s", w.instruction, said.c_str());
        const std::string text(w.instruction);
        CHECK(says(said, { "ptx: k", "line 15", text.substr(0, text.size() - 1) }), "%s: %s",
              w.instruction, said.c_str());
    }
}

/* ---- clusters ---- */

/* Each of two blocks reads what the other left in its shared memory. */
static void test_cluster() {
    memory out(2);
    void *at = out.at();
    const int code = run(".param .u64 out", R"(
        .reg .b32 %r<8>;
        .reg .b64 %rd<4>;
        .shared .align 4 .b8 mine[4];
        mov.u32 %r1, %cluster_ctarank;
        add.u32 %r2, %r1, 70;
        st.shared.u32 [mine], %r2;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        xor.b32 %r3, %r1, 1;
        mov.u32 %r4, mine;
        mapa.shared::cluster.u32 %r5, %r4, %r3;
        ld.shared::cluster.u32 %r6, [%r5];
        ld.param.u64 %rd1, [out];
        mad.wide.u32 %rd1, %r1, 4, %rd1;
        st.global.u32 [%rd1], %r6;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
    )",
                         1, { &at }, nullptr, 2);
    CHECK(code == 0, "the kernel runs");
    CHECK(out.words[0] == 71 && out.words[1] == 70, "%u, %u", out.words[0], out.words[1]);
}

/* ---- asynchronous copies ---- */

/* What is read between a copy and the wait for it: the old value if copies are late. */
static void test_late_copy() {
    memory out(64), from(32);
    for (uint32_t i = 0; i < 32; i++) from.words[i] = 1000 + i;
    void *at = out.at(), *source = from.at();
    const int code = run(".param .u64 out, .param .u64 from", opening(8) + R"(
        .shared .align 16 .b8 buffer[128];
        ld.param.u64 %rd2, [from];
        mad.wide.u32 %rd2, %r1, 4, %rd2;
        mov.u32 %r2, buffer;
        mad.lo.u32 %r2, %r1, 4, %r2;
        st.shared.u32 [%r2], 7;
        cp.async.ca.shared.global [%r2], [%rd2], 4;
        cp.async.commit_group;
        ld.shared.u32 %r3, [%r2];
        cp.async.wait_group 0;
        ld.shared.u32 %r4, [%r2];
        st.global.v2.u32 [%rd1], {%r3, %r4};
    )",
                         32, { &at, &source });
    CHECK(code == 0, "the kernel runs");
    for (uint32_t l = 0; l < 32; l++) {
        CHECK(out.words[2 * l] == (late() ? 7 : 1000 + l), "before, lane %u: %u", l,
              out.words[2 * l]);
        CHECK(out.words[2 * l + 1] == 1000 + l, "after, lane %u: %u", l, out.words[2 * l + 1]);
    }
}

/* Where TMA and wgmma put byte x of 128-byte line y: its 16-byte unit is exclusive-ored with the
 * line's number. */
static size_t swizzled(size_t y, size_t x) {
    return y * 128 + (x / 16 ^ y % 8) * 16 + x % 16;
}

/* A box of 64 x 8 that begins outside of a tensor of 40 x 5 and ends outside of it: zeros there. */
static void test_tensor_copy() {
    constexpr int COLUMNS = 40, ROWS = 5, BOX = 64, BOX_ROWS = 8, X = -8, Y = -1;
    memory out(BOX * BOX_ROWS / 2), from(COLUMNS * ROWS / 2);
    matrix m(ROWS, COLUMNS);
    for (size_t i = 0; i < from.words.size(); i++)
        from.words[i] = bf16_pair(m.x[2 * i], m.x[2 * i + 1]);
    ptx_tensor_map map = {};
    map.magic = PTX_TENSOR_MAP, map.address = (uint64_t)(uintptr_t)from.at();
    map.rank = 2, map.element_bytes = 2, map.swizzle = 3;
    map.dims[0] = COLUMNS, map.dims[1] = ROWS, map.strides[0] = COLUMNS * 2;
    map.box[0] = BOX, map.box[1] = BOX_ROWS;
    unsigned char bytes[128] = {};
    memcpy(bytes, &map, sizeof map);
    void *at = out.at();
    const int code = run(".param .u64 out, .param .align 64 .b8 map[128]", opening(32) + R"(
        .shared .align 128 .b8 tile[1024];
        .shared .align 8 .b8 full[8];
        mov.u32 %r2, tile;
        mov.u32 %r3, full;
        setp.ne.u32 %p1, %r1, 0;
        @%p1 bra WAIT;
        mbarrier.init.shared.b64 [%r3], 1;
        mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r3], 1024;
        mov.u32 %r4, -8;
        mov.u32 %r5, -1;
        mov.b64 %rd2, map;
        cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
            [%r2], [%rd2, {%r4, %r5}], [%r3];
    WAIT:
        bar.warp.sync -1;
        mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;
        @!%p2 bra WAIT;
        mad.lo.u32 %r6, %r1, 32, %r2;
        ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r6];
        ld.shared.v4.u32 {%r14, %r15, %r16, %r17}, [%r6+16];
        st.global.v4.u32 [%rd1], {%r10, %r11, %r12, %r13};
        st.global.v4.u32 [%rd1+16], {%r14, %r15, %r16, %r17};
    )",
                         32, { &at, bytes });
    CHECK(code == 0, "the kernel runs");
    for (int y = 0; y < BOX_ROWS; y++) {
        for (int x = 0; x < BOX; x++) {
            const int c = X + x, r = Y + y;
            const bool inside = c >= 0 && c < COLUMNS && r >= 0 && r < ROWS;
            uint16_t got;
            memcpy(&got, (const char *)out.at() + swizzled((size_t)y, 2 * (size_t)x), 2);
            CHECK(got == (inside ? bf16(m(r, c)) : 0), "row %d column %d: 0x%x", r, c, got);
        }
    }
}

/* ---- products ---- */

/* m16n8k16 of bf16, fragments as the ISA has them: lane 4 g + t. */
static void test_mma() {
    const matrix a(16, 16), b(16, 8), c(16, 8);
    memory out(128), in(32 * 12);
    for (int l = 0; l < 32; l++) {
        const int g = l / 4, t = l % 4;
        uint32_t *v = &in.words[(size_t)(12 * l)];
        for (int i = 0; i < 4; i++) {
            const int r = g + 8 * (i % 2), k = 2 * t + 8 * (i / 2);
            v[i] = bf16_pair(a(r, k), a(r, k + 1));
        }
        for (int i = 0; i < 2; i++)
            v[4 + i] = bf16_pair(b(2 * t + 8 * i, g), b(2 * t + 8 * i + 1, g));
        for (int i = 0; i < 4; i++) {
            const float x = c(g + 8 * (i / 2), 2 * t + i % 2);
            memcpy(&v[8 + i], &x, 4);
        }
    }
    void *at = out.at(), *source = in.at();
    const int code = run(".param .u64 out, .param .u64 in", opening(16) + R"(
        ld.param.u64 %rd2, [in];
        mad.wide.u32 %rd2, %r1, 48, %rd2;
        ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd2];
        ld.global.v2.u32 {%r14, %r15}, [%rd2+16];
        ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd2+32];
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f5, %f6, %f7, %f8},
            {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%f1, %f2, %f3, %f4};
        st.global.v4.f32 [%rd1], {%f5, %f6, %f7, %f8};
    )",
                         32, { &at, &source });
    CHECK(code == 0, "the kernel runs");
    for (int l = 0; l < 32; l++) {
        for (int i = 0; i < 4; i++) {
            const int r = l / 4 + 8 * (i / 2), n = l % 4 * 2 + i % 2;
            const float want = product(a, b, r, n) + c(r, n), got = out.number((size_t)(4 * l + i));
            CHECK(got == want, "(%d, %d): %g, not %g", r, n, (double)got, (double)want);
        }
    }
}

/* Element (n, k) of an operand of wgmma: lines along k, or along n, in 128 bytes with their
 * swizzle. */
static void put(std::vector<uint32_t> *image, size_t base, bool transposed, int n, int k, float x) {
    const size_t line = (size_t)(transposed ? k : n), byte = 2 * (size_t)(transposed ? n : k);
    const uint16_t bits = bf16(x);
    memcpy((char *)image->data() + base + swizzled(line, byte), &bits, 2);
}

/* m64n16k16 by a warp group, A and B from shared memory, each along k and along its other
 * dimension. */
static void test_wgmma(bool transposed_a, bool transposed_b) {
    const matrix a(64, 16), b(16, 16);
    memory out(128 * 8), image(10240 / 4);
    for (int k = 0; k < 16; k++) {
        for (int r = 0; r < 64; r++) put(&image.words, 0, transposed_a, r, k, a(r, k));
        for (int n = 0; n < 16; n++) put(&image.words, 8192, transposed_b, n, k, b(k, n));
    }
    std::string body = opening(32) + R"(
        .shared .align 1024 .b8 tiles[10240];
        ld.param.u64 %rd2, [in];
        mad.wide.u32 %rd2, %r1, 80, %rd2;
        mov.u32 %r2, tiles;
        mad.lo.u32 %r3, %r1, 80, %r2;
        mov.u32 %r4, 0;
    COPY:
        ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd2];
        st.shared.v4.u32 [%r3], {%r10, %r11, %r12, %r13};
        add.s64 %rd2, %rd2, 16;
        add.s32 %r3, %r3, 16;
        add.s32 %r4, %r4, 1;
        setp.lt.s32 %p1, %r4, 5;
        @%p1 bra COPY;
        bar.sync 0;
        fence.proxy.async;
        cvt.u64.u32 %rd3, %r2;
        and.b64 %rd3, %rd3, 262143;
        shr.u64 %rd3, %rd3, 4;
        or.b64 %rd3, %rd3, DESCRIPTOR;
        add.s64 %rd4, %rd3, 512;
        setp.ne.b32 %p2, %r4, %r4;
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16
            {%f1, %f2, %f3, %f4, %f5, %f6, %f7, %f8},
            %rd3, %rd4, %p2, 1, 1, TRANS_A, TRANS_B;
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0;
        st.global.v4.f32 [%rd1], {%f1, %f2, %f3, %f4};
        st.global.v4.f32 [%rd1+16], {%f5, %f6, %f7, %f8};
    )";
    // swizzle of 128 bytes; 1024 from eight lines to the next, and from 64 columns to the next
    const uint64_t descriptor = 1ull << 62 | 64ull << 32 | 64ull << 16;
    body = replaced(body, "DESCRIPTOR", std::to_string(descriptor));
    body = replaced(replaced(body, "TRANS_A", transposed_a ? "1" : "0"), "TRANS_B",
                    transposed_b ? "1" : "0");
    void *at = out.at(), *source = image.at();
    const int code = run(".param .u64 out, .param .u64 in", body, 128, { &at, &source });
    CHECK(code == 0, "the kernel runs");
    for (int thread = 0; thread < 128; thread++) {
        for (int i = 0; i < 8; i++) {
            const int l = thread % 32, r = thread / 32 * 16 + l / 4 + 8 * (i / 2 % 2);
            const int n = l % 4 * 2 + i % 2 + 8 * (i / 4);
            const float want = product(a, b, r, n), got = out.number((size_t)(8 * thread + i));
            CHECK(got == want, "%d%d (%d, %d): %g, not %g", transposed_a, transposed_b, r, n,
                  (double)got, (double)want);
        }
    }
}

int main() {
    test_divergence();
    test_shuffles();
    test_shuffle_of_some();
    test_barrier_that_never_comes();
    test_bounds();
    test_cluster();
    test_late_copy();
    test_tensor_copy();
    test_mma();
    for (int i = 0; i < 4; i++) test_wgmma(i & 1, i & 2);
    return n_failed != 0;
}
