/* same.h - whether two configurations are of one model. */
#ifndef MN_MODEL_FOLDER_SAME_H
#define MN_MODEL_FOLDER_SAME_H

#include "model/config.h"

enum { MN_SAME_WHY = 256 };

/* Whether models of both compute the same from the same parameters; else `why` says in what they
 * differ first. What names a family, and how parameters would start, is left out. Sizes that are
 * chosen by the width have to be in both: configurations of mn_model_describe have them. */
bool mn_model_config_same(char why[MN_SAME_WHY], const mn_model_config *a,
                          const mn_model_config *b);

#endif
