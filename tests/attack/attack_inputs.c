/* attack_inputs.c - mutated inputs for one parser: attack_NAME COUNT CORPUS.
 *
 * Linked with a fuzz target, whose contract it checks without a fuzzer: files of the corpus with
 * bits turned, bytes replaced, parts cut out, doubled, moved or joined with another file, and
 * numbers made absurd. Case i is a function of i alone; a broken one is left in the file CASE-i. */
#include <dirent.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attack/batch.h"
#include "base/rng.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

enum { MOST_FILES = 256, MOST_BYTES = 1 << 16 };

static struct {
    uint8_t *bytes;
    size_t size;
} corpus[MOST_FILES];
static int n_files;

static void read_corpus(const char *folder) {
    struct dirent **entries;
    const int n = scandir(folder, &entries, NULL, alphasort);
    for (int i = 0; i < n; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", folder, entries[i]->d_name);
        const bool wanted = entries[i]->d_name[0] != '.' && n_files < MOST_FILES;
        FILE *file = wanted ? fopen(path, "rb") : NULL;
        free(entries[i]);
        if (!file) continue;
        corpus[n_files].bytes = malloc(MOST_BYTES);
        if (corpus[n_files].bytes) {
            corpus[n_files].size = fread(corpus[n_files].bytes, 1, MOST_BYTES, file);
            n_files++;
        }
        fclose(file);
    }
    if (n >= 0) free(entries);
}

typedef struct text {
    uint8_t bytes[3 * MOST_BYTES];
    size_t size;
} text;

static void replace(text *t, size_t at, size_t cut, const void *with, size_t n) {
    if (at > t->size) at = t->size;
    if (cut > t->size - at) cut = t->size - at;
    if (t->size - cut + n > sizeof t->bytes) return;
    memmove(t->bytes + at + n, t->bytes + at + cut, t->size - at - cut);
    if (n > 0) memcpy(t->bytes + at, with, n);
    t->size += n - cut;
}

static void mutate(text *t, uint64_t i, uint64_t turn) {
    static const char *const words[] = {
        "-1", "0", "9223372036854775807", "-9223372036854775808", "1e999", "1e-999",
        "4611686018427387904", "null", "[]", "{}", "\"\"", "\\u0000", "\\ud800", "\xff\xfe", "NaN",
        "true", "{\"a\":", "]]]]", "\"",
    };
    static const uint8_t edges[] = { 0x00, 0xff, 0x7f, 0x80 };
    const uint64_t a = mn_rng_bits(i, turn, 0), b = mn_rng_bits(i, turn, 1);
    const size_t at = t->size ? (size_t)(a % t->size) : 0, n = (size_t)(b % 32) + 1;
    uint8_t block[8];
    memset(block, edges[b / 64 % 4], sizeof block);
    switch (mn_rng_bits(i, turn, 2) % 8) {
    case 0: if (t->size) t->bytes[at] ^= (uint8_t)(1u << b % 8); break;
    case 1: if (t->size) t->bytes[at] = (uint8_t)b; break;
    case 2: replace(t, at, n, NULL, 0); break;
    case 3: {
        uint8_t again[32];
        const size_t from = t->size ? (size_t)(b / 32 % t->size) : 0;
        const size_t count = n < t->size - from ? n : t->size - from;
        memcpy(again, t->bytes + from, count);
        replace(t, at, 0, again, count);
        break;
    }
    case 4: replace(t, at, 8, block, sizeof block); break;
    case 5: t->size = at; break;
    case 6: {
        const char *word = words[b % (sizeof words / sizeof *words)];
        size_t digits = 0;
        while (at + digits < t->size && strchr("0123456789.-e", t->bytes[at + digits])) digits++;
        replace(t, at, digits, word, strlen(word));
        break;
    }
    default: {
        const int other = (int)(b % (uint64_t)n_files);
        const size_t from = corpus[other].size ? (size_t)(b / 256 % corpus[other].size) : 0;
        replace(t, at, n, corpus[other].bytes + from, corpus[other].size - from);
    }
    }
}

static void make(text *t, int64_t i) {
    const int file = (int)(i % n_files);
    t->size = corpus[file].size;
    memcpy(t->bytes, corpus[file].bytes, t->size);
    const uint64_t turns = 1 + mn_rng_bits((uint64_t)i, 1000, 0) % 6;
    for (uint64_t turn = 0; turn < turns; turn++) mutate(t, (uint64_t)i, turn);
}

static void try(int64_t i) {
    static text t;
    make(&t, i);
    uint8_t *exact = malloc(t.size + 1);    // so that a sanitizer sees a read beyond the end
    if (!exact) return;
    memcpy(exact, t.bytes, t.size);
    LLVMFuzzerTestOneInput(exact, t.size);
    free(exact);
}

static void tell(int64_t i) {
    static text t;
    char name[64];
    make(&t, i);
    snprintf(name, sizeof name, "CASE-%" PRId64, i);
    FILE *file = fopen(name, "wb");
    const bool kept = file && fwrite(t.bytes, 1, t.size, file) == t.size;
    if (file) fclose(file);
    printf("%zu bytes%s%s\n", t.size, kept ? ", kept in " : "", kept ? name : "");
}

int main(int argc, char **argv) {
    const long n = argc == 3 ? strtol(argv[1], NULL, 10) : 0;
    if (n > 0) read_corpus(argv[2]);
    if (n <= 0 || n_files == 0) {
        fprintf(stderr, "usage: %s COUNT CORPUS\n", argv[0]);
        return 2;
    }
    const int64_t broken = attack_all(n, 200, try, tell);
    printf("%s: %ld mutated inputs, %" PRId64 " broke it\n", argv[0], n, broken);
    return broken > 0;
}
