"""`regard study roformer`: BERT against RoFormer, which differs only in its positions: learned ones added to the embeddings,
or queries and keys turned (RoPE). Both fill in the blanks of WikiText-2 and are fine-tuned on GLUE's tasks."""

from __future__ import annotations

from typing import Any

from regard.studies.finetuning import Row, Study
from regard.studies.pretraining import TUNE

TASKS = ("MRPC", "SST-2", "STS-B", "CoLA", "RTE")
SIZES = {"n_encoder_layers": 6, "d_model": 256, "n_heads": 4, "d_ff": 1024, "max_len": 256, "token_types": 2}


def bert(positions: str) -> dict[str, Any]:
    return {
        "task": "masked-lm",
        "tokenizer": {"kind": "wordpiece", "vocab_size": 8000, "lowercase": True},
        "model": {
            **{"preset": "bert-tiny", **SIZES, "positions": positions, "activation": "gelu"},
            **{"scale_embeddings": False, "embedding_norm": True},
        },
        "train": {
            **{"steps": 5000, "batch_tokens": 16384, "lr": 1e-3, "warmup": 500, "schedule": "cosine"},
            **{"weight_decay": 0.01, "label_smoothing": 0.0, "valid_every": 1000, "save_every": 1000, "keep": 1},
        },
    }


STUDY = Study(
    pretrained={"bert": bert("learned"), "roformer": bert("rope")},
    rows=(
        Row("BERT", "bert"),
        Row("RoFormer", "roformer"),
    ),
    tune=TUNE,
)
