/* needles.c - models trained on text at one length, and asked beyond it: needles in a haystack
 * (S-NIAH and RULER), and perplexity of text held out. */
#include "experiments/experiment_internal.h"

const mn_experiment_text mn_experiment_needles = {
    .common = MN_JSON_TEXT({
        "grid": {
            "job": {
                "kind": "text", "data": {"made": 1500000},
                "model": {"tie_word_embeddings": true},
                "train": {
                    "weight_decay": 0.1, "clip": 1, "beta1": 0.9, "beta2": 0.95,
                    "schedule": "cosine"
                },
                "ask": {"tasks": {"s-niah-1": {}}}
            },
            "grid": {
                "model": {
                    "gla": {"model": {"layers": "gla"}},
                    "gla+ccq": {"model": {"layers": "gla+ccq"}},
                    "gdn": {"model": {"layers": "gdn"}},
                    "gdn+ccq": {"model": {"layers": "gdn+ccq"}},
                    "bayes": {"model": {"layers": "bayes"}},
                    "attention": {"model": {"layers": "attention"}}
                }
            }
        },
        "claims": [
            {"says": "gla+ccq finds more needles (S-NIAH-1) than gla at twice the length",
             "table": 0, "cell": ["gla+ccq", "2x"], "less": ["gla", "2x"], "above": 0,
             "learned": 0.05},
            {"says": "gdn+ccq finds more needles (S-NIAH-2) than gdn at twice the length",
             "table": 1, "cell": ["gdn+ccq", "2x"], "less": ["gdn", "2x"], "above": 0,
             "learned": 0.05},
            {"says": "attention loses its needles (S-NIAH-1) at twice the length",
             "table": 0, "cell": ["attention", "2x"], "less": ["attention", "1x"], "below": 0,
             "learned": 0.05},
            {"says": "gla+ccq foretells text better than gla at four times the length (nats)",
             "table": 7, "cell": ["gla+ccq", "4x"], "less": ["gla", "4x"], "below": 0},
            {"says": "gdn+ccq foretells text better than gdn at four times the length (nats)",
             "table": 7, "cell": ["gdn+ccq", "4x"], "less": ["gdn", "4x"], "below": 0},
            {"says": "attention loses the text at four times the length (nats)",
             "table": 7, "cell": ["attention", "4x"], "less": ["attention", "1x"], "above": 0}
        ],
        "tables": [
            {"title": "S-NIAH-1, numbers in noise: found without an error", "rows": "model",
             "values": {"1/4x": "tasks.s-niah-1.1/4x.sequence",
                        "1/2x": "tasks.s-niah-1.1/2x.sequence",
                        "1x": "tasks.s-niah-1.1x.sequence", "2x": "tasks.s-niah-1.2x.sequence",
                        "4x": "tasks.s-niah-1.4x.sequence",
                        "16x": "tasks.s-niah-1.16x.sequence"},
             "percent": true, "figure": "lines"},
            {"title": "S-NIAH-2, numbers in essays: found without an error", "rows": "model",
             "values": {"1/4x": "tasks.s-niah-2.1/4x.sequence",
                        "1/2x": "tasks.s-niah-2.1/2x.sequence",
                        "1x": "tasks.s-niah-2.1x.sequence", "2x": "tasks.s-niah-2.2x.sequence",
                        "4x": "tasks.s-niah-2.4x.sequence",
                        "16x": "tasks.s-niah-2.16x.sequence"},
             "percent": true, "figure": "lines"},
            {"title": "S-NIAH-3, UUIDs in essays: found without an error", "rows": "model",
             "values": {"1/4x": "tasks.s-niah-3.1/4x.sequence",
                        "1/2x": "tasks.s-niah-3.1/2x.sequence",
                        "1x": "tasks.s-niah-3.1x.sequence", "2x": "tasks.s-niah-3.2x.sequence",
                        "4x": "tasks.s-niah-3.4x.sequence"},
             "percent": true, "figure": "lines"},
            {"title": "RULER at the length trained on: samples without an error", "rows": "model",
             "values": {"multikey-1": "tasks.niah-multikey-1.1x.sequence",
                        "multikey-2": "tasks.niah-multikey-2.1x.sequence",
                        "multivalue": "tasks.niah-multivalue.1x.sequence",
                        "multiquery": "tasks.niah-multiquery.1x.sequence"},
             "percent": true, "figure": "bars"},
            {"title": "RULER at four times the length: samples without an error", "rows": "model",
             "values": {"multikey-1": "tasks.niah-multikey-1.4x.sequence",
                        "multikey-2": "tasks.niah-multikey-2.4x.sequence",
                        "multivalue": "tasks.niah-multivalue.4x.sequence",
                        "multiquery": "tasks.niah-multiquery.4x.sequence"},
             "percent": true, "figure": "bars"},
            {"title": "S-NIAH-1: loss of the answers, in nats a token", "rows": "model",
             "values": {"1/4x": "tasks.s-niah-1.1/4x.loss", "1/2x": "tasks.s-niah-1.1/2x.loss",
                        "1x": "tasks.s-niah-1.1x.loss", "2x": "tasks.s-niah-1.2x.loss",
                        "4x": "tasks.s-niah-1.4x.loss", "16x": "tasks.s-niah-1.16x.loss"},
             "figure": "lines"},
            {"title": "Perplexity of text held out, by length of the windows", "rows": "model",
             "values": {"1x": "perplexity.1x.perplexity", "2x": "perplexity.2x.perplexity",
                        "3x": "perplexity.3x.perplexity", "4x": "perplexity.4x.perplexity",
                        "5x": "perplexity.5x.perplexity", "8x": "perplexity.8x.perplexity",
                        "16x": "perplexity.16x.perplexity", "20x": "perplexity.20x.perplexity"},
             "figure": "lines"},
            {"title": "The same in nats a token", "rows": "model",
             "values": {"1x": "perplexity.1x.loss", "2x": "perplexity.2x.loss",
                        "3x": "perplexity.3x.loss", "4x": "perplexity.4x.loss",
                        "5x": "perplexity.5x.loss", "8x": "perplexity.8x.loss",
                        "16x": "perplexity.16x.loss", "20x": "perplexity.20x.loss"}},
            {"title": "Loss of text held out while training, in nats a token", "rows": "model",
             "values": {"lowest": "loss", "last": "last"}}
        ]
    }),
    .preset = {
        [MN_PRESET_SMOKE] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "data": {"made": 150000},
                    "model": {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2},
                    "train": {
                        "steps": 60, "batch": 4, "context": 352, "lr": 0.005, "min_lr": 0.0005,
                        "warmup": 20, "eval_every": 60, "eval_batches": 4
                    },
                    "ask": {
                        "lengths": {"1x": 352, "4x": 1408}, "tokens": 7040, "rows": 4,
                        "budgets": {"2x": 704}
                    }
                },
                "grid": {"seed": [0]},
                "only": {"model": ["gdn", "gdn+ccq", "attention"]}
            }
        }),
        [MN_PRESET_CPU] = MN_JSON_TEXT({
            "grid": {
                "job": {
                    "model": {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2},
                    "train": {
                        "steps": 1200, "batch": 6, "context": 768, "lr": 0.004, "min_lr": 0.0004,
                        "warmup": 100, "eval_every": 400, "eval_batches": 16
                    },
                    "ask": {
                        "lengths": {"1x": 768, "2x": 1536, "3x": 2304, "4x": 3072, "8x": 6144,
                                    "16x": 12288, "20x": 15360},
                        "tokens": 61440, "rows": 40,
                        "budgets": {"1x": 768, "2x": 1536, "4x": 3072, "16x": 12288}
                    }
                },
                "grid": {"seed": [0, 1]}
            }
        }),
        [MN_PRESET_GPU] = MN_JSON_TEXT({
            "needs_text": true,
            "grid": {
                "job": {
                    "model": {"hidden_size": 512, "num_hidden_layers": 12},
                    "train": {
                        "dtype": "bf16", "steps": 1600, "batch": 32, "accumulate": 2,
                        "context": 1024, "lr": 0.001, "min_lr": 0.0001, "warmup": 100,
                        "eval_every": 800
                    },
                    "ask": {
                        "lengths": {"1x": 1024, "2x": 2048, "3x": 3072, "4x": 4096, "8x": 8192,
                                    "16x": 16384, "20x": 20480},
                        "tokens": 614400, "rows": 64,
                        "tasks": {"s-niah-2": {}, "niah-multikey-1": {}, "niah-multivalue": {}},
                        "budgets": {"1x": 1024, "2x": 2048, "4x": 4096, "16x": 16384}
                    }
                },
                "grid": {
                    "model": {
                        "gla": {"model": {"num_heads": 4, "intermediate_size": 1304}},
                        "gla+ccq": {"model": {"num_heads": 4, "intermediate_size": 1304}},
                        "gdn": {
                            "model": {
                                "num_heads": 4, "head_dim": 128, "expand_v": 1,
                                "intermediate_size": 1136
                            }
                        },
                        "gdn+ccq": {
                            "model": {
                                "num_heads": 4, "head_dim": 128, "expand_v": 1,
                                "intermediate_size": 1136
                            }
                        },
                        "bayes": {"model": {"num_heads": 8, "intermediate_size": 1128}},
                        "attention": {"model": {"num_heads": 8, "intermediate_size": 1312}}
                    },
                    "seed": [0, 1]
                }
            }
        }),
        [MN_PRESET_FULL] = MN_JSON_TEXT({
            "needs_text": true,
            "grid": {
                "job": {
                    "model": {
                        "hidden_size": 1024, "num_hidden_layers": 21, "intermediate_size": 4096
                    },
                    "train": {
                        "dtype": "bf16", "steps": 28610, "batch": 16, "accumulate": 8,
                        "context": 4096, "lr": 0.0004, "min_lr": 0, "warmup": 1907,
                        "eval_every": 5722
                    },
                    "ask": {
                        "lengths": {"1x": 4096, "2x": 8192, "3x": 12288, "4x": 16384, "5x": 20480},
                        "rows": 500,
                        "tasks": {"s-niah-2": {}, "s-niah-3": {}, "niah-multikey-1": {},
                                  "niah-multikey-2": {}, "niah-multivalue": {},
                                  "niah-multiquery": {}},
                        "budgets": {"1/4x": 1024, "1/2x": 2048, "1x": 4096, "2x": 8192,
                                    "4x": 16384}
                    }
                },
                "grid": {
                    "model": {
                        "gla": {"model": {"num_heads": 4, "expand_k": 1, "expand_v": 2}},
                        "gla+ccq": {"model": {"num_heads": 4, "expand_k": 1, "expand_v": 2}},
                        "gdn": {"model": {"num_heads": 4, "head_dim": 256, "expand_v": 2}},
                        "gdn+ccq": {"model": {"num_heads": 4, "head_dim": 256, "expand_v": 2}},
                        "bayes": {"model": {"num_heads": 16, "intermediate_size": 5104}},
                        "attention": {
                            "model": {
                                "num_hidden_layers": 35, "num_heads": 16, "intermediate_size": 2736
                            }
                        }
                    },
                    "seed": [0, 1]
                }
            }
        }),
    },
    .notes = {
        "Columns are lengths over the length trained on: 768 bytes at preset cpu, 1,024 tokens at "
        "gpu, 4,096 at full. A sample counts when every token of the answer is the likeliest one "
        "given those before, which is what greedy generation says. Perplexity is of windows that "
        "do not overlap and that each start from nothing.",
        "Text of --data is the user's: a folder as bench/language makes it (150 MB or more of "
        "documentation, a tokenizer of 16,000 tokens), or a file, whose bytes are the tokens and "
        "whose last tenth is held out. Essays of the haystacks are essays.txt or valid.jsonl of "
        "the folder, or the file itself. One learning rate for all rows, none was tried out.",
        "Without --data, at presets smoke and cpu, the text is made: small stories about where "
        "things are, and between them numbers hidden in noise and asked for, as in the task, of "
        "other seeds. Such models know these two kinds of text and nothing else.",
        "Preset gpu has the rows of bench/language at 45 million parameters, on 105 million "
        "tokens. Preset full has the paper's layers, widths, heads, length and 15 billion tokens; "
        "learning rate, warm-up and tokens of a step are those of Gated DeltaNet, whose settings "
        "the paper says it takes over. Widths of the MLPs are ours, for 474 million parameters "
        "with a vocabulary of 32,000 in all rows; the corpus is the user's to bring.",
        "The paper trained at 4,096 tokens; its columns 1K, 2K, 4K and 8K stand at 1/4x to 2x. "
        "Figures 3 and 4 draw perplexity from 4K to 20K: with ccq below without at every length, "
        "attention off the range beyond 4K. It has no row of bayes.",
        NULL
    },
};
