/* base_mqar.h - notes that experiments on MQAR tasks share. */
#ifndef MN_EXPERIMENTS_PAPERS_BASE_MQAR_H
#define MN_EXPERIMENTS_PAPERS_BASE_MQAR_H

#define MN_MQAR_NOTES                                                                              \
    "The paper leaves open: peak learning rates, epochs, and whether blocks have an MLP. Here: "   \
    "the grid of the zoology benchmark, 64 epochs or until 99 percent, no MLP.",                   \
    "The paper compares with RWKV-7 and Hyena too: RWKV-7 is a row of mqar-update, Hyena is no "   \
    "layer of this library."

#endif
