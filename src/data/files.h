/* files.h - the files that a list of files and folders stands for. */
#ifndef MN_DATA_FILES_H
#define MN_DATA_FILES_H

#include "data/corpus.h"

typedef struct mn_data_file {
    char *path;
    int64_t bytes;
    int64_t changed_ns;          // time of the last change
    mn_corpus_format format;     // AUTO: a .bin of either kind; PREPARED: a folder
} mn_data_file;

typedef struct mn_data_files {
    mn_data_file *items;
    int64_t count, capacity;
} mn_data_files;

/* Lists the files of `paths` in the order given; folders are walked in the order of their names'
 * bytes, without hidden files, meta.json and anything that is not a regular file. A folder with an
 * index.json written by mneme prepare stays one item.
 *
 * With AUTO the ending decides: .bin are tokens (of llm.c if they begin with its number), .jsonl
 * and .ndjson lines of JSON, .json too when they begin with a brace, the rest text. Compressed
 * files and what cannot be text are refused. Fails when there is no file at all. */
mn_status mn_data_files_list(mn_data_files *out, const char *const *paths, int64_t n_paths,
                             mn_corpus_format format);
void mn_data_files_free(mn_data_files *files);    // all zeros is fine

#endif
