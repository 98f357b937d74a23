"""A search, seen while it goes on: every hypothesis of every step, and where it looked.

    translation, search = searched(translator, "Two young men play.", beam=4)
    search.steps  # the tree: the hypotheses that each step left open, and those that ended
    search.weights["decoder.3.cross"]  # (H, T, S), along the hypothesis that survived

`Live` is a decoder like the model it stands for, and the search knows nothing of it. A step is recorded as it runs, with its
cache: hypotheses are queries side by side, and a key is whoever's it is. Afterwards a hypothesis is followed back from
parent to parent (look/tree.py), and where it looked in each step is a row of its weights. They are those of a forward that
is given the whole hypothesis (`look.record`), but nothing is read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from regard.config import DecodeConfig
from regard.decode.beam_search import best_extensions
from regard.decode.constraints import Hypothesis, log_probabilities
from regard.decode.generation import generate
from regard.errors import RegardError
from regard.inference.generator import Generation, Generator
from regard.inference.translator import Translation, Translator
from regard.layers.hooks import paused
from regard.look.record import Record, layers_of, record
from regard.look.tree import Node as Node
from regard.look.tree import Search as Search
from regard.look.tree import Step, Tree, along


def searched(translator: Translator, text: str, to: str | None = None, **options: Any) -> tuple[Translation, Search]:
    """Translate a sentence and keep the whole search. Options are those of `[decode]`."""
    if not text.strip():
        raise RegardError("there is nothing to translate: give a sentence")
    live = Live(translator.model, translator.decode_options(**options), len(translator.token_template.start))
    following, given = Following(translator, live), {} if to is None else {"to": to}
    (translation,) = following.translate_sentences([text], **{**options, **given})
    best = following.found[0]
    return translation, live.search([*best.tokens, *[live.config.eos_token_id] * best.ended])


class Following(Translator):
    """A translator whose model is looked at, and which keeps what it found."""

    found: list[Hypothesis]

    def __init__(self, translator: Translator, live: Live) -> None:
        self.__dict__.update(vars(translator))
        self.model = cast(Any, live)

    def _translation(self, hypotheses: list[Hypothesis]) -> Translation:
        self.found = hypotheses
        return super()._translation(hypotheses)


def continued(writer: Generator, prompt: str, **options: Any) -> tuple[Generation, Search]:
    """The same of a language model that goes on with a prompt: its tree is a line."""
    chosen, ids = writer.decode_options(**options), writer.framed(prompt)
    if chosen.nbest > 1:
        raise RegardError(f"one text can be followed at a time, not {chosen.nbest}: leave out n")
    live, teller, texts = Live(writer.model, replace(chosen, beam=1)), writer._teller(ids, chosen), [""]

    def hear(row: int, token: int) -> bool:
        texts.append(teller.push(token))
        return teller.stopped

    (row,) = generate(cast(Any, live), [ids], chosen, hear)
    generation = writer._generation(prompt, "".join(texts) + teller.flush(), row)
    return generation, live.search([*row.tokens, *[live.config.eos_token_id] * (row.end == "end")])


class Live:
    """`options` are those of the search; `start` says how many tokens are read before the first one is written.

    It remembers the last `begin`. A language model reads its prompts in it, whose tokens have rows of weights too.
    """

    def __init__(self, model: Any, options: DecodeConfig | None = None, start: int = 1) -> None:
        if not layers_of(model):
            raise RegardError("this model has no attention: there is nothing to follow while it searches")
        self.model, self.options, self.start = model, options or DecodeConfig(), start
        # what translating and writing ask of a model
        self.config, self.parameters, self.embedding = model.config, model.parameters, getattr(model, "embedding", None)
        self.beam = self.options.beam if self.options.temperature == 0 else 1
        self.steps: list[Step] = []
        self.final: dict[int, Tensor] = {}  # sentence -> log p (K, V) of what its last step could have said
        self.read: dict[str, Tensor] = {}  # layer -> (B, H, S, S), where those tokens looked that were given
        self.lengths: list[int] = []  # how many they are

    def begin(self, source: Tensor) -> Any:
        self.steps, self.final, self.lengths = [], {}, (source >= 0).sum(1).tolist()
        with paused(self.model), record(self.model) as tape:
            begun = self.model.begin(source)
        self.read = {name: tape.weights(name).cpu() for name in tape if tape[name]}
        rows = torch.arange(len(source), device=source.device)
        if not isinstance(begun, tuple):
            return LiveState(begun, rows)
        logits, state = begun[0], LiveState(begun[1], rows)
        last = source.gather(1, (source >= 0).sum(1, keepdim=True) - 1)[:, 0]
        self._remember(last, state, {}, logits)
        return logits, state

    def step(self, tokens: Tensor, state: LiveState) -> Tensor:
        with paused(self.model), record(self.model) as tape:
            logits = self.model.step(tokens, state.inner)
        looked = {name: rows_of(tape[name][-1], name).flatten(0, 1).cpu() for name in tape if tape[name]}
        self._remember(tokens, state, looked, logits)
        return logits

    def search(self, tokens: Sequence[int], sentence: int = 0) -> Search:
        """The search for one of the sources, and the weights along these tokens, the end token among them if they ended."""
        tree = Tree(self.steps[self.start - 1 :], sentence, self.final[sentence], self.beam, self.config.eos_token_id)
        steps, path = tree.grown(list(tokens))
        before = [(step, int((step.sentences == sentence).nonzero()[0])) for step in self.steps[: self.start - 1]]
        return Search(steps, along([*before, *path], self.read, sentence, self.lengths[sentence]))

    def _remember(self, tokens: Tensor, state: LiveState, looked: dict[str, Tensor], logits: Tensor) -> None:
        parents, log_prob = state.arrived(tokens, self.config.eos_token_id)
        ended = torch.full_like(log_prob, -torch.inf)
        written = len(self.steps) + 1 - self.start
        if written >= 0:  # else it is a token of the start, after which another one comes anyway
            log_p = log_probabilities(logits, written, self.options, self.config)
            state.log_p, state.log_prob = log_p, log_prob
            by_sentence = log_p.view(len(state.sentences), -1, log_p.shape[1])  # (B, K, V)
            self.final.update(zip(state.sentences.tolist(), by_sentence, strict=True))
            if self.beam > 1:
                ended = endings(by_sentence, log_prob, self.beam, self.config.eos_token_id)
        sentences = state.sentences.repeat_interleave(len(tokens) // len(state.sentences))
        kept = [x.cpu() for x in (tokens, parents, sentences, log_prob, ended)]
        self.steps.append(Step(looked, *kept))


class LiveState:
    """The model's own state, and what became of its hypotheses."""

    def __init__(self, inner: Any, sentences: Tensor) -> None:
        self.inner, self.sentences = inner, sentences  # (B,) those that are left
        self.parents: Tensor | None = None  # (N,) of the rows that come next, if they have moved
        self.log_p: Tensor | None = None  # (N, V) of what may be said next,
        self.log_prob: Tensor | None = None  # ... and (N,) of what was said so far

    @property
    def length(self) -> int:
        return self.inner.length

    def reorder(self, parents: Tensor) -> None:
        """Hypothesis i of each sentence becomes what its hypothesis parents[:, i] was; parents (B, K)."""
        self.inner.reorder(parents)
        rows = self._rows().view(len(self.sentences), -1)
        self.parents = rows.gather(1, parents).flatten()

    def select(self, sentences: Tensor) -> None:
        """Sentence i becomes what sentence sentences[i] was, with all of its hypotheses."""
        self.parents = self._rows().view(len(self.sentences), -1)[sentences].flatten()
        self.inner.select(sentences)
        self.sentences = self.sentences[sentences]

    def _rows(self) -> Tensor:
        """Return the rows of the last step that the present rows were, (N,)."""
        if self.parents is not None:
            return self.parents
        n = len(self.sentences) if self.log_prob is None else len(self.log_prob)
        return torch.arange(n, device=self.sentences.device)

    def arrived(self, tokens: Tensor, eos: int) -> tuple[Tensor, Tensor]:
        """Whom these tokens (N,) follow, and log p of all up to them, -inf for a row that only fills its place in the beam:
        one that ended, or the copy of another."""
        parents, self.parents = self.parents, None
        if parents is None:
            parents = torch.arange(len(tokens), device=tokens.device)
        if self.log_p is None or self.log_prob is None:
            return parents, torch.zeros(len(tokens), device=tokens.device)
        same = (parents * self.log_p.shape[1] + tokens).view(len(self.sentences), -1)
        copies = (same[:, :, None] == same[:, None, :]).tril(-1).any(-1).flatten()
        log_prob = self.log_prob[parents] + self.log_p[parents, tokens]
        return parents, log_prob.masked_fill(copies | (tokens == eos), -torch.inf)


def endings(log_p: Tensor, log_prob: Tensor, beam: int, eos: int) -> Tensor:
    """What hypotheses (N,) are worth that end here, as beam search finds them: among the best; -inf for the others."""
    b, rows, _ = log_p.shape
    value, parent, token = best_extensions(log_p, log_prob.view(b, rows), 2 * beam)
    value = value.masked_fill(token != eos, -torch.inf)[:, :beam]
    found = log_prob.new_full((b, rows), -torch.inf)
    return found.scatter_reduce(1, parent[:, :beam], value, "amax").flatten()


def rows_of(kept: Record, name: str) -> Tensor:
    """Where each hypothesis looked in a step, (B, K, H, S): in self-attention at its own past alone, in its order."""
    found, plan = kept.weights().transpose(1, 2), kept.plan
    if not name.endswith("self"):
        return found
    own = (plan.k >= 0)[:, None].expand(-1, found.shape[1], -1) if plan.past is None else plan.past  # (B, K, S)
    order = plan.k[:, None].masked_fill(~own, torch.iinfo(torch.long).max).argsort(-1)
    return found.take_along_dim(order[:, :, None, : int(own.sum(-1).max())], -1)
