/* commit.c - the commit that the program was built from; the build writes the header. */
#include "experiments/job.h"

#include <mneme_commit.h>

const char *mn_build_commit(void) {
    return MN_COMMIT;
}
