"""Tracing a search while it runs: every hypothesis of every step, and its attention weights.

    translation, search = trace_translation(translator, "Two young men play.", beam=4)
    search.steps  # the tree: the hypotheses that each step kept, and those that ended
    search.weights["decoder.3.cross"]  # (H, T, S), along the hypothesis that was returned

`SearchTracer` has the interface of the decoder that it wraps, so the search runs unchanged. It records each step with
its key/value cache: the hypotheses of a sentence are queries side by side, and a cached key may belong to several of
them. Then a hypothesis is followed back from parent to parent, and its row of each step's weights is taken. These are
the weights of a forward pass over the whole hypothesis (look/record.py), but nothing is read again.

A step reads the last token of each open hypothesis. So the nodes of a level of the tree are the rows of the step that
read them, and beside them those that ended, which no step reads. The last level is not read by any step: it is computed
from the log-probabilities of the last step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.config import DecodeConfig
from regard.decode.batch_decoding import decode
from regard.decode.beam_search import best_extensions
from regard.decode.constraints import log_probabilities
from regard.decode.generation import generate
from regard.decode.unknown_words import allow_unknown
from regard.errors import RegardError
from regard.inference.arguments import decode_config
from regard.inference.generator import Generation, Generator
from regard.inference.translator import Translation, Translator
from regard.kernels.masks import PAD_POSITION
from regard.layers.hooks import paused
from regard.look.record import AttentionRecord, attention_layers, record


@dataclass(frozen=True)
class BeamNode:
    """A hypothesis after one more token."""

    token: int
    parent: int | None  # its index in the step before; None in the first
    log_prob: float  # of all its tokens
    ended: bool
    best: bool  # on the path that was returned
    piece: str = ""  # the token as text, where a tokenizer is known


@dataclass(frozen=True)
class BeamSearchTrace:
    """The tree of a search, and the attention weights along the hypothesis that was returned."""

    steps: list[list[BeamNode]]
    weights: dict[str, Tensor]  # layer -> (H, T, S): a row for every token that was read


def trace_translation(
    translator: Translator, text: str, to: str | None = None, **options: Any
) -> tuple[Translation, BeamSearchTrace]:
    """Translate a sentence and trace the search. Options are those of `[decode]`."""
    if not text.strip():
        raise RegardError("there is nothing to translate: give a sentence")
    chosen, template = decode_config(translator.options, options), translator.token_template
    if chosen.temperature > 0 and chosen.nbest > 1:
        raise RegardError(f"one sample can be followed at a time, not {chosen.nbest}: leave out nbest")
    if chosen.prune:
        raise RegardError("a search with decode.prune cannot be traced: set it to 0")
    chosen = allow_unknown(chosen, translator.model, translator.tokenizers)
    tracer = SearchTracer(translator.model, chosen, len(template.start))
    sources, (language,) = translator.encode_sources([text], translator.target_languages([text], to)[0])
    device = next(translator.model.parameters()).device
    model = cast(Any, tracer)
    (found,) = decode(model, sources, chosen, tracer.config.max_len, device, token_template=template)
    ids = [*found[0].tokens, *[tracer.config.eos_token_id] * found[0].ended]
    texts = translator.texts_of([text], sources, [found], chosen)
    return translator._with_languages(translator._translation(found, texts[0]), language), tracer.trace(ids)


def trace_generation(generator: Generator, prompt: str, **options: Any) -> tuple[Generation, BeamSearchTrace]:
    """Continue a prompt with a language model and trace it: the tree is a single path."""
    chosen, ids = generator.decode_options(**options), generator.framed(prompt)
    if chosen.nbest > 1:
        raise RegardError(f"one text can be followed at a time, not {chosen.nbest}: leave out n")
    tracer = SearchTracer(generator.model, replace(chosen, beam=1))
    streamer, texts = generator._teller(ids, chosen), [""]

    def receive(row: int, token: int) -> bool:
        texts.append(streamer.push(token))
        return streamer.stopped

    (row,) = generate(cast(Any, tracer), [ids], chosen, receive)
    generation = generator._generation(prompt, "".join(texts) + streamer.flush(), row)
    return generation, tracer.trace([*row.tokens, *[tracer.config.eos_token_id] * (row.end == "end")])


# ---- recording the steps ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchStep:
    """One more token, read by N hypotheses."""

    weights: dict[str, Tensor]  # layer -> (N, H, S)
    tokens: Tensor  # (N,)
    parents: Tensor  # (N,) rows of the step before
    sentences: Tensor  # (N,)
    log_prob: Tensor  # (N,) including this token; -inf: the row is no hypothesis
    ended: Tensor  # (N,) log-probabilities of those that ended after it; -inf: it did not end

    def rows_of(self, sentence: int) -> list[int]:
        """Return the rows that are hypotheses of a sentence."""
        return ((self.sentences == sentence) & (self.log_prob > -torch.inf)).nonzero()[:, 0].tolist()


class SearchTracer:
    """A decoder that records every step of the decoder it wraps, since the last `begin`.

    `options` are those of the search; `start` is the number of tokens that are read before the first one is generated. A
    language model reads its prompts in `begin`; their tokens have rows of weights too.
    """

    def __init__(self, model: Any, options: DecodeConfig | None = None, start: int = 1) -> None:
        if not attention_layers(model):
            raise RegardError("this model has no attention: there is nothing to follow while it searches")
        self.model, self.options, self.start = model, options or DecodeConfig(), start
        # attributes of a model that translators and generators use
        self.config, self.parameters, self.embedding = model.config, model.parameters, getattr(model, "embedding", None)
        self.modules = model.modules
        self.beam = self.options.beam if self.options.temperature == 0 else 1
        self.steps: list[SearchStep] = []
        self.final: dict[int, Tensor] = {}  # sentence -> log-probabilities (K, V) of the tokens after its last step
        self.prompt_weights: dict[str, Tensor] = {}  # layer -> (B, H, S, S), weights of the tokens that were given
        self.lengths: list[int] = []  # the number of these tokens in each sentence

    def begin(self, source: Tensor) -> Any:
        self.steps, self.final, self.lengths = [], {}, (source >= 0).sum(1).tolist()
        with paused(self.model), record(self.model) as tape:
            begun = self.model.begin(source)
        self.prompt_weights = {name: tape.weights(name).cpu() for name in tape if tape[name]}
        rows = torch.arange(len(source), device=source.device)
        if not isinstance(begun, tuple):
            return TracedState(begun, rows)
        logits, state = begun[0], TracedState(begun[1], rows)
        last = source.gather(1, (source >= 0).sum(1, keepdim=True) - 1)[:, 0]
        self._add_step(last, state, {}, logits)
        return logits, state

    def step(self, tokens: Tensor, state: TracedState) -> Tensor:
        with paused(self.model), record(self.model) as tape:
            logits = self.model.step(tokens, state.inner)
        weights = {name: rows_by_hypothesis(tape[name][-1], name) for name in tape if tape[name]}
        self._add_step(tokens, state, {name: w.flatten(0, 1).cpu() for name, w in weights.items()}, logits)
        return logits

    def trace(self, tokens: Sequence[int], sentence: int = 0) -> BeamSearchTrace:
        """Return the search for one of the sources, with the weights along a hypothesis that it returned.

        `tokens` are those of the hypothesis, including the end token if it ended."""
        tree = SearchTree(
            self.steps[self.start - 1 :], sentence, self.final[sentence], self.beam, self.config.eos_token_id
        )
        steps, path = tree.nodes_and_path(list(tokens))
        before = [(step, int((step.sentences == sentence).nonzero()[0])) for step in self.steps[: self.start - 1]]
        weights = weights_along([*before, *path], self.prompt_weights, sentence, self.lengths[sentence])
        return BeamSearchTrace(steps, weights)

    def _add_step(self, tokens: Tensor, state: TracedState, weights: dict[str, Tensor], logits: Tensor) -> None:
        parents, log_prob = state.advance(tokens, self.config.eos_token_id)
        ended = torch.full_like(log_prob, -torch.inf)
        generated = len(self.steps) + 1 - self.start
        if generated >= 0:  # while the start tokens are read, the next token is given, whatever its probability
            log_p = log_probabilities(logits, generated, self.options, self.config)
            state.log_p, state.log_prob = log_p, log_prob
            by_sentence = log_p.view(len(state.sentences), -1, log_p.shape[1])  # (B, K, V)
            self.final.update(zip(state.sentences.tolist(), by_sentence, strict=True))
            if self.beam > 1:
                ended = ended_log_probs(by_sentence, log_prob, self.beam, self.config.eos_token_id)
        sentences = state.sentences.repeat_interleave(len(tokens) // len(state.sentences))
        on_cpu = [x.cpu() for x in (tokens, parents, sentences, log_prob, ended)]
        self.steps.append(SearchStep(weights, *on_cpu))


class TracedState:
    """The decoding state of the wrapped model, and the parents of its hypotheses."""

    def __init__(self, inner: Any, sentences: Tensor) -> None:
        self.inner, self.sentences = inner, sentences  # (B,) the sentences that are still searched
        self.parents: Tensor | None = None  # (N,) rows of the last step, if hypotheses have been reordered since
        self.log_p: Tensor | None = None  # (N, V) log-probabilities of the next token
        self.log_prob: Tensor | None = None  # (N,) log-probabilities of the hypotheses so far

    @property
    def length(self) -> int:
        return self.inner.length

    def reorder(self, parents: Tensor) -> None:
        """Replace hypothesis i of each sentence by its hypothesis parents[:, i]; parents (B, K)."""
        self.inner.reorder(parents)
        rows = self._rows().view(len(self.sentences), -1)
        self.parents = rows.gather(1, parents).flatten()

    def select(self, sentences: Tensor) -> None:
        """Replace sentence i by sentence sentences[i], with all of its hypotheses."""
        self.parents = self._rows().view(len(self.sentences), -1)[sentences].flatten()
        self.inner.select(sentences)
        self.sentences = self.sentences[sentences]

    def _rows(self) -> Tensor:
        """Return the rows of the last step that the present rows were, (N,)."""
        if self.parents is not None:
            return self.parents
        n = len(self.sentences) if self.log_prob is None else len(self.log_prob)
        return torch.arange(n, device=self.sentences.device)

    def advance(self, tokens: Tensor, eos: int) -> tuple[Tensor, Tensor]:
        """Return the parents of these tokens (N,), and the log-probabilities of the hypotheses that they end.

        Rows that only fill the beam have -inf: those that ended, and copies of others."""
        parents, self.parents = self.parents, None
        if parents is None:
            parents = torch.arange(len(tokens), device=tokens.device)
        if self.log_p is None or self.log_prob is None:
            return parents, torch.zeros(len(tokens), device=tokens.device)
        same = (parents * self.log_p.shape[1] + tokens).view(len(self.sentences), -1)
        copies = (same[:, :, None] == same[:, None, :]).tril(-1).any(-1).flatten()
        log_prob = self.log_prob[parents] + self.log_p[parents, tokens]
        return parents, log_prob.masked_fill(copies | (tokens == eos), -torch.inf)


def ended_log_probs(log_p: Tensor, log_prob: Tensor, beam: int, eos: int) -> Tensor:
    """Return the log-probabilities (N,) of hypotheses whose extension by the end token is among the best; else -inf."""
    b, rows, _ = log_p.shape
    value, parent, token = best_extensions(log_p, log_prob.view(b, rows), 2 * beam)
    value = value.masked_fill(token != eos, -torch.inf)[:, :beam]
    found = log_prob.new_full((b, rows), -torch.inf)
    return found.scatter_reduce(1, parent[:, :beam], value, "amax").flatten()


def rows_by_hypothesis(one: AttentionRecord, name: str) -> Tensor:
    """Return the weights (B, K, H, S) of each hypothesis in a step; self-attention over its own past only, by position.

    Columns that a sliding window has left behind may be gone from the cache: their weights are 0."""
    found, plan = one.weights().transpose(1, 2), one.plan
    if not name.endswith("self"):
        return found
    at = plan.key_positions[:, None].expand(-1, found.shape[1], -1)  # (B, K, S)
    own = at > PAD_POSITION
    if plan.past is not None:
        own = own & plan.past
    n = int(at.where(own, PAD_POSITION).max()) + 1
    index = at.where(own, n)[:, :, None].expand_as(found)  # columns of others go behind the last position
    return found.new_zeros(*found.shape[:3], n + 1).scatter(-1, index, found)[..., :n]


# ---- the tree ---------------------------------------------------------------------------------------------------------


Level = list[tuple[BeamNode, int | None]]  # nodes, each with its row in the step that read it, if one did
Path = list[tuple[SearchStep, int]]  # the row of one hypothesis in each step


class SearchTree:
    """The tree of the search for one sentence.

    `steps` begin with the one after which the first token was generated; `final` (K, V) holds the log-probabilities of
    the tokens after the last one."""

    def __init__(self, steps: list[SearchStep], sentence: int, final: Tensor, beam: int, eos: int) -> None:
        self.sentence, self.final, self.beam, self.eos = sentence, final.cpu(), beam, eos
        self.steps = [step for step in steps if (step.sentences == sentence).any()]

    def nodes_and_path(self, tokens: list[int]) -> tuple[list[list[BeamNode]], Path]:
        """Return the nodes of every level, and the rows that read the hypothesis of these tokens."""
        (root,) = self.steps[0].rows_of(self.sentence)
        path, place, levels = [(self.steps[0], root)], None, []
        places: dict[int, int | None] = {root: None}  # row -> index in the level above
        for t, step in enumerate(self.steps):
            after = self.steps[t + 1] if t + 1 < len(self.steps) else None
            level = self.open_nodes(after, places) if after else self.last_nodes(tokens, places)
            level += self.ended_nodes(step, places)
            if t < len(tokens):
                place = find_node(level, tokens[t], place)
                node, row = level[place]
                level[place] = replace(node, best=True), row
                path += [(after, row)] if after is not None and row is not None else []
            levels.append([node for node, _ in level])
            places = {row: i for i, (_, row) in enumerate(level) if row is not None}
        return levels, path

    def open_nodes(self, after: SearchStep, places: dict[int, int | None]) -> Level:
        rows = after.rows_of(self.sentence)
        columns = (x[rows].tolist() for x in (after.tokens, after.parents, after.log_prob))
        return [
            (BeamNode(token, places[parent], value, False, False), row)
            for row, token, parent, value in zip(rows, *columns, strict=True)
        ]

    def ended_nodes(self, step: SearchStep, places: dict[int, int | None]) -> Level:
        rows = (row for row in step.rows_of(self.sentence) if step.ended[row] > -torch.inf)
        return [(BeamNode(self.eos, places[row], float(step.ended[row]), True, False), None) for row in rows]

    def last_nodes(self, tokens: list[int], places: dict[int, int | None]) -> Level:
        """Return the hypotheses that were open when the search stopped; without a beam, the one that was generated."""
        step = self.steps[-1]
        rows = (step.sentences == self.sentence).nonzero()[:, 0].tolist()
        log_prob = step.log_prob[rows]
        if self.beam == 1:
            token = tokens[-1]
            value = float(log_prob[0] + self.final[0, token])
            return [(BeamNode(token, places[rows[0]], value, token == self.eos, False), None)]
        best = (x[0].tolist() for x in best_extensions(self.final[None], log_prob[None], 2 * self.beam))
        open_ = [(v, p, token) for v, p, token in zip(*best, strict=True) if token != self.eos and v > -torch.inf]
        return [(BeamNode(token, places[rows[p]], v, False, False), None) for v, p, token in open_[: self.beam]]


def find_node(level: Level, token: int, parent: int | None) -> int:
    """Return the index of the node of a level that has this token and this parent."""
    for i, (node, _) in enumerate(level):
        if (node.token, node.parent) == (token, parent):
            return i
    raise RegardError(
        "the search followed no such hypothesis: give one that it returned, with the end token if it ended"
    )


# ---- weights along a hypothesis ---------------------------------------------------------------------------------------


def weights_along(path: Path, prompt: dict[str, Tensor], sentence: int, length: int) -> dict[str, Tensor]:
    """Return the weights (H, T, S) of every layer: the rows of the given tokens (`prompt`), then a row for each step."""
    given = {name: w[sentence, :, :length, :length] for name, w in prompt.items()}
    return {name: join_rows(name, path, given.get(name), length) for name in {**given, **path[-1][0].weights}}


def join_rows(name: str, path: Path, given: Tensor | None, length: int) -> Tensor:
    """Return the rows of a layer along a path as one matrix for each head; self-attention gets one key more each step."""
    rows = [step.weights[name][row][:, None] for step, row in path if name in step.weights]  # (H, 1, S) each
    if not name.endswith("self"):
        return torch.cat(rows, 1)[:, :, :length]
    parts = [*([] if given is None else [given]), *rows]
    width = sum(part.shape[1] for part in parts)
    return torch.cat([F.pad(part, (0, width - part.shape[-1])) for part in parts], 1)
