/* base_mqar.h - notes that experiments on MQAR tasks share. */
#ifndef MN_EXPERIMENTS_PAPERS_BASE_MQAR_H
#define MN_EXPERIMENTS_PAPERS_BASE_MQAR_H

#define MN_MQAR_NOTES                                                                              \
    "The paper leaves open: peak learning rates, epochs, and whether blocks have an MLP. Here: "   \
    "the grid of the zoology benchmark, 64 epochs or until 99 percent, no MLP.",                   \
    "The readout is the table of embeddings, as in the model of the zoology benchmark; the paper " \
    "says a linear readout and not whether it is tied. With one of its own (--set "                \
    "model.tie_word_embeddings=false) rows stay at chance where they learn with this one.",        \
    "The paper compares with RWKV-7 and Hyena too: RWKV-7 is a row of mqar-update, Hyena is no "   \
    "layer of this library."

#endif
