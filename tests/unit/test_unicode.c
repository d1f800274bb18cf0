/* test_unicode.c - normal forms, strict UTF-8, blanks, lower case. */
// labels: sanitize
#include "tokenizer/unicode/unicode.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "base/rng.h"
#include "base/util.h"
#include "base/utf8.h"

/* Draw `index` of UTF-8 with many kinds of characters. */
static size_t random_text(char *out, size_t most, uint64_t index) {
    static const uint32_t starts[] = { 0x20, 0x61, 0xC0, 0x300, 0x3B1, 0x5D0, 0x1100, 0x1161,
                                       0x11A8, 0x1E00, 0x2000, 0x3040, 0xAC00, 0xF900, 0x1F600 };
    size_t n = 0;
    const size_t wanted = 1 + mn_rng_bits(11, index, 0) % most;
    for (uint64_t i = 1; n + 4 <= wanted; i++) {
        const uint64_t bits = mn_rng_bits(11, index, i);
        const uint32_t start = starts[bits % MN_COUNTOF(starts)];
        n += (size_t)mn_utf8_put(out + n, start + (uint32_t)(bits >> 32) % 40);
    }
    return n;
}

static void utf8_is_strict(void **state) {
    (void)state;
    static const struct {
        const char *text;
        size_t size;
        uint32_t point;
        int length;
    } rows[] = {
        { "a", 1, 'a', 1 },
        { "\xC2\x80", 2, 0x80, 2 },
        { "\xE2\x82\xAC", 3, 0x20AC, 3 },
        { "\xF4\x8F\xBF\xBF", 4, 0x10FFFF, 4 },
        { "\x80", 1, MN_UTF8_BAD, 1 },
        { "\xC0\x80", 2, MN_UTF8_BAD, 1 },             // overlong
        { "\xE0\x9F\xBF", 3, MN_UTF8_BAD, 1 },
        { "\xF0\x8F\xBF\xBF", 4, MN_UTF8_BAD, 1 },
        { "\xED\xA0\x80", 3, MN_UTF8_BAD, 1 },         // a surrogate
        { "\xF4\x90\x80\x80", 4, MN_UTF8_BAD, 1 },     // above the last
        { "\xF5\x80\x80\x80", 4, MN_UTF8_BAD, 1 },
        { "\xE2\x82", 2, MN_UTF8_BAD, 2 },             // cut off
        { "\xE2\x82z", 3, MN_UTF8_BAD, 2 },
        { "\xF0\x9F\x98", 3, MN_UTF8_BAD, 3 },
        { "\xF0\x9F\x98z", 4, MN_UTF8_BAD, 3 },
    };
    for (size_t i = 0; i < MN_COUNTOF(rows); i++) {
        uint32_t point;
        const int length = mn_utf8_take(rows[i].text, rows[i].size, &point);
        assert_int_equal(point, rows[i].point);
        assert_int_equal(length, rows[i].length);
        const bool good = point != MN_UTF8_BAD;
        assert_int_equal(mn_utf8_valid(rows[i].text, rows[i].size), good ? (size_t)length : 0);
    }
    for (uint32_t point = 0; point < 0x110000; point++) {
        if (point >= 0xD800 && point < 0xE000) continue;
        char bytes[4];
        uint32_t back;
        const int length = mn_utf8_put(bytes, point);
        assert_int_equal(mn_utf8_take(bytes, (size_t)length, &back), length);
        assert_int_equal(back, point);
    }
    assert_int_equal(mn_utf8_valid("eight by\xFF", 9), 8);
}

static void bad_bytes_become_replacements(void **state) {
    (void)state;
    mn_text out = { 0 };
    assert_int_equal(mn_text_add_utf8(&out, "a\xE2\x82z\xFF\xFF", 6), MN_OK);
    assert_int_equal(out.size, 11);
    assert_memory_equal(out.bytes, "a\uFFFDz\uFFFD\uFFFD", 11);
    mn_text_free(&out);
    mn_text_free(&out);
}

static void lower_case_and_blanks(void **state) {
    (void)state;
    mn_text out = { 0 };
    const char text[] = "aZ\u00C4\u0130\u0141\u03A3\u1E9E\U00010400!";
    const char want[] = "az\u00E4i\u0307\u0142\u03C3\u00DF\U00010428!";
    assert_int_equal(mn_unicode_lower(&out, text, strlen(text)), MN_OK);
    assert_int_equal(out.size, strlen(want));
    assert_memory_equal(out.bytes, want, out.size);
    mn_text_free(&out);
    int64_t n = 0;
    for (uint32_t point = 0; point < 0x110000; point++) n += mn_unicode_is_space(point);
    assert_int_equal(n, 25);                           // as the Unicode character database counts
    assert_false(mn_unicode_is_space(0x180E));
    assert_false(mn_unicode_is_space(0x200B));
}

static void expect_form(mn_normal_form form, const char *text, const char *want) {
    mn_text out = { 0 };
    assert_int_equal(mn_unicode_normalise(&out, text, strlen(text), form), MN_OK);
    assert_int_equal(out.size, strlen(want));
    assert_memory_equal(out.bytes, want, out.size);
    mn_text_free(&out);
}

static void normal_forms(void **state) {
    (void)state;
    static const struct {
        const char *text, *nfc, *nfd, *nfkc, *nfkd;
    } rows[] = {
        { "e\u0301", "\u00E9", "e\u0301", "\u00E9", "e\u0301" },
        { "\u00E9", "\u00E9", "e\u0301", "\u00E9", "e\u0301" },
        { "a\u0323\u0307", "\u1EA1\u0307", "a\u0323\u0307", "\u1EA1\u0307", "a\u0323\u0307" },
        { "a\u0307\u0323", "\u1EA1\u0307", "a\u0323\u0307", "\u1EA1\u0307", "a\u0323\u0307" },
        { "\uD55C", "\uD55C", "\u1112\u1161\u11AB", "\uD55C", "\u1112\u1161\u11AB" },
        { "\u1112\u1161", "\uD558", "\u1112\u1161", "\uD558", "\u1112\u1161" },
        { "x \uFB01 y", "x \uFB01 y", "x \uFB01 y", "x fi y", "x fi y" },
        { "\u212B", "\u00C5", "A\u030A", "\u00C5", "A\u030A" },
        { "\u0958", "\u0915\u093C", "\u0915\u093C", "\u0915\u093C", "\u0915\u093C" },
        { "\u1E9B\u0323", "\u1E9B\u0323", "\u017F\u0323\u0307", "\u1E69", "s\u0323\u0307" },
        { "A\u0300\u0300", "\u00C0\u0300", "A\u0300\u0300", "\u00C0\u0300", "A\u0300\u0300" },
    };
    for (size_t i = 0; i < MN_COUNTOF(rows); i++) {
        expect_form(MN_NFC, rows[i].text, rows[i].nfc);
        expect_form(MN_NFD, rows[i].text, rows[i].nfd);
        expect_form(MN_NFKC, rows[i].text, rows[i].nfkc);
        expect_form(MN_NFKD, rows[i].text, rows[i].nfkd);
    }
}

/* NFC of NFD is NFC, and both leave their own results alone; long runs of marks included. */
static void normal_forms_are_normal(void **state) {
    (void)state;
    for (uint64_t i = 0; i < 400; i++) {
        char text[900];
        size_t n = random_text(text, 400, i);
        for (uint64_t k = 0; i % 4 == 0 && k < 100; k++) {    // marks of many classes
            n += (size_t)mn_utf8_put(text + n, 0x300 + (uint32_t)mn_rng_bits(9, i, k) % 0x70);
        }
        mn_text c = { 0 }, d = { 0 }, cd = { 0 }, cc = { 0 }, dd = { 0 };
        assert_int_equal(mn_unicode_normalise(&c, text, n, MN_NFC), MN_OK);
        assert_int_equal(mn_unicode_normalise(&d, text, n, MN_NFD), MN_OK);
        assert_int_equal(mn_unicode_normalise(&cd, d.bytes, d.size, MN_NFC), MN_OK);
        assert_int_equal(mn_unicode_normalise(&cc, c.bytes, c.size, MN_NFC), MN_OK);
        assert_int_equal(mn_unicode_normalise(&dd, c.bytes, c.size, MN_NFD), MN_OK);
        assert_int_equal(cd.size, c.size);
        assert_memory_equal(cd.bytes, c.bytes, c.size);
        assert_int_equal(cc.size, c.size);
        assert_memory_equal(cc.bytes, c.bytes, c.size);
        assert_int_equal(dd.size, d.size);
        assert_memory_equal(dd.bytes, d.bytes, d.size);
        mn_text *all[] = { &c, &d, &cd, &cc, &dd };
        for (size_t k = 0; k < MN_COUNTOF(all); k++) mn_text_free(all[k]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(utf8_is_strict),
        cmocka_unit_test(bad_bytes_become_replacements),
        cmocka_unit_test(lower_case_and_blanks),
        cmocka_unit_test(normal_forms),
        cmocka_unit_test(normal_forms_are_normal),
    };
    return cmocka_run_group_tests_name("unicode", tests, NULL, NULL);
}
