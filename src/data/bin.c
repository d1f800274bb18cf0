/* bin.c - files of token ids, read in place by pread: a file that shrinks is a failed read, where
 * a mapping would trap. */
#define _XOPEN_SOURCE 700
#include "data/bin.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "io/cursor.h"

typedef struct llmc_kind {
    uint32_t magic, version;
    int token_bytes;
} llmc_kind;

static const llmc_kind kinds[] = { { 20240520, 1, 2 }, { 20240801, 7, 4 } };

static const llmc_kind *kind_of_magic(uint32_t magic) {
    for (size_t i = 0; i < MN_COUNTOF(kinds); i++) {
        if (kinds[i].magic == magic) return &kinds[i];
    }
    return NULL;
}

static mn_status describe_llmc(mn_bin_shape *out, const uint8_t *head, size_t head_bytes,
                               int64_t file_bytes, const char *name) {
    mn_cursor in = mn_cursor_over(head, head_bytes);
    uint32_t magic, version, count;
    if (head_bytes < MN_BIN_HEADER_BYTES || !mn_take_u32le(&in, &magic) ||
        !mn_take_u32le(&in, &version) || !mn_take_u32le(&in, &count)) {
        return mn_fail(MN_ERR_FORMAT,
                       "%s: %" PRId64 " bytes are too few for the header of an llm.c file, "
                       "which has %d",
                       name, file_bytes, MN_BIN_HEADER_BYTES);
    }
    const llmc_kind *kind = kind_of_magic(magic);
    if (!kind) {
        return mn_fail(MN_ERR_FORMAT,
                       "%s: begins with %" PRIu32 ", an llm.c file of tokens with 20240520 or "
                       "20240801",
                       name, magic);
    }
    if (version != kind->version) {
        return mn_fail(MN_ERR_FORMAT,
                       "%s: llm.c magic %" PRIu32 " with version %" PRIu32 ", known is %" PRIu32,
                       name, magic, version, kind->version);
    }
    const int64_t data_bytes = file_bytes - MN_BIN_HEADER_BYTES;
    if (count > MN_BIN_MAX_TOKENS || (int64_t)count * kind->token_bytes != data_bytes) {
        return mn_fail(MN_ERR_FORMAT,
                       "%s: the header promises %" PRIu32 " tokens of %d bytes, the file holds "
                       "%" PRId64 " bytes of them: it is %s",
                       name, count, kind->token_bytes, data_bytes,
                       (int64_t)count * kind->token_bytes > data_bytes ? "cut short"
                                                                      : "too long");
    }
    *out = (mn_bin_shape){ MN_BIN_HEADER_BYTES, count, kind->token_bytes };
    return MN_OK;
}

mn_status mn_bin_describe(mn_bin_shape *out, const uint8_t *head, size_t head_bytes,
                          int64_t file_bytes, mn_corpus_format format, const char *name) {
    mn_cursor in = mn_cursor_over(head, head_bytes);
    uint32_t magic = 0;
    const bool known = mn_take_u32le(&in, &magic) && kind_of_magic(magic);
    if (format == MN_CORPUS_LLMC || (format != MN_CORPUS_NANOGPT && known)) {
        return describe_llmc(out, head, head_bytes, file_bytes, name);
    }
    if (file_bytes % 2 != 0) {
        return mn_fail(MN_ERR_FORMAT,
                       "%s: %" PRId64 " bytes are no whole number of 16-bit tokens: the file is "
                       "cut short, or no nanoGPT file",
                       name, file_bytes);
    }
    *out = (mn_bin_shape){ 0, file_bytes / 2, 2 };
    return MN_OK;
}

void mn_bin_header(uint8_t out[MN_BIN_HEADER_BYTES], int64_t n_tokens, int token_bytes) {
    const llmc_kind *kind = &kinds[token_bytes == 2 ? 0 : 1];
    const uint32_t fields[] = { kind->magic, kind->version, (uint32_t)n_tokens };
    memset(out, 0, MN_BIN_HEADER_BYTES);
    for (size_t i = 0; i < sizeof fields; i++) {
        out[i] = (uint8_t)(fields[i / 4] >> (8 * (i % 4)));
    }
}

/* Bytes [at, at + size) of an open file; fewer only at its end. -1: the system's error. */
static int64_t read_at(int fd, void *out, size_t size, int64_t at) {
    size_t done = 0;
    while (done < size) {
        const ssize_t n = pread(fd, (uint8_t *)out + done, size - done, (off_t)at + (off_t)done);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return -1;
        if (n == 0) break;
        done += (size_t)n;
    }
    return (int64_t)done;
}

static mn_status open_regular(int *fd, int64_t *bytes, const char *path) {
    struct stat info;
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);    // a pipe must not block us
    if (*fd < 0 && errno == EMFILE) {
        return mn_fail(MN_ERR_IO, "%s: too many files are open; raise the limit with ulimit -n",
                       path);
    }
    if (*fd < 0) {
        return errno == ENOENT ? mn_fail(MN_ERR_IO, "%s: no such file", path)
                               : mn_fail(MN_ERR_IO, "%s: cannot open: %s", path, strerror(errno));
    }
    if (fstat(*fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        close(*fd);
        return mn_fail(MN_ERR_IO, "%s: is no regular file", path);
    }
    *bytes = info.st_size;
    return MN_OK;
}

mn_status mn_bin_open(mn_bin *out, const char *path, mn_corpus_format format) {
    *out = (mn_bin){ 0 };
    uint8_t head[MN_BIN_HEADER_BYTES];
    mn_bin bin = { .fd = -1 };
    int64_t file_bytes = 0;
    mn_status st = open_regular(&bin.fd, &file_bytes, path);
    if (st != MN_OK) return st;
    const int64_t n = read_at(bin.fd, head, sizeof head, 0);
    if (n < 0) st = mn_fail(MN_ERR_IO, "%s: cannot read: %s", path, strerror(errno));
    if (st == MN_OK) {
        st = mn_bin_describe(&bin.shape, head, (size_t)n, file_bytes, format, path);
    }
    if (st == MN_OK && !(bin.path = strdup(path))) {
        st = mn_fail(MN_ERR_MEMORY, "%s: out of memory", path);
    }
    if (st == MN_OK) *out = bin;
    else close(bin.fd);
    return st;
}

void mn_bin_close(mn_bin *bin) {
    if (bin->path) close(bin->fd);
    free(bin->path);
    *bin = (mn_bin){ 0 };
}

mn_status mn_check_ids(const int32_t *ids, int64_t count, int64_t vocab_size, const char *name,
                       int64_t first) {
    const uint32_t limit = vocab_size > 0 && vocab_size <= INT32_MAX ? (uint32_t)vocab_size
                                                                     : (uint32_t)INT32_MAX + 1;
    uint32_t wrong = 0;
    for (int64_t i = 0; i < count; i++) wrong |= (uint32_t)ids[i] >= limit;
    for (int64_t i = 0; i < count && wrong; i++) {
        if ((uint32_t)ids[i] < limit) continue;
        return mn_fail(MN_ERR_FORMAT,
                       "%s: token %" PRIu32 " at place %" PRId64 " is not below the vocabulary "
                       "size %" PRIu32 "; was it made with another tokenizer?",
                       name, (uint32_t)ids[i], first + i, limit);
    }
    return MN_OK;
}

/* Little-endian ids of 2 or 4 bytes, spread from the end of `out` to its beginning: the bytes may
 * lie at the start of `out`. */
static void widen(int32_t *out, const uint8_t *bytes, int64_t count, int token_bytes) {
    if (token_bytes == 2) {
        for (int64_t i = count - 1; i >= 0; i--) {
            const uint32_t id = (uint32_t)bytes[2 * i] | (uint32_t)bytes[2 * i + 1] << 8;
            out[i] = (int32_t)id;
        }
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *b = bytes + 4 * i;
        const uint32_t id = (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 |
                            (uint32_t)b[3] << 24;
        out[i] = (int32_t)id;
    }
}

mn_status mn_bin_read(const mn_bin *bin, int64_t at, int64_t count, int64_t vocab_size,
                      int32_t *out) {
    const int width = bin->shape.token_bytes;
    const size_t bytes = (size_t)count * (size_t)width;
    const int64_t n = read_at(bin->fd, out, bytes, bin->shape.offset + at * width);
    if (n < 0) return mn_fail(MN_ERR_IO, "%s: cannot read: %s", bin->path, strerror(errno));
    if ((size_t)n < bytes) {
        return mn_fail(MN_ERR_IO,
                       "%s: shrank while in use: %" PRId64 " tokens from place %" PRId64
                       " are gone; restore the file and start again",
                       bin->path, count - n / width, at + n / width);
    }
    widen(out, (const uint8_t *)out, count, width);
    return mn_check_ids(out, count, vocab_size, bin->path, at);
}
