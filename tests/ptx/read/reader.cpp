/* reader.cpp - names, operands and declarations of a function's body. */
#include "read/reader.h"

#include <algorithm>
#include <cctype>

#include "run/handlers.h"
#include "run/operations.h"

namespace ptx {

reader::reader(ptx_kernel &k, function &of, placed_function &at) : kernel(k), f(of), placed(at) {
    scopes.push_back({ -1, {}, {}, {}, {} });
}

scope &reader::here() {
    return scopes[(size_t)current];
}

/* From the innermost scope outwards, until found(scope). */
template <class F> bool reader::search(F found) const {
    for (int s = current; s >= 0; s = scopes[(size_t)s].parent) {
        if (found(s)) return true;
    }
    return false;
}

/* ---- operands ---- */

operand reader::new_register(type t) {
    operand x;
    if (width(t) > 8) fail("a register of .%s", types[t].name.data());
    x.kind = operand::REGISTER, x.size = (u8)width(t);
    const u32 n = (u32)LANES * x.size;
    x.at = (u32)rounded_up(kernel.register_bytes, n);
    kernel.register_bytes = x.at + n;
    return x;
}

/* Immediates of equal bits and width share their lanes. */
operand reader::immediate(s64 v, int bytes) {
    operand x;
    x.kind = operand::IMMEDIATE, x.size = (u8)bytes, x.value = v;
    const u64 bits = bytes == 8 ? (u64)v : (u64)v & ((1ull << 8 * bytes) - 1);
    const auto [found, fresh] = kernel.pooled.try_emplace({ bytes, bits }, 0);
    if (fresh) {
        kernel.pool.resize(rounded_up(kernel.pool.size(), 256));
        found->second = (u32)kernel.pool.size();
        for (int l = 0; l < LANES; l++) {
            for (int i = 0; i < bytes; i++) kernel.pool.push_back((u8)(bits >> 8 * i));
        }
    }
    x.at = found->second;
    return x;
}

/* Registers of a family get their place when they are first named. */
bool reader::find_register(const std::string &name, operand *x) {
    size_t n = name.size();
    while (n > 0 && isdigit((unsigned char)name[n - 1])) n--;
    return search([&](int s) {
        scope &in = scopes[(size_t)s];
        const auto one = in.registers.find(name);
        if (one != in.registers.end()) {
            *x = one->second;
            return true;
        }
        const auto family = in.families.find(name.substr(0, n));
        if (family == in.families.end() || n == name.size()) return false;
        *x = in.registers[name] = new_register(family->second);
        return true;
    });
}

bool reader::find_symbol(view of, symbol *to) const {
    const std::string name(of);
    const auto in = [&](const std::unordered_map<std::string, symbol> &all) {
        const auto found = all.find(name);
        if (found == all.end()) return false;
        *to = found->second;
        return true;
    };
    return search([&](int s) { return in(scopes[(size_t)s].slots); }) || in(kernel.shared) ||
           in(kernel.module->globals);
}

/* An instruction takes its value into a register; never guarded. */
bool reader::special_register(view s, int bytes, operand *x) {
    static const std::unordered_map<view, special> names = {
#define SPECIAL(name, id) { name, id },
#include "read/specials.def"
#undef SPECIAL
    };
    const size_t dot = s.find('.');
    const auto found = names.find(s.substr(0, dot));
    if (found == names.end()) return false;
    *x = new_register(bytes == 8 ? T_U64 : T_U32);
    instruction &op = emit(run_special, { *x });
    op.code = found->second, op.guarded = false;
    op.variant = dot == view::npos ? 0 : s[dot + 1] - 'x';
    return true;
}

/* name or name+offset: its address, in a register. */
operand reader::symbol_address(view s, int bytes) {
    const size_t plus = s.find('+');
    s64 offset = 0;
    symbol found;
    if (plus != view::npos && !number(trimmed(s.substr(plus + 1)), &offset)) fail("no operand");
    if (!find_symbol(trimmed(s.substr(0, plus)), &found))
        fail("unknown name '%s'", std::string(s).c_str());
    operand from;
    from.from = found.from, from.value = found.at + offset;
    const operand x = new_register(bytes == 4 ? T_U32 : T_U64);
    emit(run_symbol, { x, from }).guarded = false;
    return x;
}

operand reader::parse(view s, int bytes) {
    operand x;
    s64 v;
    s = trimmed(s);
    if (s.empty() || s == "_") return x;
    if (s[0] == '!') {
        x = parse(s.substr(1), bytes);
        x.negated = true;
    } else if (s[0] == '{') {
        x.kind = operand::LIST;
        for (view part : split(s.substr(1, s.size() - 2))) x.list.push_back(parse(part, bytes));
    } else if (s[0] == '[') {
        x = parse_address(s.substr(1, s.size() - 2));
    } else if (number(s, &v)) {
        x = immediate(v, bytes);
    } else if (s == "WARP_SZ") {
        x = immediate(LANES, bytes);
    } else if (!special_register(s, bytes, &x) && !find_register(std::string(s), &x)) {
        x = symbol_address(s, bytes);
    }
    return x;
}

/* base, base+offset; behind a comma the coordinates of a tensor. */
operand reader::parse_address(view s) {
    operand x, r;
    x.kind = operand::ADDRESS;
    const std::vector<view> pieces = split(s);
    if (pieces.empty()) fail("an empty address");
    const size_t plus = pieces[0].find('+');
    const view base = trimmed(pieces[0].substr(0, plus));
    symbol found;
    s64 v;
    if (plus != view::npos && !number(trimmed(pieces[0].substr(plus + 1)), &x.value))
        fail("no address");
    if (find_register(std::string(base), &r)) {
        x.list.push_back(r);
    } else if (number(base, &v)) {
        x.from = B_ABSOLUTE, x.value += v;
    } else if (find_symbol(base, &found)) {
        x.from = found.from, x.value += found.at;
    } else {
        fail("unknown name '%s'", std::string(base).c_str());
    }
    if (pieces.size() > 1) x.list.push_back(parse(pieces[1], 4));
    return x;
}

/* ---- declarations ---- */

u32 reader::slot(size_t bytes, size_t align) {
    const u32 at = (u32)rounded_up(kernel.local_bytes, align);
    kernel.local_bytes = (u32)(at + bytes);
    return at;
}

void reader::declare_registers(view s) {
    const size_t end = s.find_first_of(" \t\n");
    const type t = type_named(s.substr(1, end - 1));
    if (t == T_NONE) fail("registers of no type");
    for (view name : split(s.substr(end))) {
        const size_t count = name.find('<');
        if (count != view::npos) here().families[std::string(name.substr(0, count))] = t;
        else here().registers[std::string(name)] = new_register(t);
    }
}

void reader::declare(view s) {
    if (begins(s, ".reg")) {
        declare_registers(trimmed(s.substr(4)));
    } else if (begins(s, ".local") || begins(s, ".param")) {
        const declared d = declaration(s.substr(6));
        here().slots[d.name] = { B_LOCAL, (s64)slot(d.bytes, (size_t)d.align), d.bytes };
    } else if (begins(s, ".shared")) {
        if (!kernel.shared.count(declaration(s.substr(7)).name))
            fail("shared memory without a place");
    } else if (!begins(s, ".pragma") && !begins(s, ".loc")) {
        fail("an unknown directive");
    }
}

/* ---- bodies ---- */

/* Functions that the text names are placed before it. */
void reader::read_callees() {
    for (auto &[name, other] : kernel.module->functions) {
        const bool other_function = !other.entry && other.begin && &other != &f;
        if (!other_function || kernel.functions.count(name) || f.body().find(name) == view::npos)
            continue;
        reader(kernel, other, kernel.functions[name]).read();
    }
}

void reader::place_parameters() {
    constexpr size_t ALIGNMENT = 16;
    for (size_t i = 0; i < f.params.size(); i++) {
        const declared &d = f.params[i];
        if (f.entry) {
            here().slots[d.name] = { B_PARAMETER, (s64)kernel.param_at[i], d.bytes };
            continue;
        }
        placed.params.push_back(slot(d.bytes, ALIGNMENT));
        here().slots[d.name] = { B_LOCAL, (s64)placed.params.back(), d.bytes };
    }
    for (const declared &d : f.returns) {
        placed.returns.push_back(slot(d.bytes, ALIGNMENT));
        here().slots[d.name] = { B_LOCAL, (s64)placed.returns.back(), d.bytes };
    }
}

/* Reads a brace, a label, a declaration or an instruction; returns what comes behind. */
const char *reader::read_item(const char *at) {
    const char *end = at;
    if (*at == ';') return at + 1;
    if (*at == '{') {
        scopes.push_back({ current, {}, {}, {}, {} });
        current = (int)scopes.size() - 1;
        return at + 1;
    }
    if (*at == '}') {
        current = here().parent;
        return at + 1;
    }
    while (end < f.end && is_name(*end)) end++;
    if (end > at && end < f.end && *end == ':' && end[1] != ':') {
        here().labels[std::string(at, end)] = (int)kernel.code.size();
        return end + 1;
    }
    end = std::find(at, f.end, ';');
    text = trimmed(view(at, (size_t)(end - at)));
    if (text[0] == '.') declare(text);
    else read_instruction(text);
    line += (int)std::count(at, end, '\n');
    return end == f.end ? end : end + 1;
}

void reader::read() {
    read_callees();
    placed.entry = (int)kernel.code.size();
    place_parameters();
    line = f.first_line;
    try {
        for (const char *at = f.begin; at < f.end;) {
            if (is_blank(*at)) line += *at++ == '\n';
            else at = read_item(at);
        }
    } catch (const failure &e) {
        fail("%s: line %d: %s: %s", f.name.c_str(), line, e.what.c_str(),
             std::string(text.substr(0, 200)).c_str());
    }
    resolve();
}

/* Adds the end of the function and says where jumps lead. */
void reader::resolve() {
    guard = instruction();
    text = "end of the function";
    placed.exit = (int)kernel.code.size();
    emit(run_return, {}).target = placed.entry;
    for (size_t r : returns) kernel.code[r].target = placed.exit;
    for (const jump &j : jumps) {
        current = j.in;
        const bool found = search([&](int s) {
            const auto label = scopes[(size_t)s].labels.find(j.label);
            if (label == scopes[(size_t)s].labels.end()) return false;
            kernel.code[j.op].target = label->second;
            return true;
        });
        if (!found) fail("%s: no label %s", f.name.c_str(), j.label.c_str());
    }
    find_reconvergence(kernel.code, (size_t)placed.entry);
}

}    // namespace ptx
