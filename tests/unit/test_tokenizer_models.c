// labels: sanitize
/* test_tokenizer_models.c - unigram and WordPiece models against ids worked out by hand, the stages
 * of BERT, and which tokens end a text. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/util.h"
#include "support/folder.h"
#include "tokenizer/tokenizer.h"

static char *quoted(const char *text) {
    char *out = strdup(text);
    assert_non_null(out);
    for (char *c = out; *c; c++) {
        if (*c == '\'') *c = '"';
    }
    return out;
}

static mn_tokenizer *made(const char *document) {
    mn_tokenizer *t = NULL;
    char *text = quoted(document);
    if (mn_tokenizer_parse(&t, text, strlen(text), "small.json") != MN_OK) {
        fail_msg("%s", mn_last_error());
    }
    free(text);
    return t;
}

static void expect(const mn_tokenizer *t, const char *text, const int32_t *ids, int64_t count) {
    mn_token_list list = { 0 };
    if (mn_tokenizer_encode(t, text, strlen(text), true, &list) != MN_OK) {
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

#define EXPECT(t, text, ...)                                                                       \
    expect(t, text, (const int32_t[]){ __VA_ARGS__ },                                              \
           MN_COUNTOF(((const int32_t[]){ __VA_ARGS__ })))

static void expect_text(const mn_tokenizer *t, const char *want, const int32_t *ids,
                        int64_t count) {
    char *text = NULL, out[256];
    size_t size = 0, n = 0;
    assert_int_equal(mn_tokenizer_decode(t, ids, count, true, &text, &size), MN_OK);
    assert_string_equal(text, want);
    free(text);
    mn_stream_decoder decoder = { 0 };
    for (int64_t i = 0; i < count; i++) {
        assert_int_equal(mn_tokenizer_stream(t, &decoder, ids[i], out, sizeof out, &n), MN_OK);
    }
    assert_int_equal(n, strlen(want));
    assert_memory_equal(out, want, n);
}

#define EXPECT_TEXT(t, want, ...)                                                                  \
    expect_text(t, want, (const int32_t[]){ __VA_ARGS__ },                                         \
                MN_COUNTOF(((const int32_t[]){ __VA_ARGS__ })))

#define METASPACE                                                                                  \
    "'pre_tokenizer':{'type':'Metaspace','replacement':'\u2581','prepend_scheme':'always',"        \
    "'split':true},'decoder':{'type':'Metaspace','replacement':'\u2581',"                          \
    "'prepend_scheme':'always','split':true},"

static void unigram_takes_the_most_likely(void **state) {
    (void)state;
    mn_tokenizer *t = made("{" METASPACE "'model':{'type':'Unigram','unk_id':0,'vocab':"
                           "[['<unk>',0],['\u2581',-1],['a',-2],['b',-2.5],['ab',-3],['aba',-6],"
                           "['\u2581a',-2.2]]}}");
    assert_string_equal(mn_tokenizer_kind(t), "unigram");
    EXPECT(t, "ab", 1, 4);            // -1 - 3 against -2.2 - 2.5
    EXPECT(t, "aa", 6, 2);            // -2.2 - 2 against -1 - 2 - 2
    EXPECT(t, "aba", 1, 4, 2);        // -1 - 3 - 2 against -2.2 - 2.5 - 2 and -1 - 6
    mn_tokenizer_destroy(t);
}

/* Of two orders of the same tokens the sum that comes out larger in float64 wins, the first where
 * neither does; an unknown character's score is one number, least - 10, before it is added. */
static void unigram_adds_as_the_reference(void **state) {
    (void)state;
    mn_tokenizer *t = made("{" METASPACE "'model':{'type':'Unigram','unk_id':0,'vocab':"
                           "[['<unk>',0],['@',-12.05927137462905],['\u2581',-3.109502537207346],"
                           "['(',-5.88297346571315],['2',-5.286892337530632],"
                           "['0',-5.1367996411068315],['00',-6.349766798524377]]}}");
    EXPECT(t, "xyz(2000", 2, 0, 3, 4, 5, 6);
    mn_tokenizer_destroy(t);
}

static void unknown_characters_of_unigram(void **state) {
    (void)state;
    mn_tokenizer *t = made("{" METASPACE "'model':{'type':'Unigram','unk_id':0,'vocab':"
                           "[['<unk>',0],['\u2581',-1],['a',-2]]}}");
    EXPECT(t, "xya", 1, 0, 2);        // neighbours are one unknown token
    EXPECT(t, "a\u00E9a", 1, 2, 0, 2);
    EXPECT_TEXT(t, "a a", 1, 2, 1, 2);
    mn_tokenizer_destroy(t);
    /* bytes where all of them are tokens, unknown where one is missing */
    t = made("{'model':{'type':'Unigram','unk_id':0,'byte_fallback':true,'vocab':"
             "[['<unk>',0],['a',-2],['<0xC3>',-9],['<0xA9>',-9]]}}");
    EXPECT(t, "a\u00E9a", 1, 2, 3, 1);
    EXPECT(t, "a\u00E8a", 1, 0, 1);
    mn_tokenizer_destroy(t);
    t = made("{'model':{'type':'Unigram','unk_id':null,'vocab':[['a',-2]]}}");
    mn_token_list list = { 0 };
    assert_int_equal(mn_tokenizer_encode(t, "ab", 2, true, &list), MN_ERR_ARGUMENT);
    assert_non_null(strstr(mn_last_error(), "\"b\""));
    mn_token_list_free(&list);
    mn_tokenizer_destroy(t);
}

#define BERT                                                                                       \
    "'normalizer':{'type':'BertNormalizer'},'pre_tokenizer':{'type':'BertPreTokenizer'},"          \
    "'decoder':{'type':'WordPiece','prefix':'##','cleanup':true},"

static void wordpiece_takes_the_longest(void **state) {
    (void)state;
    mn_tokenizer *t = made("{" BERT "'model':{'type':'WordPiece','unk_token':'[UNK]',"
                           "'max_input_chars_per_word':12,'vocab':{'[UNK]':0,'un':1,'##aff':2,"
                           "'##able':3,'aff':4,',':5,'##a':6,'\u4E2D':7,'##ab':8,'n':9}}}");
    assert_string_equal(mn_tokenizer_kind(t), "wordpiece");
    EXPECT(t, "unaffable", 1, 2, 3);
    EXPECT(t, " Unaffable,\tUN\n", 1, 2, 3, 5, 1);
    EXPECT(t, "unx aff", 0, 4);                       // the whole word is unknown
    EXPECT(t, "aff\u4E2Daff", 4, 7, 4);               // Chinese characters stand alone
    EXPECT(t, "\u00C0ff a\u0301ff", 4, 4);            // accents go with lower case
    mn_tokenizer_destroy(t);
}

static void words_of_bert(void **state) {
    (void)state;
    mn_tokenizer *t = made("{" BERT "'model':{'type':'WordPiece','unk_token':'[UNK]',"
                           "'max_input_chars_per_word':4,'vocab':{'[UNK]':0,'aff':4,',':5,"
                           "'##s':6,'n':9,'##n':10,'\\'':11}}}");
    EXPECT(t, "a\u200Bff", 4);                        // controls are left out
    EXPECT(t, "affs affss", 4, 6, 0);                 // five characters are too many
    EXPECT_TEXT(t, "affs, n", 4, 6, 5, 9);
    mn_tokenizer_destroy(t);
    t = made("{'normalizer':{'type':'BertNormalizer','lowercase':false},"
             "'pre_tokenizer':{'type':'BertPreTokenizer'},'model':{'type':'WordPiece',"
             "'unk_token':'U','vocab':{'U':0,'\u00C9':1,'\u00E9':2}}}");
    EXPECT(t, "\u00C9 \u00E9", 1, 2);                 // cased: accents stay too
    mn_tokenizer_destroy(t);
}

/* A table by which "a" becomes "be": a trie of 98 units, nearly all of them 0. */
static void tables_of_sentencepiece(void **state) {
    (void)state;
    char document[1024], zeros[518 + 1];
    memset(zeros, 'A', 518);
    zeros[518] = '\0';
    snprintf(document, sizeof document,
             "{'normalizer':{'type':'Precompiled','precompiled_charsmap':'%s%s%s'},'model':{"
             "'vocab':{'a':0,'b':1,'e':2,'x':3},'merges':[]}}",
             "iAE", zeros, "IBhBQAAYmUA");
    mn_tokenizer *t = made(document);
    EXPECT(t, "axa", 1, 2, 3, 1, 2);
    mn_tokenizer_destroy(t);
    t = made("{'normalizer':{'type':'Precompiled','precompiled_charsmap':''},'model':{"
             "'vocab':{'a':0},'merges':[]}}");
    EXPECT(t, "aa", 0, 0);
    mn_tokenizer_destroy(t);
    static const char *const bad[] = { "A", "????", "AAAA", "/////w==", "CAAAAAAA" };
    for (size_t i = 0; i < MN_COUNTOF(bad); i++) {
        snprintf(document, sizeof document, "{'normalizer':{'type':'Precompiled',"
                 "'precompiled_charsmap':'%s'},'model':{'vocab':{'a':0},'merges':[]}}", bad[i]);
        char *text = quoted(document);
        assert_fails(mn_tokenizer_parse(&t, text, strlen(text), "small.json"), MN_ERR_FORMAT,
                     "precompiled_charsmap", "SentencePiece");
        free(text);
    }
}

static void write_text(const char *path, const char *text) {
    char *out = quoted(text);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(out, file) >= 0);
    assert_int_equal(fclose(file), 0);
    free(out);
}

static void ends_of_generation(void **state) {
    (void)state;
    mn_tokenizer *t = NULL, *again = NULL;
    write_text(in_folder("tokenizer.json"),
               "{'added_tokens':[{'id':1,'content':'<s>','special':true},"
               "{'id':2,'content':'</s>','special':true},{'id':3,'content':'<end>',"
               "'special':true}],'model':{'vocab':{'a':0},'merges':[]}}");
    write_text(in_folder("tokenizer_config.json"),
               "{'eos_token':'</s>','model_max_length':1000000000000000019884624838656}");
    write_text(in_folder("generation_config.json"), "{'bos_token_id':1,'eos_token_id':[2,3,77]}");
    assert_int_equal(mn_tokenizer_load(&t, in_folder("")), MN_OK);
    assert_int_equal(mn_tokenizer_bos(t), 1);
    assert_int_equal(mn_tokenizer_eos(t), 2);
    assert_true(mn_tokenizer_ends(t, 2) && mn_tokenizer_ends(t, 3));
    assert_false(mn_tokenizer_ends(t, 0) || mn_tokenizer_ends(t, 77) || mn_tokenizer_ends(t, -1));
    assert_int_equal(remove(in_folder("tokenizer_config.json")), 0);
    assert_int_equal(remove(in_folder("generation_config.json")), 0);
    assert_int_equal(mn_tokenizer_save_ends(t, in_folder("")), MN_OK);
    assert_int_equal(mn_tokenizer_load(&again, in_folder("")), MN_OK);
    assert_int_equal(mn_tokenizer_eos(again), 2);
    assert_true(mn_tokenizer_ends(again, 3));
    mn_tokenizer_destroy(t);
    mn_tokenizer_destroy(again);
    write_text(in_folder("generation_config.json"), "{'eos_token_id':'</s>'}");
    assert_fails(mn_tokenizer_load(&t, in_folder("")), MN_ERR_FORMAT, "generation_config.json",
                 "eos_token_id");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(unigram_takes_the_most_likely),
        cmocka_unit_test(unigram_adds_as_the_reference),
        cmocka_unit_test(unknown_characters_of_unigram),
        cmocka_unit_test(wordpiece_takes_the_longest),
        cmocka_unit_test(words_of_bert),
        cmocka_unit_test(tables_of_sentencepiece),
        cmocka_unit_test(ends_of_generation),
    };
    return cmocka_run_group_tests_name("tokenizer models", tests, make_folder, remove_folder);
}
