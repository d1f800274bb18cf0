/* test_tokenizer.c - tokenizers: small ones of each family with known ids, round trips, merges
 * against a plain reference, training, streaming, files, threads.
 *
 * Documents are written with ' for " so that they can be read. */
// labels: sanitize threads
#define _XOPEN_SOURCE 700
#include "tokenizer/tokenizer.h"

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
#include "base/utf8.h"
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

/* Text -> tokens -> the same text, at once and token by token (only whole characters show). */
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

/* ---- families -------------------------------------------------------------------------------- */

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

/* Llama 3: a pattern of its own, whole pieces before merges, texts start with a token. */
static void llama3_in_small(void **state) {
    (void)state;
    mn_tokenizer *t = made(
        "{'added_tokens':[{'id':9,'content':'<|begin_of_text|>','special':true},"
        "{'id':10,'content':'<|end_of_text|>','special':true}],"
        "'pre_tokenizer':{'type':'Sequence','pretokenizers':[{'type':'Split','pattern':{'Regex':"
        "'\\\\p{L}+|\\\\p{N}{1,3}|\\\\s+(?!\\\\S)|[^\\\\S\\\\r\\\\n]|\\\\n'},"
        "'behavior':'Isolated'},"
        "{'type':'ByteLevel','add_prefix_space':false,'use_regex':false}]},"
        "'post_processor':{'type':'Sequence','processors':[{'type':'ByteLevel'},"
        "{'type':'TemplateProcessing','single':[{'SpecialToken':{'id':'B'}},"
        "{'Sequence':{'id':'A'}}],'special_tokens':{'B':{'ids':[9]}}}]},"
        "'decoder':{'type':'ByteLevel'},"
        "'model':{'type':'BPE','ignore_merges':true,'vocab':{'a':0,'b':1,'ab':2,'aba':3,'1':4,"
        "'11':5,'\u0120':6,'\u010A':7,'\u0120\u0120':8},"
        "'merges':[['1','1'],['a','b']]}}");
    EXPECT(t, "abab", true, 9, 2, 2);
    EXPECT(t, "aba", true, 9, 3);                             // no merge leads to it
    EXPECT(t, "1111", false, 5, 4, 4);                        // 111 and 1
    EXPECT(t, "a   a\n", false, 0, 8, 6, 0, 7);
    EXPECT_TEXT(t, false, "aba 11", 9, 3, 6, 5, 10);
    assert_int_equal(mn_tokenizer_bos(t), 9);
    assert_int_equal(mn_tokenizer_eos(t), 10);
    mn_tokenizer_destroy(t);
}

/* Qwen 2: NFC first, digits one by one. */
static void qwen2_in_small(void **state) {
    (void)state;
    mn_tokenizer *t = made(
        "{'normalizer':{'type':'NFC'},'added_tokens':[{'id':5,'content':'<|im_end|>',"
        "'special':true},{'id':6,'content':'\u00E9\u00E9','special':false,'normalized':true}],"
        "'pre_tokenizer':{'type':'Sequence','pretokenizers':[{'type':'Split','pattern':{'Regex':"
        "'\\\\p{L}+|\\\\p{N}'},'behavior':'Isolated'},{'type':'ByteLevel',"
        "'add_prefix_space':false,'use_regex':false}]},'decoder':{'type':'ByteLevel'},"
        "'model':{'type':'BPE','vocab':{'\u00C3':0,'\u00A9':1,'\u00C3\u00A9':2,'1':3,'11':4},"
        "'merges':['\u00C3 \u00A9','1 1']}}");
    EXPECT(t, "e\u0301", true, 2);
    EXPECT(t, "\u00E9", true, 2);
    EXPECT(t, "11", true, 3, 3);
    EXPECT(t, "e\u0301\u00E9<|im_end|>", true, 6, 5);         // found in the normalised text
    EXPECT_TEXT(t, true, "\u00E9<|im_end|>", 2, 5);
    assert_int_equal(mn_tokenizer_eos(t), 5);
    mn_tokenizer_destroy(t);
}

/* Falcon: ByteLevel is not the last stage: later ones see the characters that stand for bytes. */
static void stages_in_any_order(void **state) {
    (void)state;
    mn_tokenizer *t = made(
        "{'pre_tokenizer':{'type':'Sequence','pretokenizers':[{'type':'ByteLevel',"
        "'add_prefix_space':true},{'type':'Digits','individual_digits':true}]},"
        "'decoder':{'type':'ByteLevel'},'model':{'type':'BPE','vocab':{'1':0,'\u0120':1,'a':2,"
        "'\u00C2':3,'\u00B2':4,'11':5,'\u0120a':6,'\u00C2\u00B2':7,'\u01201':8},"
        "'merges':['1 1','\u0120 a','\u00C2 \u00B2','\u0120 1']}}");
    EXPECT(t, "a11", true, 6, 0, 0);
    EXPECT(t, " 1", true, 1, 0);
    EXPECT(t, "\u00B2", true, 1, 3, 4);                       // the second byte is spelt as a digit
    EXPECT(t, "a\xC2", true, 6, 3);                           // no text, kept
    mn_tokenizer_destroy(t);
}

static mn_tokenizer *with_splitter(const char *splitter) {
    char document[1024];
    snprintf(document, sizeof document,
             "{'pre_tokenizer':%s,'decoder':{'type':'Fuse'},'model':{'vocab':{'a':0,'-':1,'a-':2,"
             "'-a':3,'--':4,'\u2581':5,'\u2581a':6,'1':7,'11':8,' ':9,'aa':10,'-1':11},"
             "'merges':['a -','- a','- -','\u2581 a','1 1','a a','- 1']}}", splitter);
    return made(document);
}

static void splitters_cut_where_they_say(void **state) {
    (void)state;
    static const struct {
        const char *splitter, *text;
        int32_t ids[8];
        int count;
    } rows[] = {
        { "{'type':'Split','pattern':{'String':'-'},'behavior':'Isolated','invert':false}",
          "a--a", { 0, 1, 1, 0 }, 4 },
        { "{'type':'Split','pattern':{'String':'-'},'behavior':'Removed','invert':false}",
          "a--a", { 0, 0 }, 2 },
        { "{'type':'Split','pattern':{'String':'-'},'behavior':'Removed','invert':true}",
          "a--a", { 1, 1 }, 2 },
        { "{'type':'Split','pattern':{'String':'-'},'behavior':'MergedWithPrevious'}",
          "a--a", { 2, 1, 0 }, 3 },
        { "{'type':'Split','pattern':{'String':'-'},'behavior':'MergedWithNext'}",
          "a--a", { 0, 1, 3 }, 3 },
        { "{'type':'Split','pattern':{'String':'-'},'behavior':'Contiguous'}",
          "a--a", { 0, 4, 0 }, 3 },
        { "{'type':'Whitespace'}", "a- 11", { 0, 1, 8 }, 3 },
        { "{'type':'WhitespaceSplit'}", "a-\t11", { 2, 8 }, 2 },
        { "{'type':'Digits','individual_digits':true}", "-11", { 1, 7, 7 }, 3 },
        { "{'type':'Digits','individual_digits':false}", "-11", { 1, 8 }, 2 },
        { "{'type':'Punctuation'}", "a--", { 0, 1, 1 }, 3 },
        { "{'type':'Punctuation','behavior':'Contiguous'}", "a--", { 0, 4 }, 2 },
        { "{'type':'CharDelimiterSplit','delimiter':'-'}", "a-a", { 0, 0 }, 2 },
        { "{'type':'Metaspace','replacement':'\u2581','prepend_scheme':'always'}", "a a",
          { 6, 6 }, 2 },
        { "{'type':'Metaspace','replacement':'\u2581','prepend_scheme':'never'}", "a a",
          { 0, 6 }, 2 },
        { "{'type':'Metaspace','replacement':'\u2581','add_prefix_space':true}", " a", { 6 }, 1 },
        { "null", "a--a", { 2, 3 }, 2 },
    };
    for (size_t i = 0; i < MN_COUNTOF(rows); i++) {
        mn_tokenizer *t = with_splitter(rows[i].splitter);
        expect(t, rows[i].text, true, rows[i].ids, rows[i].count);
        mn_tokenizer_destroy(t);
    }
}

static void added_tokens_stand_as_they_ask(void **state) {
    (void)state;
    mn_tokenizer *t = made(
        "{'added_tokens':[{'id':3,'content':'<m>','lstrip':true,'special':true},"
        "{'id':4,'content':'<n>','rstrip':true,'special':true},"
        "{'id':5,'content':'cat','single_word':true},{'id':6,'content':'<m><','normalized':false},"
        "{'id':7,'content':'\u3000','normalized':false}],"
        "'decoder':{'type':'Fuse'},'model':{'vocab':{'c':0,'a':1,'t':2,' ':8,'<':9,'n':10,'>':11},"
        "'merges':[]}}");
    EXPECT(t, "a  <m> a", true, 1, 3, 8, 1);
    EXPECT(t, "a <n>  a", true, 1, 8, 4, 1);
    EXPECT(t, "a  <m><", true, 1, 8, 8, 6);                   // the longest that fits
    EXPECT(t, "cat", true, 5);
    EXPECT(t, "a cat<cat", true, 1, 8, 5, 9, 5);
    EXPECT(t, "cata", true, 0, 1, 2, 1);
    EXPECT(t, "tcat", true, 2, 0, 1, 2);
    EXPECT(t, "a<n>", false, 1, 9, 10, 11);                   // special ones are plain text now
    EXPECT(t, "cat", false, 5);                               // others are not
    EXPECT(t, "<n>\u3000a", true, 4, 7, 1);                   // swallowed, and a token all the same
    mn_token_list list = { 0 };
    assert_fails(mn_tokenizer_encode(t, "cat a!", 6, true, &list), MN_ERR_ARGUMENT, "U+0021",
                 "byte 5");
    mn_token_list_free(&list);
    mn_tokenizer_destroy(t);
}

/* The text of an added token may be that of a byte-level token, which is spelt otherwise. */
static void added_tokens_are_no_spelt_bytes(void **state) {
    (void)state;
    mn_tokenizer *t = made(
        "{" BYTE_RULES "'added_tokens':[{'id':3,'content':'  ','normalized':false}],"
        "'model':{'vocab':{'\u0120':0,'a':1,'\u0120\u0120':2},'merges':['\u0120 \u0120']}}");
    EXPECT(t, "a   a", true, 1, 3, 0, 1);
    EXPECT(t, "a  ", false, 1, 3);
    EXPECT_TEXT(t, true, "a  a  ", 1, 3, 1, 2);
    mn_tokenizer_destroy(t);
}

static void unknown_characters(void **state) {
    (void)state;
    static const char *const fused[] = { "false", "true" };
    for (int i = 0; i < 2; i++) {
        char document[256];
        snprintf(document, sizeof document,
                 "{'model':{'vocab':{'<unk>':0,'a':1},'merges':[],'unk_token':'<unk>','fuse_unk':%s"
                 "}}", fused[i]);
        mn_tokenizer *t = made(document);
        if (i == 0) EXPECT(t, "xya", true, 0, 0, 1);
        else EXPECT(t, "xya", true, 0, 1);
        EXPECT_TEXT(t, true, "<unk> a", 0, 1);                // no decoder: words
        mn_tokenizer_destroy(t);
    }
}

static void decoders_do_as_they_say(void **state) {
    (void)state;
    static const struct {
        const char *decoder, *text;
    } rows[] = {
        { "{'type':'Fuse'}", "\u2581a\u2581b<0xC3><0xA9><0xC3>" },
        { "{'type':'ByteFallback'}", "\u2581a\u2581b\uFFFD\uFFFD\uFFFD" },
        { "{'type':'Metaspace','replacement':'\u2581','prepend_scheme':'always'}",
          "a b<0xC3><0xA9><0xC3>" },
        { "{'type':'Metaspace','replacement':'\u2581','prepend_scheme':'never'}",
          " a b<0xC3><0xA9><0xC3>" },
        { "{'type':'Replace','pattern':{'Regex':'[ab]'},'content':'x'}",
          "\u2581x\u2581x<0xC3><0xA9><0xC3>" },
        { "{'type':'Strip','content':'\u2581','start':1,'stop':0}", "ab<0xC3><0xA9><0xC3>" },
        { "{'type':'Strip','content':'>','start':0,'stop':1}",
          "\u2581a\u2581b<0xC3<0xA9<0xC3" },
        { "null", "\u2581a \u2581b <0xC3> <0xA9> <0xC3>" },
    };
    for (size_t i = 0; i < MN_COUNTOF(rows); i++) {
        char document[512];
        snprintf(document, sizeof document,
                 "{'decoder':%s,'model':{'vocab':{'\u2581a':0,'\u2581b':1,'<0xC3>':2,'<0xA9>':3},"
                 "'merges':[]}}", rows[i].decoder);
        mn_tokenizer *t = made(document);
        EXPECT_TEXT(t, true, rows[i].text, 0, 1, 2, 3, 2);
        mn_tokenizer_destroy(t);
    }
}

/* ---- merges ---------------------------------------------------------------------------------- */

static void merges_go_by_rank_then_place(void **state) {
    (void)state;
    mn_tokenizer *t = made("{'model':{'vocab':{'a':0,'b':1,'c':2,'bc':3,'ab':4,'aa':5,'aaa':6},"
                           "'merges':['b c','a b','a a','aa a']}}");
    EXPECT(t, "abc", true, 0, 3);
    EXPECT(t, "aab", true, 0, 4);
    EXPECT(t, "aaa", true, 6);
    EXPECT(t, "aaaa", true, 5, 5);
    EXPECT(t, "aaaaa", true, 5, 6);
    mn_tokenizer_destroy(t);
}

enum { LETTERS = 3, RANDOM_MERGES = 40 };

/* Random merges over a few letters; token i is the text tokens[i]. */
typedef struct random_bpe {
    char tokens[LETTERS + RANDOM_MERGES][80];
    int left[RANDOM_MERGES], right[RANDOM_MERGES], count;
} random_bpe;

static mn_tokenizer *random_merges(random_bpe *r, uint64_t seed) {
    mn_text vocab = { 0 }, merges = { 0 };
    char row[200];
    r->count = LETTERS;
    for (int i = 0; i < LETTERS; i++) {
        snprintf(r->tokens[i], sizeof r->tokens[i], "%c", 'a' + i);
        const int n = snprintf(row, sizeof row, "%s'%c':%d", i ? "," : "", 'a' + i, i);
        mn_text_add(&vocab, row, (size_t)n);
    }
    for (uint64_t i = 0; r->count < LETTERS + RANDOM_MERGES; i++) {
        const uint64_t bits = mn_rng_bits(seed, 3, i);
        const uint64_t n_now = (uint64_t)r->count;
        const int a = (int)(bits % n_now), b = (int)((bits >> 32) % n_now);
        char both[160];
        snprintf(both, sizeof both, "%s%s", r->tokens[a], r->tokens[b]);
        bool known = strlen(both) > 12;
        for (int k = 0; k < r->count; k++) known = known || strcmp(r->tokens[k], both) == 0;
        if (known) continue;
        const int m = r->count - LETTERS;
        r->left[m] = a;
        r->right[m] = b;
        strcpy(r->tokens[r->count], both);
        int n = snprintf(row, sizeof row, ",'%s':%d", both, r->count++);
        mn_text_add(&vocab, row, (size_t)n);
        n = snprintf(row, sizeof row, "%s'%s %s'", m ? "," : "", r->tokens[a], r->tokens[b]);
        mn_text_add(&merges, row, (size_t)n);
    }
    char *document = malloc(vocab.size + merges.size + 100);
    sprintf(document, "{'model':{'vocab':{%.*s},'merges':[%.*s]}}", (int)vocab.size, vocab.bytes,
            (int)merges.size, merges.bytes);
    mn_tokenizer *t = made(document);
    free(document);
    mn_text_free(&vocab);
    mn_text_free(&merges);
    return t;
}

/* The definition: the merge of lowest rank that applies, leftmost, until none does. */
static int64_t merge_plainly(const random_bpe *r, int32_t *ids, int64_t count) {
    for (int m = 0; m < RANDOM_MERGES; m++) {
        for (int64_t i = 0; i + 1 < count; i++) {
            if (ids[i] != r->left[m] || ids[i + 1] != r->right[m]) continue;
            ids[i] = LETTERS + m;
            memmove(ids + i + 1, ids + i + 2, (size_t)(count - i - 2) * sizeof *ids);
            count--;
            m = -1;                                           // from the lowest rank again
            break;
        }
    }
    return count;
}

static void long_and_short_pieces_merge_alike(void **state) {
    (void)state;
    for (uint64_t seed = 0; seed < 60; seed++) {
        random_bpe r;
        mn_tokenizer *t = random_merges(&r, seed);
        for (uint64_t n = 1; n < 220; n += 1 + n / 8) {
            char text[256];
            int32_t ids[256];
            for (uint64_t i = 0; i < n; i++) {
                ids[i] = (int32_t)(mn_rng_bits(seed, 4 + n, i) % LETTERS);
                text[i] = (char)('a' + ids[i]);
            }
            text[n] = 0;
            const int64_t count = merge_plainly(&r, ids, (int64_t)n);
            expect(t, text, true, ids, count);
        }
        mn_tokenizer_destroy(t);
    }
}

static void both_spellings_of_merges_are_one(void **state) {
    (void)state;
    mn_tokenizer *a = made("{'model':{'vocab':{'a':0,'b':1,'ab':2},'merges':['a b']}}");
    mn_tokenizer *b = made("{ 'model': { 'merges': [['a', 'b']], 'type': 'BPE',"
                           "'vocab': {'b': 1, 'ab': 2, 'a': 0} }, 'normalizer': null }");
    mn_tokenizer *c = made("{'model':{'vocab':{'a':0,'b':2,'ab':1},'merges':['a b']}}");
    mn_tokenizer *d = made("{'model':{'vocab':{'a':0,'b':1,'ab':2},'merges':[]}}");
    mn_tokenizer *e = made("{'normalizer':{'type':'NFC'},'model':{'vocab':{'a':0,'b':1,'ab':2},"
                           "'merges':['a b']}}");
    assert_true(mn_tokenizer_fingerprint(a) == mn_tokenizer_fingerprint(b));
    assert_true(mn_tokenizer_fingerprint(a) != mn_tokenizer_fingerprint(c));
    assert_true(mn_tokenizer_fingerprint(a) != mn_tokenizer_fingerprint(d));
    assert_true(mn_tokenizer_fingerprint(a) != mn_tokenizer_fingerprint(e));
    EXPECT(b, "ab", true, 2);
    mn_tokenizer_destroy(a);
    mn_tokenizer_destroy(b);
    mn_tokenizer_destroy(c);
    mn_tokenizer_destroy(d);
    mn_tokenizer_destroy(e);
}

/* ---- training -------------------------------------------------------------------------------- */

static mn_tokenizer *trained(const mn_tokenizer_training *how, const char *text) {
    const size_t size = strlen(text);
    mn_tokenizer *t = NULL;
    if (mn_tokenizer_train(&t, how, &text, &size, 1) != MN_OK) fail_msg("%s", mn_last_error());
    return t;
}

/* low x5, lower x2, newest x6, widest x3: the example of the paper on BPE, with blanks. */
static const char words[] = "low low low low low lower lower newest newest newest newest newest "
                            "newest widest widest widest";

static void training_takes_the_most_frequent_pair(void **state) {
    (void)state;
    static const char *const special[] = { "<|a|>", "<|b|>", NULL };
    const mn_tokenizer_training how = { .vocab_size = 2 + 256 + 6, .special = special };
    mn_tokenizer *t = trained(&how, words);
    assert_int_equal(mn_tokenizer_size(t), 264);
    assert_int_equal(mn_tokenizer_find(t, "<|a|>"), 0);
    assert_int_equal(mn_tokenizer_find(t, "<|b|>"), 1);
    assert_int_equal(mn_tokenizer_find(t, "!"), 2);           // first of the printable bytes
    /* es 9, est 9 (before lo 7 and others); then " n" and its like at 6 follow lo, low at 7. */
    assert_int_equal(mn_tokenizer_find(t, "es"), 258);
    assert_int_equal(mn_tokenizer_find(t, "est"), 259);
    assert_int_equal(mn_tokenizer_find(t, "lo"), 260);
    assert_int_equal(mn_tokenizer_find(t, "low"), 261);
    EXPECT(t, "<|b|>est", true, 1, 259);
    mn_tokenizer_destroy(t);
}

static void training_is_repeatable_and_reversible(void **state) {
    (void)state;
    static const char *const patterns[] = { NULL, "gpt2", "llama3", "qwen2" };
    char text[6000];
    const size_t size = random_text(text, sizeof text, 77, true);
    const char *const texts[] = { text, words };
    const size_t sizes[] = { size, strlen(words) };
    for (size_t i = 0; i < MN_COUNTOF(patterns); i++) {
        const mn_tokenizer_training how = { .vocab_size = 400, .pattern = patterns[i] };
        mn_tokenizer *a = NULL, *b = NULL;
        assert_int_equal(mn_tokenizer_train(&a, &how, texts, sizes, 2), MN_OK);
        assert_int_equal(mn_tokenizer_train(&b, &how, texts, sizes, 2), MN_OK);
        assert_true(mn_tokenizer_fingerprint(a) == mn_tokenizer_fingerprint(b));
        const bool normalises = i == 3;
        for (uint64_t k = 0; k < 100 && !normalises; k++) {
            char some[300];
            expect_round_trip(a, some, random_text(some, sizeof some, k, k % 2 == 0));
        }
        mn_tokenizer_destroy(a);
        mn_tokenizer_destroy(b);
    }
}

static void special_tokens_teach_nothing(void **state) {
    (void)state;
    static const char *const special[] = { "<|x|>", NULL };
    const mn_tokenizer_training how = { .vocab_size = 300, .special = special };
    mn_tokenizer *t = trained(&how, "ab<|x|>ab<|x|>ab<|x|>ab\xFF\xFF\xFF\xFF");
    assert_int_equal(mn_tokenizer_size(t), 258);              // ab alone
    EXPECT(t, "ab<|x|>", true, 257, 0);
    mn_tokenizer_destroy(t);
}

static bool stop_at_once(void *context, int64_t done, int64_t all) {
    ++*(int *)context;
    return done < 0 || all < 0;
}

static void training_says_what_is_wrong(void **state) {
    (void)state;
    static const char *const twice[] = { "<x>", "<x>", NULL }, *const byte[] = { "a", NULL };
    static const char *const empty[] = { "", NULL };
    const char *text = words;
    const size_t size = strlen(words);
    mn_tokenizer *t = NULL;
    int calls = 0;
    mn_tokenizer_training how = { .vocab_size = 255 };
    assert_fails(mn_tokenizer_train(&t, &how, &text, &size, 1), MN_ERR_ARGUMENT, "255", "256");
    how.vocab_size = INT64_MAX;
    assert_fails(mn_tokenizer_train(&t, &how, &text, &size, 1), MN_ERR_ARGUMENT, "size", "between");
    how.vocab_size = 300;
    how.pattern = "gpt9";
    assert_fails(mn_tokenizer_train(&t, &how, &text, &size, 1), MN_ERR_ARGUMENT, "gpt9", "qwen2");
    how.pattern = "gpt2";
    how.special = twice;
    assert_fails(mn_tokenizer_train(&t, &how, &text, &size, 1), MN_ERR_ARGUMENT, "<x>", "twice");
    how.special = empty;
    assert_fails(mn_tokenizer_train(&t, &how, &text, &size, 1), MN_ERR_ARGUMENT, "empty", "");
    how.special = byte;
    assert_fails(mn_tokenizer_train(&t, &how, &text, &size, 1), MN_ERR_ARGUMENT, "\"a\"", "byte");
    char many[4000];
    random_text(many, sizeof many, 5, true);
    how = (mn_tokenizer_training){ .vocab_size = 2000, .min_count = 1, .progress = stop_at_once,
                                   .context = &calls };
    text = many;
    assert_fails(mn_tokenizer_train(&t, &how, &text, &(size_t){ 3000 }, 1), MN_ERR_ARGUMENT,
                 "stopped", "");
    assert_int_equal(calls, 1);
    assert_null(t);
}

static void no_text_gives_bytes(void **state) {
    (void)state;
    const mn_tokenizer_training how = { .vocab_size = 1000 };
    mn_tokenizer *t = NULL;
    assert_int_equal(mn_tokenizer_train(&t, &how, NULL, NULL, 0), MN_OK);
    assert_int_equal(mn_tokenizer_size(t), 256);
    expect_round_trip(t, "any \xFF text", 10);
    mn_tokenizer_destroy(t);
}

/* ---- streaming ------------------------------------------------------------------------------- */

static void streams_hold_back_parts_of_characters(void **state) {
    (void)state;
    mn_tokenizer *t = NULL;
    mn_stream_decoder decoder = { 0 };
    char out[16];
    size_t n = 0;
    assert_int_equal(mn_tokenizer_bytes(&t), MN_OK);
    for (int i = 0; i < 3; i++) {                             // U+1F600
        assert_int_equal(mn_tokenizer_stream(t, &decoder, (uint8_t)"\xF0\x9F\x98\x80"[i], out,
                                             sizeof out, &n), MN_OK);
        assert_int_equal(n, 0);
    }
    const mn_stream_decoder before = decoder;
    assert_fails(mn_tokenizer_stream(t, &decoder, 0x80, out, 3, &n), MN_ERR_ARGUMENT, "4 bytes",
                 "3 are left");
    assert_memory_equal(&decoder, &before, sizeof decoder);   // nothing is lost
    assert_int_equal(mn_tokenizer_stream(t, &decoder, 0x80, out, 4, &n), MN_OK);
    assert_int_equal(n, 4);
    assert_memory_equal(out, "\xF0\x9F\x98\x80", 4);
    n = 0;
    assert_int_equal(mn_tokenizer_stream(t, &decoder, 0xE2, out, sizeof out, &n), MN_OK);
    assert_int_equal(mn_tokenizer_stream(t, &decoder, 'a', out, sizeof out, &n), MN_OK);
    assert_int_equal(mn_tokenizer_stream(t, &decoder, 0xE2, out, sizeof out, &n), MN_OK);
    assert_int_equal(mn_tokenizer_stream(t, &decoder, -1, out, sizeof out, &n), MN_OK);
    assert_int_equal(n, 7);
    assert_memory_equal(out, "\xEF\xBF\xBD" "a\xEF\xBF\xBD", 7);
    assert_fails(mn_tokenizer_stream(t, &decoder, 256, out, sizeof out, &n), MN_ERR_ARGUMENT, "256",
                 "not in the vocabulary");
    mn_tokenizer_destroy(t);
}

static void streams_give_what_decoding_gives(void **state) {
    (void)state;
    static const int32_t ids[] = { 1, 8, 9, 2, 3, 7, 1, 8, 5, 5, 7 };
    mn_tokenizer *t = made(llama2);
    mn_stream_decoder decoder = { 0 };
    char out[64], *text = NULL;
    size_t n = 0, size = 0;
    for (size_t i = 0; i < MN_COUNTOF(ids); i++) {
        assert_int_equal(mn_tokenizer_stream(t, &decoder, ids[i], out, sizeof out, &n), MN_OK);
    }
    assert_int_equal(mn_tokenizer_decode(t, ids, MN_COUNTOF(ids), false, &text, &size), MN_OK);
    assert_int_equal(n, size);
    assert_memory_equal(out, text, n);
    assert_string_equal(text, "aab\u00E9" "b a  b");
    free(text);
    mn_tokenizer_destroy(t);
}

/* ---- files ----------------------------------------------------------------------------------- */

static void write_quoted(const char *path, const char *document) {
    char *text = quoted(document);
    write_file(path, text, strlen(text));
    free(text);
}

static void files_and_folders(void **state) {
    (void)state;
    mn_tokenizer *t = NULL, *again = NULL;
    write_quoted(in_folder("tokenizer.json"), gpt2);
    assert_int_equal(mn_tokenizer_load(&t, in_folder("")), MN_OK);
    assert_int_equal(mn_tokenizer_eos(t), 12);
    assert_int_equal(mn_tokenizer_save(t, in_folder("copy.json")), MN_OK);
    assert_int_equal(mn_tokenizer_load(&again, in_folder("copy.json")), MN_OK);
    assert_true(mn_tokenizer_fingerprint(t) == mn_tokenizer_fingerprint(again));
    EXPECT(again, "low lower!", true, 7, 9, 8, 10);
    mn_tokenizer_destroy(t);
    mn_tokenizer_destroy(again);

    const char *config = in_folder("tokenizer_config.json");
    write_quoted(config, "{'bos_token':{'content':'<|endoftext|>'},'eos_token':'!',"
                         "'model_max_length':Infinity}");
    assert_int_equal(mn_tokenizer_load(&t, in_folder("tokenizer.json")), MN_OK);
    assert_int_equal(mn_tokenizer_bos(t), 12);
    assert_int_equal(mn_tokenizer_eos(t), 10);
    mn_tokenizer_destroy(t);
    write_quoted(config, "{'eos_token':null}");
    assert_int_equal(mn_tokenizer_load(&t, in_folder("tokenizer.json")), MN_OK);
    assert_int_equal(mn_tokenizer_eos(t), -1);
    mn_tokenizer_destroy(t);
    write_quoted(config, "{'eos_token':'nowhere'}");
    assert_fails(mn_tokenizer_load(&t, in_folder("tokenizer.json")), MN_ERR_FORMAT,
                 "tokenizer_config.json: eos_token", "\"nowhere\"");
    assert_null(t);
    assert_int_equal(remove(config), 0);
    assert_fails(mn_tokenizer_load(&t, "nowhere.json"), MN_ERR_IO, "nowhere.json", "no such file");
    assert_fails(mn_tokenizer_load(&t, ""), MN_ERR_ARGUMENT, "no name", "");
    assert_fails(mn_tokenizer_load(&t, NULL), MN_ERR_ARGUMENT, "no name", "");
}

static void made_ones_are_saved_and_loaded(void **state) {
    (void)state;
    const mn_tokenizer_training how = { .vocab_size = 264, .pattern = "llama3" };
    mn_tokenizer *t[3] = { NULL }, *back = NULL;
    assert_int_equal(mn_tokenizer_bytes(&t[0]), MN_OK);
    assert_int_equal(mn_tokenizer_chars(&t[1], "quote\"\\\n", 8), MN_OK);
    t[2] = trained(&how, words);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(mn_tokenizer_save(t[i], in_folder("made.json")), MN_OK);
        assert_int_equal(mn_tokenizer_load(&back, in_folder("made.json")), MN_OK);
        assert_true(mn_tokenizer_fingerprint(t[i]) == mn_tokenizer_fingerprint(back));
        assert_string_equal(mn_tokenizer_kind(t[i]), mn_tokenizer_kind(back));
        mn_tokenizer_destroy(back);
        mn_tokenizer_destroy(t[i]);
    }
}

/* ---- normalisers and threads ----------------------------------------------------------------- */

static void normalisers_in_a_tokenizer(void **state) {
    (void)state;
    mn_tokenizer *t = made(
        "{'normalizer':{'type':'Sequence','normalizers':[{'type':'Strip','strip_left':true,"
        "'strip_right':true},{'type':'Lowercase'},{'type':'Replace','pattern':{'Regex':' +'},"
        "'content':'_'},{'type':'NFKC'}]},'decoder':{'type':'Fuse'},"
        "'model':{'vocab':{'a':0,'_':1,'f':2,'i':3,'\u0307':4,'\u03C3':5},'merges':[]}}");
    EXPECT(t, " \u3000 A   a\n", true, 0, 1, 0);
    EXPECT(t, "\uFB01", true, 2, 3);
    EXPECT(t, "A\u0130", true, 0, 3, 4);                      // two characters in lower case
    EXPECT(t, "\u03A3a\u03A3", true, 5, 0, 5);
    mn_tokenizer_destroy(t);
}

static void *encode_often(void *tokenizer) {
    mn_token_list list = { 0 };
    bool fine = true;
    for (int i = 0; i < 300 && fine; i++) {
        list.count = 0;
        fine = mn_tokenizer_encode(tokenizer, words, strlen(words), true, &list) == MN_OK;
        char *text = NULL;
        size_t size = 0;
        fine = fine && mn_tokenizer_decode(tokenizer, list.ids, list.count, true, &text, &size) ==
                           MN_OK && size == strlen(words) && memcmp(text, words, size) == 0;
        free(text);
    }
    mn_token_list_free(&list);
    return fine ? tokenizer : NULL;
}

static void one_tokenizer_serves_many_threads(void **state) {
    (void)state;
    const mn_tokenizer_training how = { .vocab_size = 264 };
    mn_tokenizer *t = trained(&how, words);
    pthread_t threads[4];
    for (size_t i = 0; i < MN_COUNTOF(threads); i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, encode_often, t), 0);
    }
    for (size_t i = 0; i < MN_COUNTOF(threads); i++) {
        void *result = NULL;
        assert_int_equal(pthread_join(threads[i], &result), 0);
        assert_ptr_equal(result, t);
    }
    mn_tokenizer_destroy(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_are_their_numbers),
        cmocka_unit_test(characters_are_in_order),
        cmocka_unit_test(gpt2_in_small),
        cmocka_unit_test(llama2_in_small),
        cmocka_unit_test(llama3_in_small),
        cmocka_unit_test(qwen2_in_small),
        cmocka_unit_test(stages_in_any_order),
        cmocka_unit_test(splitters_cut_where_they_say),
        cmocka_unit_test(added_tokens_stand_as_they_ask),
        cmocka_unit_test(added_tokens_are_no_spelt_bytes),
        cmocka_unit_test(unknown_characters),
        cmocka_unit_test(decoders_do_as_they_say),
        cmocka_unit_test(merges_go_by_rank_then_place),
        cmocka_unit_test(long_and_short_pieces_merge_alike),
        cmocka_unit_test(both_spellings_of_merges_are_one),
        cmocka_unit_test(training_takes_the_most_frequent_pair),
        cmocka_unit_test(training_is_repeatable_and_reversible),
        cmocka_unit_test(special_tokens_teach_nothing),
        cmocka_unit_test(training_says_what_is_wrong),
        cmocka_unit_test(no_text_gives_bytes),
        cmocka_unit_test(streams_hold_back_parts_of_characters),
        cmocka_unit_test(streams_give_what_decoding_gives),
        cmocka_unit_test(files_and_folders),
        cmocka_unit_test(made_ones_are_saved_and_loaded),
        cmocka_unit_test(normalisers_in_a_tokenizer),
        cmocka_unit_test(one_tokenizer_serves_many_threads),
    };
    return cmocka_run_group_tests_name("tokenizer", tests, make_folder, remove_folder);
}
