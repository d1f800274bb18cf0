/* defaults.c - what mneme serve does unless told otherwise. */
#include "server/server.h"

void mn_server_defaults(mn_server_options *options) {
    *options = (mn_server_options){ .address = "127.0.0.1", .port = 8080, .connections = 16384,
                                    .timeout = 60, .drain = 30,
                                    .body_bytes = (size_t)16 << 20,
                                    .upload_bytes = (size_t)1 << 30 };
    mn_engine_defaults(&options->engine);
}
