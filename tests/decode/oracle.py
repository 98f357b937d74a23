"""Oracles for the tests of decoding: a model that is a table, exhaustive search, and a simple, slow beam search.

The oracles count in fp64 Python and never call `regard.decode`; they share with it only the ids of the special tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from configured import model_config
from fused_rows import fused, kv_rows, qkv_rows
from tokens import EOS, MASK, PADDING, SETTINGS, SOS, UNK
from torch import Tensor

from regard.config import ModelConfig
from regard.models.transformer import Transformer
from regard.text.special_tokens import PAD

BANNED = (PADDING, SOS, UNK, MASK)
FIRST_WORD = 5
VOCAB = 23  # of the tiny Transformer
Prefix = tuple[int, ...]
LogP = Callable[[Prefix], np.ndarray]  # the words written so far -> log p of each next token, (V,) fp64
Said = tuple[list[int], float, float, bool]  # tokens, score, log_prob, ended: the fields of a Hypothesis


@dataclass
class TableState:
    names: list[int]  # of sentences
    prefixes: list[Prefix]  # of hypotheses, SOS first

    @property
    def width(self) -> int:
        return len(self.prefixes) // len(self.names)

    def reorder(self, parents: Tensor) -> None:
        k = self.width
        self.prefixes = [self.prefixes[i * k + j] for i, row in enumerate(parents.tolist()) for j in row]

    def select(self, sentences: Tensor) -> None:
        k = self.width
        self.prefixes = [self.prefixes[i * k + j] for i in sentences.tolist() for j in range(k)]
        self.names = [self.names[i] for i in sentences.tolist()]


@dataclass
class TableModel:
    """A `DecodableModel` that looks up its log-probabilities in a table, by the first token of the source and the prefix."""

    table: Callable[[int, Prefix], np.ndarray]
    steps: int = field(default=0)  # how often `step` was called
    config: ModelConfig = field(default_factory=lambda: model_config(**SETTINGS))

    def begin(self, source: Tensor) -> TableState:
        return TableState(source[:, 0].tolist(), [()] * len(source))

    def step(self, tokens: Tensor, state: TableState) -> Tensor:
        self.steps += 1
        state.prefixes = [(*said, token) for said, token in zip(state.prefixes, tokens.tolist(), strict=True)]
        width = len(state.prefixes) // len(state.names)
        rows = [self.table(state.names[i // width], said[1:]) for i, said in enumerate(state.prefixes)]
        return torch.tensor(np.stack(rows), dtype=torch.float32)


def random_table(seed: int, words: int, end: float = 0.0, spread: float = 1.5) -> Callable[[int, Prefix], np.ndarray]:
    """Return random log-probabilities for every sentence and prefix; `end` is added to the logit of the end token."""

    @cache
    def table(name: int, said: Prefix) -> np.ndarray:
        logits = np.random.default_rng([seed, name, *said]).normal(size=FIRST_WORD + words) * spread
        logits[list(BANNED)] -= 2.0  # masked by the decoder, they only take their share of the probability
        logits[EOS] += end
        return log_softmax(logits)

    return table


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def score(log_prob: float, length: int, penalty: float) -> float:
    return log_prob / length**penalty


def successors(log_p: np.ndarray, said: Prefix, min_len: int) -> list[tuple[int, float]]:
    """Return the allowed next tokens with their log p."""
    banned = set(BANNED) | ({EOS} if len(said) < min_len else set())
    return [(token, float(log_p[token])) for token in range(len(log_p)) if token not in banned]


def every_sequence(log_p: LogP, limit: int, penalty: float, min_len: int = 0) -> list[Said]:
    """Return all sequences of at most `limit` tokens (end token included), best score first."""

    def walk(said: Prefix, total: float) -> list[Said]:
        found: list[Said] = []
        for token, gain in successors(log_p(said), said, min_len):
            new, length = total + gain, len(said) + 1
            if token == EOS:
                found.append((list(said), score(new, length, penalty), new, True))
            elif length == limit:
                found.append(([*said, token], score(new, length, penalty), new, False))
            else:
                found += walk((*said, token), new)
        return found

    return sorted(walk((), 0.0), key=lambda s: -s[1])


def slow_beam(log_p: LogP, k: int, limit: int, penalty: float, min_len: int = 0, stop: str = "never") -> list[Said]:
    """Beam search with lists: 2K candidates a step, ends count among the first K, the best K others stay open.

    `stop`: never (only at the limit or with nothing open), or likely (K finished, none worse than the best open one now).
    """
    alive: list[tuple[Prefix, float]] = [((), 0.0)]
    done: list[Said] = []
    for length in range(1, limit + 1):
        offers = [
            (said, token, total + gain)
            for said, total in alive
            for token, gain in successors(log_p(said), said, min_len)
        ]
        offers = sorted(offers, key=lambda o: -o[2])[: 2 * k]
        last = length == limit
        for said, token, total in offers[:k]:
            if token == EOS:
                done.append((list(said), score(total, length, penalty), total, True))
            elif last:
                done.append(([*said, token], score(total, length, penalty), total, False))
        done = sorted(done, key=lambda s: -s[1])[:k]
        alive = [((*said, token), total) for said, token, total in offers if token != EOS][:k]
        if not alive or (stop == "likely" and len(done) == k and done[-1][1] >= score(alive[0][1], length, penalty)):
            break
    return done


def tiny_transformer(seed: int, end: float = 2.0, **sizes: object) -> Transformer:
    """Return a random model whose translations depend on the source and end at different lengths.

    Norm scales are random: with tied embeddings and unit scales an untrained decoder repeats its last token. Embeddings of
    equal size keep any one word from always being the likeliest. The bias of the last norm favours the end token by `end`.
    """
    chosen = {
        "n_encoder_layers": 2,
        "n_decoder_layers": 2,
        "d_model": 16,
        "n_heads": 2,
        "d_ff": 32,
        "max_len": 64,
        **sizes,
    }
    config = model_config(**{**SETTINGS, "source_vocab": VOCAB, "target_vocab": VOCAB, "dropout": 0.0, **chosen})  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(config).eval()
    h, g, d = model.config.n_heads, model.config.n_kv_heads, model.config.d_head
    rows = {"qkv": qkv_rows(h, g, d), "kv": kv_rows(g, d)}
    with torch.no_grad():
        for name, weight in parameters_by_sublayer(model):
            spread = 1.0 if "norm" in name and name.endswith("weight") else 0.1 if name.endswith("bias") else 0.4
            drawn = torch.randn(weight.shape, generator=generator) * spread
            layer = name.split(".")[-2]
            weight.copy_(fused(drawn, rows[layer]) if layer in rows else drawn)  # the same model whatever the layout
        embedding = model.target_embedding.weight
        embedding.copy_(torch.nn.functional.normalize(embedding, dim=1) * 1.6)
        last = [module for module in model.decoder.modules() if isinstance(module, torch.nn.LayerNorm)][-1]
        last.bias += end * embedding[EOS] / embedding[EOS].norm() ** 2
    return model


def parameters_by_sublayer(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters with the norm of a sublayer right after it: an order for drawing random weights that does not
    depend on where a block keeps its norms."""
    norms: dict[str, list[tuple[str, torch.nn.Parameter]]] = {}
    others = []
    for name, parameter in model.named_parameters():
        block, is_norm, rest = name.partition(".norms.")
        if is_norm:
            norms.setdefault(f"{block}.sublayers.{rest.split('.')[0]}.", []).append((name, parameter))
        else:
            others.append((name, parameter))
    found = []
    for i, (name, parameter) in enumerate(others):
        found.append((name, parameter))
        following = others[i + 1][0] if i + 1 < len(others) else ""
        for sublayer in [prefix for prefix in norms if name.startswith(prefix) and not following.startswith(prefix)]:
            found += norms.pop(sublayer)
    assert not norms
    return found


def random_sources(seed: int, count: int, longest: int = 12) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(FIRST_WORD, VOCAB, size=rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return padded ids (B, S), each row with EOS at its end."""
    width = max(map(len, rows)) + 1
    return torch.tensor([[*row, EOS] + [PAD] * (width - 1 - len(row)) for row in rows])
