"""Stage 4: the initial student: the teacher without most of its decoder layers.

    python recipes/translator/shrink.py TEACHER OUT [--layers 0,5]

The student's encoder, embeddings and remaining decoder layers begin with the weights of the teacher ("shrink and fine-tune",
Shleifer and Rush 2020), and are trained further on the teacher's translations (student.toml).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from regard import model_folder
from regard.models.architectures import make_model
from regard.models.weights import weights_of

DECODER_BLOCKS = "decoder.blocks."


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("teacher", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", default="0,5", help="the decoder layers that the student keeps, from 0")
    given = parser.parse_args()
    package = model_folder.load(given.teacher, torch.device("cpu"), "fp32")
    student = keep_decoder_layers(package.model, [int(layer) for layer in given.layers.split(",")])
    card = f"# {given.out.name}\n\nA teacher without most of its decoder layers, before its training as a student.\n"
    model_folder.save(given.out, replace(package, model=student), card)
    before, after = (sum(p.numel() for p in model.parameters()) for model in (package.model, student))
    print(f"{given.out}: {after:,} of {before:,} parameters")


@torch.no_grad()
def keep_decoder_layers(teacher: nn.Module, layers: list[int]) -> nn.Module:
    """Return a model with the weights of the teacher and some of its decoder layers, in the order given."""
    student = make_model(replace(teacher.config, n_decoder_layers=len(layers)))  # type: ignore[type-var, arg-type]
    given = weights_of(teacher)
    for name, weight in weights_of(student).items():
        if name.startswith(DECODER_BLOCKS):
            layer, _, rest = name.removeprefix(DECODER_BLOCKS).partition(".")
            name = f"{DECODER_BLOCKS}{layers[int(layer)]}.{rest}"
        weight.copy_(given[name])
    return student


if __name__ == "__main__":
    main()
