/* look.c - the table of looks. */
#include "experiments/looks/look.h"

#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "io/closest.h"

static const char *const names[] = {
#define LOOK(name, about) #name,
#include "experiments/looks/looks.def"
#undef LOOK
};

static const mn_look *const looks[] = {
#define LOOK(name, about) &mn_look_##name,
#include "experiments/looks/looks.def"
#undef LOOK
};

static const mn_look *find(const char *name) {
    for (size_t i = 0; i < MN_COUNTOF(names); i++) {
        if (strcmp(names[i], name) == 0) return looks[i];
    }
    return NULL;
}

mn_status mn_look_check(const mn_json *list) {
    mn_status st = mn_json_expect_object(list);
    for (mn_json m = { 0 }; st == MN_OK && mn_json_next(&m, list);) {
        const mn_look *look = find(m.name);
        const char *near = mn_closest(m.name, names, (int64_t)MN_COUNTOF(names));
        if (look) st = look->check(&m);
        else st = mn_json_fail(list, "there is nothing called \"%s\" to look at%s%s%s", m.name,
                               near ? ", did you mean \"" : "", near ? near : "",
                               near ? "\"?" : "");
    }
    return st;
}

mn_status mn_look_all(json_t *result, const mn_look_at *at, const mn_json *list) {
    mn_status st = MN_OK;
    for (mn_json m = { 0 }; st == MN_OK && mn_json_next(&m, list);) {
        st = find(m.name)->look(result, at, &m);
    }
    return st;
}
