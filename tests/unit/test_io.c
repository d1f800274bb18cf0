/* test_io.c - bounded reads, files and JSON: round trips and every way to be wrong.
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
#include "io/closest.h"
#include "io/cursor.h"
#include "io/file.h"
#include "io/json.h"
#include "io/json_write.h"
#include "support/folder.h"

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
    assert_fails(mn_file_map(&file, in_folder("")), MN_ERR_IO, in_folder(""), "is a folder");
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
    assert_fails(mn_file_write_bytes(in_folder(""), "x", 1), MN_ERR_IO, in_folder(""),
                 "is a folder");
    assert_fails(mn_file_write_bytes("/dev/null", "x", 1), MN_ERR_IO, "/dev/null", "device");
    assert_fails(mn_file_write_bytes("", "x", 1), MN_ERR_ARGUMENT, "no file name", "");

    /* Permissions do not bind root, who steps down for the attempt. */
    const char *closed = in_folder("closed");
    assert_int_equal(mkdir(closed, 0555), 0);
    assert_int_equal(chmod(in_folder(""), 0755), 0);
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

/* A list of nothing but small whole numbers is read beside the document; whatever is not one is the
 * document's, with the sentence that it has there. */
static void json_reads_ids_beside_the_document(void **state) {
    (void)state;
    static const struct {
        const char *text;
        int64_t count;    // -1: in the document; -2: refused
    } cases[] = {
        { "{\"prompt\": [1, 20,300 ], \"n\": 2}", 3 },
        { " {\"a\": [{\"prompt\": 1}, \"]\\\"\"], \"prompt\" : [ 0,999999999,7], \"n\": 2}", 3 },
        { "{\"n\": 2, \"prompt\":[5]}", 1 },
        { "{\"n\": 2, \"prompt\": []}", -1 },
        { "{\"n\": 2, \"prompt\": [1, 2.0]}", -1 },
        { "{\"n\": 2, \"prompt\": [1, -2]}", -1 },
        { "{\"n\": 2, \"prompt\": [1, 1e3]}", -1 },
        { "{\"n\": 2, \"prompt\": [1000000000]}", -1 },
        { "{\"n\": 2, \"prompt\": [[1, 2], [3]]}", -1 },
        { "{\"n\": 2, \"prompt\": \"[1, 2]\"}", -1 },
        { "{\"n\": 2, \"pr\\u006fmpt\": [1, 2]}", -1 },
        { "{\"n\": 2, \"a\": {\"prompt\": [1, 2]}}", -1 },
        { "{\"n\": 2, \"prompt\": [1, 02]}", -2 },
        { "{\"n\": 2, \"prompt\": [1, 2,]}", -2 },
        { "{\"n\": 2, \"prompt\": [1 2]}", -2 },
        { "{\"n\": 2, \"prompt\": [1, 2}", -2 },
        { "{\"n\": 2, \"prompt\": [1, 2]", -2 },
        { "{\"n\": 2, \"prompt\": [1], \"pr\\u006fmpt\": [2]}", -2 },
        { "{\"n\": 2, \"prompt\": [1], \"prompt\": [2]}", -2 },
        { "{\"n\": 2, \"\\", -2 },
        { "{", -2 },
    };
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        mn_json root;
        int64_t n = 0;
        const mn_status st = mn_json_parse_ids(&root, cases[i].text, strlen(cases[i].text),
                                               "request", "prompt");
        assert_int_equal(st == MN_OK, cases[i].count != -2);
        if (st != MN_OK) {
            mn_json plain;
            char sentence[256];
            snprintf(sentence, sizeof sentence, "%s", mn_last_error());
            assert_int_equal(mn_json_parse(&plain, cases[i].text, strlen(cases[i].text), "request",
                                           MN_JSON_STANDARD), st);
            assert_string_equal(mn_last_error(), sentence);
            continue;
        }
        assert_int_equal(root.ids.of != NULL, cases[i].count >= 0);
        assert_int_equal(root.ids.count, mn_max(cases[i].count, 0));
        assert_int_equal(mn_json_get_i64(&n, &root, "n"), MN_OK);
        assert_int_equal(n, 2);
        const mn_json list = mn_json_member(&root, "prompt");
        if (root.ids.of) assert_int_equal(mn_json_expect_list(&list), MN_OK);
        if (root.ids.of) assert_int_equal(mn_json_count(&list), 0);
        mn_json_free(&root);
    }
}

static void json_reads_long_lists_of_ids(void **state) {
    (void)state;
    enum { COUNT = 5000 };
    char *text = malloc(COUNT * 12 + 32);
    size_t n = (size_t)sprintf(text, "{\"prompt\":[");
    for (int i = 0; i < COUNT; i++) n += (size_t)sprintf(text + n, "%s%d", i ? ", " : "", i * 13);
    n += (size_t)sprintf(text + n, "]}");
    mn_json root;
    assert_int_equal(mn_json_parse_ids(&root, text, n, "request", "prompt"), MN_OK);
    assert_int_equal(root.ids.count, COUNT);
    for (int i = 0; i < COUNT; i++) assert_int_equal(root.ids.of[i], i * 13);
    mn_json_free(&root);
    free(text);
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
        cmocka_unit_test(json_reads_ids_beside_the_document),
        cmocka_unit_test(json_reads_long_lists_of_ids),
        cmocka_unit_test(json_suggests_the_nearest_key),
        cmocka_unit_test(closest_counts_edits),
        cmocka_unit_test(json_writes_both_styles),
        cmocka_unit_test(json_numbers_read_back_exactly),
        cmocka_unit_test(json_ignores_the_locale),
        cmocka_unit_test(json_files_round_trip),
    };
    return cmocka_run_group_tests_name("io", tests, make_folder, remove_folder);
}
