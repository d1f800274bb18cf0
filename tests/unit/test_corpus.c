/* test_corpus.c - files of every kind as one row of tokens: detection, documents, parts, and what
 * is wrong with files that are not what they say. */
#define _XOPEN_SOURCE 700
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/rng.h"
#include "base/util.h"
#include "data/bin.h"
#include "data/corpus.h"
#include "data/hash.h"
#include "support/folder.h"

static mn_tokenizer *bytes;

static void write_text(const char *name, const char *text) {
    write_file(in_folder(name), text, strlen(text));
}

/* Opens one path with the byte tokenizer and the options given. */
static mn_status open_with(mn_corpus **out, const char *path, mn_corpus_options options) {
    options.paths = &path;
    options.n_paths = 1;
    return mn_corpus_open(out, &options, bytes);
}

static mn_corpus *open_path(const char *path, mn_corpus_options options) {
    mn_corpus *corpus;
    if (open_with(&corpus, path, options) != MN_OK) fail_msg("%s", mn_last_error());
    return corpus;
}

/* The tokens are the bytes of `text`, and documents begin at `starts`, closed by its length. */
static void assert_corpus(const mn_corpus *corpus, const char *text, const int64_t *starts,
                          int64_t n_documents) {
    const int64_t n = (int64_t)strlen(text);
    int32_t ids[512];
    assert_true(n <= 512);
    assert_int_equal(mn_corpus_tokens(corpus), n);
    assert_int_equal(mn_corpus_documents(corpus), n_documents);
    assert_int_equal(mn_corpus_read(corpus, 0, n, ids), MN_OK);
    for (int64_t i = 0; i < n; i++) assert_int_equal(ids[i], (uint8_t)text[i]);
    for (int64_t i = 0; i < n_documents; i++) {
        assert_int_equal(mn_corpus_document_start(corpus, i), starts[i]);
    }
    assert_int_equal(mn_corpus_document_start(corpus, n_documents), n);
}

#define STARTS(...) (const int64_t[]){ __VA_ARGS__ }, MN_COUNTOF(((const int64_t[]){ __VA_ARGS__ }))

/* ---- text ------------------------------------------------------------------------------------ */

static void text_is_one_document_or_split(void **state) {
    (void)state;
    write_text("a.txt", "one\n\ntwo\n\n\n\nthree\n\n");
    const mn_corpus_options plain = { .document_end = MN_DOCUMENT_END_NONE };
    mn_corpus *corpus = open_path(in_folder("a.txt"), plain);
    assert_corpus(corpus, "one\n\ntwo\n\n\n\nthree\n\n", STARTS(0));
    mn_corpus_destroy(corpus);
    corpus = open_path(in_folder("a.txt"),
                       (mn_corpus_options){ .separator = "\n\n",
                                            .document_end = MN_DOCUMENT_END_NONE });
    assert_corpus(corpus, "onetwothree", STARTS(0, 3, 6));    // empty documents are left out
    mn_corpus_destroy(corpus);
    corpus = open_path(in_folder("a.txt"),
                       (mn_corpus_options){ .separator = "\n\n", .document_end = '|' });
    assert_corpus(corpus, "one|two|three|", STARTS(0, 4, 8));
    mn_corpus_destroy(corpus);
}

/* Bytes have no EOS, so "the tokenizer's own" is none. */
static void document_end_may_be_the_tokenizers_or_none(void **state) {
    (void)state;
    write_text("b.txt", "xy");
    const int32_t none[] = { MN_DOCUMENT_END_OWN, MN_DOCUMENT_END_NONE };
    for (size_t i = 0; i < MN_COUNTOF(none); i++) {
        mn_corpus *corpus = open_path(in_folder("b.txt"),
                                      (mn_corpus_options){ .document_end = none[i] });
        assert_corpus(corpus, "xy", STARTS(0));
        mn_corpus_destroy(corpus);
    }
    mn_corpus *corpus;
    assert_fails(open_with(&corpus, in_folder("b.txt"), (mn_corpus_options){ .document_end = 256 }),
                 MN_ERR_ARGUMENT, "document_end", "256");
    assert_null(corpus);
}

static void folders_are_walked_in_order(void **state) {
    (void)state;
    char folder[512], path[600];
    snprintf(folder, sizeof folder, "%s", in_folder("tree"));
    static const struct {
        const char *name, *text;
    } files[] = { { "b.txt", "BB" }, { "a", NULL }, { "a/z.txt", "AZ" }, { "a/b", "AB" },
                  { ".hidden", "no" }, { "c.jsonl", "{\"text\": \"CC\"}\n" }, { ".git", NULL },
                  { ".git/x", "no" }, { "B.txt", "upper" } };
    assert_int_equal(mkdir(folder, 0777), 0);
    for (size_t i = 0; i < MN_COUNTOF(files); i++) {
        snprintf(path, sizeof path, "%s/%s", folder, files[i].name);
        if (files[i].text) write_file(path, files[i].text, strlen(files[i].text));
        else assert_int_equal(mkdir(path, 0777), 0);
    }
    snprintf(path, sizeof path, "%s/link", folder);
    assert_int_equal(symlink("/nowhere/at/all", path), 0);
    mn_corpus *corpus = open_path(folder, (mn_corpus_options){ .document_end = '.' });
    assert_corpus(corpus, "upper.AB.AZ.BB.CC.", STARTS(0, 6, 9, 12, 15));
    mn_corpus_destroy(corpus);
    assert_int_equal(unlink(path), 0);
    for (size_t i = MN_COUNTOF(files); i-- > 0;) {    // files of a folder come behind it
        snprintf(path, sizeof path, "%s/%s", folder, files[i].name);
        if (files[i].text) assert_int_equal(unlink(path), 0);
    }
    snprintf(path, sizeof path, "%s/a", folder);
    assert_int_equal(rmdir(path), 0);
    snprintf(path, sizeof path, "%s/.git", folder);
    assert_int_equal(rmdir(path), 0);
    assert_fails(open_with(&corpus, folder, (mn_corpus_options){ 0 }), MN_ERR_IO, folder,
                 "no file");
    assert_int_equal(rmdir(folder), 0);
    assert_fails(open_with(&corpus, folder, (mn_corpus_options){ 0 }), MN_ERR_IO, folder,
                 "no such file");
}

static void other_things_are_refused_by_name(void **state) {
    (void)state;
    mn_corpus *corpus;
    write_file(in_folder("t.txt.gz"), "\x1f\x8b\x08\0", 4);
    assert_fails(open_with(&corpus, in_folder("t.txt.gz"), (mn_corpus_options){ 0 }), MN_ERR_FORMAT,
                 "t.txt.gz", "gzip");
    write_file(in_folder("binary"), "abc\0def", 7);
    assert_fails(open_with(&corpus, in_folder("binary"), (mn_corpus_options){ 0 }), MN_ERR_FORMAT,
                 "binary", "offset 3");
    corpus = open_path(in_folder("binary"), (mn_corpus_options){ .format = MN_CORPUS_TEXT });
    assert_int_equal(mn_corpus_tokens(corpus), 8);    // and a document end, token 0
    mn_corpus_destroy(corpus);
    write_text("empty.txt", "");
    assert_fails(open_with(&corpus, in_folder("empty.txt"), (mn_corpus_options){ 0 }),
                 MN_ERR_FORMAT, "empty.txt", "no text");
    write_text("blank.jsonl", "\n\n");
    assert_fails(open_with(&corpus, in_folder("blank.jsonl"), (mn_corpus_options){ 0 }),
                 MN_ERR_FORMAT, "no token", "");
    const char *path = in_folder("blank.jsonl");
    const mn_corpus_options options = { .paths = &path, .n_paths = 1 };
    assert_fails(mn_corpus_open(&corpus, &options, NULL), MN_ERR_ARGUMENT, "blank.jsonl",
                 "tokenizer");
    assert_fails(mn_corpus_open(&corpus, &(mn_corpus_options){ 0 }, bytes), MN_ERR_ARGUMENT,
                 "no file", "");
    assert_null(corpus);
}

/* ---- JSON lines ------------------------------------------------------------------------------ */

static void lines_are_documents(void **state) {
    (void)state;
    write_text("a.jsonl", "\xef\xbb\xbf{\"text\": \"first\", \"n\": 1}\n\n  \n"
                          "{\"n\": 2, \"text\": \"a\\u00e9\\n\"}\r\n{\"text\": \"\"}\n"
                          "{\"text\": \"last\"}");
    mn_corpus *corpus = open_path(in_folder("a.jsonl"),
                                  (mn_corpus_options){ .document_end = '|' });
    assert_corpus(corpus, "first|a\xc3\xa9\n|last|", STARTS(0, 6, 11));
    mn_corpus_destroy(corpus);
    write_text("k.json", " {\"body\": \"b\"}\n");
    corpus = open_path(in_folder("k.json"),
                       (mn_corpus_options){ .document_end = '|', .text_key = "body" });
    assert_corpus(corpus, "b|", STARTS(0));
    mn_corpus_destroy(corpus);
}

static void bad_lines_are_named(void **state) {
    (void)state;
    static const struct {
        const char *text, *line, *why;
    } bad[] = {
        { "{\"text\": \"a\"}\n{\"text\": \"b\"\n", "line 2", "" },
        { "{\"text\": \"a\"}\n\n\n{\"texts\": \"b\"}\n", "line 4", "did you mean \"texts\"" },
        { "{\"content\": \"b\"}\n", "line 1", "first one there is \"content\"" },
        { "{}\n", "line 1", "empty" },
        { "{\"text\": 5}\n", "line 1", "expected" },
        { "\n[1, 2]\n", "line 2", "expected" },
        { "{\"text\": \"a\"} {\"text\": \"b\"}\n", "line 1", "" },
        { "{\"text\": \"\\ud800\"}\n", "line 1", "" },
    };
    for (size_t i = 0; i < MN_COUNTOF(bad); i++) {
        mn_corpus *corpus;
        write_text("bad.jsonl", bad[i].text);
        assert_fails(open_with(&corpus, in_folder("bad.jsonl"), (mn_corpus_options){ 0 }),
                     MN_ERR_FORMAT, "bad.jsonl: ", bad[i].line);
        assert_message_holds(bad[i].why);
        assert_null(corpus);
    }
}

/* The bad line lies far behind the first piece and on another thread. */
static void bad_lines_are_counted_across_pieces(void **state) {
    (void)state;
    enum { LINES = 300000 };
    FILE *file = fopen(in_folder("long.jsonl"), "wb");
    for (int i = 1; i <= LINES; i++) {
        fprintf(file, i == 271828 ? "{\"text\": %d}\n" : "{\"text\": \"line %d\"}\n", i);
    }
    fclose(file);
    mn_corpus *corpus;
    assert_fails(open_with(&corpus, in_folder("long.jsonl"), (mn_corpus_options){ 0 }),
                 MN_ERR_FORMAT, "long.jsonl: line 271828: ", "text");
}

/* ---- long text ------------------------------------------------------------------------------- */

/* Words, blanks and line ends in runs, signs, digits, and letters of two to four bytes. */
static char *draw_text(size_t size, uint64_t seed) {
    static const char *const pieces[] = {
        " the", " of", "and", " I'll", "  ", "\n", "\n\n", "\n \n", ".", ", ", "!\n", " 1234567",
        "\t", "\r\n", "\xc3\xa9t\xc3\xa9", " \xe4\xb8\xad\xe6\x96\x87", "\xe3\x80\x80",
        "\xf0\x9f\x98\x80", " it's", "\n    x = 1;\n", "\xc2\xa0", "can't", "\n-", "A",
    };
    char *text = malloc(size + 16);
    assert_non_null(text);
    size_t n = 0;
    for (uint64_t i = 0; n < size; i++) {
        const uint64_t bits = mn_rng_bits(seed, 0, i);
        const char *piece = pieces[bits % MN_COUNTOF(pieces)];
        n += (size_t)sprintf(text + n, "%s", piece);
    }
    text[n] = '\0';
    return text;
}

static void assert_same_as_whole(const mn_tokenizer *tokenizer, const char *text,
                                 const char *what) {
    mn_token_list whole = { 0 };
    mn_corpus *corpus;
    const char *path = in_folder("long.txt");
    const mn_corpus_options options = { .paths = &path, .n_paths = 1,
                                        .document_end = MN_DOCUMENT_END_NONE };
    write_file(path, text, strlen(text));
    assert_int_equal(mn_tokenizer_encode(tokenizer, text, strlen(text), false, &whole), MN_OK);
    assert_int_equal(mn_corpus_open(&corpus, &options, tokenizer), MN_OK);
    assert_int_equal(mn_corpus_tokens(corpus), whole.count);
    int32_t *ids = malloc((size_t)whole.count * sizeof *ids);
    assert_int_equal(mn_corpus_read(corpus, 0, whole.count, ids), MN_OK);
    for (int64_t i = 0; i < whole.count; i++) {
        if (ids[i] != whole.ids[i]) fail_msg("%s: token %d differs", what, (int)i);
    }
    free(ids);
    mn_corpus_destroy(corpus);
    mn_token_list_free(&whole);
}

/* Five pieces: their tokens in a row are those of the whole text, for every kind of tokenizer. */
static void pieces_give_the_tokens_of_the_whole(void **state) {
    (void)state;
    static const char *const patterns[] = { "gpt2", "llama3", "qwen2" };
    char *text = draw_text(5 << 18, 7);
    const char *texts[] = { text };
    const size_t sizes[] = { 200000 };
    mn_tokenizer *tokenizer;
    for (size_t i = 0; i < MN_COUNTOF(patterns); i++) {
        const mn_tokenizer_training how = { .vocab_size = 400, .pattern = patterns[i] };
        assert_int_equal(mn_tokenizer_train(&tokenizer, &how, texts, sizes, 1), MN_OK);
        assert_same_as_whole(tokenizer, text, patterns[i]);
        mn_tokenizer_destroy(tokenizer);
    }
    assert_int_equal(mn_tokenizer_chars(&tokenizer, text, strlen(text)), MN_OK);
    assert_same_as_whole(tokenizer, text, "chars");
    mn_tokenizer_destroy(tokenizer);
    assert_same_as_whole(bytes, text, "bytes");
    free(text);
}

/* No line end and no blank: words of the tokenizer may lie across any place. */
static void text_without_places_to_cut_stays_whole(void **state) {
    (void)state;
    const size_t size = 1 << 20;
    char *text = malloc(size + 1);
    for (size_t i = 0; i < size; i++) text[i] = (char)('a' + mn_rng_bits(3, 0, i) % 3);
    text[size] = '\0';
    const char *texts[] = { text };
    const size_t sizes[] = { 20000 };
    mn_tokenizer *tokenizer;
    const mn_tokenizer_training how = { .vocab_size = 300 };
    assert_int_equal(mn_tokenizer_train(&tokenizer, &how, texts, sizes, 1), MN_OK);
    text[size / 2] = '\n';
    assert_same_as_whole(tokenizer, text, "one word");
    mn_tokenizer_destroy(tokenizer);
    free(text);
}

/* Separators that overlap themselves, and runs of them, are found as one reader would from the
 * left, wherever the pieces begin. */
static void documents_do_not_depend_on_pieces(void **state) {
    (void)state;
    static const char *const separators[] = { "\n\n", "aba", "\n", "<|endoftext|>" };
    for (size_t s = 0; s < MN_COUNTOF(separators); s++) {
        const char *separator = separators[s];
        const size_t size = 1 << 20, n = strlen(separator);
        char *text = malloc(size + 32);
        size_t end = 0;
        for (uint64_t i = 0; end < size; i++) {
            const uint64_t bits = mn_rng_bits(11, s, i);
            if (bits % 3 == 0) end += (size_t)sprintf(text + end, "%s", separator);
            else text[end++] = "ab \n"[bits / 3 % 4];
        }
        text[end] = '\0';
        write_file(in_folder("sep.txt"), text, end);
        mn_corpus *corpus = open_path(in_folder("sep.txt"),
                                      (mn_corpus_options){ .separator = separator,
                                                           .document_end = 255 });
        int64_t document = 0, tokens = 0;
        for (char *at = text; *at;) {
            const char *found = strstr(at, separator);
            const int64_t length = found ? found - at : (int64_t)strlen(at);
            if (length > 0) {
                assert_int_equal(mn_corpus_document_start(corpus, document++), tokens);
                tokens += length + 1;
            }
            at += length + (found ? (int64_t)n : 0);
        }
        assert_int_equal(mn_corpus_documents(corpus), document);
        assert_int_equal(mn_corpus_tokens(corpus), tokens);
        mn_corpus_destroy(corpus);
        free(text);
    }
}

/* ---- .bin ------------------------------------------------------------------------------------ */

static void write_ids(const char *name, const uint32_t *header, size_t n_header, const int32_t *ids,
                      int64_t n, int width) {
    uint8_t file[4096] = { 0 };
    size_t size = n_header > 0 ? MN_BIN_HEADER_BYTES : 0;
    for (size_t i = 0; i < 4 * n_header; i++) file[i] = (uint8_t)(header[i / 4] >> 8 * (i % 4));
    for (int64_t i = 0; i < n; i++) {
        for (int b = 0; b < width; b++) file[size++] = (uint8_t)((uint32_t)ids[i] >> 8 * b);
    }
    write_file(in_folder(name), file, size);
}

static mn_status open_bin(mn_corpus **out, const char *name, mn_corpus_options options) {
    const char *path = in_folder(name);
    options.paths = &path;
    options.n_paths = 1;
    return mn_corpus_open(out, &options, NULL);
}

static void token_files_of_each_kind_are_read(void **state) {
    (void)state;
    static const int32_t ids[] = { 5, 65535, 0, 7, 300, 7, 9 };
    static const struct {
        const char *name;
        uint32_t header[3];
        size_t n_header;
        int width;
        mn_corpus_format format;
    } kinds[] = { { "nano.bin", { 0 }, 0, 2, MN_CORPUS_NANOGPT },
                  { "gpt2.bin", { 20240520, 1, 7 }, 3, 2, MN_CORPUS_LLMC },
                  { "llama.bin", { 20240801, 7, 7 }, 3, 4, MN_CORPUS_LLMC } };
    uint64_t fingerprint = 0;
    for (size_t i = 0; i < MN_COUNTOF(kinds); i++) {
        write_ids(kinds[i].name, kinds[i].header, kinds[i].n_header, ids, 7, kinds[i].width);
        for (int named = 0; named < 2; named++) {
            mn_corpus *corpus;
            int32_t got[7];
            const mn_corpus_options options = { .format = named ? kinds[i].format : MN_CORPUS_AUTO,
                                                .document_end = 7, .vocab_size = 65536 };
            assert_int_equal(open_bin(&corpus, kinds[i].name, options), MN_OK);
            assert_int_equal(mn_corpus_tokens(corpus), 7);
            assert_int_equal(mn_corpus_documents(corpus), 3);
            assert_int_equal(mn_corpus_document_start(corpus, 1), 4);
            assert_int_equal(mn_corpus_document_start(corpus, 2), 6);
            assert_int_equal(mn_corpus_read(corpus, 0, 7, got), MN_OK);
            assert_memory_equal(got, ids, sizeof ids);
            assert_int_equal(mn_corpus_read(corpus, 1, 2, got), MN_OK);
            assert_int_equal(got[0], 65535);
            assert_fails(mn_corpus_read(corpus, 6, 2, got), MN_ERR_ARGUMENT, "6", "7");
            assert_fails(mn_corpus_read(corpus, -1, 1, got), MN_ERR_ARGUMENT, "-1", "7");
            /* The same tokens and documents, however they are stored. */
            if (fingerprint == 0) fingerprint = mn_corpus_fingerprint(corpus);
            assert_true(mn_corpus_fingerprint(corpus) == fingerprint);
            mn_corpus_destroy(corpus);
        }
    }
}

static void lying_headers_are_refused(void **state) {
    (void)state;
    static const int32_t ids[] = { 1, 2, 3, 4 };
    static const struct {
        uint32_t header[3];
        int width;
        const char *why;
    } bad[] = { { { 20240520, 1, 5 }, 2, "cut short" }, { { 20240520, 1, 3 }, 2, "too long" },
                { { 20240520, 2, 4 }, 2, "version 2" }, { { 20240801, 7, 4 }, 2, "cut short" },
                { { 20240801, 1, 4 }, 4, "version 1" }, { { 20240520, 1, 4 }, 4, "too long" },
                { { 20240520, 1, 0xFFFFFFFF }, 2, "4294967295" },
                { { 20240801, 7, 0x80000000 }, 4, "2147483648" } };
    mn_corpus *corpus;
    for (size_t i = 0; i < MN_COUNTOF(bad); i++) {
        write_ids("lie.bin", bad[i].header, 3, ids, 4, bad[i].width);
        assert_fails(open_bin(&corpus, "lie.bin", (mn_corpus_options){ 0 }), MN_ERR_FORMAT,
                     "lie.bin", bad[i].why);
        assert_null(corpus);
    }
    write_file(in_folder("short.bin"), "\x88\xd8\x34\x01\x01\0\0\0", 8);    // 20240520, 1
    assert_fails(open_bin(&corpus, "short.bin", (mn_corpus_options){ 0 }), MN_ERR_FORMAT,
                 "short.bin", "header");
    write_file(in_folder("odd.bin"), "abc", 3);
    assert_fails(open_bin(&corpus, "odd.bin", (mn_corpus_options){ 0 }), MN_ERR_FORMAT, "odd.bin",
                 "3 bytes");
    assert_fails(open_bin(&corpus, "odd.bin", (mn_corpus_options){ .format = MN_CORPUS_LLMC }),
                 MN_ERR_FORMAT, "odd.bin", "header");
    write_ids("other.bin", (const uint32_t[]){ 20240326, 3, 0 }, 3, ids, 4, 2);
    assert_fails(open_bin(&corpus, "other.bin", (mn_corpus_options){ .format = MN_CORPUS_LLMC }),
                 MN_ERR_FORMAT, "other.bin", "20240326");
    write_file(in_folder("none.bin"), "", 0);
    assert_fails(open_bin(&corpus, "none.bin", (mn_corpus_options){ 0 }), MN_ERR_FORMAT, "no token",
                 "");
    assert_fails(open_bin(&corpus, "absent.bin", (mn_corpus_options){ 0 }), MN_ERR_IO, "absent.bin",
                 "no such file");
}

static void vocabulary_is_checked_with_place(void **state) {
    (void)state;
    static int32_t ids[1000];
    for (int i = 0; i < 1000; i++) ids[i] = i % 50;
    ids[777] = 65;
    write_ids("vocab.bin", NULL, 0, ids, 1000, 2);
    mn_corpus *corpus;
    assert_fails(open_bin(&corpus, "vocab.bin", (mn_corpus_options){ .vocab_size = 65 }),
                 MN_ERR_FORMAT, "vocab.bin: token 65", "place 777");
    assert_int_equal(open_bin(&corpus, "vocab.bin", (mn_corpus_options){ .vocab_size = 66 }),
                     MN_OK);
    mn_corpus_destroy(corpus);
    const uint32_t header[] = { 20240801, 7, 1 };
    write_ids("negative.bin", header, 3, (const int32_t[]){ -5 }, 1, 4);
    assert_fails(open_bin(&corpus, "negative.bin", (mn_corpus_options){ 0 }), MN_ERR_FORMAT,
                 "negative.bin", "4294967291");
    write_text("meta.json", "{\"vocab_size\": 70, \"itos\": {}}");
    assert_fails(open_bin(&corpus, "vocab.bin", (mn_corpus_options){ .vocab_size = 66 }),
                 MN_ERR_FORMAT, "meta.json", "70");
    assert_int_equal(unlink(in_folder("meta.json")), 0);
    assert_fails(mn_corpus_from_tokens(&corpus, (const int32_t[]){ 1, -1 }, 2,
                                       (const int64_t[]){ 0, 2 }, 1),
                 MN_ERR_FORMAT, "place 1", "");
}

/* The file loses its second half, and gets another token, while the corpus is open. */
static void files_that_change_underneath_fail(void **state) {
    (void)state;
    static int32_t ids[1000];
    int32_t got[1000];
    write_ids("shrink.bin", NULL, 0, ids, 1000, 2);
    mn_corpus *corpus;
    assert_int_equal(open_bin(&corpus, "shrink.bin", (mn_corpus_options){ .vocab_size = 9 }),
                     MN_OK);
    assert_int_equal(mn_corpus_read(corpus, 0, 1000, got), MN_OK);
    assert_int_equal(truncate(in_folder("shrink.bin"), 1000), 0);
    assert_int_equal(mn_corpus_read(corpus, 0, 500, got), MN_OK);
    assert_fails(mn_corpus_read(corpus, 400, 200, got), MN_ERR_IO, "shrink.bin: shrank",
                 "100 tokens from place 500");
    assert_fails(mn_corpus_read(corpus, 999, 1, got), MN_ERR_IO, "shrink.bin: shrank", "place 999");
    ids[3] = 9;
    write_ids("shrink.bin", NULL, 0, ids, 1000, 2);
    assert_fails(mn_corpus_read(corpus, 0, 1000, got), MN_ERR_FORMAT, "shrink.bin: token 9",
                 "place 3");
    mn_corpus_destroy(corpus);
}

/* ---- mixtures, parts, fingerprints ----------------------------------------------------------- */

static void kinds_mix_in_the_order_given(void **state) {
    (void)state;
    char paths[3][512];
    const char *list[3];
    for (int i = 0; i < 3; i++) list[i] = paths[i];
    snprintf(paths[0], sizeof paths[0], "%s", in_folder("m1.txt"));
    snprintf(paths[1], sizeof paths[1], "%s", in_folder("m2.bin"));
    snprintf(paths[2], sizeof paths[2], "%s", in_folder("m3.jsonl"));
    write_text("m1.txt", "one");
    write_file(paths[1], "t\0w\0o\0", 6);
    write_text("m3.jsonl", "{\"text\": \"three\"}\n{\"text\": \"four\"}");
    const mn_corpus_options options = { .paths = list, .n_paths = 3, .document_end = '|' };
    mn_corpus *corpus;
    assert_int_equal(mn_corpus_open(&corpus, &options, bytes), MN_OK);
    assert_corpus(corpus, "one|twothree|four|", STARTS(0, 4, 7, 13));
    int32_t got[6];
    assert_int_equal(mn_corpus_read(corpus, 2, 6, got), MN_OK);
    for (int i = 0; i < 6; i++) assert_int_equal(got[i], "e|twot"[i]);
    mn_corpus_destroy(corpus);
}

/* A text of 1,115,394 characters divides into 1,003,854 and 111,540, as nanoGPT has it. */
static void one_document_is_split_at_the_token(void **state) {
    (void)state;
    enum { N = 1115394 };
    int32_t *ids = malloc(N * sizeof *ids), got[4];
    for (int i = 0; i < N; i++) ids[i] = i % 65;
    mn_corpus *corpus, *train, *valid;
    assert_int_equal(mn_corpus_from_tokens(&corpus, ids, N, (const int64_t[]){ 0, N }, 1), MN_OK);
    assert_int_equal(mn_corpus_part(&train, corpus, 0, 0.9), MN_OK);
    assert_int_equal(mn_corpus_part(&valid, corpus, 0.9, 1), MN_OK);
    assert_int_equal(mn_corpus_tokens(train), 1003854);
    assert_int_equal(mn_corpus_tokens(valid), 111540);
    assert_int_equal(mn_corpus_documents(valid), 1);
    assert_int_equal(mn_corpus_document_start(valid, 0), 0);
    assert_int_equal(mn_corpus_document_start(valid, 1), 111540);
    assert_int_equal(mn_corpus_read(valid, 0, 4, got), MN_OK);
    assert_memory_equal(got, ids + 1003854, sizeof got);
    assert_fails(mn_corpus_read(train, 1003853, 2, got), MN_ERR_ARGUMENT, "1003853", "");
    mn_corpus *half;    // a part of a part
    assert_int_equal(mn_corpus_part(&half, valid, 0.5, 1), MN_OK);
    assert_int_equal(mn_corpus_tokens(half), 55770);
    assert_int_equal(mn_corpus_read(half, 55766, 4, got), MN_OK);
    assert_memory_equal(got, ids + N - 4, sizeof got);
    mn_corpus *all[] = { corpus, train, valid, half };
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < i; j++) {
            assert_true(mn_corpus_fingerprint(all[i]) != mn_corpus_fingerprint(all[j]));
        }
    }
    for (int i = 4; i-- > 0;) mn_corpus_destroy(all[i]);
    free(ids);
}

static void many_documents_are_split_at_borders(void **state) {
    (void)state;
    enum { N = 1000 };
    static int32_t ids[N];
    static const int64_t borders[] = { 0, 100, 130, 500, 910, 1000 };
    for (int i = 0; i < N; i++) ids[i] = i;
    mn_corpus *corpus, *part;
    assert_int_equal(mn_corpus_from_tokens(&corpus, ids, N, borders, 5), MN_OK);
    static const struct {
        double from, to;
        int64_t first, end, documents;
    } parts[] = { { 0, 1, 0, 1000, 5 }, { 0, 0.9, 0, 910, 4 }, { 0.9, 1, 910, 1000, 1 },
                  { 0.001, 0.5, 100, 500, 2 }, { 0.5, 0.999, 500, 910, 1 } };
    for (size_t i = 0; i < MN_COUNTOF(parts); i++) {
        int32_t got;
        assert_int_equal(mn_corpus_part(&part, corpus, parts[i].from, parts[i].to), MN_OK);
        assert_int_equal(mn_corpus_tokens(part), parts[i].end - parts[i].first);
        assert_int_equal(mn_corpus_documents(part), parts[i].documents);
        assert_int_equal(mn_corpus_document_start(part, 0), 0);
        assert_int_equal(mn_corpus_document_start(part, parts[i].documents),
                         parts[i].end - parts[i].first);
        assert_int_equal(mn_corpus_read(part, 0, 1, &got), MN_OK);
        assert_int_equal(got, parts[i].first);
        mn_corpus_destroy(part);
    }
    assert_fails(mn_corpus_part(&part, corpus, 0.111, 0.112), MN_ERR_ARGUMENT, "empty", "");
    static const double wrong[][2] = { { -0.1, 1 }, { 0, 1.1 }, { 0.5, 0.5 }, { 0.9, 0.1 },
                                       { 0.0 / 0.0, 1 } };
    for (size_t i = 0; i < MN_COUNTOF(wrong); i++) {
        assert_fails(mn_corpus_part(&part, corpus, wrong[i][0], wrong[i][1]), MN_ERR_ARGUMENT,
                     "part", "[0, 1]");
        assert_null(part);
    }
    mn_corpus_destroy(corpus);
}

static uint64_t fingerprint_of(const int32_t *ids, int64_t n, const int64_t *borders, int64_t d) {
    mn_corpus *corpus;
    assert_int_equal(mn_corpus_from_tokens(&corpus, ids, n, borders, d), MN_OK);
    const uint64_t fingerprint = mn_corpus_fingerprint(corpus);
    mn_corpus_destroy(corpus);
    return fingerprint;
}

static void fingerprint_changes_with_every_token(void **state) {
    (void)state;
    enum { N = 200 };
    int32_t ids[N + 1] = { 0 };
    uint64_t seen[N + 4];
    int n = 0;
    const int64_t whole[] = { 0, N }, longer[] = { 0, N + 1 }, split[] = { 0, 9, N };
    seen[n++] = fingerprint_of(ids, N, whole, 1);
    seen[n++] = fingerprint_of(ids, N + 1, longer, 1);
    seen[n++] = fingerprint_of(ids, N, split, 2);
    for (int i = 0; i < N; i++) {
        ids[i] = 1;
        seen[n++] = fingerprint_of(ids, N, whole, 1);
        ids[i] = 0;
    }
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < i; j++) assert_true(seen[i] != seen[j]);
    }
    assert_true(fingerprint_of(ids, N, whole, 1) == seen[0]);
}

static void wrong_borders_are_refused(void **state) {
    (void)state;
    static const int32_t ids[4] = { 1, 2, 3, 4 };
    static const int64_t wrong[][3] = { { 1, 2, 4 }, { 0, 2, 3 }, { 0, 0, 4 }, { 0, 5, 4 },
                                        { 0, 4, 4 } };
    mn_corpus *corpus;
    for (size_t i = 0; i < MN_COUNTOF(wrong); i++) {
        assert_fails(mn_corpus_from_tokens(&corpus, ids, 4, wrong[i], 2), MN_ERR_ARGUMENT,
                     "borders", "");
        assert_null(corpus);
    }
    assert_fails(mn_corpus_from_tokens(&corpus, ids, 0, (const int64_t[]){ 0 }, 0), MN_ERR_ARGUMENT,
                 "borders", "");
}

/* ---- hash ------------------------------------------------------------------------------------ */

static void hash_does_not_depend_on_pieces(void **state) {
    (void)state;
    uint8_t data[300];
    for (size_t i = 0; i < sizeof data; i++) data[i] = (uint8_t)(mn_rng_bits(1, 2, i));
    for (size_t n = 0; n <= sizeof data; n++) {
        mn_hash whole = { 0 }, pieces = { 0 };
        mn_hash_add(&whole, data, n);
        for (size_t at = 0, step = 1; at < n; at += step, step = step * 2 % 41) {
            if (step > n - at) step = n - at;
            mn_hash_add(&pieces, data + at, step);
        }
        assert_true(mn_hash_value(&whole) == mn_hash_value(&pieces));
        mn_hash one_more = whole;
        mn_hash_add(&one_more, "", 1);    // a zero byte
        assert_true(mn_hash_value(&one_more) != mn_hash_value(&whole));
    }
}

static void hash_sees_every_bit_and_swaps(void **state) {
    (void)state;
    uint8_t data[96];
    for (int kind = 0; kind < 2; kind++) {
        for (size_t i = 0; i < sizeof data; i++) {
            data[i] = kind == 0 ? 0 : (uint8_t)(mn_rng_bits(5, 6, i));
        }
        mn_hash base = { 0 };
        mn_hash_add(&base, data, sizeof data);
        for (size_t bit = 0; bit < 8 * sizeof data; bit++) {
            mn_hash flipped = { 0 };
            data[bit / 8] ^= (uint8_t)(1u << bit % 8);
            mn_hash_add(&flipped, data, sizeof data);
            data[bit / 8] ^= (uint8_t)(1u << bit % 8);
            const uint64_t difference = mn_hash_value(&flipped) ^ mn_hash_value(&base);
            /* Half of 64 bits change on average; 8 or fewer by chance once in 10^9. */
            assert_in_range(__builtin_popcountll(difference), 9, 55);
        }
    }
    mn_hash ab = { 0 }, ba = { 0 };
    mn_hash_add_u64(&ab, 1);
    mn_hash_add_u64(&ab, 2);
    mn_hash_add_u64(&ba, 2);
    mn_hash_add_u64(&ba, 1);
    assert_true(mn_hash_value(&ab) != mn_hash_value(&ba));
}

static int set_up(void **state) {
    return make_folder(state) != 0 || mn_tokenizer_bytes(&bytes) != MN_OK;
}

static int tear_down(void **state) {
    mn_tokenizer_destroy(bytes);
    return remove_folder(state);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_is_one_document_or_split),
        cmocka_unit_test(document_end_may_be_the_tokenizers_or_none),
        cmocka_unit_test(folders_are_walked_in_order),
        cmocka_unit_test(other_things_are_refused_by_name),
        cmocka_unit_test(lines_are_documents),
        cmocka_unit_test(bad_lines_are_named),
        cmocka_unit_test(bad_lines_are_counted_across_pieces),
        cmocka_unit_test(pieces_give_the_tokens_of_the_whole),
        cmocka_unit_test(text_without_places_to_cut_stays_whole),
        cmocka_unit_test(documents_do_not_depend_on_pieces),
        cmocka_unit_test(token_files_of_each_kind_are_read),
        cmocka_unit_test(lying_headers_are_refused),
        cmocka_unit_test(vocabulary_is_checked_with_place),
        cmocka_unit_test(files_that_change_underneath_fail),
        cmocka_unit_test(kinds_mix_in_the_order_given),
        cmocka_unit_test(one_document_is_split_at_the_token),
        cmocka_unit_test(many_documents_are_split_at_borders),
        cmocka_unit_test(fingerprint_changes_with_every_token),
        cmocka_unit_test(wrong_borders_are_refused),
        cmocka_unit_test(hash_does_not_depend_on_pieces),
        cmocka_unit_test(hash_sees_every_bit_and_swaps),
    };
    return cmocka_run_group_tests_name("corpus", tests, set_up, tear_down);
}
