"""What beam search and sampling share: length limits, disallowed tokens masked to -inf, and the choice of CUDA graphs."""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.config import DecodeConfig, ModelConfig
from regard.errors import RegardError
from regard.models.ensemble import Ensemble, EnsembleState
from regard.text.special_tokens import PAD

log = logging.getLogger("regard")
LENGTH_OFFSETS = {"power": 0.0, "gnmt": 5.0}  # by decode.length_norm: log p(y) / ((offset + |y|) / (offset + 1))^a
MAX_GRAPH_BEAM = 16  # the widest beam that the CUDA-graph kernels support


class DecodableModel(Protocol):
    """What search needs of a model: it reads a source once and then writes token by token.

    Its configuration names the token that ends a text and those that are never generated."""

    @property
    def config(self) -> ModelConfig: ...

    def begin(self, source: Tensor) -> Any:
        """Read sources (B, S) and return the decoding state, which has `reorder(parents)` and `select(sentences)`."""

    def step(self, tokens: Tensor, state: Any) -> Tensor:
        """Return the logits (N, V) after one more token (N,) of each hypothesis."""


@dataclass(frozen=True)
class Hypothesis:
    """One translation as token ids, without start and end tokens."""

    tokens: list[int]
    score: float  # what hypotheses are ranked by
    log_prob: float  # log p(y | x), the end token included where there is one
    ended: bool  # False: cut off at the length limit


def check_options(options: DecodeConfig) -> None:
    """Refuse values of decoding settings that are out of range or contradict each other."""
    if options.beam < 1 or options.nbest < 1:
        raise RegardError(f"decode.beam and decode.nbest must be at least 1, not {options.beam} and {options.nbest}")
    if options.temperature == 0 and options.nbest > options.beam and not options.mbr:
        raise RegardError(f"decode.nbest {options.nbest} is more than decode.beam {options.beam}: widen the beam")
    if not 0 <= options.temperature < math.inf or options.top_k < 0 or not 0 < options.top_p <= 1:
        raise RegardError(
            "decode.temperature and decode.top_k must be finite and not negative, decode.top_p must be in (0, 1]"
        )
    if not 0 <= options.min_p <= 1 or not 0 < options.repetition_penalty < math.inf:
        raise RegardError(
            f"decode.min_p must be from 0 to 1 and decode.repetition_penalty above 0, "
            f"not {options.min_p} and {options.repetition_penalty}: 0 and 1 switch them off"
        )
    searches = options.mbr_candidates == "beam" if options.mbr else options.temperature == 0 and options.beam > 1
    if options.repetition_penalty != 1 and searches:
        raise RegardError("decode.repetition_penalty is not for beam search: set decode.beam 1 or a decode.temperature")
    if options.unknown_dictionary and options.replace_unknown == "none":
        raise RegardError("decode.unknown_dictionary is for decode.replace_unknown copy: set that too, or leave it out")
    if not -10 <= options.length_penalty <= 10:  # beyond, |y|^a leaves the range of fp32
        raise RegardError(f"decode.length_penalty must be from -10 to 10, not {options.length_penalty}: 1 is usual")
    if not 0 <= options.coverage_penalty < math.inf or not 0 <= options.prune < math.inf:
        raise RegardError(
            f"decode.coverage_penalty and decode.prune must be finite and not negative, not {options.coverage_penalty} and "
            f"{options.prune}: 0 switches them off"
        )
    if (options.coverage_penalty or options.prune) and not searches:
        remedy = "set decode.mbr_candidates beam" if options.mbr else "widen decode.beam"
        raise RegardError(f"decode.coverage_penalty and decode.prune are for beam search: {remedy}, or set them to 0")
    if not 0 <= options.epsilon < 1:
        raise RegardError(
            f"decode.epsilon must be a probability below 1, not {options.epsilon}: 0.02 is usual, 0 is off"
        )
    check_mbr(options)


TRANSLATION_SETTINGS = ("length_norm", "coverage_penalty", "prune", "mbr", "ensemble", "replace_unknown")


def check_language_model_options(options: DecodeConfig) -> None:
    """Refuse settings that are for translations alone."""
    for name in TRANSLATION_SETTINGS:
        if getattr(options, name) != getattr(DecodeConfig(), name):
            raise RegardError(f"decode.{name} is for translations, not for language models: leave it out")


def searching(options: DecodeConfig, **changes: Any) -> DecodeConfig:
    """Return settings for beam search or greedy decoding, ranked by length and log p alone, with some changes."""
    return replace(options, **plain_search() | changes)


def plain_search() -> dict[str, Any]:
    """Return the settings of a search that does not sample, and ranks by length and log p alone."""
    default = DecodeConfig()
    names = ("temperature", "epsilon", "coverage_penalty", "prune", "mbr", "mbr_metric", "mbr_candidates")
    return {name: getattr(default, name) for name in names}


def greedy_options() -> dict[str, Any]:
    """Return the settings of greedy decoding, as options of a call that other settings of a model remain in force for."""
    return plain_search() | {"beam": 1, "nbest": 1}


def greedy(options: DecodeConfig) -> DecodeConfig:
    """Return settings for greedy decoding with the limits of given ones."""
    return replace(options, **greedy_options(), ensemble="mean")


def check_mbr(options: DecodeConfig) -> None:
    """Refuse settings of minimum-Bayes-risk decoding, and of epsilon sampling, that contradict each other."""
    default = DecodeConfig()
    if not options.mbr:
        for name in ("mbr_metric", "mbr_candidates"):
            if getattr(options, name) != getattr(default, name):
                raise RegardError(f"decode.{name} does nothing without candidates: give decode.mbr, 32 for example")
        if options.epsilon and options.temperature == 0:
            raise RegardError("decode.epsilon is for sampling: give a decode.temperature above 0, or decode.mbr")
        return
    if options.mbr < 2:
        raise RegardError(f"decode.mbr compares candidates with each other: give at least 2, not {options.mbr}")
    if options.nbest > options.mbr:
        raise RegardError(f"decode.nbest {options.nbest} is more than the {options.mbr} candidates of decode.mbr")
    if options.mbr_candidates == "beam" and options.temperature > 0:
        raise RegardError("decode.mbr_candidates beam does not sample: leave out decode.temperature")
    for name in ("top_k", "top_p", "min_p") if options.mbr_candidates == "beam" else ():
        if getattr(options, name) != getattr(default, name):
            raise RegardError(f"decode.mbr_candidates beam does not sample: leave out decode.{name}")
    if options.mbr_candidates != "epsilon" and options.epsilon:
        raise RegardError(f"decode.epsilon is for decode.mbr_candidates epsilon, not {options.mbr_candidates}")


def token_budget(options: DecodeConfig, device: torch.device) -> int:
    """Return how many tokens are decoded at a time: a CPU gains nothing from more, a GPU is idle with fewer."""
    return options.batch_tokens or (131072 if device.type == "cuda" else 8192)


def uses_cuda_graphs(model: Any, beam: int = 1, options: DecodeConfig | None = None) -> bool:
    """Return whether a model is decoded by CUDA graphs (decode/graphs): on a GPU, if its step can be captured."""
    weight = getattr(getattr(model, "head", None), "weight", None)
    if isinstance(model, Ensemble):
        weight = next(model.parameters())
    if weight is None or not weight.is_cuda or importlib.util.find_spec("triton") is None:
        return False
    from regard.decode.graphs.step_model import why_not_capturable

    too_wide = f"a beam of {beam}, more than {MAX_GRAPH_BEAM}" if beam > MAX_GRAPH_BEAM else ""
    reason = why_not_captured(model, options) or why_not_capturable(model) or NOT_CAPTURED.get(model) or too_wide
    if reason:
        warn_once(f"decoding goes token by token, not by CUDA graphs: {reason}")
    return not reason


def why_not_captured(model: Any, options: DecodeConfig | None) -> str:
    """Return what a captured step does not compute, or an empty string."""
    if isinstance(model, Ensemble):
        return f"an ensemble of {len(model.members)} models"
    if options is not None and (options.coverage_penalty or options.prune):
        return "decode.coverage_penalty" if options.coverage_penalty else "decode.prune"
    return ""


NOT_CAPTURED: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # models whose step could not be captured, and why


def warn_not_captured(model: Any, reason: str) -> None:
    """Remember that a model's step cannot be captured in a CUDA graph, and warn about it."""
    NOT_CAPTURED[model] = reason
    warn_once(f"decoding goes token by token, not by CUDA graphs: {reason}")


def free_decode_graphs(model: Any) -> None:
    """Free the CUDA graphs and static caches that are kept for decoding `model`."""
    engines = sys.modules.get("regard.decode.graphs.engine")  # without it there are none, and it need not be imported
    if engines is not None:
        for engine in engines.ENGINES.pop(model, {}).values():
            engine.release()


@functools.cache
def warn_once(text: str) -> None:
    log.warning(text)


def length_limits(source_lengths: Tensor, options: DecodeConfig, max_len: int) -> Tensor:
    """Return how many tokens the translation of each sentence may have, the end token included, (B,).

    The limit depends on the sentence alone, so no neighbour in the batch can change a result."""
    limit = options.max_len_a * source_lengths.double() + options.max_len_b
    return limit.clamp(min=max(1, options.min_len + 1), max=max_len).long()


def pad_rows(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return ids (B, T), padded on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*ids, *[PAD] * (width - len(ids))] for ids in rows], device=device)


def length_normalizer(length: Any, options: DecodeConfig) -> Any:
    """Return what log p(y) is divided by, for a length |y| or an fp64 tensor of lengths.

    It is |y|^a, or with `decode.length_norm` gnmt ((5 + |y|) / 6)^a (Wu et al. 2016), a being the length penalty."""
    offset = LENGTH_OFFSETS[options.length_norm]
    return ((length + offset) / (1.0 + offset)) ** options.length_penalty


def start_decoding(
    model: DecodableModel, source: Tensor, start: tuple[int, ...], options: DecodeConfig
) -> tuple[Any, Tensor]:
    """Read sources (B, S) and all start tokens but the last; return the state and that last token (B,)."""
    state = model.begin(source)
    if isinstance(state, EnsembleState):
        state.average = options.ensemble
    *first, last = (torch.full((len(source),), id, device=source.device) for id in start)
    for tokens in first:
        model.step(tokens, state)
    return state, last


def log_probabilities(logits: Tensor, step: int, options: DecodeConfig, config: ModelConfig) -> Tensor:
    """Return log p of each next token (N, V) in fp32, with disallowed tokens masked to -inf."""
    config = with_allowed_tokens(config, options)
    return mask_disallowed(logits.float().log_softmax(-1), step < options.min_len, config)


def with_allowed_tokens(config: ModelConfig, options: DecodeConfig) -> ModelConfig:
    """Return a model's configuration without the suppressed tokens that these options allow."""
    if not options.allow_tokens:
        return config
    return _without_suppressed(config, frozenset(options.allow_tokens))


@functools.lru_cache(maxsize=16)
def _without_suppressed(config: ModelConfig, allowed: frozenset[int]) -> ModelConfig:
    return replace(config, suppress_tokens=tuple(id for id in config.suppress_tokens if id not in allowed))


def mask_disallowed(scores: Tensor, no_end: Tensor | bool, config: ModelConfig) -> Tensor:
    """Mask to -inf, in place, the tokens that are never generated and, in rows (N,) that may not end yet, the end token.

    On a GPU they are masked one by one: a CUDA graph cannot capture the copy of an index list from the host."""
    end = config.eos_token_id
    if scores.is_cuda:
        for id in config.suppress_tokens:
            scores[:, id] = -torch.inf
    elif config.suppress_tokens:
        scores.index_fill_(1, index_tensor(config.suppress_tokens), -torch.inf)
    if end < 0:
        return scores
    if isinstance(no_end, Tensor):
        scores[:, end].masked_fill_(no_end, -torch.inf)
    elif no_end:
        scores[:, end] = -torch.inf
    return scores


@functools.cache
def index_tensor(tokens: tuple[int, ...]) -> Tensor:
    """Return token ids as a tensor, made once: that takes as long as masking their columns."""
    return torch.tensor(tokens)
