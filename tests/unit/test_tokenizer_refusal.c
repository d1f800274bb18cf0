/* test_tokenizer_refusal.c - documents that are refused, and what the message says.
 *
 * Documents are written with ' for " so that they can be read. */
// labels: sanitize
#define _XOPEN_SOURCE 700
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "tokenizer/tokenizer.h"
#include "support/folder.h"

static mn_status parse(mn_tokenizer **out, const char *document) {
    char *text = strdup(document);
    assert_non_null(text);
    for (char *c = text; *c; c++) {
        if (*c == '\'') *c = '"';
    }
    const mn_status st = mn_tokenizer_parse(out, text, strlen(text), "small.json");
    free(text);
    return st;
}

static void documents_that_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *document, *piece1, *piece2;
    } rows[] = {
        { "[]", "expected an object", "" },
        { "{}", "model", "missing" },
        { "{'model':{'type':'WordLevel','vocab':{}}}", "\"WordLevel\"", "BPE, Unigram, WordPiece" },
        { "{'model':{'type':'Unigram','vocab':[]}}", "model.vocab", "no token" },
        { "{'model':{'type':'Unigram','vocab':{}}}", "model.vocab", "list" },
        { "{'model':{'type':'Unigram','vocab':[['a']]}}", "model.vocab[0]", "missing" },
        { "{'model':{'type':'Unigram','vocab':[['a',0]],'unk_id':1}}", "unk_id", "outside" },
        { "{'model':{'type':'WordPiece','vocab':{'a':0}}}", "[UNK]", "not in the vocabulary" },
        { "{'model':{'vocab':{},'merges':[]}}", "model.vocab", "no token" },
        { "{'model':{'vocab':{'a':0}}}", "model.merges", "missing" },
        { "{'model':{'vocab':{'a':-1},'merges':[]}}", "model.vocab.a", "-1" },
        { "{'model':{'vocab':{'a':99999999},'merges':[]}}", "model.vocab.a", "99999999" },
        { "{'model':{'vocab':{'a':0,'b':0},'merges':[]}}", "\"a\"", "\"b\"" },
        { "{'model':{'vocab':{'a':0},'merges':['a']}}", "model.merges[0]", "one blank" },
        { "{'model':{'vocab':{'a':0},'merges':['a a a']}}", "model.merges[0]", "one blank" },
        { "{'model':{'vocab':{'a':0},'merges':[['a']]}}", "model.merges[0]", "missing" },
        { "{'model':{'vocab':{'a':0},'merges':[['a','a','a']]}}", "model.merges[0]", "two texts" },
        { "{'model':{'vocab':{'a':0},'merges':['a b']}}", "merges[0]", "\"b\" is not in the" },
        { "{'model':{'vocab':{'a':0},'merges':['a a']}}", "merges[0]", "\"aa\" is not in the" },
        { "{'model':{'vocab':{'a':0},'merges':[],'unk_token':'u'}}", "unk_token \"u\"", "not in" },
        { "{'model':{'vocab':{'a':0},'merges':[],'end_of_word_suffix':'</w>'}}",
          "end_of_word_suffix", "</w>" },
        { "{'model':{'vocab':{'a':0},'merges':[],'continuing_subword_prefix':'##'}}",
          "continuing_subword_prefix", "##" },
        { "{'model':{'vocab':{'a':0},'merges':[],'dropout':0.1}}", "dropout", "null" },
        { "{'normalizer':{'type':'Nmt'},'model':{'vocab':{'a':0},'merges':[]}}",
          "normalizer: normalizer type \"Nmt\"", "NFC" },
        { "{'normalizer':{'type':'Sequence','normalizers':[{'type':'Prepend'}]}}",
          "normalizer.normalizers[0].prepend", "missing" },
        { "{'pre_tokenizer':{'type':'Magic'}}", "pre_tokenizer type \"Magic\"", "ByteLevel" },
        { "{'pre_tokenizer':{'type':'Split','pattern':{'Regex':'('}}}", "does not compile", "(" },
        { "{'pre_tokenizer':{'type':'Split','pattern':{'Regex':'[a&&b]'}}}", "sets within sets",
          "[a&&b]" },
        { "{'pre_tokenizer':{'type':'Split','pattern':{}}}", "pre_tokenizer.pattern", "Regex" },
        { "{'pre_tokenizer':{'type':'Split','pattern':{'String':'a'},'behavior':'Shuffled'}}",
          "\"Shuffled\"", "Isolated" },
        { "{'decoder':{'type':'CTC'},'model':{'vocab':{'a':0},'merges':[]}}", "\"CTC\"",
          "ByteFallback" },
        { "{'post_processor':{'type':'Odd'},'model':{'vocab':{'a':0},'merges':[]}}", "\"Odd\"",
          "TemplateProcessing" },
        { "{'post_processor':{'type':'RobertaProcessing','cls':['a',7],'sep':['a',0]},"
          "'model':{'vocab':{'a':0},'merges':[]}}", "post_processor.cls[1]", "id 7" },
        { "{'post_processor':{'type':'TemplateProcessing','single':[],'special_tokens':{}},"
          "'model':{'vocab':{'a':0},'merges':[]}}", "post_processor.single", "0 times" },
        { "{'added_tokens':[{'id':5,'content':'a'}],'model':{'vocab':{'a':0},'merges':[]}}",
          "added_tokens[0]", "id 5 here and 0" },
        { "{'added_tokens':[{'id':0,'content':'b'}],'model':{'vocab':{'a':0},'merges':[]}}",
          "added_tokens[0]", "id 0 is given" },
        { "{'added_tokens':[{'content':'b'}],'model':{'vocab':{'a':0},'merges':[]}}",
          "added_tokens[0].id", "missing" },
    };
    for (size_t i = 0; i < MN_COUNTOF(rows); i++) {
        mn_tokenizer *t = NULL;
        if (parse(&t, rows[i].document) == MN_OK) fail_msg("accepted: %s", rows[i].document);
        assert_null(t);
        assert_message_holds("small.json: ");
        assert_message_holds(rows[i].piece1);
        assert_message_holds(rows[i].piece2);
    }
}

/* Stages recurse: their number is bounded. */
static void too_many_stages_are_refused(void **state) {
    (void)state;
    enum { STAGES = 65 };
    static const char stage[] = "{'type':'Whitespace'}";
    char document[STAGES * sizeof stage + 200];
    size_t n = (size_t)sprintf(document, "{'pre_tokenizer':{'type':'Sequence','pretokenizers':[");
    for (int i = 0; i < STAGES; i++) {
        n += (size_t)sprintf(document + n, "%s%s", i ? "," : "", stage);
    }
    sprintf(document + n, "]},'model':{'vocab':{'a':0},'merges':[]}}");
    mn_tokenizer *t = NULL;
    assert_int_equal(parse(&t, document), MN_ERR_FORMAT);
    assert_message_holds("pretokenizers[64]");
    assert_message_holds("more than 64 stages");
}

/* Every document cut short, and the whole one with each byte changed: a message or a tokenizer. */
static void damage(const char *whole, size_t size) {
    char *text = malloc(size);
    assert_non_null(text);
    for (size_t i = 0; i + 1 < size; i++) {
        mn_tokenizer *t = NULL;
        memcpy(text, whole, size);
        text[i] = 0;
        assert_int_not_equal(parse(&t, text), MN_OK);
        assert_null(t);
        memcpy(text, whole, size);
        text[i] ^= 1;
        if (parse(&t, text) != MN_OK) assert_message_holds("small.json: ");
        mn_token_list list = { 0 };
        if (t) mn_tokenizer_encode(t, "ab x\xC3\xA9z", 8, true, &list);    // or fails with a message
        mn_token_list_free(&list);
        mn_tokenizer_destroy(t);
    }
    free(text);
}

static void damaged_documents_fail_cleanly(void **state) {
    (void)state;
    static const char bpe[] = "{'added_tokens':[{'id':3,'content':'x'}],'pre_tokenizer':{'type':"
                              "'Digits'},'model':{'vocab':{'a':0,'b':1,'ab':2},"
                              "'merges':['a b']}}";
    static const char unigram[] = "{'pre_tokenizer':{'type':'Metaspace'},'model':{'type':'Unigram',"
                                  "'unk_id':0,'byte_fallback':true,'vocab':[['u',0.5],['a',-1],"
                                  "['ab',-2.5],['<0xC3>',-9]]}}";
    static const char wordpiece[] = "{'normalizer':{'type':'BertNormalizer'},'pre_tokenizer':{'type'"
                                    ":'BertPreTokenizer'},'decoder':{'type':'WordPiece'},'model':{"
                                    "'type':'WordPiece','vocab':{'[UNK]':0,'a':1,'##b':2}}}";
    damage(bpe, sizeof bpe);
    damage(unigram, sizeof unigram);
    damage(wordpiece, sizeof wordpiece);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(documents_that_are_refused),
        cmocka_unit_test(too_many_stages_are_refused),
        cmocka_unit_test(damaged_documents_fail_cleanly),
    };
    return cmocka_run_group_tests_name("tokenizer_refusal", tests, NULL, NULL);
}
