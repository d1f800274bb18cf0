/* http_none.c - the server of builds without libmicrohttpd. */
#include "base/status.h"
#include "server/server.h"

mn_status mn_server_run(const mn_server_options *options, const volatile sig_atomic_t *stop,
                        volatile sig_atomic_t *reload, void (*ready)(int port)) {
    (void)options;
    (void)stop;
    (void)reload;
    (void)ready;
    return mn_fail(MN_ERR_UNSUPPORTED, "this build has no HTTP: install libmicrohttpd "
                   "(libmicrohttpd-dev) and build again");
}
