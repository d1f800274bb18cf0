/* test_io.c - bounded reads, files, JSON and safetensors: round trips and every way to be wrong.
 *
 * Damaged inputs are made from a sound one by a single change, so each test knows which message
 * it must get. Files go into a fresh folder that is removed at the end. */
#define _XOPEN_SOURCE 700
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
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
#include "io/closest.h"
#include "io/cursor.h"
#include "io/file.h"
#include "io/json.h"
#include "io/json_write.h"
#include "io/safetensors.h"

static char folder[] = "/tmp/mneme-test-io-XXXXXX";

/* The path of `name` in the test's folder; valid until the fourth next call. */
static const char *in_folder(const char *name) {
    static char paths[4][256];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

/* The call failed so, and its message holds each of the two pieces. */
#define assert_fails(call, wanted, piece1, piece2)                                                 \
    do {                                                                                           \
        assert_int_equal(call, wanted);                                                            \
        assert_message_holds(piece1);                                                              \
        assert_message_holds(piece2);                                                              \
    } while (0)

static void assert_message_holds(const char *piece) {
    if (strstr(mn_last_error(), piece)) return;
    fail_msg("message \"%s\" lacks \"%s\"", mn_last_error(), piece);
}

static void write_file(const char *path, const void *bytes, size_t size) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

static void assert_file_is(const char *path, const void *bytes, size_t size) {
    mn_file file;
    assert_int_equal(mn_file_map(&file, path), MN_OK);
    assert_int_equal(file.size, size);
    if (size > 0) assert_memory_equal(file.bytes, bytes, size);
    mn_file_unmap(&file);
}

static int64_t files_in_folder(void) {
    DIR *open_folder = opendir(folder);
    assert_non_null(open_folder);
    int64_t n = 0;
    for (struct dirent *entry; (entry = readdir(open_folder));) n += entry->d_name[0] != '.';
    closedir(open_folder);
    return n;
}

/* ---- cursor ---------------------------------------------------------------------------------- */

static void cursor_reads_little_endian(void **state) {
    (void)state;
    static const uint8_t bytes[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0xff, 0xfe};
    mn_cursor in = mn_cursor_over(bytes, sizeof bytes);
    uint8_t u8;
    uint16_t u16;
    uint32_t u32;
    uint64_t u64;
    mn_bytes rest;
    assert_true(mn_take_u8(&in, &u8) && u8 == 1);
    assert_true(mn_take_u16le(&in, &u16) && u16 == 0x0302);
    assert_true(mn_take_u32le(&in, &u32) && u32 == 0x07060504);
    assert_true(mn_take_u64le(&in, &u64) && u64 == UINT64_C(0x0f0e0d0c0b0a0908));
    assert_int_equal(mn_left(&in), 2);
    assert_true(mn_take_bytes(&in, &rest, 2));
    assert_ptr_equal(rest.bytes, bytes + 15);
    assert_int_equal(rest.size, 2);
    assert_int_equal(mn_left(&in), 0);
}

static void cursor_refuses_what_is_not_there(void **state) {
    (void)state;
    static const uint8_t bytes[7] = {0};
    mn_cursor in = mn_cursor_over(bytes, sizeof bytes);
    uint8_t u8 = 42;
    uint32_t u32 = 42;
    uint64_t u64 = 42;
    mn_bytes rest = {0};
    assert_false(mn_take_u64le(&in, &u64));
    assert_false(mn_take_bytes(&in, &rest, 8));
    assert_false(mn_take_bytes(&in, &rest, SIZE_MAX));
    assert_int_equal(mn_left(&in), 7);              // a refusal moves nothing
    assert_true(mn_take_u32le(&in, &u32));
    u32 = 42;
    assert_false(mn_take_u32le(&in, &u32));
    assert_true(u32 == 42 && u64 == 42);            // and writes nothing
    assert_true(mn_take_bytes(&in, &rest, 3));
    assert_true(mn_take_bytes(&in, &rest, 0));
    assert_false(mn_take_u8(&in, &u8));

    in = mn_cursor_over(NULL, 0);
    assert_false(mn_take_u8(&in, &u8));
    assert_true(mn_take_bytes(&in, &rest, 0));
    assert_null(rest.bytes);
}

/* ---- file ------------------------------------------------------------------------------------ */

static void map_gives_the_bytes(void **state) {
    (void)state;
    mn_file file;
    write_file(in_folder("some"), "bytes\0here", 10);
    assert_file_is(in_folder("some"), "bytes\0here", 10);
    write_file(in_folder("empty"), "", 0);
    assert_int_equal(mn_file_map(&file, in_folder("empty")), MN_OK);
    assert_int_equal(file.size, 0);
    assert_non_null(file.bytes);
    mn_file_unmap(&file);
    assert_null(file.bytes);
    mn_file_unmap(&file);
    mn_file_unmap(NULL);
}

static void map_says_what_is_wrong(void **state) {
    (void)state;
    mn_file file;
    assert_fails(mn_file_map(&file, "missing.json"), MN_ERR_IO, "missing.json: no such file", "");
    assert_null(file.bytes);
    assert_fails(mn_file_map(&file, folder), MN_ERR_IO, folder, "is a folder");
    assert_fails(mn_file_map(&file, "/dev/null"), MN_ERR_IO, "/dev/null", "device");
    assert_fails(mn_file_map(&file, ""), MN_ERR_ARGUMENT, "no file name", "");
    assert_fails(mn_file_map(&file, NULL), MN_ERR_ARGUMENT, "no file name", "");
    assert_int_equal(mkfifo(in_folder("pipe"), 0600), 0);       // must not wait for a writer
    assert_fails(mn_file_map(&file, in_folder("pipe")), MN_ERR_IO, "pipe", "expected a regular");
    assert_int_equal(unlink(in_folder("pipe")), 0);
}

static void write_replaces_and_leaves_no_trace(void **state) {
    (void)state;
    const char *path = in_folder("out");
    assert_int_equal(mn_file_write_bytes(path, "first", 5), MN_OK);
    const int64_t n_files = files_in_folder();
    assert_int_equal(chmod(path, 0640), 0);
    assert_int_equal(mn_file_write_bytes(path, "second", 6), MN_OK);
    assert_file_is(path, "second", 6);
    assert_int_equal(files_in_folder(), n_files);
    struct stat info;
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(info.st_mode & 0777, 0640);

    assert_int_equal(mn_file_write_bytes(path, NULL, 0), MN_OK);
    assert_file_is(path, "", 0);
}

/* A mapping made before a write keeps the old bytes: readers never see a mixture. */
static void write_leaves_readers_alone(void **state) {
    (void)state;
    const char *path = in_folder("shared");
    mn_file before;
    assert_int_equal(mn_file_write_bytes(path, "old content", 11), MN_OK);
    assert_int_equal(mn_file_map(&before, path), MN_OK);
    assert_int_equal(mn_file_write_bytes(path, "new", 3), MN_OK);
    assert_memory_equal(before.bytes, "old content", 11);
    mn_file_unmap(&before);
    assert_file_is(path, "new", 3);
}

static void write_follows_links(void **state) {
    (void)state;
    assert_int_equal(mn_file_write_bytes(in_folder("target"), "old", 3), MN_OK);
    assert_int_equal(symlink("target", in_folder("link")), 0);
    assert_int_equal(mn_file_write_bytes(in_folder("link"), "new", 3), MN_OK);
    assert_file_is(in_folder("target"), "new", 3);
    struct stat info;
    assert_int_equal(lstat(in_folder("link"), &info), 0);
    assert_true(S_ISLNK(info.st_mode));
}

static mn_status half_then_fail(mn_sink *sink, void *context) {
    const mn_status st = mn_sink_put(sink, context, strlen(context));
    return st == MN_OK ? MN_ERR_NUMERIC : st;
}

static mn_status ignore_failed_put(mn_sink *sink, void *context) {
    const size_t *size = context;
    char *big = calloc(1, *size);
    assert_non_null(big);
    (void)mn_sink_put(sink, big, *size);
    (void)mn_sink_put(sink, "after", 5);
    free(big);
    return MN_OK;
}

static void failed_write_keeps_the_old_file(void **state) {
    (void)state;
    const char *path = in_folder("kept");
    assert_int_equal(mn_file_write_bytes(path, "precious", 8), MN_OK);
    const int64_t n_files = files_in_folder();
    assert_int_equal(mn_file_write_atomic(path, half_then_fail, "half"), MN_ERR_NUMERIC);
    assert_file_is(path, "precious", 8);

    /* A size limit stands for the full disk: write() stops part-way and then refuses. */
    struct rlimit old;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    const struct rlimit tight = {.rlim_cur = 4096, .rlim_max = old.rlim_max};
    void (*const handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &tight), 0);
    size_t size = 10000;
    const mn_status st = mn_file_write_atomic(path, ignore_failed_put, &size);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    signal(SIGXFSZ, handler);
    assert_fails(st, MN_ERR_IO, "kept: cannot write: ", strerror(EFBIG));
    assert_file_is(path, "precious", 8);
    assert_int_equal(files_in_folder(), n_files);
}

static void write_says_what_is_wrong(void **state) {
    (void)state;
    assert_fails(mn_file_write_bytes(in_folder("no/such/out"), "x", 1), MN_ERR_IO, "no/such/out",
                 "its folder does not exist");
    assert_fails(mn_file_write_bytes(folder, "x", 1), MN_ERR_IO, folder, "is a folder");
    assert_fails(mn_file_write_bytes("/dev/null", "x", 1), MN_ERR_IO, "/dev/null", "device");
    assert_fails(mn_file_write_bytes("", "x", 1), MN_ERR_ARGUMENT, "no file name", "");

    /* Permissions do not bind root, who steps down for the attempt. */
    const char *closed = in_folder("closed");
    assert_int_equal(mkdir(closed, 0555), 0);
    assert_int_equal(chmod(folder, 0755), 0);
    const bool root = geteuid() == 0;
    if (root) assert_int_equal(seteuid(65534), 0);
    const mn_status st = mn_file_write_bytes(in_folder("closed/out"), "x", 1);
    if (root) assert_int_equal(seteuid(0), 0);
    assert_fails(st, MN_ERR_IO, "closed/out: cannot create", strerror(EACCES));
}

/* ---- json ------------------------------------------------------------------------------------ */

static mn_status parse_text(mn_json *root, const char *text) {
    return mn_json_parse(root, text, strlen(text), "config.json", MN_JSON_STANDARD);
}

static const char example[] =
    "{\"name\": \"tiny\", \"lr\": 3e-4, \"steps\": 2e3, \"seed\": 7, \"bias\": false,"
    " \"none\": null, \"layers\": [{\"heads\": 1}, {\"heads\": 2}, {}, {\"heads\": \"four\"}],"
    " \"a.b\": {\"c\": 1.5}}";

static void json_reads_every_kind(void **state) {
    (void)state;
    mn_json root;
    assert_int_equal(parse_text(&root, example), MN_OK);
    const char *text = NULL;
    double lr = 0;
    int64_t steps = 0, seed = 0, heads = 0;
    bool bias = true;
    assert_int_equal(mn_json_get_text(&text, &root, "name"), MN_OK);
    assert_string_equal(text, "tiny");
    assert_int_equal(mn_json_get_f64(&lr, &root, "lr"), MN_OK);
    assert_true(lr == 3e-4);
    assert_int_equal(mn_json_get_i64(&steps, &root, "steps"), MN_OK);
    assert_int_equal(steps, 2000);
    assert_int_equal(mn_json_get_i64(&seed, &root, "seed"), MN_OK);
    assert_int_equal(seed, 7);
    assert_int_equal(mn_json_get_f64(&lr, &root, "seed"), MN_OK);       // whole is a number too
    assert_true(lr == 7.0);
    assert_int_equal(mn_json_get_bool(&bias, &root, "bias"), MN_OK);
    assert_false(bias);

    const mn_json layers = mn_json_member(&root, "layers");
    assert_int_equal(mn_json_expect_list(&layers), MN_OK);
    assert_int_equal(mn_json_count(&layers), 4);
    const mn_json second = mn_json_item(&layers, 1);
    assert_int_equal(mn_json_get_i64(&heads, &second, "heads"), MN_OK);
    assert_int_equal(heads, 2);
    mn_json_free(&root);
    assert_null(root.value);
    mn_json_free(&root);
}

static void json_names_the_way(void **state) {
    (void)state;
    mn_json root;
    assert_int_equal(parse_text(&root, example), MN_OK);
    const mn_json layers = mn_json_member(&root, "layers");
    const mn_json third = mn_json_item(&layers, 2), fourth = mn_json_item(&layers, 3);
    const mn_json dotted = mn_json_member(&root, "a.b"), absent = mn_json_member(&root, "absent");
    const mn_json beyond = mn_json_item(&layers, 4);
    int64_t n = 42;
    bool yes = true;
    const char *text = "kept";
    assert_int_equal(mn_json_get_i64(&n, &fourth, "heads"), MN_ERR_FORMAT);
    assert_string_equal(mn_last_error(), "config.json: layers[3].heads: expected a whole number, "
                                         "found a string");
    assert_int_equal(mn_json_get_i64(&n, &third, "heads"), MN_ERR_FORMAT);
    assert_string_equal(mn_last_error(),
                        "config.json: layers[2].heads: is missing, expected a whole number");
    assert_int_equal(mn_json_get_i64(&n, &dotted, "c"), MN_ERR_FORMAT);
    assert_string_equal(mn_last_error(), "config.json: [\"a.b\"].c: expected a whole number, "
                                         "found a fractional number");
    assert_int_equal(mn_json_get_i64(&n, &layers, "heads"), MN_ERR_FORMAT);
    assert_string_equal(mn_last_error(), "config.json: layers: expected an object, found a list");
    assert_int_equal(mn_json_get_bool(&yes, &absent, "x"), MN_ERR_FORMAT);
    assert_string_equal(mn_last_error(), "config.json: absent: is missing, expected an object");
    assert_fails(mn_json_expect_object(&beyond), MN_ERR_FORMAT, "layers[4]: is missing", "");
    assert_fails(mn_json_get_text(&text, &root, "none"), MN_ERR_FORMAT, "none: expected a string",
                 "found null");
    assert_fails(mn_json_get_bool(&yes, &root, "seed"), MN_ERR_FORMAT, "true or false", "");
    assert_fails(mn_json_expect_list(&root), MN_ERR_FORMAT,
                 "config.json: expected a list, found an object", "");
    assert_fails(mn_json_fail(&fourth, "must be %d", 3), MN_ERR_FORMAT,
                 "config.json: layers[3]: must be 3", "");
    assert_true(n == 42 && yes && strcmp(text, "kept") == 0);
    mn_json_free(&root);
}

static void json_optional_members_keep_the_default(void **state) {
    (void)state;
    mn_json root;
    assert_int_equal(parse_text(&root, example), MN_OK);
    int64_t n = 42;
    double x = 0.5;
    assert_int_equal(mn_json_opt_i64(&n, &root, "absent"), MN_OK);
    assert_int_equal(mn_json_opt_f64(&x, &root, "none"), MN_OK);
    assert_true(n == 42 && x == 0.5);
    assert_int_equal(mn_json_opt_i64(&n, &root, "seed"), MN_OK);
    assert_int_equal(n, 7);
    assert_fails(mn_json_opt_i64(&n, &root, "lr"), MN_ERR_FORMAT, "config.json: lr: ", "whole");
    const mn_json name = mn_json_member(&root, "name");         // no object: not "absent"
    assert_fails(mn_json_opt_i64(&n, &name, "x"), MN_ERR_FORMAT, "name: expected an object", "");
    assert_int_equal(n, 7);
    mn_json_free(&root);
}

static void json_walks_members_in_order(void **state) {
    (void)state;
    mn_json root;
    char keys[16] = "";
    assert_int_equal(parse_text(&root, "{\"z\": 1, \"a\": 2, \"m\": 3}"), MN_OK);
    for (mn_json member = {0}; mn_json_next(&member, &root);) strcat(keys, member.name);
    assert_string_equal(keys, "zam");
    mn_json_free(&root);
    assert_int_equal(parse_text(&root, "[1, 2]"), MN_OK);
    mn_json none = {0};
    assert_false(mn_json_next(&none, &root));
    mn_json_free(&root);
}

static void json_refuses_bad_text(void **state) {
    (void)state;
    static const struct {
        const char *text, *piece;
    } cases[] = {
        {"", "is empty"},
        {" ", "line 1, column 1"},
        {"{\"a\": 1,}", "line 1, column 9"},
        {"{\n\"a\": 1\n\"b\": 2}", "line 3"},
        {"{\"a\": 1, \"a\": 2}", "duplicate"},
        {"{\"a\": 1} x", "end of file expected"},
        {"{'a': 1}", "config.json"},
        {"[1, 2", "config.json"},
        {"[01]", "config.json"},
        {"[1e999]", "overflow"},
        {"[99999999999999999999]", "too big"},
        {"[NaN]", "config.json"},
        {"[Infinity]", "config.json"},
        {"[\"\xff\"]", "unable to decode"},
        {"[\"a\nb\"]", "newline"},
        {"[\"a\x01z\"]", "control character"},
        {"[\"\\u0000\"]", "config.json"},
        {"[\"\\ud800\"]", "config.json"},
        {"// comment\n[1]", "config.json"},
    };
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        mn_json root;
        assert_fails(parse_text(&root, cases[i].text), MN_ERR_FORMAT, "config.json: ",
                     cases[i].piece);
        assert_null(root.value);
    }
}

static void json_bounds_the_depth(void **state) {
    (void)state;
    enum { TOO_DEEP = MN_JSON_MAX_DEPTH + 1, DEEP = 1000000 };
    mn_json root;
    char *text = malloc(2 * DEEP + 1);
    assert_non_null(text);
    for (int depth = MN_JSON_MAX_DEPTH; depth <= TOO_DEEP; depth++) {
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        text[2 * depth] = '\0';
        const mn_status st = parse_text(&root, text);
        assert_int_equal(st, depth == TOO_DEEP ? MN_ERR_FORMAT : MN_OK);
        mn_json_free(&root);
    }
    memset(text, '[', DEEP);
    text[DEEP] = '\0';
    assert_fails(parse_text(&root, text), MN_ERR_FORMAT, "nested", "64");
    /* Brackets inside strings are text. */
    text[0] = text[DEEP - 1] = '"';
    text[1] = '\\';
    text[2] = '"';
    assert_int_equal(parse_text(&root, text), MN_OK);
    mn_json_free(&root);
    free(text);
}

static void json_reads_python_words_when_asked(void **state) {
    (void)state;
    static const char text[] =
        "{\"limit\": [0.0, Infinity], \"low\": -Infinity, \"x\": NaN,"
        " \"s\": \"a\\\"NaN Infinity\"}";
    mn_json root;
    assert_int_equal(parse_text(&root, text), MN_ERR_FORMAT);
    assert_int_equal(mn_json_parse(&root, text, strlen(text), "c", MN_JSON_PYTHON), MN_OK);
    const mn_json limit = mn_json_member(&root, "limit"), high = mn_json_item(&limit, 1);
    const char *s;
    double x = 3.0;
    assert_false(mn_json_given(&high));
    assert_int_equal(mn_json_opt_f64(&x, &root, "low"), MN_OK);
    assert_int_equal(mn_json_opt_f64(&x, &root, "x"), MN_OK);
    assert_true(x == 3.0);
    assert_int_equal(mn_json_get_text(&s, &root, "s"), MN_OK);
    assert_string_equal(s, "a\"NaN Infinity");
    mn_json_free(&root);
    /* The worst case for the copy's size, and cut-off words and escapes. */
    static const char *const odd[] = {"[NaN,NaN,NaN,NaN,NaN]", "NaN", "[Infinit", "[-Infinity",
                                      "\"\\", "\"\\\"", "[NaN-Infinity]"};
    for (size_t i = 0; i < MN_COUNTOF(odd); i++) {
        const mn_status st = mn_json_parse(&root, odd[i], strlen(odd[i]), "c", MN_JSON_PYTHON);
        assert_int_equal(st, i < 2 ? MN_OK : MN_ERR_FORMAT);
        mn_json_free(&root);
    }
}

static void json_suggests_the_nearest_key(void **state) {
    (void)state;
    static const char *const known[] = {"heads", "head_dim", "mixer", "hidden_size"};
    mn_json root;
    assert_int_equal(parse_text(&root, "{\"l\": [{\"heads\": 1}, {\"mixer\": 0, \"haeds\": 2}]}"),
                     MN_OK);
    const mn_json list = mn_json_member(&root, "l");
    const mn_json good = mn_json_item(&list, 0), bad = mn_json_item(&list, 1);
    assert_int_equal(mn_json_unknown_key(&good, known, 4), MN_OK);
    assert_int_equal(mn_json_unknown_key(&bad, known, 4), MN_ERR_FORMAT);
    assert_string_equal(mn_last_error(),
                        "config.json: l[1]: unknown key \"haeds\", did you mean \"heads\"?");
    assert_int_equal(mn_json_unknown_key(&root, known, 4), MN_ERR_FORMAT);
    assert_string_equal(mn_last_error(), "config.json: unknown key \"l\"");
    assert_fails(mn_json_unknown_key(&list, known, 4), MN_ERR_FORMAT, "expected an object", "");
    mn_json_free(&root);
}

static void closest_counts_edits(void **state) {
    (void)state;
    static const char *const names[] = {"train", "eval", "generate", "serve", "bench", "kla"};
    static const struct {
        const char *word, *meant;
    } cases[] = {
        {"train", "train"}, {"trian", "train"}, {"TRAIN", "train"},   {"tran", "train"},
        {"eva", "eval"},    {"genrate", "generate"}, {"sevre", "serve"}, {"klaa", "kla"},
        {"x", NULL},        {"", NULL},         {"plot", NULL},       {"kxy", NULL},
    };
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        const char *found = mn_closest(cases[i].word, names, 6);
        if (cases[i].meant) {
            assert_non_null(found);
            assert_string_equal(found, cases[i].meant);
        } else {
            assert_null(found);
        }
    }
    char longer[200];
    memset(longer, 'a', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    const char *const same[] = {longer};
    assert_null(mn_closest(longer, same, 1));
    assert_null(mn_closest("train", same, 1));
    assert_null(mn_closest("train", NULL, 0));
}

/* ---- json writing ---------------------------------------------------------------------------- */

static void assert_text(json_t *value, mn_json_style style, const char *wanted) {
    char *text;
    assert_int_equal(mn_json_text(&text, value, style), MN_OK);
    assert_string_equal(text, wanted);
    free(text);
}

static void json_writes_both_styles(void **state) {
    (void)state;
    json_t *value = json_pack("{s:i, s:[f, f], s:{s:b, s:n}, s:[{s:s}], s:[], s:{}}", "n", 3, "lr",
                              0.1, 1e-6, "o", "yes", 1, "no", "list", "t", "q\"\\\n\x01\xc3\xa9",
                              "e", "f");
    assert_non_null(value);
    assert_text(value, MN_JSON_COMPACT,
                "{\"n\":3,\"lr\":[0.1,1e-06],\"o\":{\"yes\":true,\"no\":null},"
                "\"list\":[{\"t\":\"q\\\"\\\\\\n\\u0001\xc3\xa9\"}],\"e\":[],\"f\":{}}");
    assert_text(value, MN_JSON_PRETTY,
                "{\n  \"n\": 3,\n  \"lr\": [0.1, 1e-06],\n  \"o\": {\n    \"yes\": true,\n"
                "    \"no\": null\n  },\n  \"list\": [\n    {\n"
                "      \"t\": \"q\\\"\\\\\\n\\u0001\xc3\xa9\"\n    }\n  ],\n  \"e\": [],\n"
                "  \"f\": {}\n}");
    json_decref(value);

    json_t *wide = json_array();                        // more than one line holds
    for (int i = 0; i < 40; i++) json_array_append_new(wide, json_integer(100 + i));
    char *text;
    assert_int_equal(mn_json_text(&text, wide, MN_JSON_PRETTY), MN_OK);
    assert_memory_equal(text, "[\n  100,\n  101,\n", 16);
    free(text);
    json_decref(wide);
}

static void json_numbers_read_back_exactly(void **state) {
    (void)state;
    static const double numbers[] = {0.0, -0.0, 1.0, -1.5, 0.1, 1.0 / 3.0, 1e22, 1e23, 3e-4,
                                     123456789.125, 5e-324, 2.2250738585072014e-308,
                                     1.7976931348623157e308, 9007199254740993.0};
    for (size_t i = 0; i < MN_COUNTOF(numbers); i++) {
        json_t *value = mn_json_real(numbers[i]);
        char *text;
        mn_json root;
        double back;
        assert_int_equal(mn_json_text(&text, value, MN_JSON_COMPACT), MN_OK);
        assert_int_equal(parse_text(&root, text), MN_OK);
        assert_true(json_is_real(root.value));          // 1.0 must not come back as 1
        assert_int_equal(mn_json_read_f64(&back, &root), MN_OK);
        assert_memory_equal(&back, &numbers[i], sizeof back);
        mn_json_free(&root);
        free(text);
        json_decref(value);
    }
    assert_text(mn_json_real((double)NAN), MN_JSON_COMPACT, "null");
    assert_text(mn_json_real((double)-INFINITY), MN_JSON_COMPACT, "null");
}

static void json_ignores_the_locale(void **state) {
    (void)state;
    static const char *const commas[] = {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8"};
    bool found = false;
    for (size_t i = 0; i < 3 && !found; i++) found = setlocale(LC_NUMERIC, commas[i]) != NULL;
    if (!found) skip();
    json_t *value = json_real(0.5);
    mn_json root;
    double back = 0;
    assert_text(value, MN_JSON_COMPACT, "0.5");
    assert_int_equal(parse_text(&root, "0.25"), MN_OK);
    assert_int_equal(mn_json_read_f64(&back, &root), MN_OK);
    setlocale(LC_NUMERIC, "C");
    assert_true(back == 0.25);
    mn_json_free(&root);
    json_decref(value);
}

static void json_files_round_trip(void **state) {
    (void)state;
    json_t *value = json_pack("{s:[i, i], s:s}", "shape", 2, 3, "text", "gr\xc3\xbc\xc3\x9f");
    const char *path = in_folder("saved.json");
    mn_json root;
    assert_int_equal(mn_json_save(path, value), MN_OK);
    static const char wanted[] = "{\n  \"shape\": [2, 3],\n  \"text\": \"gr\xc3\xbc\xc3\x9f\"\n}\n";
    assert_file_is(path, wanted, strlen(wanted));
    assert_int_equal(mn_json_load(&root, path, MN_JSON_STANDARD), MN_OK);
    assert_true(json_equal(root.value, value));
    mn_json_free(&root);
    json_decref(value);

    assert_fails(mn_json_load(&root, "missing.json", MN_JSON_STANDARD), MN_ERR_IO,
                 "missing.json: no such file", "");
    char *text;
    assert_int_equal(mn_json_text(&text, NULL, MN_JSON_COMPACT), MN_ERR_INTERNAL);
    assert_null(text);
}

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
    assert_fails(mn_safetensors_open(&in, folder), MN_ERR_IO, folder, "is a folder");
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

/* ---- all ------------------------------------------------------------------------------------- */

static int make_folder(void **state) {
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state) {
    (void)state;
    DIR *open_folder = opendir(folder);
    if (!open_folder) return -1;
    for (struct dirent *entry; (entry = readdir(open_folder));) {
        if (entry->d_name[0] != '.') remove(in_folder(entry->d_name));
    }
    closedir(open_folder);
    return rmdir(folder);                               // fails if a test left something hidden
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cursor_reads_little_endian),
        cmocka_unit_test(cursor_refuses_what_is_not_there),
        cmocka_unit_test(map_gives_the_bytes),
        cmocka_unit_test(map_says_what_is_wrong),
        cmocka_unit_test(write_replaces_and_leaves_no_trace),
        cmocka_unit_test(write_leaves_readers_alone),
        cmocka_unit_test(write_follows_links),
        cmocka_unit_test(failed_write_keeps_the_old_file),
        cmocka_unit_test(write_says_what_is_wrong),
        cmocka_unit_test(json_reads_every_kind),
        cmocka_unit_test(json_names_the_way),
        cmocka_unit_test(json_optional_members_keep_the_default),
        cmocka_unit_test(json_walks_members_in_order),
        cmocka_unit_test(json_refuses_bad_text),
        cmocka_unit_test(json_bounds_the_depth),
        cmocka_unit_test(json_reads_python_words_when_asked),
        cmocka_unit_test(json_suggests_the_nearest_key),
        cmocka_unit_test(closest_counts_edits),
        cmocka_unit_test(json_writes_both_styles),
        cmocka_unit_test(json_numbers_read_back_exactly),
        cmocka_unit_test(json_ignores_the_locale),
        cmocka_unit_test(json_files_round_trip),
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
    return cmocka_run_group_tests_name("io", tests, make_folder, remove_folder);
}
