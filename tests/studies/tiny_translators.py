"""A tiny Multi30k with the real file names, and the settings of a tiny translation model."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

from regard.data import toy

TINY: dict[str, Any] = {
    "model": {
        **{"preset": "transformer-tiny", "n_encoder_layers": 1, "n_decoder_layers": 1, "max_len": 128},
        **{"d_model": 16, "n_heads": 2, "d_ff": 32},
    },
    "decode": {"max_len_a": 0.0, "max_len_b": 8},
}


def write_multi30k(folder: Path) -> Path:
    splits = {"train": 60, "val": 10, "test_2016_flickr": 14, "test_2017_flickr": 9}
    for (split, n), kind in zip(splits.items(), ("train", "valid", "test", "test"), strict=True):
        english, german = zip(*toy.pairs(n, kind, seed=len(split)), strict=True)
        for language, lines in (("en", english), ("de", german)):
            (folder / f"{split}.{language}.xz").write_bytes(lzma.compress("\n".join(lines).encode()))
    return folder
