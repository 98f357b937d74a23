"""Stage 4: a student that begins as the teacher without some of its decoder layers."""

from __future__ import annotations

import pytest
import shrink
import torch
from torch import Tensor, nn

from regard.models.architectures import make_model, preset

SIZES = {"n_encoder_layers": 2, "n_decoder_layers": 4, "d_model": 16, "n_heads": 2, "d_ff": 32, "max_len": 32}


@pytest.fixture
def teacher() -> nn.Module:
    torch.manual_seed(0)
    model = make_model(preset("transformer-tiny", source_vocab=30, target_vocab=30, **SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # also biases and norms differ from layer to layer
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def compute_logits(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randint(5, 30, (3, length), generator=generator) for length in (7, 6))
    with torch.no_grad():
        return model.eval()(source, target)


@pytest.mark.parametrize("layers", [[0, 3], [2], [3, 1]])
def test_weights_are_those_of_the_layers_that_are_kept(teacher: nn.Module, layers: list[int]) -> None:
    student = shrink.keep_decoder_layers(teacher, layers)
    own, given = student.state_dict(), teacher.state_dict()
    assert student.config.n_decoder_layers == len(layers)  # type: ignore[union-attr]
    kept = {name for name in given if not name.startswith("decoder.blocks.")}
    assert {name for name in own if not name.startswith("decoder.blocks.")} == kept
    for name in kept:  # encoder, embeddings, last norm
        assert torch.equal(own[name], given[name]), name
    for new, old in enumerate(layers):
        block, original = (model.get_submodule(f"decoder.blocks.{i}") for model, i in ((student, new), (teacher, old)))
        for (name, weight), expected in zip(block.named_parameters(), original.parameters(), strict=True):
            assert torch.equal(weight, expected), name


def test_a_student_equals_a_teacher_whose_other_layers_do_nothing(teacher: nn.Module) -> None:
    student = shrink.keep_decoder_layers(teacher, [0, 3])
    assert not torch.allclose(compute_logits(student), compute_logits(teacher), atol=1e-3)
    with torch.no_grad():
        for layer in (1, 2):  # each sublayer adds its output to its input: zeros leave the input as it is
            sublayers = teacher.get_submodule(f"decoder.blocks.{layer}.sublayers")
            for last in ("self.out", "cross.out", "ff.outer"):
                for parameter in sublayers.get_submodule(last).parameters():
                    parameter.zero_()
    torch.testing.assert_close(compute_logits(student), compute_logits(teacher))


def test_the_weights_of_the_student_are_copies(teacher: nn.Module) -> None:
    before = {name: weight.clone() for name, weight in teacher.state_dict().items()}
    student = shrink.keep_decoder_layers(teacher, [0, 3])
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.zero_()
    assert all(torch.equal(weight, before[name]) for name, weight in teacher.state_dict().items())
