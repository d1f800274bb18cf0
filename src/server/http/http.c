/* http.c - libmicrohttpd around the routes: one thread that waits in epoll for all connections.
 *
 * A connection whose answer is not there yet is suspended and costs nothing; the engine resumes it
 * when there is more to send. Bodies are bounded while they come, requests are refused before
 * their body where the header already says why. */
#include "server/server.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <microhttpd.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"
#include "server/http/clients.h"
#include "server/engines.h"
#include "server/http/exchange.h"

typedef struct server {
    const mn_server_options *options;
    mn_engines *engines;
    mn_clients *clients;
    struct MHD_Daemon *daemon;
    char folder[64];           // for states on their way
} server;

/* A request on its connection. */
typedef struct request {
    mn_exchange x;
    server *s;
    mn_client *client;         // NULL: not watched
    struct MHD_Connection *connection;
    double started;
    char method[16], path[128];
    int early;                 // status of HTTP that was decided before the body; 0: none
    const char *early_kind, *early_message;
    size_t limit, came;        // bytes of the body
    FILE *file;                // where bytes go
    bool called;               // the handler has run
    size_t sent;
} request;

/* ---- log ------------------------------------------------------------------------------------- */

static void put_quoted(FILE *out, const char *text) {
    fputc('"', out);
    for (; *text; text++) {
        const unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\') fprintf(out, "\\%c", c);
        else if (c < 32 || c >= 127) fprintf(out, "\\u%04x", c);
        else fputc(c, out);
    }
    fputc('"', out);
}

static void log_request(const request *r) {
    const mn_server_options *o = r->s->options;
    if (o->quiet) return;
    char when[32];
    struct tm parts;
    const time_t now = time(NULL);
    gmtime_r(&now, &parts);
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", &parts);
    const double seconds = mn_seconds() - r->started;
    if (o->log_json) {
        fprintf(stderr, "{\"time\":\"%s\",\"method\":", when);
        put_quoted(stderr, r->method);
        fputs(",\"path\":", stderr);
        put_quoted(stderr, r->path);
        fprintf(stderr, ",\"status\":%d,\"seconds\":%.6f,\"received\":%zu,\"sent\":%zu}\n",
                r->x.status, seconds, r->came, r->sent);
    } else {
        fprintf(stderr, "time=%s method=%s path=", when, r->method);
        put_quoted(stderr, r->path);
        fprintf(stderr, " status=%d seconds=%.6f received=%zu sent=%zu\n", r->x.status, seconds,
                r->came, r->sent);
    }
}

/* ---- before the body ------------------------------------------------------------------------- */

/* Whether two texts are equal, in a time that tells only the length of the first. */
static bool same_secret(const char *given, const char *want) {
    const size_t n = strlen(given), m = strlen(want);
    unsigned different = n != m;
    for (size_t i = 0; i < n; i++) {
        different |= (unsigned)(unsigned char)given[i] ^
                     (unsigned)(unsigned char)want[m ? i % m : 0];
    }
    return different == 0;
}

static bool is_authorised(const request *r) {
    const char *key = r->s->options->key;
    if (!key || strcmp(r->path, "/") == 0 || strcmp(r->path, "/health") == 0) return true;
    const char *given = MHD_lookup_connection_value(r->connection, MHD_HEADER_KIND,
                                                    MHD_HTTP_HEADER_AUTHORIZATION);
    return given && strncasecmp(given, "Bearer ", 7) == 0 && same_secret(given + 7, key);
}

/* Pages of other sites may not use a visitor's browser to reach this server. */
static bool is_own_origin(struct MHD_Connection *connection) {
    const char *origin = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Origin");
    const char *host = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Host");
    if (!origin) return true;
    const char *at = strstr(origin, "://");
    return at && host && strcmp(at + 3, host) == 0;
}

static void decide(request *r, int status, const char *kind, const char *message) {
    r->early = status;
    r->early_kind = kind;
    r->early_message = message;
}

static void check_header(request *r) {
    int status;
    r->x.route = mn_route_find(r->method, r->path, r->x.id, &status);
    if (!is_authorised(r)) {
        decide(r, 401, "authentication_error", "the request carries no valid bearer token");
        return;
    }
    if (!is_own_origin(r->connection)) {
        decide(r, 403, "permission_error", "pages of other origins may not use this server");
        return;
    }
    if (!r->x.route) {
        if (status == 405) {
            decide(r, 405, "invalid_request_error",
                   "this path takes another method; /openapi.json lists them");
        } else {
            decide(r, 404, "not_found_error", "there is no such path; /openapi.json lists them");
        }
        return;
    }
    const bool bytes = r->x.route->body == MN_BODY_BYTES;
    r->limit = bytes ? r->s->options->upload_bytes : r->s->options->body_bytes;
    const char *length = MHD_lookup_connection_value(r->connection, MHD_HEADER_KIND,
                                                     MHD_HTTP_HEADER_CONTENT_LENGTH);
    if (length && strtoull(length, NULL, 10) > r->limit) {
        decide(r, 413, "invalid_request_error", "the body is larger than this server takes");
    }
}

/* ---- the body -------------------------------------------------------------------------------- */

static mn_status keep_bytes(request *r, const char *bytes, size_t size) {
    if (!r->file) {
        const int n = snprintf(r->x.file, sizeof r->x.file, "%s/upload-XXXXXX", r->s->folder);
        const int fd = n > 0 ? mkstemp(r->x.file) : -1;
        if (fd < 0) r->x.file[0] = '\0';
        r->file = fd < 0 ? NULL : fdopen(fd, "wb");
    }
    if (r->file && fwrite(bytes, 1, size, r->file) == size) return MN_OK;
    return mn_fail(MN_ERR_IO, "the upload cannot be kept: %s", strerror(errno));
}

enum { MOST_DISCARDED = 1 << 24 };    // bytes read from a client that was refused

/* A client that is still sending hears at once that its request is refused. */
static void refuse_now(request *r) {
    char status[64];
    snprintf(status, sizeof status, "%d %s", r->early,
             MHD_get_reason_phrase_for((unsigned)r->early));
    mn_clients_refuse(r->x.fd, status, r->early_message);
    r->x.status = r->early;
}

static const char *header_of(const request *r, const char *name) {
    return MHD_lookup_connection_value(r->connection, MHD_HEADER_KIND, name);
}

/* A request that is refused by its header. Closing the connection over a body that is on its way
 * resets it, and a proxy that still writes never sees the answer; so the body is read and thrown
 * away first. One that is too long for that is answered at once, then read for a while. A client
 * that asks before it sends (Expect) is answered instead of encouraged. */
static bool discards_body(request *r) {
    const char *length = header_of(r, MHD_HTTP_HEADER_CONTENT_LENGTH);
    const bool chunked = header_of(r, MHD_HTTP_HEADER_TRANSFER_ENCODING) != NULL;
    const unsigned long long bytes = length ? strtoull(length, NULL, 10) : 0;
    if ((bytes == 0 && !chunked) || header_of(r, MHD_HTTP_HEADER_EXPECT)) return false;
    if (bytes > MOST_DISCARDED) refuse_now(r);
    return true;
}

/* MHD_NO closes the connection. */
static enum MHD_Result take_body(request *r, const char *bytes, size_t *size) {
    const size_t n = *size;
    *size = 0;
    r->came += n;
    mn_client_sent(r->s->clients, r->client, n);
    if (r->early) return r->came > r->limit + MOST_DISCARDED ? MHD_NO : MHD_YES;
    if (r->came > r->limit) {
        decide(r, 413, "invalid_request_error", "the body is larger than this server takes");
        refuse_now(r);
        mn_text_free(&r->x.body);
        return MHD_YES;
    }
    const mn_status st = r->x.route->body == MN_BODY_BYTES ? keep_bytes(r, bytes, n)
                                                           : mn_text_add(&r->x.body, bytes, n);
    if (st != MN_OK) decide(r, 503, "overloaded_error", "there is no room for the body");
    return MHD_YES;
}

/* ---- answers --------------------------------------------------------------------------------- */

static void add_headers(struct MHD_Response *response, const char *type) {
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
    MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
    if (strncmp(type, "text/html", 9) == 0) {
        MHD_add_response_header(response, "Content-Security-Policy",
                                "default-src 'self'; style-src 'unsafe-inline'; script-src "
                                "'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'");
    }
}

static enum MHD_Result queue(request *r, struct MHD_Response *response, const char *type) {
    if (!response) return MHD_NO;
    add_headers(response, type);
    if (r->x.status == 429) MHD_add_response_header(response, "Retry-After", "1");
    if (r->x.status == 401) MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
    mn_engine_answered(r->x.engine, r->x.status);
    const enum MHD_Result ok = MHD_queue_response(r->connection, (unsigned)r->x.status, response);
    MHD_destroy_response(response);
    return ok;
}

static enum MHD_Result answer_bytes(request *r, const void *bytes, size_t size, const char *type) {
    r->sent = size;
    return queue(r, MHD_create_response_from_buffer(size, (void *)bytes, MHD_RESPMEM_MUST_COPY),
                 type);
}

static enum MHD_Result answer_file(request *r) {
    struct stat about;
    const int fd = open(r->x.file, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &about) != 0) {
        if (fd >= 0) close(fd);
        return MHD_NO;
    }
    r->sent = (size_t)about.st_size;
    return queue(r, MHD_create_response_from_fd64((uint64_t)about.st_size, fd),
                 "application/octet-stream");
}

static enum MHD_Result answer_exchange(request *r) {
    mn_exchange *x = &r->x;
    if (x->static_bytes) return answer_bytes(r, x->static_bytes, x->static_size, x->type);
    return answer_bytes(r, x->answer.bytes ? x->answer.bytes : "", x->answer.size, x->type);
}

static void wake(void *context) {
    MHD_resume_connection(context);
}

/* Events as they come. */
static ssize_t read_events(void *context, uint64_t position, char *out, size_t size) {
    (void)position;
    request *r = context;
    bool done = false;
    mn_engine_lock(r->x.engine);
    const size_t n = mn_job_take(r->x.job, out, size, &done);
    if (n == 0 && !done && !mn_job_ready(r->x.job)) MHD_suspend_connection(r->connection);
    mn_engine_unlock(r->x.engine);
    r->sent += n;
    return n > 0 ? (ssize_t)n : done ? MHD_CONTENT_READER_END_OF_STREAM : 0;
}

/* The job has something to say, or all. */
static enum MHD_Result answer_job(request *r, bool done) {
    size_t size = 0;
    const char *body = done ? mn_job_body(r->x.job, &size) : NULL;    // the engine writes no more
    const int status = done ? mn_job_status(r->x.job) : 200;
    r->x.status = status ? status : 200;
    if (!done || (size > 5 && memcmp(body, "data:", 5) == 0)) {
        return queue(r, MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 1 << 14, read_events,
                                                          r, NULL), "text/event-stream");
    }
    if (r->x.sends_file) return answer_file(r);
    return answer_bytes(r, body, size, "application/json");
}

static enum MHD_Result wait_for_job(request *r) {
    mn_engine_lock(r->x.engine);
    const bool ready = mn_job_ready(r->x.job);
    const bool done = mn_job_is_done(r->x.job);
    if (!ready) MHD_suspend_connection(r->connection);
    mn_engine_unlock(r->x.engine);
    return ready ? answer_job(r, done) : MHD_YES;
}

static enum MHD_Result respond(request *r) {
    if (r->early) {
        mn_exchange_fail(&r->x, r->early, r->early_kind, r->early_message);
        return answer_exchange(r);
    }
    if (r->file) {
        const bool kept = fclose(r->file) == 0;
        r->file = NULL;
        if (!kept) mn_exchange_fail(&r->x, 503, "overloaded_error", "the upload cannot be kept");
        if (!kept) return answer_exchange(r);
    }
    if (!r->called) {
        r->called = true;
        mn_client_waits(r->s->clients, r->client);
        r->x.route->handle(&r->x);
    }
    if (r->x.job) return wait_for_job(r);
    return answer_exchange(r);
}

/* ---- connections ----------------------------------------------------------------------------- */

static request *begin(server *s, struct MHD_Connection *connection, const char *path,
                      const char *method) {
    request *r = calloc(1, sizeof *r);
    if (!r) return NULL;
    r->s = s;
    r->connection = connection;
    r->started = mn_seconds();
    snprintf(r->method, sizeof r->method, "%s", method);
    snprintf(r->path, sizeof r->path, "%s", path);
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    const union MHD_ConnectionInfo *own =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    r->client = own ? own->socket_context : NULL;
    mn_client_sends(s->clients, r->client);
    r->x = (mn_exchange){ .engine = mn_engines_take(s->engines), .folder = s->folder, .wake = wake,
                          .waker = connection, .fd = info ? info->connect_fd : -1 };
    check_header(r);
    return r;
}

static enum MHD_Result handle(void *context, struct MHD_Connection *connection, const char *path,
                              const char *method, const char *version, const char *bytes,
                              size_t *size, void **own) {
    (void)version;
    request *r = *own;
    if (!r) {
        r = begin(context, connection, path, method);
        *own = r;
        if (!r) return MHD_NO;
        return r->early && !discards_body(r) ? respond(r) : MHD_YES;
    }
    return *size > 0 ? take_body(r, bytes, size) : respond(r);
}

static void completed(void *context, struct MHD_Connection *connection, void **own,
                      enum MHD_RequestTerminationCode code) {
    (void)context;
    (void)connection;
    (void)code;
    request *r = *own;
    if (!r) return;
    log_request(r);
    mn_job_release(r->x.job);
    mn_engines_give(r->s->engines, r->x.engine);
    mn_client_rests(r->s->clients, r->client);
    if (r->file) fclose(r->file);
    mn_exchange_free(&r->x);
    free(r);
    *own = NULL;
}

/* Connections as they come and go. */
static void watch(void *context, struct MHD_Connection *connection, void **own,
                  enum MHD_ConnectionNotificationCode code) {
    server *s = context;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *info =
            MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
        *own = info ? mn_clients_add(s->clients, info->connect_fd) : NULL;
    } else {
        mn_clients_remove(s->clients, *own);
        *own = NULL;
    }
}

static void say_nothing(void *context, const char *format, va_list args) {
    (void)context;
    (void)format;
    (void)args;
}

/* ---- running --------------------------------------------------------------------------------- */

static mn_status resolve(struct addrinfo **out, const mn_server_options *o) {
    char port[16];
    const struct addrinfo hints = { .ai_socktype = SOCK_STREAM,
                                    .ai_flags = AI_PASSIVE | AI_NUMERICSERV };
    snprintf(port, sizeof port, "%d", o->port);
    const int rc = getaddrinfo(o->address, port, &hints, out);
    if (rc == 0) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "--address %s: %s", o->address, gai_strerror(rc));
}

enum { OWN_FILES = 64 };           // descriptors that are no connections

/* As many connections as were asked for, or as many files as this process may open. */
static int most_connections(const mn_server_options *o) {
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0) return o->connections;
    const rlim_t want = (rlim_t)o->connections + OWN_FILES;
    if (files.rlim_cur < want) {
        files.rlim_cur = files.rlim_max < want ? files.rlim_max : want;
        setrlimit(RLIMIT_NOFILE, &files);
        getrlimit(RLIMIT_NOFILE, &files);
    }
    if (files.rlim_cur >= want) return o->connections;
    return (int)mn_max((int64_t)files.rlim_cur - OWN_FILES, 1);
}

static mn_status start(server *s) {
    const mn_server_options *o = s->options;
    struct addrinfo *address = NULL;
    mn_status st = resolve(&address, o);
    if (st != MN_OK) return st;
    const unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME |
                           MHD_USE_ERROR_LOG |
                           (address->ai_family == AF_INET6 ? (unsigned)MHD_USE_IPv6 : 0);
    s->daemon = MHD_start_daemon(
        flags, 0, NULL, NULL, handle, s, MHD_OPTION_EXTERNAL_LOGGER, say_nothing, NULL,
        MHD_OPTION_SOCK_ADDR, address->ai_addr, MHD_OPTION_NOTIFY_COMPLETED, completed, NULL,
        MHD_OPTION_NOTIFY_CONNECTION, watch, s,
        MHD_OPTION_CONNECTION_LIMIT, (unsigned)most_connections(o), MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)o->timeout, MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)64 << 10,
        MHD_OPTION_LISTEN_BACKLOG_SIZE, 1024u, MHD_OPTION_END);
    freeaddrinfo(address);
    if (s->daemon) return MN_OK;
    return mn_fail(MN_ERR_IO, "%s port %d cannot be listened on: %s", o->address, o->port,
                   errno ? strerror(errno) : "it may be in use");
}

static int port_of(const server *s) {
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(s->daemon, MHD_DAEMON_INFO_BIND_PORT);
    return info ? info->port : s->options->port;
}

static mn_status make_folder(server *s) {
    const char *base = getenv("TMPDIR");
    const int n = snprintf(s->folder, sizeof s->folder, "%s/mneme-serve-XXXXXX",
                           base && *base ? base : "/tmp");
    if (n > 0 && (size_t)n < sizeof s->folder && mkdtemp(s->folder)) return MN_OK;
    return mn_fail(MN_ERR_IO, "no folder for states on their way in %s: %s",
                   base && *base ? base : "/tmp", strerror(errno));
}

static void stop_all(server *s) {
    const int socket = MHD_quiesce_daemon(s->daemon);
    mn_engines_drain(s->engines, s->options->drain);
    const struct timespec moment = { .tv_nsec = 200000000 };
    nanosleep(&moment, NULL);    // for last answers on their way
    MHD_stop_daemon(s->daemon);
    if (socket >= 0) close(socket);
}

/* One line about a reload, in the form of the log. */
static void log_reload(const server *s, mn_status st) {
    if (s->options->log_json) {
        fprintf(stderr, "{\"event\":\"reload\",\"message\":");
        put_quoted(stderr, st == MN_OK ? "the model was read again" : mn_last_error());
        fputs("}\n", stderr);
    } else {
        fputs("event=reload message=", stderr);
        put_quoted(stderr, st == MN_OK ? "the model was read again" : mn_last_error());
        fputc('\n', stderr);
    }
}

/* What is done beside the requests, until the end. */
static void keep_house(server *s, const volatile sig_atomic_t *stop,
                       volatile sig_atomic_t *reload) {
    const struct timespec moment = { .tv_nsec = 50000000 };
    for (unsigned turn = 0; !*stop; turn++) {
        nanosleep(&moment, NULL);
        if (*reload) {
            *reload = 0;
            log_reload(s, mn_engines_reload(s->engines));
        }
        if (turn % 10 == 0) mn_clients_sweep(s->clients);
        mn_engines_sweep(s->engines);
    }
}

mn_status mn_server_run(const mn_server_options *options, const volatile sig_atomic_t *stop,
                        volatile sig_atomic_t *reload, void (*ready)(int port)) {
    server s = { .options = options };
    mn_status st = mn_engines_open(&s.engines, &options->engine);
    if (st != MN_OK) return st;
    st = mn_clients_create(&s.clients, most_connections(options), options->timeout);
    if (st == MN_OK) st = make_folder(&s);
    if (st == MN_OK) st = start(&s);
    if (st == MN_OK) {
        ready(port_of(&s));
        keep_house(&s, stop, reload);
        stop_all(&s);
    }
    mn_engines_close(s.engines);
    mn_clients_destroy(s.clients);
    if (s.folder[0]) rmdir(s.folder);
    return st;
}
