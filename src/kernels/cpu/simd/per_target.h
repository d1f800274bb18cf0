/* per_target.h - includes the header that MN_PER_TARGET names once for each vector target, so that
 * its functions are declared under each of their names (target.h). Not guarded. */
#define MN_TARGET avx2
#include MN_PER_TARGET
#undef MN_TARGET
#define MN_TARGET avx512
#include MN_PER_TARGET
#undef MN_TARGET
#define MN_TARGET neon
#include MN_PER_TARGET
#undef MN_TARGET
#undef MN_PER_TARGET
