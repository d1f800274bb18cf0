/* machine.h - what the program says about the machine it runs on. */
#ifndef MN_CLI_MACHINE_H
#define MN_CLI_MACHINE_H

#include <stddef.h>

/* The processor's name as the system gives it, "unknown processor" when it gives none. */
void mn_machine_cpu(char *out, size_t size);

#endif
