"""Small models with random weights, in evaluation mode, and rows of random tokens for them."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from configured import model_config
from tokens import SETTINGS
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.models.bert import Bert
from regard.models.gpt import GPT
from regard.models.seq2seq import Seq2Seq
from regard.models.transformer import Transformer
from regard.models.vit import ViT
from regard.text.special_tokens import PAD

V, C, H, D, MAX_LEN = 23, 16, 4, 4, 64


@torch.no_grad()
def add_noise(model: nn.Module, seed: str = "") -> None:
    """Add noise to every parameter, so that none is at a special value such as 0 or 1.

    It is seeded by the parameter's name: models stay the same if their modules are registered in another order. Scales of
    norms get any sign: with tied embeddings and scales near 1 an untrained decoder repeats its last token.
    """
    for name, p in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}{name}".encode()))
        noise = torch.randn(p.shape, generator=generator)
        p.add_((1.0 if "norm" in name and name.endswith("weight") else 0.3) * noise)


def stirred(model: nn.Module) -> nn.Module:
    add_noise(model)
    return model.eval()


def config(**changes: object) -> ModelConfig:
    sizes: dict = {"n_encoder_layers": 2, "n_decoder_layers": 2, "d_model": C, "n_heads": H, "d_ff": 24}
    sizes |= {"source_vocab": V, "target_vocab": V, "max_len": MAX_LEN, "dropout": 0.0, "cope.positions": 8, **SETTINGS}
    return model_config(**{**sizes, **changes})


def transformer(**changes: object) -> Transformer:
    torch.manual_seed(0)
    alone = {"encoder_positions": "sinusoidal"} if changes.get("positions") in ("none", "cope") else {}
    return stirred(Transformer(config(**alone, **changes)))  # type: ignore[return-value]


def gpt(**changes: object) -> GPT:
    torch.manual_seed(0)
    return stirred(GPT(config(preset="gpt-tiny", **changes)))  # type: ignore[return-value]


def bert(**changes: object) -> Bert:
    torch.manual_seed(0)
    return stirred(Bert(config(preset="bert-tiny", **changes)))  # type: ignore[return-value]


def vit(**changes: object) -> ViT:
    """Pictures of 12 by 12 pixels are nine patches."""
    torch.manual_seed(0)
    pixels = {"vit.patch_size": 4, "vit.image_channels": 1, "n_classes": 3}
    return stirred(ViT(config(preset="vit-tiny", **(pixels | changes))))  # type: ignore[return-value]


def seq2seq(**changes: object) -> Seq2Seq:
    torch.manual_seed(0)
    sizes = {"preset": "rnnsearch-small", "n_encoder_layers": 1, "n_decoder_layers": 1, "d_model": 6}
    vocabulary = {"source_vocab": V, "target_vocab": V, "max_len": MAX_LEN, "dropout": 0.0, **SETTINGS}
    return stirred(Seq2Seq(model_config(**{**sizes, "recurrent.d_hidden": 8, **vocabulary, **changes})))  # type: ignore[arg-type,return-value]


def ids(*lengths: int, seed: int = 1) -> Tensor:
    """Random rows of these lengths, padded on the right."""
    rng = np.random.default_rng(seed)
    return torch.tensor([[*rng.integers(5, V, n).tolist(), *[PAD] * (max(lengths) - n)] for n in lengths])
