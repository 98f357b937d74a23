"""Cases for tests of attention: every mask, ragged and packed rows, caches, encoder memories, shared key heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from configured import SCHEMES
from formula import SETTINGS, H, packed, ragged
from torch import Tensor

from regard.config import ModelConfig
from regard.kernels.masks import CAUSAL, FULL, Mask, document_mask, prefix, with_window
from regard.layers.attention_kernels import AttentionPlan, raw_scores
from regard.layers.positions.scheme import PositionScheme, make_positions

ADDITIVE = ("alibi", "t5", "kerple-log", "kerple-power", "fire")
CONTEXTUAL = ("shaw", "cope", "disentangled")
NOT_IN = {  # place -> schemes that make no sense there
    "encoder": ("none", "cope"),
    "decoder": ("disentangled",),
    "cross": ("linear", "sinusoidal", "learned", "rope", "yarn", "fire", *CONTEXTUAL),
}


@dataclass(frozen=True)
class Case:
    place: str
    mask: Mask
    rule: dict[str, Any]  # the same mask, for `visible`
    q: Tensor  # positions (B, T)
    k: Tensor | None = None  # None: the queries' own
    groups: int = H  # heads of keys and values

    @property
    def keys(self) -> Tensor:
        return self.q if self.k is None else self.k


def cases(t: int) -> dict[str, Case]:
    """Rows of up to t tokens; `w` is short of all but the shortest."""
    w, rows = t // 3, ragged(t, t // 2)
    docs = packed([w, t - w - 2], [1, t // 2, t - t // 2 - 1])
    more = torch.tensor([[t, t + 1], [t // 2, t // 2 + 1]])  # two tokens more, after padding for the shorter row
    past = torch.cat([rows, more], 1)
    return {
        "bidirectional": Case("encoder", FULL, {}, rows),
        "bidirectional window": Case("encoder", with_window(FULL, w), {"back": w - 1, "ahead": w - 1}, rows, groups=2),
        "bidirectional documents": Case("encoder", document_mask(FULL), {"documents": True}, docs, groups=1),
        "causal": Case("decoder", CAUSAL, {"ahead": 0}, rows),
        "causal, grouped queries": Case("decoder", CAUSAL, {"ahead": 0}, rows, groups=2),
        "causal, multi-query": Case("decoder", CAUSAL, {"ahead": 0}, rows, groups=1),
        "causal window": Case("decoder", with_window(CAUSAL, w), {"back": w - 1, "ahead": 0}, rows),
        "prefix": Case("decoder", prefix(w), {"ahead": 0, "prefix": w}, rows, groups=2),
        "prefix of each row": Case(
            "decoder", prefix(torch.tensor([[0], [t - 2]])), {"ahead": 0, "prefix": [0, t - 2]}, rows
        ),
        "causal documents": Case("decoder", document_mask(CAUSAL), {"ahead": 0, "documents": True}, docs),
        "causal documents, window": Case(
            "decoder",
            document_mask(with_window(CAUSAL, w)),
            {"back": w - 1, "ahead": 0, "documents": True},
            docs,
            groups=2,
        ),
        "cache": Case("decoder", CAUSAL, {"ahead": 0}, more, past),
        "cache, window": Case("decoder", with_window(CAUSAL, w), {"back": w - 1, "ahead": 0}, more, past, groups=2),
        "cross": Case("cross", FULL, {}, ragged(4, 3), ragged(t, t - 2)),
        "cross, multi-query": Case("cross", FULL, {}, ragged(t, t // 2), ragged(t - 3, t // 3), groups=1),
    }


def scheme_of(name: str, place: str, config: ModelConfig = SETTINGS) -> PositionScheme:
    """With no parameter left at zero, where T5's and CoPE's start."""
    torch.manual_seed(0)
    scheme = make_positions(config, place, name)
    with torch.no_grad():
        for p in scheme.parameters():
            if not p.any():
                p.normal_()
    return scheme


def allowed(cases: dict[str, Case], names: tuple[str, ...] = (*SCHEMES, "disentangled")) -> Iterator[tuple[str, str]]:
    """Schemes and names of cases that go together."""
    for case_name, case in cases.items():
        for name in names:
            if name not in NOT_IN[case.place]:
                yield name, case_name


def masked_scores(q: Tensor, k: Tensor, plan: AttentionPlan) -> Tensor:
    """Return what the softmax is taken of, (B, H, T, S) in fp32, -inf where a query may not attend."""
    return raw_scores(q, k, plan).masked_fill(~plan.seen(), -torch.inf)
