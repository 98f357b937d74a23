"""`regard study pretraining`: what pre-training and an auxiliary loss bring, the ablation of the first GPT at our scale.

A small GPT learns WikiText-2, and is then fine-tuned on GLUE's tasks: with the language-model loss beside the task's,
without it, and from fresh weights. (The paper's fourth row, an LSTM, joins when Regard has one.)
"""

from __future__ import annotations

from regard.studies.finetuning import Row, Study

TASKS = ("SST-2", "CoLA", "MRPC", "RTE")
SIZES = {"n_decoder_layers": 6, "d_model": 256, "n_heads": 4, "d_ff": 1024, "max_len": 256}
GPT = {
    "task": "causal-lm",
    "tokenizer": {"kind": "bpe", "vocab_size": 8000, "lowercase": True},
    "model": {"preset": "gpt-small", **SIZES, "positions": "learned", "activation": "gelu", "scale_embeddings": False},
    "train": {
        **{"steps": 3000, "batch_tokens": 16384, "lr": 1e-3, "warmup": 200, "schedule": "cosine", "weight_decay": 0.1},
        **{"label_smoothing": 0.0, "valid_every": 500, "save_every": 500, "keep": 1, "samples": 0},
    },
}
TUNE = {"lr": 3e-4, "schedule": "linear", "batch_tokens": 4096, "label_smoothing": 0.0, "weight_decay": 0.01}
TUNE |= {"compile": False}  # for a few hundred steps compiling would take longer than it saves
AUXILIARY = {"train": {"auxiliary": 0.5}}

STUDY = Study(
    pretrained={"gpt": GPT},
    rows=(
        Row("pre-trained, auxiliary loss", "gpt", changes=AUXILIARY),
        Row("pre-trained", "gpt"),
        Row("from scratch, auxiliary loss", "gpt", fresh=True, changes=AUXILIARY),
        Row("from scratch", "gpt", fresh=True),
    ),
    tune=TUNE,
)
