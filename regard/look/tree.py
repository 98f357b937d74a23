"""The tree of a search, from what each step of it left: which hypotheses there were, and which of them survived.

A step reads one token of each open hypothesis. So the nodes of a level are the rows of the step that read them, and beside
them those that ended, which nobody read again. Of the last level there is only what could have been said.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.decode.beam_search import best_extensions
from regard.errors import RegardError


@dataclass(frozen=True)
class Node:
    """A hypothesis after one more token."""

    token: int
    parent: int | None  # its place in the step before; None in the first
    log_prob: float  # of all its tokens
    ended: bool
    best: bool  # on the path that survived


@dataclass(frozen=True)
class Search:
    steps: list[list[Node]]
    weights: dict[str, Tensor]  # layer -> (H, T, S): a row for every token that was read


@dataclass(frozen=True)
class Step:
    """One token more, read by N hypotheses."""

    looked: dict[str, Tensor]  # layer -> (N, H, S)
    tokens: Tensor  # (N,)
    parents: Tensor  # (N,) rows of the step before
    sentences: Tensor  # (N,)
    log_prob: Tensor  # (N,) with this token; -inf: there is no such hypothesis
    ended: Tensor  # (N,) of those that ended after it; -inf: they did not

    def of(self, sentence: int) -> list[int]:
        """Its rows."""
        return ((self.sentences == sentence) & (self.log_prob > -torch.inf)).nonzero()[:, 0].tolist()


Level = list[tuple[Node, int | None]]  # each with its row in the step that read it, if one did
Path = list[tuple[Step, int]]  # the row that is a hypothesis, in one step after the other


class Tree:
    """`steps` from the one after which the first token was written; `final` (K, V) is log p of what the last could say."""

    def __init__(self, steps: list[Step], sentence: int, final: Tensor, beam: int, eos: int) -> None:
        self.sentence, self.final, self.beam, self.eos = sentence, final.cpu(), beam, eos
        self.steps = [step for step in steps if (step.sentences == sentence).any()]

    def grown(self, tokens: list[int]) -> tuple[list[list[Node]], Path]:
        """All nodes, and the rows that read the hypothesis of these tokens."""
        (root,) = self.steps[0].of(self.sentence)
        path, place, levels = [(self.steps[0], root)], None, []
        places: dict[int, int | None] = {root: None}  # row -> place in the level above
        for t, step in enumerate(self.steps):
            after = self.steps[t + 1] if t + 1 < len(self.steps) else None
            level = self.opened(after, places) if after else self.last(tokens, places)
            level += self.ended(step, places)
            if t < len(tokens):
                place = found(level, tokens[t], place)
                node, row = level[place]
                level[place] = replace(node, best=True), row
                path += [(after, row)] if after is not None and row is not None else []
            levels.append([node for node, _ in level])
            places = {row: i for i, (_, row) in enumerate(level) if row is not None}
        return levels, path

    def opened(self, after: Step, places: dict[int, int | None]) -> Level:
        rows = after.of(self.sentence)
        kept = zip(rows, *(x[rows].tolist() for x in (after.tokens, after.parents, after.log_prob)), strict=True)
        return [(Node(token, places[parent], value, False, False), row) for row, token, parent, value in kept]

    def ended(self, step: Step, places: dict[int, int | None]) -> Level:
        rows = (row for row in step.of(self.sentence) if step.ended[row] > -torch.inf)
        return [(Node(self.eos, places[row], float(step.ended[row]), True, False), None) for row in rows]

    def last(self, tokens: list[int], places: dict[int, int | None]) -> Level:
        """What was open when the search stopped; of one hypothesis alone, what it said last."""
        step = self.steps[-1]
        rows = (step.sentences == self.sentence).nonzero()[:, 0].tolist()
        log_prob = step.log_prob[rows]
        if self.beam == 1:
            token = tokens[-1]
            value = float(log_prob[0] + self.final[0, token])
            return [(Node(token, places[rows[0]], value, token == self.eos, False), None)]
        best = (x[0].tolist() for x in best_extensions(self.final[None], log_prob[None], 2 * self.beam))
        open_ = [(v, p, token) for v, p, token in zip(*best, strict=True) if token != self.eos and v > -torch.inf]
        return [(Node(token, places[rows[p]], v, False, False), None) for v, p, token in open_[: self.beam]]


def found(level: Level, token: int, parent: int | None) -> int:
    for i, (node, _) in enumerate(level):
        if (node.token, node.parent) == (token, parent):
            return i
    raise RegardError(
        "the search followed no such hypothesis: give one that it returned, with the end token if it ended"
    )


# ---- weights ----------------------------------------------------------------------------------------------------------


def along(path: Path, read: dict[str, Tensor], sentence: int, length: int) -> dict[str, Tensor]:
    """Of every layer, (H, T, S): rows of what was given, of each step, or of both where a prompt was gone on with."""
    given = {name: w[sentence, :, :length, :length] for name, w in read.items()}
    return {name: joined(name, path, given.get(name), length) for name in {**given, **path[-1][0].looked}}


def joined(name: str, path: Path, given: Tensor | None, length: int) -> Tensor:
    rows = [step.looked[name][row][:, None] for step, row in path if name in step.looked]  # (H, 1, S) each
    if not name.endswith("self"):
        return torch.cat(rows, 1)[:, :, :length]
    parts = [*([] if given is None else [given]), *rows]
    width = sum(part.shape[1] for part in parts)
    return torch.cat([F.pad(part, (0, width - part.shape[-1])) for part in parts], 1)
