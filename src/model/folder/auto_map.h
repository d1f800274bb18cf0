/* auto_map.h - folders of models that no other software has a class for: one Python file of plain
 * PyTorch goes along, which transformers loads by the "auto_map" of config.json. */
#ifndef MN_MODEL_FOLDER_AUTO_MAP_H
#define MN_MODEL_FOLDER_AUTO_MAP_H

#include <jansson.h>

#include "model/config.h"

/* Whether the file has all that such a model is made of; else mn_last_error() says what is missing.
 * Models of a family that has a class of its own need none. */
bool mn_auto_map_covers(const mn_model_config *config);

/* Adds "architectures" and "auto_map" to a configuration of the model_type mneme, and writes the
 * file into the folder, where the file covers the model; else does nothing. */
mn_status mn_auto_map_add(json_t *object, const mn_model_config *config, const char *folder);

#endif
