/* folder.h - folders: making them with those above, and finding the model in one. */
#ifndef MN_IO_FOLDER_H
#define MN_IO_FOLDER_H

#include "mneme.h"

enum { MN_FOLDER_PATH = 4096 };

/* Makes the folder at `path` and those above it; being there already is fine. */
mn_status mn_folder_make(const char *path);

/* The same for the folder that the file at `path` will lie in. */
mn_status mn_folder_make_above(const char *path);

/* The folder of a model: `path` itself, or, where that is the folder of a training run, its best
 * checkpoint, else its last one. Other paths are copied as they are. */
mn_status mn_folder_of_model(char out[MN_FOLDER_PATH], const char *path);

#endif
