"""Training on a reward: the expected score of sampled translations, by REINFORCE or minimum risk training.

For a pair (X, Y*) the model draws n translations Y_j of X, which are compared with Y*: r_j from 0 to 1. What is maximized,
summed over the pairs of a batch, is that of GNMT (Wu et al. 2016):

    likelihood_weight * log P(Y*|X) + E[r(Y, Y*)]

The gradient of E[r] is estimated by the sum over j of w_j grad log P(Y_j|X):

| form         | w_j                               | the mean of the estimate                                         |
|--------------|-----------------------------------|------------------------------------------------------------------|
| reinforce    | (r_j - b_j) / n                   | the gradient, if b_j is the mean reward of the other samples;    |
|              |                                   | (n - 1) / n of it, if b_j is the mean of all samples             |
| minimum-risk | Q_j (r_j - sum over i of Q_i r_i) | 1 / a of the gradient of sum Q_i r_i, where Q_i ~ P(Y_i|X)^a is  |
|              |                                   | normalized over the distinct samples (Shen et al. 2016)          |

Minimum risk is divided by a, so that `likelihood_weight` means the same in both forms. Both terms are sums over sentence
pairs, each pair counting once whatever its length, as in the paper; log P is a sum over the tokens of a translation. The
training step divides both by the number of reference labels, as it does for every objective, which keeps their ratio.

Samples are drawn without dropout and without gradient, by the decoding that translates too: on a GPU with CUDA graphs,
whose copies of the weights are refreshed before each use. Rewards are computed on the host, so a step is not captured as a
whole. A sample that reaches the length limit of [decode] ends there, without an end token. Special tokens other than the end
token are never sampled, except unknown words that decode.replace_unknown will replace. P of REINFORCE is therefore the
distribution that samples are drawn from, which gives such tokens no probability; P of minimum risk, and log P(Y*|X), are the
model's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from regard.config import DecodeConfig, RewardConfig, TrainConfig
from regard.decode.batch_decoding import decode
from regard.decode.constraints import Hypothesis, pad_rows
from regard.kernels.cross_entropy import linear_cross_entropy
from regard.layers.hooks import paused
from regard.metrics.sample_scores import score_samples
from regard.metrics.sentence_scores import characters
from regard.metrics.translation_scores import bleu_tokenizer
from regard.models.model import TranslationModel
from regard.text.special_tokens import EOS_TEMPLATE, PAD, SpecialTokenTemplate
from regard.text.tokenizer import Tokenizer
from regard.text.tokenizer_training import SPACE
from regard.training.objective import Objective

Ids = list[int]
PRIVATE_USE = 0xE000  # the first of 6,400 characters that Unicode leaves to programs
NEVER = -1e4  # a logit whose probability is 0


class SentenceReward:
    """The reward of sampled translations: a score of their text against that of the reference, from 0 to 1.

    GLEU and BLEU compare words, as sacreBLEU's tokenizer for the target language finds them, since translations are
    evaluated by words, and since several segmentations into pieces are the same text. chrF compares characters. Without a
    tokenizer all of them compare token ids. An unknown word that will be replaced is a word of its own, or one character: a
    positional one (tokenizer.positional_unknown), and `<unk>` with decode.replace_unknown. So an `<unk:+2>` that is not in
    the reference is as wrong as another word.
    """

    def __init__(
        self,
        metric: str = "gleu",
        tokenizer: Tokenizer | None = None,
        language: str = "",
        language_tokens: Mapping[int, str] | None = None,
        allow_tokens: Sequence[int] = (),
    ) -> None:
        """Take the metric, the tokenizer of the target side and its language; for a model of several directions, the
        languages by the ids of the tokens that name them in the source; and the special tokens that stand for words."""
        self.metric, self.tokenizer, self.language = metric, tokenizer, language
        self.language_tokens = language_tokens or {}
        self.unknown: dict[int, str] = {}  # a character that is in no text, for each token of unknown words
        if tokenizer is not None:
            unknown = [*tokenizer.positional_unknown(), *allow_tokens]
            self.unknown = {id: chr(PRIVATE_USE + i) for i, id in enumerate(unknown)}

    def __call__(
        self, samples: Sequence[Sequence[Ids]], references: Sequence[Ids], sources: Sequence[Ids]
    ) -> np.ndarray:
        """Return the rewards (B, n) of n samples for each of B references; all are ids without special tokens."""
        if self.tokenizer is None:
            return score_samples(samples, references, self.metric)
        n = len(samples[0])
        flat = [ids for several in samples for ids in several]
        languages = [self._language_of(ids) for ids in sources]
        texts = self._texts(self.tokenizer, [*flat, *references])
        repeated = [language for language in languages for _ in range(n)] + languages
        tokens = [self._split(text, language) for text, language in zip(texts, repeated, strict=True)]
        grouped = [tokens[i : i + n] for i in range(0, len(flat), n)]
        return score_samples(grouped, tokens[len(flat) :], self.metric)

    def _texts(self, tokenizer: Tokenizer, rows: Sequence[Ids]) -> list[str]:
        """Return the texts of token ids, with a character between spaces for each unknown word."""
        if not self.unknown:
            return tokenizer.decode_batch(rows)
        space = SPACE if tokenizer.marks_spaces else ""
        words = {id: f"{space}{character}{space}" for id, character in self.unknown.items()}
        kept = [[id for id in row if id in words or id not in tokenizer.special_ids] for row in rows]
        return [tokenizer.join_pieces([words.get(id) or tokenizer.token(id) for id in row]) for row in kept]

    def _language_of(self, source: Ids) -> str:
        return next((self.language_tokens[id] for id in source[:1] if id in self.language_tokens), self.language)

    def _split(self, text: str, language: str) -> Sequence[str]:
        return characters(text) if self.metric == "chrf" else bleu_tokenizer(language)(text.rstrip()).split()


class RewardObjective(Objective):
    """The expected reward of sampled translations, and the label-smoothed likelihood of the references."""

    passes = 0
    can_capture = False
    more_sums = 3  # over the pairs: mean reward, variance of the reward between samples, 1

    def __init__(
        self,
        model: TranslationModel,
        config: TrainConfig,
        decoding: DecodeConfig,
        reward: SentenceReward,
        token_template: SpecialTokenTemplate = EOS_TEMPLATE,
    ) -> None:
        super().__init__(model, config.label_smoothing, config.z_loss)
        self.settings, self.reward, self.token_template = config.reward, reward, token_template
        self.decoding = replace(
            DecodeConfig(beam=1, nbest=config.reward.samples, temperature=1.0, length_penalty=0.0),
            **{name: getattr(decoding, name) for name in ("max_len_a", "max_len_b", "batch_tokens", "allow_tokens")},
        )
        self.unsampled = set(model.config.suppress_tokens) - set(decoding.allow_tokens)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return six sums (6,) for source (B, S), target and labels (B, T): the three, and what `describe_sums` reads.

        The first is likelihood_weight * loss of the references - sum of mean rewards over the pairs.
        """
        source, target, labels = inputs
        sources = [self._strip_source(ids) for ids in real_ids(source)]
        start = len(self.token_template.start)
        references = [ids[start:] for ids in real_ids(target)]
        samples = self.draw_samples(sources, source.device)
        rewards = self.reward([[h.tokens for h in several] for several in samples], references, sources)
        weights, values = weigh_samples(samples, rewards, self.settings)
        scored = (labels != PAD).any(1)  # (B,): a batch may be filled up with rows that are not scored
        numbers = np.stack([*weights.T, values, rewards.var(1, ddof=1)], 1)  # (B, n + 2), one copy to the device
        dtype = torch.promote_types(cast(Any, self.model).head.weight.dtype, torch.float32)
        found = torch.tensor(numbers, dtype=dtype).to(source.device) * scored[:, None]
        n = self.settings.samples
        return self.loss_from_samples((source, target, labels), samples, found[:, :n], found[:, n:], scored)

    def loss_from_samples(
        self,
        inputs: tuple[Tensor, ...],
        samples: Sequence[Sequence[Hypothesis]],
        weights: Tensor,
        values: Tensor,
        scored: Tensor,
    ) -> Tensor:
        """Return the six sums (6,) for a batch and the samples of its rows, which have weights (B, n) in the gradient.

        values (B, 2) are mean and variance of the rewards of each row; rows that are not `scored` (B,) have zeros."""
        source, target, labels = inputs
        model: Any = self.model
        encoded, alpha = model.encode(source), self.settings.likelihood_weight
        with torch.set_grad_enabled(torch.is_grad_enabled() and alpha > 0):
            likelihood = self.loss_from_hidden(model.read_target(encoded, target), labels)
        sampled_target, sampled_labels = self._teacher_forcing(
            [h for several in samples for h in several], source.device
        )
        hidden = model.read_target(repeat_rows(encoded, weights.shape[1]), sampled_target)
        shares = weights.reshape(-1, 1).expand_as(sampled_labels)
        given = model.head.features(hidden).flatten(0, -2), model.head.weight, self.sampling_bias()
        surrogate = linear_cross_entropy(*given, sampled_labels.flatten(), shares=shares.flatten())[0]
        mean, variance = values.sum(0)
        # The surrogate has the gradient, and the mean reward the value, of the expected reward.
        loss = alpha * likelihood[0] + surrogate - surrogate.detach() - mean
        return torch.stack([loss, likelihood[1], likelihood[2], mean, variance, scored.sum()])

    def sampling_bias(self) -> Tensor | None:
        """Return the bias (V,) of the logits that samples are drawn by, or None."""
        head: Any = self.model.head
        if self.settings.form != "reinforce" or not self.unsampled:
            return head.bias
        bias = torch.zeros_like(head.weight[:, 0], requires_grad=False) if head.bias is None else head.bias
        return bias.index_fill(0, torch.tensor(sorted(self.unsampled), device=bias.device), NEVER)

    def describe_sums(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the mean reward of a sample, and how far the samples of a pair are apart: their standard deviation."""
        mean, variance, pairs = sums
        return {"reward": mean / max(pairs, 1), "reward_sd": math.sqrt(variance / max(pairs, 1))}

    def draw_samples(self, sources: Sequence[Ids], device: torch.device) -> list[list[Hypothesis]]:
        """Return n samples of each source, without dropout, by a seed from torch's generator, which checkpoints keep."""
        model: Any = self.model
        options = replace(self.decoding, seed=int(torch.randint(1 << 48, ())))
        was_training = model.training
        model.eval()
        try:
            # Blocks are compiled for training alone, and a recorder is to see the passes that have a gradient.
            with paused(model), torch.compiler.set_stance("force_eager"):
                found = decode(
                    model, sources, options, model.config.max_len, device, token_template=self.token_template
                )
        finally:
            model.train(was_training)
        return found

    def _strip_source(self, ids: Ids) -> Ids:
        """Return a source without its special tokens."""
        return ids[len(self.token_template.before) : len(ids) - len(self.token_template.after)]

    def _teacher_forcing(self, samples: Sequence[Hypothesis], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return what the decoder reads and is to predict for samples, (N, T) each: start y1 ... and y1 ... end."""
        start, end = self.token_template.start, cast(TranslationModel, self.model).config.eos_token_id
        written = pad_rows([[*start, *h.tokens, *([end] if h.ended else [])] for h in samples], torch.device("cpu"))
        target, labels = written[:, :-1], written[:, 1:].clone()
        labels[:, : len(start) - 1] = PAD  # start tokens are given, not sampled
        target = target.masked_fill(written[:, 1:] == PAD, PAD)  # what predicts nothing is not read
        return target.to(device), labels.to(device)


def weigh_samples(
    samples: Sequence[Sequence[Hypothesis]], rewards: np.ndarray, settings: RewardConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights (B, n) of grad log P of the samples in the gradient of the reward, and the mean reward (B,).

    rewards (B, n). The mean is over all samples, or over the distinct ones by their normalized probabilities."""
    n = rewards.shape[1]
    if settings.form == "reinforce":
        mean = rewards.mean(1)
        advantages = rewards - mean[:, None]
        if settings.baseline == "leave-one-out":  # r_j - (n mean - r_j) / (n - 1)
            advantages *= n / (n - 1)
        return advantages / n, mean
    log_probs = np.array([[h.log_prob for h in several] for several in samples])
    for row, several in zip(log_probs, samples, strict=True):
        seen: set[tuple[int, ...]] = set()
        for j, h in enumerate(several):
            if (key := (*h.tokens, h.ended)) in seen:
                row[j] = -np.inf
            seen.add(key)
    scores = settings.sharpness * log_probs
    q = np.exp(scores - scores.max(1, keepdims=True))
    q /= q.sum(1, keepdims=True)
    mean = (q * rewards).sum(1)
    return q * (rewards - mean[:, None]), mean


def real_ids(rows: Tensor) -> list[Ids]:
    """Return the ids of each row (B, T) without padding."""
    return [[id for id in ids if id != PAD] for ids in rows.tolist()]


def repeat_rows(encoded: Any, n: int) -> Any:
    """Return what an encoder returned with each of its rows n times in a row; nested tuples of tensors stay such."""
    if isinstance(encoded, Tensor):
        return encoded.repeat_interleave(n, 0)
    return tuple(repeat_rows(each, n) for each in encoded)
