/* exchange.h - one request and its answer, between HTTP (http.c) and what serves it (routes.c). */
#ifndef MN_SERVER_EXCHANGE_H
#define MN_SERVER_EXCHANGE_H

#include "server/engine.h"

typedef enum mn_body { MN_BODY_NONE, MN_BODY_COMPLETION, MN_BODY_CHAT, MN_BODY_FREE, MN_BODY_BYTES }
    mn_body;

typedef struct mn_exchange mn_exchange;

typedef struct mn_route {
    const char *method, *path;
    void (*handle)(mn_exchange *x);
    mn_body body;
    const char *about;
} mn_route;

const mn_route *mn_routes(int *count);

/* The route of a path, its id in `id`; NULL with *status 404 or 405. HEAD takes the routes of GET.
 */
const mn_route *mn_route_find(const char *method, const char *path, char id[MN_STATE_ID],
                              int *status);

/* Either `job` is started and answers, or the handler has answered. */
struct mn_exchange {
    mn_engine *engine;
    const mn_route *route;
    char id[MN_STATE_ID];      // of the path
    mn_text body;
    const char *folder;        // of the server, for files on their way
    char file[256];            // of bytes that came or go; "": none
    mn_job *job;
    int fd;                    // of the connection, -1: none
    mn_job_wake wake;
    void *waker;
    int status;                // of the answer, 0: none yet
    const char *type;
    mn_text answer;            // or `static_bytes`, or the file
    const void *static_bytes;
    size_t static_size;
    bool sends_file;
};

/* Ways to answer. */
void mn_exchange_json(mn_exchange *x, int status, json_t *body);    // takes the body over
void mn_exchange_fail(mn_exchange *x, int status, const char *kind, const char *message);
void mn_exchange_fail_last(mn_exchange *x, mn_status status);       // with the last sentence

void mn_exchange_free(mn_exchange *x);    // what it holds; not the job

/* The description of all routes. NULL when memory is short. */
json_t *mn_openapi(void);

#endif
