"""What is computed of a frozen model, once by make.py with the old code and then by the test with the present code.

A case is an entry of data/models.json: `kind` (pair, text, masked, image, row or token), `settings`, `sizes`, `decode`. Its
inputs are tensors by name; ids have -1 where there is padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import convert
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import DecodeConfig
from regard.decode.batch_decoding import decode
from regard.decode.generation import generate
from regard.models.architectures import make_model, preset
from regard.text.special_tokens import SpecialTokenTemplate

Case = Mapping[str, Any]
Inputs = Mapping[str, Tensor]
FRAME = SpecialTokenTemplate(before=(), between=(convert.EOS,), after=(convert.EOS,), start=(convert.BOS,))
STEPS = 10


def build(case: Case) -> nn.Module:
    settings = convert.settings(case["settings"])
    return make_model(preset(settings.pop("preset"), **settings))


def filled(case: Case, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return the model of a case with weights that are named and laid out as in commit 0802df8."""
    model = build(case)
    new = convert.weights(weights, case["sizes"])
    own = dict(model.named_parameters())
    assert own.keys() == new.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            assert parameter.shape == new[name].shape, name
            parameter.copy_(new[name])
    return model.eval()


# ---- logits and losses ------------------------------------------------------------------------------------------------


def given(case: Case, inputs: Inputs) -> tuple[Tensor, ...]:
    """Return what the model is called with."""
    names = {"pair": ("source", "target"), "image": ("images",)}.get(case["kind"], ("ids", "types"))
    return tuple(
        convert.padded(inputs[name]) if name in ("source", "target", "ids") else inputs[name]
        for name in names
        if name in inputs
    )


def predicted(model: nn.Module, case: Case, inputs: Inputs) -> Tensor:
    """Return the logits of real tokens, (N, V), or of rows, (B, V)."""
    found: Tensor = model(*given(case, inputs))
    read = inputs["target"] if case["kind"] == "pair" else inputs.get("ids")
    return found if found.dim() == 2 or read is None else found[read >= 0]


def packed(model: Any, inputs: Inputs) -> Tensor:
    """Return the logits of rows of two documents each, of 5 and 4 tokens, that do not see each other."""
    ids = inputs["ids"].where(inputs["ids"] >= 0, 7)  # every place holds a token
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3]).expand_as(ids)
    found: Tensor = model.packed(ids, positions)
    return found


def labels_of(case: Case, inputs: Inputs) -> Tensor:
    """Return what each of the predictions should be; -1 where nothing is asked."""
    read = inputs["target"] if case["kind"] == "pair" else inputs.get("ids")
    if case["kind"] in ("pair", "text"):
        assert read is not None
        return F.pad(read[:, 1:], (0, 1), value=-1)[read >= 0]
    labels = inputs["labels"]
    return labels if labels.dim() == 1 or read is None else labels[read >= 0]


def losses(model: nn.Module, case: Case, inputs: Inputs) -> list[float]:
    """Return the loss before each of ten steps of AdamW and after the last."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    labels, found = labels_of(case, inputs), []
    for _ in range(STEPS + 1):
        loss = F.cross_entropy(predicted(model, case, inputs), labels, ignore_index=-1)
        found.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found


# ---- decoding ---------------------------------------------------------------------------------------------------------


def written(model: nn.Module, case: Case, inputs: Inputs) -> dict[str, Any]:
    """Return what the model writes, by the name of each way of decoding: ids and scores."""
    return {name: one_way(model, case, inputs, options) for name, options in case["decode"].items()}


def one_way(model: nn.Module, case: Case, inputs: Inputs, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    texts = [[i for i in row if i >= 0] for row in inputs["source" if case["kind"] == "pair" else "ids"].tolist()]
    config = DecodeConfig(**convert.decode_settings(options))
    with torch.inference_mode():
        if case["kind"] == "pair":
            found = decode(model, texts, config, case["max_len"], torch.device("cpu"), token_template=FRAME)  # type: ignore[arg-type]
            return [
                {"ids": h.tokens, "score": h.score, "log_prob": h.log_prob, "ended": h.ended, "text": i}
                for i, ranked in enumerate(found)
                for h in ranked
            ]
        rows = generate(model, texts, config)  # type: ignore[arg-type]
        return [{"ids": row.tokens, "log_prob": sum(row.log_probs), "end": row.end} for row in rows]
