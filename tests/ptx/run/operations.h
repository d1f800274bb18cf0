/* operations.h - codes by which rows of read/instructions.def choose among a handler's
 * operations. */
#ifndef PTX_OPERATIONS_H
#define PTX_OPERATIONS_H

#include "value.h"

namespace ptx {

enum operation {
    ADD,
    SUB,
    MUL,
    DIV,
    REM,
    MIN,
    MAX,
    AND,
    OR,
    XOR,
    SHL,
    SHR,
    NOT,
    NEG,
    ABS,
    CNOT,
    BREV,
    POPC,
    CLZ,
    EX2,
    LG2,
    RSQRT,
    SQRT,
    RCP,
    TANH,
    SIN,
    COS,
    COPYSIGN,
    EXCH,
    CAS,
    INC,
    DEC
};

enum comparison { EQ, NE, LT, LE, GT, GE, LO, LS, HI, HS, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NAN_ };
enum combination { ALONE, WITH_AND, WITH_OR, WITH_XOR };
enum shuffle { UP, DOWN, BFLY, IDX };
enum vote { ANY, ALL, UNI, BALLOT };
enum number_class { FINITE, INFINITE, NUMBER, NOTANUMBER };
enum direction { LEFT, RIGHT };
enum arrival { ARRIVE, WAIT };
enum transaction { ARRIVES, ARRIVES_EXPECTING, EXPECTS, COMPLETES };
enum wait_kind { TRY, TEST };
enum transfer { LOADS, STORES, ADDS };
enum fragment { OPERAND, ACCUMULATOR };

enum special {
    TID,
    NTID,
    CTAID,
    NCTAID,
    LANEID,
    WARPID,
    NWARPID,
    CLUSTERID,
    NCLUSTERID,
    CLUSTER_CTAID,
    CLUSTER_NCTAID,
    CLUSTER_RANK,
    CLUSTER_SIZE,
    SMID,
    NSMID,
    CLOCK,
    MASK_EQ,
    MASK_LT,
    MASK_LE,
    MASK_GT,
    MASK_GE,
    DYNAMIC_SHARED,
    TOTAL_SHARED,
    GRIDID,
    ENVREG1,
    ENVREG2
};

/* What an operation of two integers or floats leaves in memory where `old` was: atomics, redux.
 * c: of CAS. */
u64 combine(int code, type t, u64 old, u64 b, u64 c);

}    // namespace ptx
#endif
