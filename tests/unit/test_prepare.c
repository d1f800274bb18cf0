/* test_prepare.c - prepared folders: the same bytes at any number of threads and after any stop,
 * read back token for token, and every damage found. */
// labels: sanitize
#define _XOPEN_SOURCE 700
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/rng.h"
#include "base/util.h"
#include "data/prepare.h"
#include "io/file.h"
#include "support/folder.h"

enum { TEXT_BYTES = 3 << 20, SHARD_TOKENS = 200000 };

static mn_tokenizer *bytes;

/* ---- folders --------------------------------------------------------------------------------- */

static void remove_prepared(const char *folder) {
    DIR *entries = opendir(folder);
    if (!entries) return;
    char path[1024];
    for (struct dirent *entry; (entry = readdir(entries));) {
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        assert_int_equal(unlink(path), 0);
    }
    closedir(entries);
    assert_int_equal(rmdir(folder), 0);
}

static int count_files(const char *folder) {
    DIR *entries = opendir(folder);
    assert_non_null(entries);
    int n = 0;
    for (struct dirent *entry; (entry = readdir(entries));) n += entry->d_name[0] != '.';
    closedir(entries);
    return n;
}

static void assert_same_folders(const char *a, const char *b) {
    DIR *entries = opendir(a);
    assert_non_null(entries);
    char path[1024], other[1024];
    for (struct dirent *entry; (entry = readdir(entries));) {
        if (entry->d_name[0] == '.') continue;
        mn_file file;
        snprintf(path, sizeof path, "%s/%s", a, entry->d_name);
        snprintf(other, sizeof other, "%s/%s", b, entry->d_name);
        assert_int_equal(mn_file_map(&file, path), MN_OK);
        assert_file_is(other, file.bytes, file.size);
        mn_file_unmap(&file);
    }
    closedir(entries);
    assert_int_equal(count_files(a), count_files(b));
}

/* Paragraphs of random length, some much longer than a piece. */
static void write_input(const char *name, uint64_t seed) {
    char *text = malloc(TEXT_BYTES);
    size_t gap = 0;
    assert_non_null(text);
    for (size_t i = 0; i < TEXT_BYTES; i++) {
        const uint64_t bits = mn_rng_bits(seed, 0, i);
        text[i] = gap == 0 || gap == 1 ? '\n' : "abcde ,.\n"[bits % 9];
        if (gap == 0) gap = bits >> 8 & 1 ? 40 : bits >> 9 & 1023 ? 3000 : 600000;
        gap--;
    }
    write_file(in_folder(name), text, TEXT_BYTES);
    free(text);
}

static const char *input_path(void) {
    static char path[512];
    snprintf(path, sizeof path, "%s", in_folder("input.txt"));
    return path;
}

static mn_prepare_options options_for(const char *folder, const char *const *path) {
    return (mn_prepare_options){ .input = { .paths = path, .n_paths = 1, .separator = "\n\n",
                                            .document_end = 255 },
                                 .folder = folder, .valid = 0.2, .shard_tokens = SHARD_TOKENS,
                                 .n_threads = 1 };
}

static void prepare(const char *folder, int n_threads) {
    const char *path = input_path();
    mn_prepare_options options = options_for(folder, &path);
    mn_prepare_result result;
    options.n_threads = n_threads;
    if (mn_prepare(&result, &options, bytes) != MN_OK) fail_msg("%s", mn_last_error());
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void threads_do_not_show(void **state) {
    (void)state;
    char one[512], many[512];
    snprintf(one, sizeof one, "%s", in_folder("one"));
    snprintf(many, sizeof many, "%s", in_folder("many"));
    prepare(one, 1);
    for (int n = 2; n <= 5; n++) {
        prepare(many, n);
        assert_same_folders(one, many);
        remove_prepared(many);
    }
    remove_prepared(one);
}

/* Stops at the n-th call. */
static bool count_down(void *context, int64_t done, int64_t all, int64_t tokens) {
    int *left = context;
    assert_true(done >= 0 && done <= all && tokens >= 0);
    return --*left > 0;
}

/* Stopped again and again, a little later each time, until it comes to an end. */
static void stops_do_not_show(void **state) {
    (void)state;
    char whole[512], stopped[512];
    const char *path = input_path();
    snprintf(whole, sizeof whole, "%s", in_folder("whole"));
    snprintf(stopped, sizeof stopped, "%s", in_folder("stopped"));
    prepare(whole, 2);
    for (int step = 4; step < 12; step++) {
        mn_prepare_result result;
        mn_prepare_options options = options_for(stopped, &path);
        int left, runs = 0;
        int64_t kept = 0;
        options.progress = count_down;
        options.context = &left;
        mn_status st;
        do {
            left = step;
            st = mn_prepare(&result, &options, bytes);
            assert_true(st == MN_OK || st == MN_ERR_ARGUMENT);
            if (st != MN_OK) assert_message_holds("stopped");
            assert_true(result.kept >= kept && !result.was_complete);
            kept = result.kept;
            assert_true(++runs < 100);
        } while (st != MN_OK);
        assert_true(runs > 1 && kept > 0);
        assert_same_folders(whole, stopped);
        remove_prepared(stopped);
    }
    remove_prepared(whole);
}

static void complete_folders_are_left_alone(void **state) {
    (void)state;
    char folder[512];
    const char *path = input_path();
    snprintf(folder, sizeof folder, "%s", in_folder("done"));
    prepare(folder, 2);
    const int n_files = count_files(folder);
    mn_prepare_result result, checked;
    const mn_prepare_options options = options_for(folder, &path);
    assert_int_equal(mn_prepare(&result, &options, bytes), MN_OK);
    assert_true(result.was_complete);
    assert_int_equal(result.kept, result.shards[0] + result.shards[1]);
    assert_int_equal(mn_prepare_check(&checked, folder, NULL, NULL), MN_OK);
    assert_int_equal(checked.tokens[0], result.tokens[0]);
    assert_int_equal(checked.documents[1], result.documents[1]);
    /* Two files a shard, index and tokenizer. */
    assert_int_equal(n_files, 2 * (result.shards[0] + result.shards[1]) + 2);
    assert_int_equal(result.shards[0], mn_ceil_div(result.tokens[0], SHARD_TOKENS));
    remove_prepared(folder);
}

/* The two parts of the folder, one after the other, are the corpus of the text itself. */
static void prepared_text_reads_as_the_text(void **state) {
    (void)state;
    char folder[512];
    const char *path = input_path(), *prepared = folder;
    snprintf(folder, sizeof folder, "%s", in_folder("parts"));
    prepare(folder, 2);
    mn_corpus_options options = options_for(folder, &path).input;
    mn_corpus *text, *part[2];
    assert_int_equal(mn_corpus_open(&text, &options, bytes), MN_OK);
    options.paths = &prepared;
    for (int i = 0; i < 2; i++) {
        options.split = i ? "valid" : "train";
        assert_int_equal(mn_corpus_open(&part[i], &options, i ? NULL : bytes), MN_OK);
    }
    const int64_t n = mn_corpus_tokens(text), first = mn_corpus_tokens(part[0]);
    const int64_t documents = mn_corpus_documents(part[0]);
    assert_int_equal(first + mn_corpus_tokens(part[1]), n);
    assert_int_equal(documents + mn_corpus_documents(part[1]), mn_corpus_documents(text));
    assert_true((double)first > 0.78 * (double)n && (double)first < 0.9 * (double)n);
    for (int64_t d = 0; d <= mn_corpus_documents(text); d++) {
        const int64_t start = d < documents ? mn_corpus_document_start(part[0], d)
                                            : first + mn_corpus_document_start(part[1],
                                                                               d - documents);
        assert_int_equal(start, mn_corpus_document_start(text, d));
    }
    int32_t *want = malloc((size_t)n * sizeof *want), *got = malloc((size_t)n * sizeof *got);
    assert_int_equal(mn_corpus_read(text, 0, n, want), MN_OK);
    assert_int_equal(mn_corpus_read(part[0], 0, first, got), MN_OK);
    assert_int_equal(mn_corpus_read(part[1], 0, n - first, got + first), MN_OK);
    assert_memory_equal(got, want, (size_t)n * sizeof *want);
    assert_true(mn_corpus_fingerprint(part[0]) != mn_corpus_fingerprint(part[1]));
    for (int i = 0; i < 2; i++) mn_corpus_destroy(part[i]);
    mn_corpus_destroy(text);
    free(want);
    free(got);
    remove_prepared(folder);
}

/* A text of one document is cut at the character, as nanoGPT does before it tokenises. */
static void single_text_is_cut_at_the_character(void **state) {
    (void)state;
    char folder[512], path[512];
    const char *paths[] = { path };
    snprintf(folder, sizeof folder, "%s", in_folder("single"));
    snprintf(path, sizeof path, "%s", in_folder("single.txt"));
    write_file(path, "0123456789abcdefghi", 19);
    mn_prepare_options options = options_for(folder, paths);
    options.input.separator = NULL;
    options.input.document_end = MN_DOCUMENT_END_NONE;
    options.valid = 0.1;
    mn_prepare_result result;
    assert_int_equal(mn_prepare(&result, &options, NULL), MN_OK);    // characters
    assert_int_equal(result.tokens[0], 17);
    assert_int_equal(result.tokens[1], 2);
    assert_int_equal(result.documents[0], 1);
    assert_int_equal(result.documents[1], 1);
    remove_prepared(folder);
    write_file(path, "0123456789abcd\xc3\xa9\xc3\xa9\xc3\xa9", 20);    // byte 18 begins the last
    assert_int_equal(mn_prepare(&result, &options, NULL), MN_OK);
    assert_int_equal(result.tokens[0], 16);
    assert_int_equal(result.tokens[1], 1);
    remove_prepared(folder);
}

/* Other software reads the shards: llm.c's header, 16 bits up to 65536 tokens. */
static void shards_have_the_header_of_llmc(void **state) {
    (void)state;
    char folder[512], path[600];
    const char *paths[] = { path };
    snprintf(folder, sizeof folder, "%s", in_folder("llmc"));
    snprintf(path, sizeof path, "%s", in_folder("abc.txt"));
    write_file(path, "ab\n\nc", 5);
    mn_prepare_options options = options_for(folder, paths);
    options.valid = 0;
    mn_prepare_result result;
    assert_int_equal(mn_prepare(&result, &options, bytes), MN_OK);
    uint8_t want[1024 + 10] = { 0x88, 0xd8, 0x34, 0x01, 1, 0, 0, 0, 5 };    // 20240520
    static const uint8_t ids[] = { 'a', 0, 'b', 0, 255, 0, 'c', 0, 255, 0 };
    static const uint8_t ends[] = { 3, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0 };
    memcpy(want + 1024, ids, sizeof ids);
    snprintf(path, sizeof path, "%s/train_000000.bin", folder);
    assert_file_is(path, want, sizeof want);
    snprintf(path, sizeof path, "%s/train_000000.documents", folder);
    assert_file_is(path, ends, sizeof ends);
    remove_prepared(folder);
}

/* ---- damage ---------------------------------------------------------------------------------- */

/* Changes one byte of a file, or cuts it; the check and, with new settings, prepare notice. */
static void every_damage_is_found(void **state) {
    (void)state;
    static const char *const names[] = { "train_000000.bin", "train_000001.documents",
                                         "valid_000000.bin", "tokenizer.json", "index.json" };
    char folder[512], path[1024];
    snprintf(folder, sizeof folder, "%s", in_folder("damaged"));
    prepare(folder, 2);
    for (size_t i = 0; i < MN_COUNTOF(names); i++) {
        mn_file file;
        mn_prepare_result result;
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        assert_int_equal(mn_file_map(&file, path), MN_OK);
        uint8_t *copy = malloc(file.size);
        const size_t size = file.size;
        memcpy(copy, file.bytes, size);
        mn_file_unmap(&file);
        assert_int_equal(mn_prepare_check(&result, folder, NULL, NULL), MN_OK);
        write_file(path, copy, size / 2);
        assert_int_not_equal(mn_prepare_check(&result, folder, NULL, NULL), MN_OK);
        assert_message_holds(names[i]);
        /* The hexadecimal digits of the last hash stand near the end of the index. */
        const size_t at = strcmp(names[i], "index.json") == 0 ? size - 30 : size / 2;
        copy[at] ^= 1;
        write_file(path, copy, size);
        assert_int_not_equal(mn_prepare_check(&result, folder, NULL, NULL), MN_OK);
        copy[at] ^= 1;
        write_file(path, copy, size);
        assert_int_equal(mn_prepare_check(&result, folder, NULL, NULL), MN_OK);
        free(copy);
    }
    remove_prepared(folder);
}

/* A shard that was damaged is made again, and leftovers of a killed run go. */
static void damaged_shards_are_made_again(void **state) {
    (void)state;
    char whole[512], folder[512], path[1024];
    snprintf(whole, sizeof whole, "%s", in_folder("whole"));
    snprintf(folder, sizeof folder, "%s", in_folder("again"));
    prepare(whole, 2);
    prepare(folder, 2);
    snprintf(path, sizeof path, "%s/train_000001.bin", folder);
    assert_int_equal(truncate(path, 3000), 0);
    snprintf(path, sizeof path, "%s/train_000002.bin.123-0.tmp", folder);
    write_file(path, "x", 1);
    prepare(folder, 2);
    assert_same_folders(whole, folder);
    remove_prepared(whole);
    remove_prepared(folder);
}

static void other_settings_are_refused(void **state) {
    (void)state;
    char folder[512];
    const char *path = input_path();
    snprintf(folder, sizeof folder, "%s", in_folder("settings"));
    prepare(folder, 2);
    mn_prepare_options o[6];
    static const char *const what[] = { "separator", "share for validation", "size of shards",
                                        "token at the end", "tokenizer", "text key" };
    for (int i = 0; i < 6; i++) o[i] = options_for(folder, &path);
    o[0].input.separator = "\n";
    o[1].valid = 0.1;
    o[2].shard_tokens = 17;
    o[3].input.document_end = MN_DOCUMENT_END_NONE;
    o[4].input.document_end = 1;
    o[5].input.text_key = "body";
    mn_prepare_result result;
    for (int i = 0; i < 6; i++) {
        assert_fails(mn_prepare(&result, &o[i], i == 4 ? NULL : bytes), MN_ERR_ARGUMENT, folder,
                     what[i]);
    }
    assert_int_equal(mn_prepare_check(&result, folder, NULL, NULL), MN_OK);    // as it was
    remove_prepared(folder);
}

static void changed_input_is_refused(void **state) {
    (void)state;
    char folder[512], path[512];
    const char *paths[] = { path };
    snprintf(folder, sizeof folder, "%s", in_folder("changed"));
    snprintf(path, sizeof path, "%s", in_folder("input2.txt"));
    write_input("input2.txt", 1);
    mn_prepare_options options = options_for(folder, paths);
    int left = 9;
    options.progress = count_down;
    options.context = &left;
    mn_prepare_result result;
    assert_int_equal(mn_prepare(&result, &options, bytes), MN_ERR_ARGUMENT);
    const char *const folders[] = { folder };
    const mn_corpus_options unfinished = { .paths = folders, .n_paths = 1 };
    mn_corpus *corpus;
    assert_fails(mn_corpus_open(&corpus, &unfinished, NULL), MN_ERR_FORMAT, folder,
                 "did not come to an end");
    assert_fails(mn_prepare_check(&result, folder, NULL, NULL), MN_ERR_FORMAT, folder,
                 "did not come to an end");
    const struct timespec times[2] = { { 1000, 0 }, { 1000, 0 } };    // of the same size
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
    left = 1000;
    assert_fails(mn_prepare(&result, &options, bytes), MN_ERR_ARGUMENT, folder, "changed since");
    remove_prepared(folder);
    assert_int_equal(mn_prepare(&result, &options, bytes), MN_OK);
    remove_prepared(folder);
}

/* ---- reading a folder ------------------------------------------------------------------------ */

static void folders_that_do_not_fit_are_refused(void **state) {
    (void)state;
    char folder[512], path[1024];
    const char *prepared = folder, *text = input_path();
    snprintf(folder, sizeof folder, "%s", in_folder("fit"));
    mn_prepare_options options = options_for(folder, &text);
    options.valid = 0;
    mn_prepare_result result;
    assert_int_equal(mn_prepare(&result, &options, bytes), MN_OK);
    mn_tokenizer *letters;
    assert_int_equal(mn_tokenizer_chars(&letters, "abc", 3), MN_OK);
    mn_corpus_options in = { .paths = &prepared, .n_paths = 1,
                             .document_end = MN_DOCUMENT_END_NONE };
    mn_corpus *corpus;
    assert_fails(mn_corpus_open(&corpus, &in, letters), MN_ERR_FORMAT, folder, "another tokenizer");
    in.split = "valid";
    assert_fails(mn_corpus_open(&corpus, &in, bytes), MN_ERR_FORMAT, folder, "--valid");
    in.split = "test";
    assert_fails(mn_corpus_open(&corpus, &in, bytes), MN_ERR_ARGUMENT, "test", "valid");
    in.split = NULL;
    in.vocab_size = 255;    // and the documents end with token 255
    assert_fails(mn_corpus_open(&corpus, &in, bytes), MN_ERR_FORMAT, "train_000000.bin: token 255",
                 "place");
    in.vocab_size = 0;
    snprintf(path, sizeof path, "%s/train_000001.bin", folder);
    assert_int_equal(truncate(path, 5000), 0);
    assert_fails(mn_corpus_open(&corpus, &in, bytes), MN_ERR_FORMAT, "train_000001.bin", "cut");
    assert_int_equal(unlink(path), 0);
    assert_fails(mn_corpus_open(&corpus, &in, bytes), MN_ERR_IO, "train_000001.bin", "no such");
    mn_tokenizer_destroy(letters);
    remove_prepared(folder);
}

static void odd_indexes_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *find, *put, *why;
    } edits[] = { { "mneme prepared", "mneme premured", "format" },
                  { "\"version\": 1", "\"version\": 2", "version" },
                  { "\"tokens\"", "\"tokenz\"", "tokens" },
                  { "\"token_bytes\": 2", "\"token_bytes\": 9", "token_bytes" },
                  { "\"hash\": \"", "\"hash\": \"-", "hash" },
                  { "\"splits\": {", "\"splits\": 5, \"x\": {", "splits" },
                  { "\"documents\": ", "\"documents\": -", "documents" },
                  { "\"vocab_size\": 256", "\"vocab_size\": 0", "vocab_size" } };
    char folder[512], path[1024];
    snprintf(folder, sizeof folder, "%s", in_folder("odd"));
    snprintf(path, sizeof path, "%s/index.json", folder);
    prepare(folder, 2);
    mn_file file;
    assert_int_equal(mn_file_map(&file, path), MN_OK);
    char *text = calloc(file.size + 1, 1), *edited = malloc(file.size + 100);
    memcpy(text, file.bytes, file.size);
    mn_file_unmap(&file);
    for (size_t i = 0; i < MN_COUNTOF(edits); i++) {
        const char *at = strstr(text, edits[i].find);
        assert_non_null(at);
        const int n = sprintf(edited, "%.*s%s%s", (int)(at - text), text, edits[i].put,
                              at + strlen(edits[i].find));
        write_file(path, edited, (size_t)n);
        mn_prepare_result result;
        assert_fails(mn_prepare_check(&result, folder, NULL, NULL), MN_ERR_FORMAT, "index.json",
                     edits[i].why);
    }
    free(text);
    free(edited);
    remove_prepared(folder);
}

static void wrong_options_are_refused(void **state) {
    (void)state;
    char folder[512], bin[512];
    const char *path = input_path(), *bins[] = { bin };
    snprintf(folder, sizeof folder, "%s", in_folder("never"));
    snprintf(bin, sizeof bin, "%s", in_folder("tokens.bin"));
    write_file(bin, "abcd", 4);
    mn_prepare_result result;
    mn_prepare_options o = options_for(folder, &path);
    o.valid = 1;
    assert_fails(mn_prepare(&result, &o, bytes), MN_ERR_ARGUMENT, "validation", "[0, 1)");
    o = options_for("", &path);
    assert_fails(mn_prepare(&result, &o, bytes), MN_ERR_ARGUMENT, "folder", "");
    o = options_for(path, &path);
    assert_fails(mn_prepare(&result, &o, bytes), MN_ERR_IO, "input.txt", "folder");
    o = options_for(folder, bins);
    assert_fails(mn_prepare(&result, &o, bytes), MN_ERR_ARGUMENT, "tokens.bin", "tokens already");
    o = options_for(folder, &path);
    o.shard_tokens = INT64_MAX;
    assert_fails(mn_prepare(&result, &o, bytes), MN_ERR_ARGUMENT, "shard", "2147483647");
    assert_int_equal(access(folder, F_OK), -1);
}

static int set_up(void **state) {
    if (make_folder(state) != 0 || mn_tokenizer_bytes(&bytes) != MN_OK) return -1;
    write_input("input.txt", 0);
    return 0;
}

static int tear_down(void **state) {
    mn_tokenizer_destroy(bytes);
    return remove_folder(state);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_do_not_show),
        cmocka_unit_test(stops_do_not_show),
        cmocka_unit_test(complete_folders_are_left_alone),
        cmocka_unit_test(prepared_text_reads_as_the_text),
        cmocka_unit_test(single_text_is_cut_at_the_character),
        cmocka_unit_test(shards_have_the_header_of_llmc),
        cmocka_unit_test(every_damage_is_found),
        cmocka_unit_test(damaged_shards_are_made_again),
        cmocka_unit_test(other_settings_are_refused),
        cmocka_unit_test(changed_input_is_refused),
        cmocka_unit_test(folders_that_do_not_fit_are_refused),
        cmocka_unit_test(odd_indexes_are_refused),
        cmocka_unit_test(wrong_options_are_refused),
    };
    return cmocka_run_group_tests_name("prepare", tests, set_up, tear_down);
}
