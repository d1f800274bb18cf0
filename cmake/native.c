/* native.c - which vector target this machine chooses, as an exit status: for MN_NATIVE. */
#include "kernels/cpuid.c"

int main(void) {
    return mn_cpu_has_avx512() ? 2 : mn_cpu_has_avx2() ? 1 : 0;
}
