/* test_safetensors.c - safetensors: round trips, damage, and numbers of every type.
 *
 * Damaged inputs are made from a sound one by a single change, so each test knows which message
 * it must get. Files go into a fresh folder that is removed at the end. */
// labels: sanitize
#define _XOPEN_SOURCE 700
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <locale.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/util.h"
#include "io/file.h"
#include "io/json.h"
#include "io/safetensors.h"
#include "support/folder.h"

/* ---- safetensors: round trips ---------------------------------------------------------------- */

static const float some_f32[6] = {1.0f, -2.5f, 3e-45f, 3.4e38f, -0.0f, 0.1f};
static const double some_f64[2] = {1.0 / 3.0, -1e-300};
static const uint8_t some_u8[3] = {0, 127, 255};
static const uint16_t some_bf16[3] = {0x3f80, 0xc049, 0x7f80};
static const int64_t some_i64[1] = {-5};

/* One of each width, in an order that would misalign all but the first. */
static const mn_stored_tensor sample[] = {
    {.name = "bytes", .dtype = MN_STORED_U8, .rank = 1, .shape = {3}, .data = some_u8, .bytes = 3},
    {.name = "w.0", .dtype = MN_STORED_F32, .rank = 2, .shape = {2, 3}, .data = some_f32,
     .bytes = 24},
    {.name = "half", .dtype = MN_STORED_BF16, .rank = 3, .shape = {3, 1, 1}, .data = some_bf16,
     .bytes = 6},
    {.name = "d", .dtype = MN_STORED_F64, .rank = 1, .shape = {2}, .data = some_f64, .bytes = 16},
    {.name = "none", .dtype = MN_STORED_F32, .rank = 2, .shape = {0, 7}, .data = NULL, .bytes = 0},
    {.name = "scalar", .dtype = MN_STORED_I64, .rank = 0, .data = some_i64, .bytes = 8},
};
enum { N_SAMPLE = MN_COUNTOF(sample) };

static const mn_stored_text sample_metadata[] = {{"format", "pt"}, {"note", "a\nb \"q\" \xc3\xa9"}};

static void safetensors_round_trip(void **state) {
    (void)state;
    const char *path = in_folder("sample.safetensors");
    assert_int_equal(mn_safetensors_write(path, sample, N_SAMPLE, sample_metadata, 2), MN_OK);
    mn_safetensors *in;
    assert_int_equal(mn_safetensors_open(&in, path), MN_OK);
    assert_int_equal(mn_safetensors_count(in), N_SAMPLE);
    for (int64_t i = 0; i < N_SAMPLE; i++) {
        const mn_stored_tensor *want = &sample[i], *got = mn_safetensors_at(in, i);
        assert_string_equal(mn_safetensors_name(in, i), want->name);
        assert_ptr_equal(mn_safetensors_find(in, want->name), got);
        assert_int_equal(got->dtype, want->dtype);
        assert_int_equal(got->rank, want->rank);
        assert_memory_equal(got->shape, want->shape, sizeof want->shape);
        assert_int_equal(got->bytes, want->bytes);
        assert_int_equal((uintptr_t)got->data % mn_stored_dtype_bytes(got->dtype), 0);
        if (want->bytes > 0) assert_memory_equal(got->data, want->data, want->bytes);
    }
    assert_null(mn_safetensors_find(in, "w.1"));
    const mn_stored_tensor *tensor;
    assert_fails(mn_safetensors_get(&tensor, in, "w.1"), MN_ERR_FORMAT, path, "\"w.1\"");
    assert_null(tensor);
    assert_int_equal(mn_safetensors_get(&tensor, in, "w.0"), MN_OK);

    assert_int_equal(mn_safetensors_metadata_count(in), 2);
    assert_string_equal(mn_safetensors_metadata_at(in, 0).key, "format");
    assert_string_equal(mn_safetensors_metadata(in, "note"), sample_metadata[1].value);
    assert_null(mn_safetensors_metadata(in, "absent"));
    mn_safetensors_close(in);
    mn_safetensors_close(NULL);
}

/* The layout that the format describes, byte for byte. */
static void safetensors_writes_the_format(void **state) {
    (void)state;
    static const char header[] =
        "{\"__metadata__\":{\"k\":\"v\"},"
        "\"x\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]}}";
    enum { TEXT = sizeof header - 1, PADDED = (TEXT + 7) / 8 * 8 };
    uint8_t want[8 + PADDED + 3] = {PADDED};
    assert_int_not_equal(TEXT, PADDED);                 // so that the padding is seen
    memset(want + 8, ' ', PADDED);
    memcpy(want + 8, header, TEXT);
    memcpy(want + 8 + PADDED, some_u8, 3);
    const mn_stored_tensor x = {.name = "x", .dtype = MN_STORED_U8, .rank = 1, .shape = {3},
                                .data = some_u8, .bytes = 3};
    const mn_stored_text metadata = {"k", "v"};
    const char *path = in_folder("x.safetensors");
    assert_int_equal(mn_safetensors_write(path, &x, 1, &metadata, 1), MN_OK);
    assert_file_is(path, want, sizeof want);

    assert_int_equal(mn_safetensors_write(path, NULL, 0, NULL, 0), MN_OK);
    assert_file_is(path, "\x08\0\0\0\0\0\0\0{}      ", 16);
    mn_safetensors *in;
    assert_int_equal(mn_safetensors_open(&in, path), MN_OK);
    assert_int_equal(mn_safetensors_count(in), 0);
    assert_int_equal(mn_safetensors_metadata_count(in), 0);
    assert_null(mn_safetensors_find(in, "x"));
    mn_safetensors_close(in);
}

static void safetensors_writer_checks_its_input(void **state) {
    (void)state;
    const char *path = in_folder("never.safetensors");
    const mn_stored_tensor good = {.name = "x", .dtype = MN_STORED_U8, .rank = 1, .shape = {3},
                                   .data = some_u8, .bytes = 3};
    mn_stored_tensor bad[2] = {good, good};
    assert_fails(mn_safetensors_write(path, bad, 2, NULL, 0), MN_ERR_ARGUMENT, path, "given twice");
    bad[0].shape[0] = 4;
    assert_fails(mn_safetensors_write(path, bad, 1, NULL, 0), MN_ERR_ARGUMENT, "\"x\"", "4 bytes");
    bad[0].shape[0] = -1;
    assert_fails(mn_safetensors_write(path, bad, 1, NULL, 0), MN_ERR_ARGUMENT, "\"x\"", "shape[0]");
    bad[0] = good;
    bad[0].rank = 9;
    assert_fails(mn_safetensors_write(path, bad, 1, NULL, 0), MN_ERR_ARGUMENT, "\"x\"", "9");
    bad[0] = good;
    bad[0].data = NULL;
    assert_fails(mn_safetensors_write(path, bad, 1, NULL, 0), MN_ERR_ARGUMENT, "\"x\"", "0 given");
    bad[0] = good;
    bad[0].name = "__metadata__";
    assert_fails(mn_safetensors_write(path, bad, 1, NULL, 0), MN_ERR_ARGUMENT, "__metadata__", "");
    bad[0].name = "\xff";
    assert_fails(mn_safetensors_write(path, bad, 1, NULL, 0), MN_ERR_ARGUMENT, "UTF-8", path);
    const mn_stored_text text[] = {{"k", "v"}, {"k", "w"}, {"u", "\xff"}};
    assert_fails(mn_safetensors_write(path, &good, 1, text, 2), MN_ERR_ARGUMENT, "\"k\"", "twice");
    assert_fails(mn_safetensors_write(path, &good, 1, text + 1, 2), MN_ERR_ARGUMENT, "\"u\"",
                 "not UTF-8");
    mn_file file;
    assert_int_equal(mn_file_map(&file, path), MN_ERR_IO);      // none of these left a file
}

/* ---- safetensors: damage --------------------------------------------------------------------- */

/* Parses a file made of a length, a header text and `n_data` zero bytes. */
static mn_status parse_made(const char *header, size_t n_data) {
    const size_t n = strlen(header);
    uint8_t *bytes = calloc(1, 8 + n + n_data);
    assert_non_null(bytes);
    for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)((uint64_t)n >> (8 * i));
    memcpy(bytes + 8, header, n);
    mn_safetensors *in;
    const mn_status st = mn_safetensors_parse(&in, bytes, 8 + n + n_data, "made.st");
    assert_true((st == MN_OK) == (in != NULL));
    mn_safetensors_close(in);
    free(bytes);
    return st;
}

static void safetensors_cut_anywhere_fails_clearly(void **state) {
    (void)state;
    const char *path = in_folder("whole.safetensors");
    assert_int_equal(mn_safetensors_write(path, sample, N_SAMPLE, sample_metadata, 2), MN_OK);
    mn_file whole;
    assert_int_equal(mn_file_map(&whole, path), MN_OK);
    for (size_t size = 0; size < whole.size; size++) {
        uint8_t *cut = malloc(size ? size : 1);         // its own block, so overruns are seen
        assert_non_null(cut);
        memcpy(cut, whole.bytes, size);
        mn_safetensors *in;
        assert_fails(mn_safetensors_parse(&in, cut, size, "cut.st"), MN_ERR_FORMAT, "cut.st: ", "");
        assert_null(in);
        free(cut);
    }
    mn_file_unmap(&whole);
}

/* Every byte of the file replaced by every power of two flipped: an error or a sound file. */
static void safetensors_bit_flips_never_crash(void **state) {
    (void)state;
    const char *path = in_folder("flip.safetensors");
    assert_int_equal(mn_safetensors_write(path, sample, N_SAMPLE, sample_metadata, 2), MN_OK);
    mn_file whole;
    assert_int_equal(mn_file_map(&whole, path), MN_OK);
    uint8_t *flipped = malloc(whole.size);
    assert_non_null(flipped);
    memcpy(flipped, whole.bytes, whole.size);
    for (size_t at = 0; at < whole.size; at++) {
        for (int bit = 0; bit < 8; bit++) {
            flipped[at] ^= (uint8_t)(1 << bit);
            mn_safetensors *in;
            if (mn_safetensors_parse(&in, flipped, whole.size, "flip.st") == MN_OK) {
                for (int64_t i = 0; i < mn_safetensors_count(in); i++) {
                    double out[32];
                    const mn_stored_tensor *tensor = mn_safetensors_at(in, i);
                    assert_true(mn_stored_elements(tensor) <= 32);
                    (void)mn_safetensors_read_f64(out, tensor);
                }
            } else {
                assert_message_holds("flip.st: ");
            }
            mn_safetensors_close(in);
            flipped[at] ^= (uint8_t)(1 << bit);
        }
    }
    free(flipped);
    mn_file_unmap(&whole);
}

static void safetensors_refuses_bad_lengths(void **state) {
    (void)state;
    static const struct {
        const char *bytes;
        size_t size;
        const char *piece;
    } cases[] = {
        {"", 0, "0 bytes are too few"},
        {"\x02\0\0", 3, "3 bytes are too few"},
        {"\xff\xff\xff\xff\xff\xff\xff\xff{}", 10, "18446744073709551615 is above the limit"},
        {"\x01\xe1\xf5\x05\0\0\0\0{}", 10, "100000001 is above the limit"},
        {"\x00\xe1\xf5\x05\0\0\0\0{}", 10, "cut short"},
        {"\x03\0\0\0\0\0\0\0{}", 10, "the header should have 3 bytes, but the file ends after 2"},
        {"\0\0\0\0\0\0\0\0", 8, "does not start with {"},
        {"\x02\0\0\0\0\0\0\0[]", 10, "does not start with {"},
        {"\x03\0\0\0\0\0\0\0 {}", 11, "does not start with {"},
        {"\x03\0\0\0\0\0\0\0{}x", 11, "header: line 1"},
        {"\x03\0\0\0\0\0\0\0{}\0", 11, "header: line 1"},
        {"\x02\0\0\0\0\0\0\0{}z", 11, "the last 1 bytes belong to no tensor"},
    };
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        mn_safetensors *in;
        assert_fails(mn_safetensors_parse(&in, cases[i].bytes, cases[i].size, "bad.st"),
                     MN_ERR_FORMAT, "bad.st: ", cases[i].piece);
        assert_null(in);
    }
}

#define X_ENTRY(dtype, shape, offsets)                                                             \
    "{\"x\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

static void safetensors_refuses_bad_entries(void **state) {
    (void)state;
    static const struct {
        const char *header;
        size_t n_data;
        const char *piece;
    } cases[] = {
        {X_ENTRY("\"F33\"", "[1]", "[0,4]"), 4, "x: dtype \"F33\""},
        {X_ENTRY("\"f32\"", "[1]", "[0,4]"), 4, "x: dtype \"f32\""},
        {X_ENTRY("4", "[1]", "[0,4]"), 4, "x.dtype: expected a string, found a whole number"},
        {X_ENTRY("\"F32\"", "1", "[0,4]"), 4, "x.shape: expected a list"},
        {X_ENTRY("\"F32\"", "[\"1\"]", "[0,4]"), 4, "x.shape[0]: expected a whole number"},
        {X_ENTRY("\"F32\"", "[1.5]", "[0,4]"), 4, "x.shape[0]: expected a whole number"},
        {X_ENTRY("\"F32\"", "[-1]", "[0,4]"), 4, "x.shape[0]: -1 is negative"},
        {X_ENTRY("\"F32\"", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, "x.shape: 9 dimensions"},
        {X_ENTRY("\"F32\"", "[4294967296,4294967296]", "[0,0]"), 0, "x.shape: the sizes multiply"},
        {X_ENTRY("\"F32\"", "[4611686018427387904]", "[0,0]"), 0, "x.shape: the sizes multiply"},
        {X_ENTRY("\"U8\"", "[9223372036854775807,3,0]", "[0,0]"), 0, "x.shape: the sizes"},
        {X_ENTRY("\"U8\"", "[18446744073709551617]", "[0,1]"), 1, "too big integer"},
        {X_ENTRY("\"F32\"", "[1]", "[0]"), 4, "x.data_offsets: expected two numbers, found 1"},
        {X_ENTRY("\"F32\"", "[1]", "[0,4,8]"), 4, "expected two numbers, found 3"},
        {X_ENTRY("\"F32\"", "[1]", "{}"), 4, "x.data_offsets: expected a list"},
        {X_ENTRY("\"F32\"", "[1]", "[0,null]"), 4, "x.data_offsets[1]: expected a whole"},
        {X_ENTRY("\"F32\"", "[1]", "[0,8]"), 4, "[0, 8] is not a range within the 4 bytes"},
        {X_ENTRY("\"F32\"", "[1]", "[4,0]"), 4, "[4, 0] is not a range"},
        {X_ENTRY("\"F32\"", "[1]", "[-4,0]"), 4, "-4 is negative"},
        {X_ENTRY("\"F32\"", "[1]", "[9223372036854775803,9223372036854775807]"), 4, "not a range"},
        {X_ENTRY("\"F32\"", "[2]", "[0,4]"), 4, "x: dtype and shape need 8 bytes"},
        {X_ENTRY("\"BF16\"", "[1]", "[0,4]"), 4, "x: dtype and shape need 2 bytes"},
        {"{\"x\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "x.dtype: is missing"},
        {"{\"x\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "x.shape: is missing"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "x.data_offsets: is missing"},
        {"{\"x\":[]}", 0, "x: expected an object, found a list"},
        {"{\"__metadata__\":{\"k\":1}}", 0, "__metadata__.k: expected a string"},
        {"{\"__metadata__\":[]}", 0, "__metadata__: expected an object"},
        {"{\"a.b\":{\"dtype\":1}}", 0, "[\"a.b\"].dtype: expected a string"},
    };
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        assert_fails(parse_made(cases[i].header, cases[i].n_data), MN_ERR_FORMAT,
                     "made.st: header: ", cases[i].piece);
    }
    assert_int_equal(parse_made(X_ENTRY("\"F32\"", "[1]", "[0,4]"), 4), MN_OK);
    assert_int_equal(parse_made(X_ENTRY("\"F32\"", "[]", "[0,4]") "   ", 4), MN_OK);
    assert_int_equal(parse_made(X_ENTRY("\"F32\"", "[5,0]", "[0,0]"), 0), MN_OK);
}

#define TWO_ENTRIES(a, offsets_a, b, offsets_b)                                                    \
    "{\"" a "\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" offsets_a "},"                  \
    "\"" b "\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" offsets_b "}}"

static void safetensors_data_is_covered_once(void **state) {
    (void)state;
    assert_int_equal(parse_made(TWO_ENTRIES("a", "[0,4]", "b", "[4,8]"), 8), MN_OK);
    assert_int_equal(parse_made(TWO_ENTRIES("a", "[4,8]", "b", "[0,4]"), 8), MN_OK);
    assert_fails(parse_made(TWO_ENTRIES("a", "[0,4]", "b", "[2,6]"), 6), MN_ERR_FORMAT,
                 "made.st: tensors \"a\" and \"b\" overlap", "");
    assert_fails(parse_made(TWO_ENTRIES("a", "[0,4]", "b", "[0,4]"), 4), MN_ERR_FORMAT,
                 "made.st: ", "overlap");
    assert_fails(parse_made(TWO_ENTRIES("a", "[0,4]", "b", "[5,9]"), 9), MN_ERR_FORMAT,
                 "made.st: the 1 bytes before tensor \"b\"", "");
    assert_fails(parse_made(TWO_ENTRIES("a", "[2,6]", "b", "[6,10]"), 10), MN_ERR_FORMAT,
                 "made.st: the 2 bytes before tensor \"a\"", "");
    assert_fails(parse_made(TWO_ENTRIES("a", "[0,4]", "b", "[4,8]"), 9), MN_ERR_FORMAT,
                 "made.st: the last 1 bytes", "");
    assert_fails(parse_made(TWO_ENTRIES("a", "[0,4]", "a", "[4,8]"), 8), MN_ERR_FORMAT,
                 "made.st: header: ", "duplicate");
}

static void safetensors_open_says_what_is_wrong(void **state) {
    (void)state;
    mn_safetensors *in;
    assert_fails(mn_safetensors_open(&in, "missing.safetensors"), MN_ERR_IO,
                 "missing.safetensors: no such file", "");
    assert_null(in);
    assert_fails(mn_safetensors_open(&in, in_folder("")), MN_ERR_IO, in_folder(""), "is a folder");
    write_file(in_folder("empty.st"), "", 0);
    assert_fails(mn_safetensors_open(&in, in_folder("empty.st")), MN_ERR_FORMAT, "empty.st",
                 "0 bytes");
}

/* ---- safetensors: numbers -------------------------------------------------------------------- */

/* `n` elements at an odd address: stored data has no alignment to rely on. */
static void assert_reads(mn_stored_dtype dtype, const void *data, const double *want, int64_t n) {
    uint8_t odd[129] = {0};
    double f64[16];
    float f32[16];
    const size_t bytes = (size_t)n * mn_stored_dtype_bytes(dtype);
    assert_true(bytes < sizeof odd && n <= 16);
    memcpy(odd + 1, data, bytes);
    const mn_stored_tensor tensor = {.name = "t", .dtype = dtype, .rank = 1, .shape = {n},
                                     .data = odd + 1, .bytes = bytes};
    assert_int_equal(mn_safetensors_read_f64(f64, &tensor), MN_OK);
    assert_int_equal(mn_safetensors_read_f32(f32, &tensor), MN_OK);
    for (int64_t i = 0; i < n; i++) {
        if (isnan(want[i])) {
            assert_true(isnan(f64[i]) && isnan(f32[i]));
            continue;
        }
        const float rounded = (float)want[i];
        assert_memory_equal(&f64[i], &want[i], sizeof(double));         // the sign of zero too
        assert_memory_equal(&f32[i], &rounded, sizeof(float));
    }
}

static void floats_of_every_width_convert(void **state) {
    (void)state;
    const double inf = (double)INFINITY, nan = (double)NAN;
    const double f64[] = {1.0 / 3.0, -0.0, 1e300, inf, nan};
    assert_reads(MN_STORED_F64, f64, f64, 5);
    const float f32[] = {1.5f, -0.0f, 1e-45f, 3.4e38f, -INFINITY, NAN};
    const double f32_want[] = {1.5, -0.0, (double)1e-45f, (double)3.4e38f, -inf, nan};
    assert_reads(MN_STORED_F32, f32, f32_want, 6);
    const uint16_t f16[] = {0x3c00, 0xc000, 0x7bff, 0x0001, 0x03ff, 0x0400, 0x8000, 0x7c00, 0xfc00,
                            0x7e01};
    const double f16_want[] = {1, -2, 65504, 0x1p-24, 0x3ffp-24, 0x1p-14, -0.0, inf, -inf, nan};
    assert_reads(MN_STORED_F16, f16, f16_want, 10);
    const uint16_t bf16[] = {0x3f80, 0xc049, 0x0001, 0x7f7f, 0x7f80, 0xffc0};
    const double bf16_want[] = {1, -3.140625, 0x1p-133, 0x1.fep127, inf, nan};
    assert_reads(MN_STORED_BF16, bf16, bf16_want, 6);
    const uint8_t e5m2[] = {0x3c, 0x7b, 0x01, 0x7c, 0x7d, 0x80};
    const double e5m2_want[] = {1, 57344, 0x1p-16, inf, nan, -0.0};
    assert_reads(MN_STORED_F8_E5M2, e5m2, e5m2_want, 6);
    const uint8_t e4m3[] = {0x38, 0x7e, 0x01, 0x7f, 0xff, 0xf8, 0x80};
    const double e4m3_want[] = {1, 448, 0x1p-9, nan, nan, -256, -0.0};
    assert_reads(MN_STORED_F8_E4M3, e4m3, e4m3_want, 7);
    const uint8_t e8m0[] = {127, 0, 254, 255, 128};
    const double e8m0_want[] = {1, 0x1p-127, 0x1p127, nan, 2};
    assert_reads(MN_STORED_F8_E8M0, e8m0, e8m0_want, 5);
}

static void integers_of_every_width_convert(void **state) {
    (void)state;
    const int64_t i64[] = {INT64_MIN, -1, INT64_MAX, 0};
    assert_reads(MN_STORED_I64, i64, (double[]){-0x1p63, -1, 0x1p63, 0}, 4);
    const uint64_t u64[] = {UINT64_MAX, 1, (UINT64_C(1) << 63)};
    assert_reads(MN_STORED_U64, u64, (double[]){0x1p64, 1, 0x1p63}, 3);
    assert_reads(MN_STORED_I32, (int32_t[]){INT32_MIN, -7}, (double[]){-2147483648.0, -7}, 2);
    assert_reads(MN_STORED_U32, (uint32_t[]){UINT32_MAX, 7}, (double[]){4294967295.0, 7}, 2);
    assert_reads(MN_STORED_I16, (int16_t[]){-32768, 32767}, (double[]){-32768, 32767}, 2);
    assert_reads(MN_STORED_U16, (uint16_t[]){65535, 2}, (double[]){65535, 2}, 2);
    assert_reads(MN_STORED_I8, (int8_t[]){-128, 127}, (double[]){-128, 127}, 2);
    assert_reads(MN_STORED_U8, (uint8_t[]){255, 0}, (double[]){255, 0}, 2);
    assert_reads(MN_STORED_BOOL, (uint8_t[]){1, 0}, (double[]){1, 0}, 2);
}

static void complex_numbers_are_refused(void **state) {
    (void)state;
    const float complex1[2] = {1, 2};
    double f64[2] = {7, 7};
    float f32[2];
    const mn_stored_tensor tensor = {.name = "z", .dtype = MN_STORED_C64, .rank = 0,
                                     .data = complex1, .bytes = 8};
    assert_fails(mn_safetensors_read_f64(f64, &tensor), MN_ERR_UNSUPPORTED, "\"z\"", "C64");
    assert_fails(mn_safetensors_read_f32(f32, &tensor), MN_ERR_UNSUPPORTED, "\"z\"", "C64");
    assert_true(f64[0] == 7);
}

/* Same type in and out: bits pass unchanged, NaN payloads included. */
static void equal_types_keep_their_bits(void **state) {
    (void)state;
    const uint32_t f32_bits = 0xff812345;
    const uint64_t f64_bits = UINT64_C(0x7ff0000000012345);
    float f32;
    double f64;
    const mn_stored_tensor narrow = {.dtype = MN_STORED_F32, .data = &f32_bits, .bytes = 4};
    const mn_stored_tensor wide = {.dtype = MN_STORED_F64, .data = &f64_bits, .bytes = 8};
    assert_int_equal(mn_safetensors_read_f32(&f32, &narrow), MN_OK);
    assert_int_equal(mn_safetensors_read_f64(&f64, &wide), MN_OK);
    assert_memory_equal(&f32, &f32_bits, 4);
    assert_memory_equal(&f64, &f64_bits, 8);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(safetensors_round_trip),
        cmocka_unit_test(safetensors_writes_the_format),
        cmocka_unit_test(safetensors_writer_checks_its_input),
        cmocka_unit_test(safetensors_cut_anywhere_fails_clearly),
        cmocka_unit_test(safetensors_bit_flips_never_crash),
        cmocka_unit_test(safetensors_refuses_bad_lengths),
        cmocka_unit_test(safetensors_refuses_bad_entries),
        cmocka_unit_test(safetensors_data_is_covered_once),
        cmocka_unit_test(safetensors_open_says_what_is_wrong),
        cmocka_unit_test(floats_of_every_width_convert),
        cmocka_unit_test(integers_of_every_width_convert),
        cmocka_unit_test(complex_numbers_are_refused),
        cmocka_unit_test(equal_types_keep_their_bits),
    };
    return cmocka_run_group_tests_name("safetensors", tests, make_folder, remove_folder);
}
