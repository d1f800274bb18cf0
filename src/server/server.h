/* server.h - mneme serve: a model folder behind HTTP. */
#ifndef MN_SERVER_SERVER_H
#define MN_SERVER_SERVER_H

#include <signal.h>
#include <stdbool.h>

#include "server/engine.h"

typedef struct mn_server_options {
    mn_engine_options engine;
    const char *address;       // to listen on: 127.0.0.1 or another of this machine
    int port;                  // 0: one that is free
    int connections;           // open at once
    int timeout;               // seconds without a byte from a client, and for a header
    int drain;                 // seconds that running requests get when the server stops
    size_t body_bytes;         // of a request
    size_t upload_bytes;       // of a state
    const char *key;           // bearer token that requests must carry; NULL: none
    bool log_json, quiet;
} mn_server_options;

void mn_server_defaults(mn_server_options *options);

/* Serves until `*stop` is not 0, then lets requests finish. Where `*reload` is not 0 it becomes 0
 * and the folder is read again while requests go on. Calls `ready` once with the port. Without
 * libmicrohttpd in this build: MN_ERR_UNSUPPORTED. */
mn_status mn_server_run(const mn_server_options *options, const volatile sig_atomic_t *stop,
                        volatile sig_atomic_t *reload, void (*ready)(int port));

#endif
