/* test_tokenizer.c - tokenizers: small ones of each family with known ids, round trips, merges
 * against a plain reference, training, streaming, files, and every way to be wrong.
 *
 * Documents are written with ' for " so that they can be read. */
#define _XOPEN_SOURCE 700
#include "io/tokenizer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "base/util.h"
#include "io/text.h"
#include "io/unicode.h"
#include "io/utf8.h"
#include "support/folder.h"

/* ---- helpers --------------------------------------------------------------------------------- */

/* A copy with " for '. */
static char *quoted(const char *text) {
    char *out = strdup(text);
    assert_non_null(out);
    for (char *c = out; *c; c++) {
        if (*c == '\'') *c = '"';
    }
    return out;
}

static mn_status parse(mn_tokenizer **out, const char *document) {
    char *text = quoted(document);
    const mn_status st = mn_tokenizer_parse(out, text, strlen(text), "small.json");
    free(text);
    return st;
}

static mn_tokenizer *made(const char *document) {
    mn_tokenizer *t = NULL;
    if (parse(&t, document) != MN_OK) fail_msg("%s", mn_last_error());
    return t;
}

/* The text becomes these ids. */
static void expect(const mn_tokenizer *t, const char *text, bool special, const int32_t *ids,
                   int64_t count) {
    mn_token_list list = { 0 };
    if (mn_tokenizer_encode(t, text, strlen(text), special, &list) != MN_OK) {
        fail_msg("%s", mn_last_error());
    }
    for (int64_t i = 0; i < count && i < list.count; i++) {
        if (list.ids[i] != ids[i]) {
            fail_msg("\"%s\": token %d is %d, not %d", text, (int)i, list.ids[i], ids[i]);
        }
    }
    assert_int_equal(list.count, count);
    mn_token_list_free(&list);
}

#define EXPECT(t, text, special, ...)                                                              \
    expect(t, text, special, (const int32_t[]){ __VA_ARGS__ },                                     \
           MN_COUNTOF(((const int32_t[]){ __VA_ARGS__ })))

static void expect_text(const mn_tokenizer *t, const int32_t *ids, int64_t count, bool special,
                        const char *want) {
    char *text = NULL;
    size_t size = 0;
    assert_int_equal(mn_tokenizer_decode(t, ids, count, special, &text, &size), MN_OK);
    assert_string_equal(text, want);
    assert_int_equal(size, strlen(want));
    free(text);
}

#define EXPECT_TEXT(t, special, want, ...)                                                         \
    expect_text(t, (const int32_t[]){ __VA_ARGS__ },                                               \
                MN_COUNTOF(((const int32_t[]){ __VA_ARGS__ })), special, want)

/* Text -> tokens -> the same text, at once and token by token (which shows only whole characters). */
static void expect_round_trip(const mn_tokenizer *t, const char *text, size_t size) {
    mn_token_list list = { 0 };
    mn_text clean = { 0 };
    char *back = NULL;
    size_t back_size = 0, n = 0;
    assert_int_equal(mn_tokenizer_encode(t, text, size, false, &list), MN_OK);
    assert_int_equal(mn_tokenizer_decode(t, list.ids, list.count, true, &back, &back_size), MN_OK);
    assert_int_equal(back_size, size);
    assert_memory_equal(back, text, size);
    assert_int_equal(mn_text_add_utf8(&clean, text, size), MN_OK);
    const size_t room = 3 * size + 16;
    char *out = malloc(room);
    mn_stream_decoder decoder = { 0 };
    for (int64_t i = 0; i < list.count; i++) {
        assert_int_equal(mn_tokenizer_stream(t, &decoder, list.ids[i], out, room, &n), MN_OK);
        assert_int_equal(mn_utf8_valid(out, n), n);
    }
    assert_int_equal(mn_tokenizer_stream(t, &decoder, -1, out, room, &n), MN_OK);
    assert_int_equal(n, clean.size);
    assert_memory_equal(out, clean.bytes, n);
    free(out);
    free(back);
    mn_text_free(&clean);
    mn_token_list_free(&list);
}

/* Draw `index`: bytes of any kind, or UTF-8 with many kinds of characters. */
static size_t random_text(char *out, size_t most, uint64_t index, bool utf8) {
    static const uint32_t starts[] = { 0x20, 0x20, 0x20, 0x61, 0x30, 0x0A, 0xC0, 0x300, 0x3B1,
                                       0x5D0, 0x1100, 0x2000, 0x3040, 0x4E00, 0xAC00, 0x1F600 };
    size_t n = 0;
    const size_t wanted = 1 + mn_rng_bits(11, index, 0) % most;
    for (uint64_t i = 1; n + 4 <= wanted; i++) {
        const uint64_t bits = mn_rng_bits(11, index, i);
        const uint32_t start = starts[bits % MN_COUNTOF(starts)];
        if (!utf8) out[n++] = (char)bits;
        else n += (size_t)mn_utf8_put(out + n, start + (uint32_t)(bits >> 32) % 40);
    }
    return n;
}

#define BYTE_RULES                                                                                 \
    "'pre_tokenizer':{'type':'ByteLevel','add_prefix_space':false,'use_regex':true},"              \
    "'decoder':{'type':'ByteLevel'},"

/* ---- bytes and characters -------------------------------------------------------------------- */

static void bytes_are_their_numbers(void **state) {
    (void)state;
    mn_tokenizer *t = NULL;
    assert_int_equal(mn_tokenizer_bytes(&t), MN_OK);
    assert_string_equal(mn_tokenizer_kind(t), "bytes");
    assert_int_equal(mn_tokenizer_size(t), 256);
    assert_int_equal(mn_tokenizer_bos(t), -1);
    assert_int_equal(mn_tokenizer_eos(t), -1);
    EXPECT(t, "A \xC3\xA9\n", true, 65, 32, 0xC3, 0xA9, 10);
    assert_int_equal(mn_tokenizer_find(t, "A"), 65);
    assert_int_equal(mn_tokenizer_find(t, "\n"), 10);
    assert_int_equal(mn_tokenizer_find(t, "AB"), -1);
    for (uint64_t i = 0; i < 300; i++) {
        char text[200];
        expect_round_trip(t, text, random_text(text, sizeof text, i, i % 3 == 0));
    }
    expect_round_trip(t, "zero\0byte", 9);
    mn_tokenizer_destroy(t);
    mn_tokenizer_destroy(NULL);
}

static void characters_are_in_order(void **state) {
    (void)state;
    mn_tokenizer *t = NULL;
    mn_token_list list = { 0 };
    assert_int_equal(mn_tokenizer_chars(&t, "b\xC3\xA9" "a b\xE2\x82\xAC", 9), MN_OK);
    assert_string_equal(mn_tokenizer_kind(t), "chars");
    assert_int_equal(mn_tokenizer_size(t), 5);                // blank a b e-acute euro
    EXPECT(t, "ab \xE2\x82\xAC\xC3\xA9", true, 1, 2, 0, 4, 3);
    EXPECT_TEXT(t, true, "ba \xE2\x82\xAC", 2, 1, 0, 4);
    assert_fails(mn_tokenizer_encode(t, "abXb", 4, true, &list), MN_ERR_ARGUMENT, "U+0058",
                 "byte 2");
    assert_fails(mn_tokenizer_encode(t, "ab\xFF", 3, true, &list), MN_ERR_ARGUMENT, "U+FFFD",
                 "byte 2");
    assert_int_equal(list.count, 0);                          // as it was
    mn_token_list_free(&list);
    mn_tokenizer_destroy(t);
    assert_fails(mn_tokenizer_chars(&t, "a\xC3", 2), MN_ERR_FORMAT, "byte 1", "not UTF-8");
    assert_null(t);
    assert_fails(mn_tokenizer_chars(&t, "ab\0c", 4), MN_ERR_FORMAT, "byte 2", "zero");
    assert_fails(mn_tokenizer_chars(&t, "", 0), MN_ERR_ARGUMENT, "empty text", "");
}

/* ---- families ---------------------------------------------------------------------------------- */

/* GPT-2: blanks lead words; U+0120 stands for one. */
static const char gpt2[] = "{" BYTE_RULES
    "'added_tokens':[{'id':12,'content':'<|endoftext|>','special':true,'normalized':false}],"
    "'model':{'type':'BPE','vocab':{'l':0,'o':1,'w':2,'e':3,'r':4,'\u0120':5,'lo':6,'low':7,"
    "'er':8,'\u0120low':9,'!':10,'\u010A':11},'merges':['l o','lo w','e r','\u0120 low']}}";

static void gpt2_in_small(void **state) {
    (void)state;
    mn_tokenizer *t = made(gpt2);
    assert_string_equal(mn_tokenizer_kind(t), "bpe");
    assert_int_equal(mn_tokenizer_size(t), 13);
    EXPECT(t, "low lower!", true, 7, 9, 8, 10);
    EXPECT(t, "  low\n", true, 5, 9, 11);                     // the last blank belongs to the word
    EXPECT(t, "lol", true, 6, 0);
    EXPECT(t, "low<|endoftext|>er", true, 7, 12, 8);
    EXPECT(t, "low?er", true, 7, 8);                          // no token, no unknown token: nothing
    EXPECT_TEXT(t, false, "low lower", 7, 9, 12, 8);
    EXPECT_TEXT(t, true, "low low<|endoftext|>er", 7, 9, 12, 8);
    assert_int_equal(mn_tokenizer_find(t, "\u0120low"), 9);   // as spelt, and as text
    assert_int_equal(mn_tokenizer_find(t, " low"), 9);
    assert_int_equal(mn_tokenizer_find(t, "<|endoftext|>"), 12);
    assert_int_equal(mn_tokenizer_eos(t), 12);
    assert_int_equal(mn_tokenizer_bos(t), -1);
    mn_tokenizer_destroy(t);
}

/* Llama 2: blanks become U+2581, one in front of all; unknown characters become bytes. */
static const char llama2[] =
    "{'normalizer':{'type':'Sequence','normalizers':[{'type':'Prepend','prepend':'\u2581'},"
    "{'type':'Replace','pattern':{'String':' '},'content':'\u2581'}]},"
    "'added_tokens':[{'id':0,'content':'<unk>','special':true,'normalized':false},"
    "{'id':1,'content':'<s>','special':true,'normalized':false}],"
    "'post_processor':{'type':'TemplateProcessing','single':[{'SpecialToken':{'id':'<s>'}},"
    "{'Sequence':{'id':'A'}}],'special_tokens':{'<s>':{'id':'<s>','ids':[1],'tokens':['<s>']}}},"
    "'decoder':{'type':'Sequence','decoders':[{'type':'Replace','pattern':{'String':'\u2581'},"
    "'content':' '},{'type':'ByteFallback'},{'type':'Fuse'},"
    "{'type':'Strip','content':' ','start':1,'stop':0}]},"
    "'model':{'type':'BPE','byte_fallback':true,'fuse_unk':true,'unk_token':'<unk>',"
    "'vocab':{'<unk>':0,'<s>':1,'<0xC3>':2,'<0xA9>':3,'<0xE2>':4,'\u2581':5,'a':6,'b':7,"
    "'\u2581a':8,'ab':9,'\u2581ab':10,'<0x82>':11},"
    "'merges':['\u2581 a','a b','\u2581 ab']}}";

static void llama2_in_small(void **state) {
    (void)state;
    mn_tokenizer *t = made(llama2);
    EXPECT(t, "ab b", true, 1, 8, 7, 5, 7);                   // blank-a ranks above a-b
    EXPECT(t, "bab", true, 1, 5, 7, 9);
    EXPECT(t, "ab b", false, 8, 7, 5, 7);
    EXPECT(t, "\u00E9", false, 5, 2, 3);
    EXPECT(t, "a\u20ACxyb", false, 8, 0, 7);                  // one byte token is missing: unknown
    EXPECT(t, "<s>a", false, 5, 0, 6);                        // as plain text: unknown, fused
    EXPECT(t, "<s>a", true, 1, 1, 8);
    EXPECT(t, "a\xFF" "b", false, 8, 0, 7);                   // U+FFFD, which is unknown
    EXPECT_TEXT(t, false, "ab b", 1, 8, 7, 5, 7);
    EXPECT_TEXT(t, true, "<s> ab", 1, 8, 7);                  // one blank is taken off the front
    EXPECT_TEXT(t, true, "a\u00E9", 8, 2, 3);
    EXPECT_TEXT(t, true, "a\uFFFD\uFFFD" "b", 8, 2, 4, 7);    // bytes that make no character
    assert_int_equal(mn_tokenizer_bos(t), 1);
    mn_tokenizer_destroy(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_are_their_numbers),
        cmocka_unit_test(characters_are_in_order),
        cmocka_unit_test(gpt2_in_small),
        cmocka_unit_test(llama2_in_small),
    };
    return cmocka_run_group_tests_name("tokenizer", tests, make_folder, remove_folder);
}
