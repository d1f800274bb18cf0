/* split_read.c - reads the "pre_tokenizer" of a tokenizer.json into stages.
 *
 * The rows of splitters.def name the types; "Sequence" is flattened. */
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "tokenizer/tokenizer_internal.h"

/* The pattern behind ByteLevel. */
#define GPT2_PATTERN                                                                               \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

typedef struct splitter_kind splitter_kind;

struct splitter_kind {
    const char *type;
    mn_status (*read)(mn_split_stage *stage, const splitter_kind *kind, const mn_json *at);
    const char *pattern;
    mn_split_behaviour behaviour;
    bool invert;
};

static mn_status read_behaviour(mn_split_stage *stage, const mn_json *at) {
    static const char *const names[] = {
        [MN_SPLIT_ISOLATED] = "Isolated",
        [MN_SPLIT_REMOVED] = "Removed",
        [MN_SPLIT_PREVIOUS] = "MergedWithPrevious",
        [MN_SPLIT_NEXT] = "MergedWithNext",
        [MN_SPLIT_CONTIGUOUS] = "Contiguous",
    };
    const char *name = NULL;
    const mn_status st = mn_json_opt_text(&name, at, "behavior");
    if (st != MN_OK || !name) return st;
    for (int i = 0; i < (int)MN_COUNTOF(names); i++) {
        if (strcmp(names[i], name) != 0) continue;
        stage->behaviour = (mn_split_behaviour)i;
        return MN_OK;
    }
    return mn_json_fail(at, "behavior \"%s\" is not supported; there are Isolated, Removed, "
                        "MergedWithPrevious, MergedWithNext, Contiguous", name);
}

/* The pattern and behaviour of the row. */
static mn_status read_fixed(mn_split_stage *stage, const splitter_kind *kind, const mn_json *at) {
    stage->cut = true;
    stage->behaviour = kind->behaviour;
    stage->invert = kind->invert;
    return mn_pattern_compile(&stage->pattern, kind->pattern, at);
}

static mn_status read_byte_level(mn_split_stage *stage, const splitter_kind *kind,
                                 const mn_json *at) {
    bool prefix = true, use_regex = true;
    mn_status st = mn_json_opt_bool(&prefix, at, "add_prefix_space");
    if (st == MN_OK) st = mn_json_opt_bool(&use_regex, at, "use_regex");
    stage->prefix = prefix ? MN_PREFIX_ALWAYS : MN_PREFIX_NEVER;
    stage->cut = use_regex;
    stage->spell = true;
    (void)kind;
    if (st == MN_OK && use_regex) st = mn_pattern_compile(&stage->pattern, GPT2_PATTERN, at);
    return st;
}

static mn_status read_split(mn_split_stage *stage, const splitter_kind *kind, const mn_json *at) {
    const mn_json pattern = mn_json_member(at, "pattern");
    mn_status st = mn_pattern_read(&stage->pattern, &pattern);
    (void)kind;
    stage->cut = true;
    if (st == MN_OK) st = read_behaviour(stage, at);
    if (st == MN_OK) st = mn_json_opt_bool(&stage->invert, at, "invert");
    return st;
}

static mn_status read_digits(mn_split_stage *stage, const splitter_kind *kind, const mn_json *at) {
    bool individual = false;
    mn_status st = mn_json_opt_bool(&individual, at, "individual_digits");
    if (st == MN_OK) st = read_fixed(stage, kind, at);
    if (individual) stage->behaviour = MN_SPLIT_ISOLATED;
    return st;
}

static mn_status read_punctuation(mn_split_stage *stage, const splitter_kind *kind,
                                  const mn_json *at) {
    const mn_status st = read_fixed(stage, kind, at);
    return st == MN_OK ? read_behaviour(stage, at) : st;
}

static mn_status read_delimiter(mn_split_stage *stage, const splitter_kind *kind,
                                const mn_json *at) {
    const char *delimiter = NULL;
    const mn_status st = mn_json_get_text(&delimiter, at, "delimiter");
    stage->cut = true;
    stage->behaviour = kind->behaviour;
    return st == MN_OK ? mn_pattern_literal(&stage->pattern, delimiter) : st;
}

static mn_status read_prefix(mn_split_stage *stage, const mn_json *at) {
    static const char *const names[] = { [MN_PREFIX_NEVER] = "never", [MN_PREFIX_FIRST] = "first",
                                         [MN_PREFIX_ALWAYS] = "always" };
    const char *scheme = NULL;
    bool prefix = true;                            // the older spelling
    mn_status st = mn_json_opt_text(&scheme, at, "prepend_scheme");
    if (st == MN_OK) st = mn_json_opt_bool(&prefix, at, "add_prefix_space");
    stage->prefix = prefix ? MN_PREFIX_ALWAYS : MN_PREFIX_NEVER;
    if (st != MN_OK || !scheme) return st;
    for (int i = 0; i < (int)MN_COUNTOF(names); i++) {
        if (strcmp(names[i], scheme) != 0) continue;
        stage->prefix = (mn_prefix)i;
        return MN_OK;
    }
    return mn_json_fail(at, "prepend_scheme \"%s\" is not supported; there are always, first, "
                        "never", scheme);
}

static mn_status read_metaspace(mn_split_stage *stage, const splitter_kind *kind,
                                const mn_json *at) {
    const char *replacement = "\xE2\x96\x81";
    mn_status st = mn_json_opt_text(&replacement, at, "replacement");
    stage->cut = true;
    stage->behaviour = kind->behaviour;
    if (st == MN_OK) st = mn_json_opt_bool(&stage->cut, at, "split");
    if (st == MN_OK) st = read_prefix(stage, at);
    if (st == MN_OK) st = mn_pattern_literal(&stage->pattern, replacement);
    if (st != MN_OK) return st;
    stage->spaces = strdup(replacement);
    return stage->spaces ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a pre_tokenizer");
}

/* The second stage of BertPreTokenizer, behind that which cuts at blanks. */
static mn_status read_bert_punctuation(mn_split_stage *stage, const mn_json *at) {
    mn_text class = { 0 };
    stage->cut = true;
    stage->behaviour = MN_SPLIT_ISOLATED;
    mn_status st = mn_bert_punctuation(&class);
    if (st == MN_OK) st = mn_pattern_compile(&stage->pattern, class.bytes, at);
    mn_text_free(&class);
    return st;
}

static mn_status read_bert(mn_split_stage *stage, const splitter_kind *kind, const mn_json *at) {
    return read_fixed(stage, kind, at);
}

static const splitter_kind kinds[] = {
#define SPLITTER(type, read, pattern, behaviour, invert)                                           \
    { #type, read, pattern, MN_SPLIT_##behaviour, invert },
#include "tokenizer/splitters.def"
#undef SPLITTER
};

static mn_status add_stage(mn_split_stage **stage, mn_splitter *out, const mn_json *at) {
    if (out->count == MN_SPLIT_STAGES_MAX) {
        return mn_json_fail(at, "the pre_tokenizer has more than %d stages", MN_SPLIT_STAGES_MAX);
    }
    mn_split_stage *stages = realloc(out->stages, (size_t)(out->count + 1) * sizeof *stages);
    if (!stages) return mn_fail(MN_ERR_MEMORY, "no memory for a pre_tokenizer");
    out->stages = stages;
    *stage = &stages[out->count++];
    **stage = (mn_split_stage){ 0 };
    return MN_OK;
}

static mn_status read_stage(mn_splitter *out, const mn_json *at, const char *type) {
    size_t i = 0;
    while (i < MN_COUNTOF(kinds) && strcmp(kinds[i].type, type) != 0) i++;
    if (i == MN_COUNTOF(kinds)) {
        return mn_unknown_type(at, "pre_tokenizer", type, &kinds[0].type, MN_COUNTOF(kinds),
                               sizeof kinds[0]);
    }
    mn_split_stage *stage = NULL;
    mn_status st = add_stage(&stage, out, at);
    if (st == MN_OK) st = kinds[i].read(stage, &kinds[i], at);
    if (st != MN_OK || kinds[i].read != read_bert) return st;
    st = add_stage(&stage, out, at);
    return st == MN_OK ? read_bert_punctuation(stage, at) : st;
}

static mn_status read_stages(mn_splitter *out, const mn_json *at) {
    const char *type = NULL;
    mn_status st = mn_json_get_text(&type, at, "type");
    if (st != MN_OK) return st;
    if (strcmp(type, "Sequence") != 0) return read_stage(out, at, type);
    const mn_json list = mn_json_member(at, "pretokenizers");
    st = mn_json_expect_list(&list);
    for (int64_t i = 0; i < mn_json_count(&list) && st == MN_OK; i++) {
        const mn_json item = mn_json_item(&list, i);
        st = read_stages(out, &item);
    }
    return st;
}

mn_status mn_splitter_read(mn_splitter *out, const mn_json *at) {
    if (!mn_json_given(at)) return MN_OK;
    const mn_status st = read_stages(out, at);
    int64_t n_spelling = 0;
    for (int64_t i = 0; i < out->count; i++) n_spelling += out->stages[i].spell;
    out->byte_level = n_spelling > 0;
    if (st == MN_OK && n_spelling == 1 && out->stages[out->count - 1].spell) {
        out->stages[out->count - 1].spell = false;
        out->byte_pieces = true;
    }
    return st;
}

void mn_splitter_free(mn_splitter *splitter) {
    for (int64_t i = 0; i < splitter->count; i++) {
        mn_pattern_free(&splitter->stages[i].pattern);
        free(splitter->stages[i].spaces);
    }
    free(splitter->stages);
    *splitter = (mn_splitter){ 0 };
}
