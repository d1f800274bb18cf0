/* code.h - a module as it was read: functions, and kernels with their instructions.
 *
 * A register is an array of 32 values, one a lane, in the register file of each warp; an
 * immediate is such an array in the kernel's pool. An operand says where its array is, so that
 * handlers do not tell them apart. */
#ifndef PTX_CODE_H
#define PTX_CODE_H

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ptx.h"
#include "value.h"

namespace ptx {

constexpr int LANES = 32;
constexpr u32 FULL = 0xffffffffu;

/* Where a name leads: to an offset that each block, lane or launch has at a place of its own, or
 * an address. */
enum base : u8 { B_REGISTER, B_SHARED, B_LOCAL, B_ABSOLUTE, B_PARAMETER };

/* State spaces of loads and stores. */
enum space : u8 { S_GENERIC, S_GLOBAL, S_SHARED, S_LOCAL, S_PARAM };

enum rounding : u8 { R_N, R_Z, R_M, R_P, R_NI, R_ZI, R_MI, R_PI, R_NA };

enum flag : u32 {
    F_FTZ = 1,
    F_SAT = 2,
    F_NAN = 4,
    F_HI = 8,
    F_WIDE = 16,
    F_APPROX = 32,
    F_RELU = 64,
    F_CC = 128,
    F_TRANS = 256,
    F_COLUMNS = 512,
    F_WRAP = 1024,
    F_TO = 2048,
    F_ORDERED = 4096,
    F_PARITY = 8192,
    F_NOINC = 16384,
    F_SHIFTAMT = 32768
};

struct operand {
    enum { NONE, REGISTER, IMMEDIATE, LIST, ADDRESS } kind = NONE;
    u8 size = 0;                  // bytes of a lane
    bool negated = false;         // !p
    base from = B_REGISTER;       // of an address or a symbol
    u32 at = 0;                   // byte of its lanes in the registers or the pool
    s64 value = 0;                // of an immediate; offset of an address
    std::vector<operand> list;    // of a list; of an address: its register, then coordinates

    /* The i-th of a list, or the operand itself where there is only one. */
    const operand &part(size_t i) const {
        return kind == LIST ? list[i] : *this;
    }
};

struct warp;
struct instruction;
typedef void (*handler)(warp &w, const instruction &op, u32 lanes);

/* The memory range that an instruction found last: most find the same again. */
struct seen_range {
    u64 begin = 0, end = 0, version = 0;
};

struct instruction {
    handler run = nullptr;
    std::vector<operand> x;
    bool guarded = false, guard_negated = false;
    u32 guard_at = 0;
    type t = T_NONE, source = T_NONE;    // the first and the second type of its name
    int code = 0, variant = 0;           // which of the handler's operations
    rounding round = R_N;
    space in = S_GENERIC;
    int count = 1;    // v2, v4; x2, x4
    struct {
        int m = 0, n = 0, k = 0;
    } shape;    // of matrices
    u32 flags = 0;
    int target = -1, meet = -1;    // of branches
    mutable seen_range seen;
    std::string_view text;
    int line = 0;
};

struct symbol {
    base from;
    s64 at;
    size_t bytes;
};

/* A variable's declaration. */
struct declared {
    std::string name;
    size_t bytes = 0;
    int align = 0;
    type of = T_B8;
};

/* A function of the text; begin is NULL where it is only declared. */
struct function {
    std::string name;
    const char *begin = nullptr, *end = nullptr;    // of its body
    int first_line = 0;
    bool entry = false;
    std::vector<declared> params, returns;
    int max_threads = 1024, min_blocks = 1;    // .maxntid, .minnctapersm

    std::string_view body() const {
        return std::string_view(begin, (size_t)(end - begin));
    }
};

/* A function within a kernel's code. Arguments pass through slots of local memory. */
struct placed_function {
    int entry = 0, exit = 0;
    std::vector<u32> params, returns;
};

}    // namespace ptx

struct ptx_module {
    struct shared_variable {
        ptx::declared is;
        bool dynamic;
    };
    std::string text;
    std::map<std::string, ptx::function, std::less<>> functions;
    std::unordered_map<std::string, ptx::symbol> globals;
    std::vector<std::unique_ptr<ptx::u8[]>> memory;
    std::vector<shared_variable> shared;
    std::map<std::string, std::unique_ptr<ptx_kernel>> kernels;
};

struct ptx_kernel {
    ptx_module *module = nullptr;
    ptx::function *of = nullptr;
    bool ready = false;
    std::string broken;    // why it cannot be read, once that has been tried
    std::vector<ptx::instruction> code;
    int entry = 0;
    std::vector<ptx::u8> pool;
    std::map<std::pair<int, ptx::u64>, ptx::u32>
        pooled;    // bytes and bits of an immediate: where it is
    ptx::u32 register_bytes = 0, local_bytes = 0, param_bytes = 0;
    std::vector<ptx::u32> param_at;
    std::unordered_map<std::string, ptx::symbol> shared;
    ptx::u32 static_end = 0, dynamic_align = 16;
    std::map<std::string, ptx::placed_function> functions;
};

namespace ptx {

/* Reads the kernel's body, once. */
void prepare(ptx_kernel &k);

/* The handlers of control flow, which the scheduler sees to itself. */
void run_branch(warp &w, const instruction &op, u32 lanes);
void run_call(warp &w, const instruction &op, u32 lanes);
void run_return(warp &w, const instruction &op, u32 lanes);

}    // namespace ptx
#endif
