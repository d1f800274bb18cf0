/* decode.cpp - instructions of a body, by the rows of instructions.def; control flow by forms of
 * its own. */
#include <algorithm>
#include <cctype>
#include <cstdio>

#include "read/reader.h"
#include "run/handlers.h"
#include "run/operations.h"

namespace ptx {

enum type_class : u8 { ANY_TYPE, REAL_TYPE, INTEGER_TYPE, PREDICATE_TYPE, PAIR_TYPE };

struct row {
    std::vector<view> words;
    type_class of;
    handler run;
    const char *operands;
    int code;
};

/* Rows by their first word, in their order. */
static const std::unordered_map<view, std::vector<row>> &rows() {
    static const std::unordered_map<view, std::vector<row>> all = [] {
        const row listed[] = {
#define INSTRUCTION(words, types, run, operands, code)                                             \
    { split(words, '.'), types##_TYPE, run, operands, code },
#include "read/instructions.def"
#undef INSTRUCTION
        };
        std::unordered_map<view, std::vector<row>> by_name;
        for (const row &r : listed) by_name[r.words[0]].push_back(r);
        return by_name;
    }();
    return all;
}

static bool is_of(type t, type_class c) {
    switch (c) {
    case REAL_TYPE: return is_float(t) || is_pair(t);
    case INTEGER_TYPE: return types[t].kind == K_BITS || is_signed(t);
    case PREDICATE_TYPE: return t == T_PRED;
    case PAIR_TYPE: return is_pair(t);
    default: return true;
    }
}

bool parts::has(view word) const {
    return std::find(words.begin() + 1, words.end(), word) != words.end();
}

static const row *row_of(const parts &p) {
    const auto named = rows().find(p.words[0]);
    if (named == rows().end()) return nullptr;
    for (const row &r : named->second) {
        const bool all = std::all_of(r.words.begin() + 1, r.words.end(),
                                     [&](view w) { return p.has(w); });
        if (all && is_of(p.first, r.of)) return &r;
    }
    return nullptr;
}

/* ---- modifiers ---- */

typedef void (*modifier)(instruction &op);

static const std::unordered_map<view, modifier> &modifiers() {
    static const std::unordered_map<view, modifier> all = {
#define MODIFIER(word, field, value) { word, [](instruction &op) { op.field = value; } },
#define FLAG(word, flag) { word, [](instruction &op) { op.flags |= flag; } },
#include "read/modifiers.def"
#undef MODIFIER
#undef FLAG
    };
    return all;
}

/* .m16n8k16 */
static void take_shape(view word, instruction &op) {
    int m, n, k;
    if (sscanf(std::string(word).c_str(), "m%dn%dk%d", &m, &n, &k) != 3) return;
    op.shape.m = m, op.shape.n = n, op.shape.k = k;
}

static void take_modifiers(const parts &p, instruction &op) {
    op.t = p.first;
    op.source = p.second == T_NONE ? T_F32 : p.second;
    for (size_t i = 1; i < p.words.size(); i++) {
        const auto found = modifiers().find(p.words[i]);
        if (found != modifiers().end()) found->second(op);
        else take_shape(p.words[i], op);
    }
    if (op.flags & F_HI) op.variant = HI;    // setp.hi; elsewhere a half of a product
}

/* ---- operands ---- */

static int immediate_bytes(type t) {
    return t == T_NONE ? 4 : std::min(width(t), 8);
}

static int bytes_of(char letter, const parts &p) {
    const int first = immediate_bytes(p.first);
    switch (letter) {
    case 's': return p.second == T_NONE ? first : immediate_bytes(p.second);
    case 'w': return p.has("wide") ? 2 * first : first;
    case 'p': return 1;
    case 'h': return 4;
    case 'q': return 8;
    default: return first;
    }
}

std::vector<operand> reader::by_letters(const parts &p, const char *letters) {
    std::vector<operand> x;
    size_t next = 0;
    for (const char *c = letters; *c && *c != '*'; c++) {
        const view s = next < p.operands.size() ? p.operands[next] : view();
        const bool left_out = *c == '-' || (*c == 'o' && !s.empty() && s[0] == '[');
        next += left_out ? 0 : 1;
        if (*c != 'D') {
            operand one = left_out ? operand() : parse(s, bytes_of(*c, p));
            const bool predicate = *c == 'p' || p.first == T_PRED;    // true is any number but 0
            if (predicate && one.kind == operand::IMMEDIATE) one = immediate(one.value != 0, 1);
            x.push_back(one);
            continue;
        }
        const std::vector<view> both = split(s, '|');
        x.push_back(both.empty() ? operand() : parse(both[0], 4));
        x.push_back(both.size() < 2 ? operand() : parse(both[1], 1));
    }
    const size_t hints = p.has("L2::cache_hint") ? 1 : 0;
    if (*letters != '*' && p.operands.size() > next + hints) fail("more operands than are known");
    return x;
}

/* ---- instructions ---- */

instruction &reader::emit(handler run, std::vector<operand> x) {
    instruction op = guard;
    op.run = run, op.x = std::move(x), op.text = text, op.line = line;
    kernel.code.push_back(std::move(op));
    return kernel.code.back();
}

/* @p or @!p before an instruction; returns what is behind. */
view reader::read_guard(view s) {
    guard = instruction();
    if (s[0] != '@') return s;
    guard.guarded = true, guard.guard_negated = s[1] == '!';
    s.remove_prefix(guard.guard_negated ? 2 : 1);
    size_t end = 0;
    while (end < s.size() && is_name(s[end])) end++;
    operand predicate;
    if (!find_register(std::string(s.substr(0, end)), &predicate)) fail("an unknown predicate");
    guard.guard_at = predicate.at;
    return trimmed(s.substr(end));
}

void reader::by_table(const parts &p) {
    const row *r = row_of(p);
    if (!r) fail("an unknown instruction");
    instruction &op = emit(r->run, by_letters(p, r->operands));
    op.code = r->code;
    take_modifiers(p, op);
}

void reader::read_instruction(view s) {
    parts p;
    s = read_guard(s);
    size_t end = 0;
    while (end < s.size() && (is_name(s[end]) || s[end] == ':')) end++;
    p.words = split(s.substr(0, end), '.');
    p.operands = split(s.substr(end));
    if (p.words.empty()) fail("no instruction");
    for (size_t i = p.words.size(); i-- > 1;) {
        const type t = type_named(p.words[i]);
        if (t != T_NONE) p.second = p.first, p.first = t;
    }
    const auto own = forms().find(p.words[0]);
    const bool reduction = p.words[0].substr(0, 3) == "bar" && p.has("red");
    if (reduction) read_reduction(p);
    else if (own != forms().end()) (this->*own->second)(p);
    else by_table(p);
}

/* ---- control flow ---- */

const std::unordered_map<view, reader::form> &reader::forms() {
    static const std::unordered_map<view, form> all = { { "bra", &reader::read_branch },
                                                        { "ret", &reader::read_return },
                                                        { "exit", &reader::read_return },
                                                        { "call", &reader::read_call } };
    return all;
}

void reader::read_branch(const parts &p) {
    if (p.operands.size() != 1) fail("a branch to nowhere");
    emit(run_branch, {});
    jumps.push_back({ kernel.code.size() - 1, std::string(p.operands[0]), current });
}

/* A jump to the function's end, where lanes that return earlier wait for the others. */
void reader::read_return(const parts &p) {
    if (p.words[0] == "exit" && !f.entry) fail("exit in a function");
    emit(run_branch, {});
    returns.push_back(kernel.code.size() - 1);
}

u32 reader::argument_slot(view name) const {
    symbol s;
    if (!find_symbol(name, &s) || s.from != B_LOCAL) fail("an argument that is no .param");
    return (u32)s.at;
}

void reader::copy_slots(u32 to, u32 from, size_t bytes) {
    operand a, b;
    a.value = to, b.value = from;
    emit(run_copy_local, { a, b }).count = (int)bytes;
}

/* call (result), name, (arguments). Functions without a body, as __assertfail, end the kernel. */
void reader::read_call(const parts &p) {
    std::vector<view> operands = p.operands, results, arguments;
    const auto inner = [](view s) { return split(s.substr(1, s.size() - 2)); };
    if (!operands.empty() && operands[0][0] == '(') {
        results = inner(operands[0]);
        operands.erase(operands.begin());
    }
    if (operands.empty()) fail("a call of nothing");
    if (operands.size() > 1 && operands[1][0] == '(') arguments = inner(operands[1]);
    const std::string name(operands[0]);
    const auto found = kernel.module->functions.find(name);
    if (found == kernel.module->functions.end() || !found->second.begin) {
        emit(run_trap, {});
        return;
    }
    const function &callee = found->second;
    const placed_function &to = kernel.functions.at(name);
    if (arguments.size() != to.params.size() || results.size() > to.returns.size())
        fail("a call with other arguments");
    for (size_t i = 0; i < arguments.size(); i++) {
        copy_slots(to.params[i], argument_slot(arguments[i]), callee.params[i].bytes);
    }
    emit(run_call, {}).target = to.entry;
    for (size_t i = 0; i < results.size(); i++) {
        copy_slots(argument_slot(results[i]), to.returns[i], callee.returns[i].bytes);
    }
}

/* bar.red d, id, [threads,] p: an arrival, and the result when all have come. */
void reader::read_reduction(const parts &p) {
    if (p.operands.size() < 3) fail("too few operands");
    const bool counted = p.operands.size() > 3;
    const operand id = parse(p.operands[1], 4),
                  threads = counted ? parse(p.operands[2], 4) : operand();
    emit(run_bar_red, { id, threads, parse(p.operands.back(), 1) });
    const operand d = parse(p.operands[0], 4);
    emit(run_bar_result, { d }).code = p.has("or") ? OR : p.has("and") ? AND : ADD;
}

}    // namespace ptx
