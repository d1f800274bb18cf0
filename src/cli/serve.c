/* serve.c - mneme serve: a model folder behind HTTP. */
#include <inttypes.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/command.h"
#include "cli/options.h"
#include "io/file.h"
#include "server/server.h"

static volatile sig_atomic_t stopped, reload;

static void read_again(int number) {
    (void)number;
    reload = 1;
}

static void stop(int number) {
    (void)number;
    stopped = 1;
}

static void print_help(void) {
    puts("usage: mneme serve MODEL [options]\n\n"
         "Serves the model of a folder over HTTP: OpenAI's /v1/completions and\n"
         "/v1/chat/completions, states that stay (/v1/states), what the memory believes\n"
         "(/v1/belief), a page at /, numbers at /metrics, and all of it at /openapi.json.\n\n"
         "  --address A             to listen on (default 127.0.0.1; others are for a reverse\n"
         "                          proxy, or for a network that you trust)\n"
         "  --port N                default 8080; 0: one that is free, printed\n"
         "  --key-file F            requests must carry the bearer token in this file\n"
         "                          (or in the environment: MNEME_API_KEY)\n"
         "  --name NAME             of the model (default: the folder's)\n"
         "  --streams N             sequences computed at once (default 64)\n"
         "  --queue N               requests that wait; more get 429 (default 256)\n"
         "  --context N             tokens of a prompt and its continuation (default 131072)\n"
         "  --chunk N               tokens of a prompt between two steps (default 128)\n"
         "  --cache-mb N            memory of the state cache; 0: none (default 256)\n"
         "  --cache-host-mb N       more of it in host memory, of a GPU's (default 0)\n"
         "  --cache-disk DIR        more of it in files of a folder, where the next server finds\n"
         "                          them again (default: none)\n"
         "  --cache-disk-mb N       of those files (default 4096)\n"
         "  --states N              stored states at most (default 1024)\n"
         "  --states-mb N           memory of stored states (default 1024)\n"
         "  --states-disk DIR       stored states are also files of a folder, where the next\n"
         "                          server finds them again (default: none)\n"
         "  --body-mb N             of a request (default 16)\n"
         "  --upload-mb N           of a state (default 1024)\n"
         "  --connections N         open at once (default 16384)\n"
         "  --timeout N             seconds a client may say nothing, take for a header, or leave\n"
         "                          its events unread (default 60)\n"
         "  --seconds N             of a request at most (default 3600; 0: no bound)\n"
         "  --draft N               tokens guessed from what was there before and read at once\n"
         "                          while one request runs alone; changes no text (default 8)\n"
         "  --drain N               seconds that requests get to finish at the end (default 30)\n"
         "  --threads N             default: one per core\n"
         "  --device D              cpu (default), cuda or cuda:N\n"
         "  --dtype T               f32 (default), or bf16 on a GPU\n"
         "  --log-json              one JSON object a request on standard error\n"
         "  --quiet                 no line a request\n\n"
         "The first line of standard output is the address. SIGINT and SIGTERM end it: no new\n"
         "requests, and those that run finish. SIGHUP reads the model again: new requests get it,\n"
         "those that run end with the one before.");
}

typedef struct serve_options {
    mn_server_options server;
    const char *key_file, *dtype;
    int streams, queue, context, chunk, cache_mb, states, states_mb, body_mb, upload_mb, threads;
    int seconds, draft;
    int cache_host_mb, cache_disk_mb;
} serve_options;

static int parse(serve_options *o, int argc, char **argv) {
    mn_server_options *s = &o->server;
    const mn_option rows[] = {
        { "--address", .text = &s->address },
        { "--port", .count = &s->port, .low = 0, .high = 65535 },
        { "--key-file", .text = &o->key_file },
        { "--name", .text = &s->engine.name },
        { "--streams", .count = &o->streams, .low = 1, .high = 4096 },
        { "--queue", .count = &o->queue, .low = 0, .high = 1 << 20 },
        { "--context", .count = &o->context, .low = 2, .high = 1 << 30 },
        { "--chunk", .count = &o->chunk, .low = 1, .high = 1 << 16 },
        { "--cache-mb", .count = &o->cache_mb, .low = 0, .high = 1 << 24 },
        { "--cache-host-mb", .count = &o->cache_host_mb, .low = 0, .high = 1 << 24 },
        { "--cache-disk", .text = &s->engine.cache_disk },
        { "--states-disk", .text = &s->engine.states_disk },
        { "--cache-disk-mb", .count = &o->cache_disk_mb, .low = 1, .high = 1 << 24 },
        { "--states", .count = &o->states, .low = 0, .high = 1 << 20 },
        { "--states-mb", .count = &o->states_mb, .low = 0, .high = 1 << 24 },
        { "--body-mb", .count = &o->body_mb, .low = 1, .high = 1 << 12 },
        { "--upload-mb", .count = &o->upload_mb, .low = 1, .high = 1 << 20 },
        { "--connections", .count = &s->connections, .low = 1, .high = 1 << 20 },
        { "--timeout", .count = &s->timeout, .low = 1, .high = 86400 },
        { "--seconds", .count = &o->seconds, .low = 0, .high = 1 << 30 },
        { "--draft", .count = &o->draft, .low = 0, .high = 64 },
        { "--drain", .count = &s->drain, .low = 0, .high = 86400 },
        { "--threads", .count = &o->threads, .low = 1, .high = 256 },
        { "--device", .text = &s->engine.device },
        { "--dtype", .text = &o->dtype },
        { "--log-json", .flag = &s->log_json },
        { "--quiet", .flag = &s->quiet },
        { NULL, .text = &s->engine.model },
    };
    const int status = mn_options_read(rows, MN_COUNTOF(rows), "serve", argc, argv);
    if (status) return status;
    if (!s->engine.model) return mn_options_mistake("serve", "", "name a folder with a model");
    const bool half = o->dtype && strcmp(o->dtype, "bf16") == 0;
    if (o->dtype && !half && strcmp(o->dtype, "f32") != 0) {
        return mn_options_mistake("serve", "--dtype", "is f32 or bf16");
    }
    s->engine.dtype = half ? MN_BF16 : MN_F32;
    s->engine.streams = o->streams;
    s->engine.queue = o->queue;
    s->engine.context = o->context;
    s->engine.chunk = o->chunk;
    s->engine.states = o->states;
    s->engine.n_threads = o->threads;
    s->engine.draft = o->draft;
    s->engine.seconds = o->seconds;
    s->engine.patience = s->timeout;
    s->engine.cache_bytes = (size_t)o->cache_mb << 20;
    s->engine.cache_host_bytes = (size_t)o->cache_host_mb << 20;
    s->engine.cache_disk_bytes = (size_t)o->cache_disk_mb << 20;
    s->engine.state_bytes = (size_t)o->states_mb << 20;
    s->body_bytes = (size_t)o->body_mb << 20;
    s->upload_bytes = (size_t)o->upload_mb << 20;
    return 0;
}

static void defaults(serve_options *o) {
    mn_server_options *s = &o->server;
    mn_server_defaults(s);
    o->streams = (int)s->engine.streams;
    o->queue = (int)s->engine.queue;
    o->context = (int)s->engine.context;
    o->chunk = (int)s->engine.chunk;
    o->states = (int)s->engine.states;
    o->draft = (int)s->engine.draft;
    o->seconds = (int)s->engine.seconds;
    o->cache_mb = (int)(s->engine.cache_bytes >> 20);
    o->cache_disk_mb = 4096;
    o->states_mb = (int)(s->engine.state_bytes >> 20);
    o->body_mb = (int)(s->body_bytes >> 20);
    o->upload_mb = (int)(s->upload_bytes >> 20);
}

/* The token in a file, without the line's end; or in the environment. To be freed. */
static mn_status read_key(char **key, const char *path) {
    mn_file file = { 0 };
    const char *given = getenv("MNEME_API_KEY");
    *key = NULL;
    if (!path && (!given || !*given)) return MN_OK;
    mn_status st = path ? mn_file_map(&file, path) : MN_OK;
    if (st != MN_OK) return st;
    size_t n = path ? file.size : strlen(given);
    const char *from = path ? (const char *)file.bytes : given;
    while (n > 0 && (from[n - 1] == '\n' || from[n - 1] == '\r')) n--;
    if (n == 0 || memchr(from, '\0', n)) st = mn_fail(MN_ERR_FORMAT, "%s holds no token", path);
    if (st == MN_OK) *key = strndup(from, n);
    if (st == MN_OK && !*key) st = mn_fail(MN_ERR_MEMORY, "no memory for a token");
    mn_file_unmap(&file);
    return st;
}

static const char *listens_on;

static void ready(int port) {
    const bool six = strchr(listens_on, ':') != NULL;
    printf("http://%s%s%s:%d\n", six ? "[" : "", listens_on, six ? "]" : "", port);
    fflush(stdout);
}

int mn_command_serve(int argc, char **argv) {
    serve_options o = { .key_file = NULL };
    char *key = NULL;
    defaults(&o);
    const int status = parse(&o, argc, argv);
    if (status < 0) print_help();
    if (status) return status < 0 ? 0 : status;
    const struct sigaction ends = { .sa_handler = stop };
    sigaction(SIGINT, &ends, NULL);
    sigaction(SIGTERM, &ends, NULL);
    const struct sigaction again = { .sa_handler = read_again, .sa_flags = SA_RESTART };
    sigaction(SIGHUP, &again, NULL);
    signal(SIGPIPE, SIG_IGN);
    listens_on = o.server.address;
    mn_status st = read_key(&key, o.key_file);
    o.server.key = key;
    if (st == MN_OK) st = mn_server_run(&o.server, &stopped, &reload, ready);
    free(key);
    if (st != MN_OK) fprintf(stderr, "mneme serve: %s\n", mn_last_error());
    return st != MN_OK;
}
