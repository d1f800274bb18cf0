/* module.cpp - the text of a module: its functions, found and not yet read, and its variables. */
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "read/reader.h"
#include "run/memory.h"

namespace ptx {

constexpr size_t VARIABLE_ALIGNMENT = 256;

/* Blanks at the beginning of lines go, and comments become blanks. Lines keep their numbers. */
static std::string without_comments(const char *text) {
    std::string out;
    bool fresh = true, comment = false;
    for (const char *c = text; *c; c++) {
        if (fresh && (*c == ' ' || *c == '\t')) continue;
        fresh = *c == '\n';
        comment = !fresh && (comment || (c[0] == '/' && c[1] == '/'));
        out += comment ? ' ' : *c;
    }
    return out;
}

static std::vector<declared> parameters_of(view s) {
    std::vector<declared> all;
    for (view p : split(s)) all.push_back(declaration(p.substr(strlen(".param"))));
    return all;
}

/* "(...) rest": what is in the brackets, and the rest in *s; empty where s begins with no
 * bracket. */
static view bracketed(view *s) {
    if (s->empty() || (*s)[0] != '(') return view();
    const size_t end = s->find(')');
    const view inside = s->substr(1, end - 1);
    *s = trimmed(s->substr(end + 1));
    return inside;
}

/* What follows a word, empty where the word is not there. */
static std::string after(view text, const char *word) {
    const size_t at = text.find(word);
    return at == view::npos ? std::string() : std::string(text.substr(at + strlen(word), 60));
}

/* .entry name(params) .maxntid 128, 1, 1 .minnctapersm 1 or .func (result) name(params) */
static function head_of(view head) {
    function f;
    const size_t entry = head.find(".entry"), func = head.find(".func");
    f.entry = entry != view::npos;
    view rest = trimmed(head.substr(f.entry ? entry + strlen(".entry") : func + strlen(".func")));
    f.returns = parameters_of(bracketed(&rest));
    size_t n = 0;
    while (n < rest.size() && is_name(rest[n])) n++;
    f.name = std::string(rest.substr(0, n));
    rest = trimmed(rest.substr(n));
    f.params = parameters_of(bracketed(&rest));
    int x = 1, y = 1, z = 1;
    if (sscanf(after(rest, ".maxntid").c_str(), "%d , %d , %d", &x, &y, &z) > 0) {
        f.max_threads = x * y * z;
    }
    sscanf(after(rest, ".minnctapersm").c_str(), "%d", &f.min_blocks);
    return f;
}

/* { 1, 2, { 3 } } as elements one after the other; braces within change nothing. */
static void initialise(u8 *at, const declared &d, view values) {
    std::string flat(trimmed(values));
    for (char &c : flat) c = c == '{' || c == '}' ? ' ' : c;
    const size_t unit = (size_t)width(d.of);
    size_t used = 0;
    for (view value : split(flat)) {
        s64 v = 0;
        if (!number(value, &v))
            fail("%s: initial value '%s'", d.name.c_str(), std::string(value).c_str());
        if (used + unit > d.bytes) fail("%s: more values than elements", d.name.c_str());
        memcpy(at + used, &v, unit);
        used += unit;
    }
}

static void read_global(ptx_module &m, view s) {
    const size_t equals = s.find('=');
    const declared d = declaration(s.substr(0, equals));
    m.memory.emplace_back(new u8[d.bytes + VARIABLE_ALIGNMENT]());
    u8 *at = (u8 *)rounded_up((u64)m.memory.back().get(), VARIABLE_ALIGNMENT);
    if (equals != view::npos) initialise(at, d, s.substr(equals + 1));
    m.globals[d.name] = { B_ABSOLUTE, (s64)(u64)at, d.bytes };
    ptx_memory_add(at, d.bytes);
}

static void read_variable(ptx_module &m, view s) {
    if (s.find(".section") != view::npos) return;    // for debuggers
    if (s.find(".shared") == view::npos) return read_global(m, s);
    m.shared.push_back({ declaration(s), s.find(".extern") != view::npos });
}

/* The brace that closes the one at `open`. */
static const char *closing(const char *open, const char *end) {
    int depth = 0;
    for (const char *c = open; c < end; c++) {
        depth += (*c == '{') - (*c == '}');
        if (depth == 0) return c;
    }
    fail("a body without an end");
}

/* One directive, variable or function; returns what comes behind, and counts its lines. */
static const char *read_top(ptx_module &m, const char *at, const char *end, int *line) {
    const char *const eol = std::find(at, end, '\n');
    const view first(at, (size_t)(eol - at));
    for (view skipped : { ".version", ".target", ".address_size", ".file" }) {
        if (begins(first, skipped)) return eol;
    }
    const char *head_end = std::find_if(at, end, [](char c) { return c == ';' || c == '{'; });
    const view head(at, (size_t)(head_end - at));
    const char *last = head_end;
    if (head.find(".entry") != view::npos || head.find(".func") != view::npos) {
        function f = head_of(head);
        f.first_line = *line + (int)std::count(at, head_end, '\n');
        if (last < end && *last == '{') {
            last = closing(last, end);
            f.begin = head_end + 1, f.end = last;
        }
        function &known = m.functions[f.name];
        if (!known.begin) known = std::move(f);
    } else {
        last = std::find(at, end, ';');
        read_variable(m, view(at, (size_t)(last - at)));
    }
    *line += (int)std::count(at, last, '\n');
    return last == end ? end : last + 1;
}

static void read_module(ptx_module &m) {
    const char *at = m.text.data(), *const end = at + m.text.size();
    int line = 1;
    while (at < end) {
        if (is_blank(*at) || *at == ';') line += *at++ == '\n';
        else at = read_top(m, at, end, &line);
    }
}

/* ---- kernels ---- */

static void place_shared(ptx_kernel &k, const declared &d) {
    k.static_end = (u32)rounded_up(k.static_end, (u64)d.align);
    k.shared[d.name] = { B_SHARED, (s64)k.static_end, d.bytes };
    k.static_end += (u32)d.bytes;
}

/* Variables that a body declares. */
static void place_shared_of(ptx_kernel &k, view body) {
    constexpr view WORD = "\n.shared";
    for (size_t at = 0; (at = body.find(WORD, at)) != view::npos;) {
        const size_t end = body.find(';', at);
        place_shared(k, declaration(body.substr(at + WORD.size(), end - at - WORD.size())));
        at = end;
    }
}

static bool is_used(const ptx_kernel &k, view name) {
    if (k.of->body().find(name) != view::npos) return true;
    for (const auto &[unused, f] : k.module->functions) {
        if (!f.entry && f.begin && f.body().find(name) != view::npos) return true;
    }
    return false;
}

/* The module's variables that are used, those of bodies, and behind them what is dynamic, which
 * has one place. */
static void lay_out_shared(ptx_kernel &k) {
    const ptx_module &m = *k.module;
    k.static_end = SHARED_FIRST;
    for (const auto &v : m.shared) {
        if (v.dynamic) k.dynamic_align = std::max(k.dynamic_align, (u32)v.is.align);
        else if (is_used(k, v.is.name)) place_shared(k, v.is);
    }
    place_shared_of(k, k.of->body());
    for (const auto &[name, f] : m.functions) {
        if (!f.entry && f.begin) place_shared_of(k, f.body());
    }
    const s64 dynamic = (s64)rounded_up(k.static_end, k.dynamic_align);
    for (const auto &v : m.shared) {
        if (v.dynamic) k.shared[v.is.name] = { B_SHARED, dynamic, 0 };
    }
}

static void lay_out_parameters(ptx_kernel &k) {
    for (const declared &d : k.of->params) {
        k.param_bytes = (u32)rounded_up(k.param_bytes, (u64)d.align);
        k.param_at.push_back(k.param_bytes);
        k.param_bytes += (u32)d.bytes;
    }
}

void prepare(ptx_kernel &k) {
    if (k.ready) return;
    if (!k.broken.empty()) fail("%s", k.broken.c_str());
    try {
        lay_out_shared(k);
        lay_out_parameters(k);
        placed_function own;
        reader(k, *k.of, own).read();
        k.entry = own.entry;
    } catch (const failure &f) {
        k.broken = f.what;
        throw;
    }
    k.local_bytes = (u32)rounded_up(k.local_bytes, 16);
    k.ready = true;
}

}    // namespace ptx

extern "C" ptx_module *ptx_module_load(const char *text) {
    auto m = std::make_unique<ptx_module>();
    m->text = ptx::without_comments(text);
    try {
        ptx::read_module(*m);
    } catch (const ptx::failure &f) {
        fprintf(stderr, "ptx: %s\n", f.what.c_str());
        return nullptr;
    }
    return m.release();
}

extern "C" void ptx_module_free(ptx_module *m) {
    if (!m) return;
    for (const auto &[name, variable] : m->globals)
        ptx_memory_remove((const void *)(uintptr_t)variable.at);
    delete m;
}

extern "C" ptx_kernel *ptx_module_kernel(ptx_module *m, const char *name) {
    const auto found = m->functions.find(name);
    if (found == m->functions.end() || !found->second.begin) return nullptr;
    auto &k = m->kernels[name];
    if (!k) {
        k.reset(new ptx_kernel());
        k->module = m, k->of = &found->second;
    }
    return k.get();
}

extern "C" void *ptx_module_variable(ptx_module *m, const char *name, size_t *bytes) {
    const auto found = m->globals.find(name);
    if (found == m->globals.end()) return nullptr;
    *bytes = found->second.bytes;
    return (void *)(uintptr_t)found->second.at;
}

extern "C" int ptx_kernel_params(const ptx_kernel *k) {
    return (int)k->of->params.size();
}

extern "C" size_t ptx_kernel_param_size(const ptx_kernel *k, int i) {
    return k->of->params[(size_t)i].bytes;
}

extern "C" int ptx_kernel_max_threads(const ptx_kernel *k) {
    return k->of->max_threads;
}

extern "C" size_t ptx_kernel_static_shared(ptx_kernel *k) {
    try {
        ptx::prepare(*k);
    } catch (const ptx::failure &f) {
        fprintf(stderr, "ptx: %s\n", f.what.c_str());
        return 0;
    }
    return k->static_end - ptx::SHARED_FIRST;
}
