/* reader.h - turns the text of a function into instructions of its kernel. */
#ifndef PTX_READER_H
#define PTX_READER_H

#include <string>
#include <unordered_map>

#include "failure.h"
#include "read/text.h"

namespace ptx {

/* Names between braces hide those outside. */
struct scope {
    int parent;
    std::unordered_map<std::string, operand> registers;
    std::unordered_map<std::string, type> families;    // %r<9> declares %r0 to %r8
    std::unordered_map<std::string, int> labels;
    std::unordered_map<std::string, symbol> slots;
};

/* An instruction's text, taken apart: name.word.word operand, operand */
struct parts {
    std::vector<view> words, operands;
    type first = T_NONE, second = T_NONE;    // of the types among the words

    bool has(view word) const;    // behind the first
};

class reader {
  public:
    reader(ptx_kernel &kernel, function &of, placed_function &at);
    void read();

  private:
    struct jump {
        size_t op;
        std::string label;
        int in;
    };

    ptx_kernel &kernel;
    function &f;
    placed_function &placed;
    std::vector<scope> scopes;
    int current = 0;
    std::vector<jump> jumps;
    std::vector<size_t> returns;    // instructions that jump to the end
    view text;
    int line = 0;
    instruction guard;    // the predicate of the instruction that is read

    scope &here();
    template <class F> bool search(F found) const;

    operand new_register(type t);
    operand immediate(s64 v, int bytes);
    bool find_register(const std::string &name, operand *x);
    bool find_symbol(view name, symbol *to) const;
    bool special_register(view s, int bytes, operand *x);
    operand symbol_address(view s, int bytes);
    operand parse(view s, int bytes);
    operand parse_address(view s);
    u32 slot(size_t bytes, size_t align);

    void read_callees();
    void place_parameters();
    const char *read_item(const char *at);
    void declare(view s);
    void declare_registers(view s);

    instruction &emit(handler run, std::vector<operand> x);
    void read_instruction(view s);
    view read_guard(view s);
    void by_table(const parts &p);
    std::vector<operand> by_letters(const parts &p, const char *letters);
    void read_branch(const parts &p);
    void read_return(const parts &p);
    void read_call(const parts &p);
    void read_reduction(const parts &p);
    u32 argument_slot(view name) const;
    void copy_slots(u32 to, u32 from, size_t bytes);

    void resolve();
    typedef void (reader::*form)(const parts &);
    static const std::unordered_map<view, form> &forms();
};

/* Gives each branch from instruction `first` to the end of the code where its lanes meet again. */
void find_reconvergence(std::vector<instruction> &code, size_t first);

}    // namespace ptx
#endif
