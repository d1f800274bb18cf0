/* openapi.c - the description of the server, from routes.def and fields.def. */
#include <ctype.h>
#include <string.h>

#include "base/util.h"
#include "server/http/exchange.h"

enum { C = 1, T = 2, B = 3 };    // completions, chat, both

static const struct {
    const char *name, *type, *about;
    int where;
} fields[] = {
#define FIELD(name, type, where, about) { #name, type, about, where },
#define NEUTRAL(name, value, about)
#define IGNORED(name)
#include "server/fields.def"
#undef FIELD
#undef NEUTRAL
#undef IGNORED
};

/* Types of fields that are no type of JSON by themselves. */
static json_t *schema_of(const char *type) {
    if (strcmp(type, "prompt") == 0) {
        return json_pack("{s:[{s:s},{s:s,s:{s:s}},{s:s,s:{s:s}},{s:s,s:{s:s,s:{s:s}}}]}", "oneOf",
                         "type", "string", "type", "array", "items", "type", "string", "type",
                         "array", "items", "type", "integer", "type", "array", "items", "type",
                         "array", "items", "type", "integer");
    }
    if (strcmp(type, "stop") == 0) {
        return json_pack("{s:[{s:s},{s:s,s:{s:s}}]}", "oneOf", "type", "string", "type", "array",
                         "items", "type", "string");
    }
    if (strcmp(type, "logprobs") == 0) {
        return json_pack("{s:[{s:s},{s:s}]}", "oneOf", "type", "integer", "type", "boolean");
    }
    if (strcmp(type, "array") == 0) {
        return json_pack("{s:s,s:{}}", "type", "array", "items");
    }
    return json_pack("{s:s}", "type", type);
}

static json_t *fields_schema(int where) {
    json_t *properties = json_object();
    for (size_t i = 0; i < MN_COUNTOF(fields); i++) {
        if (!(fields[i].where & where)) continue;
        json_t *schema = schema_of(fields[i].type);
        json_object_set_new(schema, "description", json_string(fields[i].about));
        json_object_set_new(properties, fields[i].name, schema);
    }
    return json_pack("{s:s,s:o}", "type", "object", "properties", properties);
}

static json_t *body_of(mn_body body) {
    const char *type = body == MN_BODY_BYTES ? "application/octet-stream" : "application/json";
    json_t *schema = body == MN_BODY_COMPLETION ? fields_schema(C)
                     : body == MN_BODY_CHAT     ? fields_schema(T)
                     : body == MN_BODY_FREE     ? json_pack("{s:s}", "type", "object")
                                                : json_pack("{s:s,s:s}", "type", "string",
                                                            "format", "binary");
    return json_pack("{s:{s:{s:o}}}", "content", type, "schema", schema);
}

static json_t *operation(const mn_route *route) {
    json_t *op = json_pack("{s:s,s:{s:{s:s},s:{s:s}}}", "summary", route->about, "responses",
                           "200", "description", "the answer", "default", "description",
                           "error: message, type and code");
    if (route->body != MN_BODY_NONE) {
        json_object_set_new(op, "requestBody", body_of(route->body));
    }
    if (strstr(route->path, "{id}")) {
        json_object_set_new(op, "parameters",
                            json_pack("[{s:s,s:s,s:b,s:{s:s}}]", "name", "id", "in", "path",
                                      "required", 1, "schema", "type", "string"));
    }
    return op;
}

json_t *mn_openapi(void) {
    int count;
    const mn_route *routes = mn_routes(&count);
    json_t *paths = json_object();
    for (int i = 0; i < count; i++) {
        char method[8] = "";
        for (int k = 0; routes[i].method[k] && k < 7; k++) {
            method[k] = (char)tolower((unsigned char)routes[i].method[k]);
        }
        json_t *path = json_object_get(paths, routes[i].path);
        if (!path) {
            path = json_object();
            json_object_set_new(paths, routes[i].path, path);
        }
        json_object_set_new(path, method, operation(&routes[i]));
    }
    return json_pack("{s:s,s:{s:s,s:s},s:o,s:{s:{s:{s:s,s:s}}}}", "openapi", "3.0.3", "info",
                     "title", "mneme serve", "version", mn_version(), "paths", paths,
                     "components", "securitySchemes", "bearer", "type", "http", "scheme",
                     "bearer");
}
