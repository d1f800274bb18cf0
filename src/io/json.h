/* json.h - reading JSON that people and other programs wrote, with errors they can act on.
 *
 * A thin layer over jansson: strict text, no duplicate keys, bounded depth. Every getter that
 * fails names the document, the way to the value and what was expected:
 *
 *     config.json: layers[3].heads: expected a whole number, found a string
 *
 * Values are small handles that remember their parent; nothing is allocated to walk a document. */
#ifndef MN_IO_JSON_H
#define MN_IO_JSON_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "mneme.h"

enum { MN_JSON_MAX_DEPTH = 64 };    // nested lists and objects; the parser recurses

/* Whole numbers of a list (mn_json_parse_ids). */
typedef struct mn_json_ids {
    int32_t *of;
    int64_t count;
} mn_json_ids;

/* One value and the way to it. A handle from mn_json_member or mn_json_item points to its parent
 * handle, which must stay in place while the child is used. All zeros: no document. */
typedef struct mn_json {
    json_t *value;                  // NULL: the document has no such value
    const struct mn_json *parent;   // NULL for the root
    const char *name;               // root: the document's name; member: its key; item: NULL
    int64_t index;                  // item: its place in the list
    mn_json_ids ids;                // root: read beside the document
} mn_json;

/* How strict the text has to be. */
typedef enum mn_json_text_rules {
    MN_JSON_STANDARD,       // RFC 8259
    MN_JSON_PYTHON,         // and Infinity, -Infinity, NaN as Python writes them, read as null;
                            // with a whole number of more than 64 bits all are read as reals
} mn_json_text_rules;

/* Parses `size` bytes. `name` (copied) opens every message about the document. The bytes are not
 * needed afterwards. On failure `*root` is all zeros. */
mn_status mn_json_parse(mn_json *root, const void *bytes, size_t size, const char *name,
                        mn_json_text_rules rules);

/* The same for an object whose member `key` may be a long list of whole numbers. Where it is one of
 * nothing but numbers of up to nine digits, they are root->ids, and the list of the document is
 * empty. */
mn_status mn_json_parse_ids(mn_json *root, const void *bytes, size_t size, const char *name,
                            const char *key);

/* Parses the file at `path`, which also becomes the name. */
mn_status mn_json_load(mn_json *root, const char *path, mn_json_text_rules rules);

/* Frees a document; every handle and text taken from it ends here. All zeros is fine. */
void mn_json_free(mn_json *root);

/* Handles. Absent members and items beyond the end give a handle without value, never a crash;
 * reading such a handle fails with a message that names it. */
mn_json mn_json_member(const mn_json *object, const char *key);
mn_json mn_json_item(const mn_json *list, int64_t index);

/* Whether there is a value other than null. */
bool mn_json_given(const mn_json *at);

/* Items of a list or members of an object; 0 for anything else. */
int64_t mn_json_count(const mn_json *at);

/* Steps through the members of `object` in the order of the text, starting from an all-zero
 * handle; false at the end.
 *     for (mn_json m = {0}; mn_json_next(&m, &object);) use(m.name, &m); */
bool mn_json_next(mn_json *member, const mn_json *object);

/* Fail unless the value is there and of that kind. */
mn_status mn_json_expect_object(const mn_json *at);
mn_status mn_json_expect_list(const mn_json *at);

/* Read the value of a handle. On failure `*out` is unchanged.
 *
 * i64 takes whole numbers, also spelt 1e6 or 2.0 up to 2^53; f64 takes any number; text is
 * borrowed from the document and holds no zero byte. */
mn_status mn_json_read_i64(int64_t *out, const mn_json *at);
mn_status mn_json_read_f64(double *out, const mn_json *at);
mn_status mn_json_read_bool(bool *out, const mn_json *at);
mn_status mn_json_read_text(const char **out, const mn_json *at);

/* Read a member that has to be there. */
mn_status mn_json_get_i64(int64_t *out, const mn_json *object, const char *key);
mn_status mn_json_get_f64(double *out, const mn_json *object, const char *key);
mn_status mn_json_get_bool(bool *out, const mn_json *object, const char *key);
mn_status mn_json_get_text(const char **out, const mn_json *object, const char *key);

/* Read a member if it is given; absent or null keeps `*out`, the default. */
mn_status mn_json_opt_i64(int64_t *out, const mn_json *object, const char *key);
mn_status mn_json_opt_f64(double *out, const mn_json *object, const char *key);
mn_status mn_json_opt_bool(bool *out, const mn_json *object, const char *key);
mn_status mn_json_opt_text(const char **out, const mn_json *object, const char *key);

/* Fails on the first member of `object` whose key is not among `known`, and suggests the nearest
 * one that is: config.json: layers[3]: unknown key "haeds", did you mean "heads"? */
mn_status mn_json_unknown_key(const mn_json *object, const char *const known[], int64_t n_known);

/* The same where only the first `n_meant` of them are worth suggesting. */
mn_status mn_json_unknown_key_among(const mn_json *object, const char *const known[],
                                    int64_t n_known, int64_t n_meant);

/* MN_ERR_FORMAT with "DOCUMENT: WAY: " before the caller's sentence; for rules of the caller. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
mn_status mn_json_fail(const mn_json *at, const char *format, ...);

#endif
