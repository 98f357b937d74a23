"""Training on a reward: its gradient against all outputs of a small model, its weights against all tuples of samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from configured import replaced
from helpers import assert_same_run, fit, fit_until, metrics, write_corpus
from torch import Tensor

from regard.config import DecodeConfig, RewardConfig, TokenizerConfig, TrainConfig
from regard.decode.constraints import Hypothesis
from regard.errors import RegardError
from regard.look.training_curves import read_training_curves
from regard.models.architectures import make_model, preset
from regard.tasks.run_config import make_config
from regard.text.special_tokens import DEFAULT_SPECIAL_TOKENS, PAD, SpecialTokenTemplate
from regard.text.tokenizer import Tokenizer
from regard.training.reward_objective import RewardObjective, SentenceReward, weigh_samples

# Four tokens, 0 to 3: 0 ends a text, and 1 is given to the decoder first. At most three tokens: 40 possible outputs.
END, LIMIT = 0, 3
TEMPLATE = SpecialTokenTemplate((), (END,), (END,), (1,), (END,))
OUTPUTS = [[*first, END] for n in range(LIMIT) for first in itertools.product((1, 2, 3), repeat=n)] + [
    list(tokens) for tokens in itertools.product((1, 2, 3), repeat=LIMIT)
]
SOURCE, REFERENCE = [2, 3, 3, 1], [3, 3]
SIZES = {"n_encoder_layers": 1, "n_decoder_layers": 1, "d_model": 8, "max_len": 16, "dropout": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "transformer": {
        "preset": "transformer-tiny",
        "n_heads": 2,
        "d_ff": 16,
        "attention_dropout": 0.0,
        "ff_dropout": 0.0,
    },
    "convs2s": {"preset": "convs2s-small"},
    "bytenet": {"preset": "bytenet-small", "n_encoder_layers": 2, "n_decoder_layers": 2},
    "gnmt": {"preset": "gnmt-small", "recurrent.d_hidden": 8, "n_encoder_layers": 3, "n_decoder_layers": 3},
    "experts": {
        **{"preset": "gnmt-small", "recurrent.d_hidden": 8, "n_encoder_layers": 3, "n_decoder_layers": 2},
        **{"recurrent_feedforward": "mixtral", "recurrent.d_ff": 8, "mixtral.experts": 3},
    },
    "deep-att": {"preset": "deep-att-small", "recurrent.d_hidden": 8, "n_encoder_layers": 2, "n_decoder_layers": 2},
    "rnnsearch": {"preset": "rnnsearch-small", "recurrent.d_hidden": 8},
    "lstm": {"preset": "sutskever-small", "recurrent.d_hidden": 8},
}


def tiny_model(kind: str = "transformer", **changes: Any) -> Any:
    torch.manual_seed(0)
    values = {**SIZES, **KINDS[kind], "source_vocab": 4, "target_vocab": 4, "eos_token_id": END, **changes}
    config = replaced(preset(values.pop("preset")), **{"suppress_tokens": (), "tie": "none", **values})
    model = make_model(config).double().train()
    for p in model.parameters():  # far from uniform outputs
        torch.nn.init.normal_(p, std=0.5)
    return model


def make_objective(model: Any, template: SpecialTokenTemplate = TEMPLATE, **reward: Any) -> RewardObjective:
    settings = RewardConfig(**{"likelihood_weight": 0.0, **reward})
    train = TrainConfig(label_smoothing=0.0, reward=settings)
    decoding = DecodeConfig(max_len_a=0.0, max_len_b=LIMIT)
    return RewardObjective(model, train, decoding, SentenceReward("gleu"), template)


def make_batch(pairs: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor, Tensor]:
    """Source, target and labels of pairs of ids."""

    def pad(rows: list[list[int]]) -> Tensor:
        return torch.tensor([row + [PAD] * (max(map(len, rows)) - len(row)) for row in rows])

    return (
        pad([[*source, END] for source, _ in pairs]),
        pad([[1, *reference] for _, reference in pairs]),
        pad([[*reference, END] for _, reference in pairs]),
    )


def log_probs(model: Any, source: list[int], outputs: Sequence[list[int]], suppressed: Sequence[int] = ()) -> Tensor:
    """log P of each output (N,), by the logits of the whole output and torch's softmax over all tokens but some."""
    found = []
    for ids in outputs:
        logits = model(torch.tensor([[*source, END]]), torch.tensor([[1, *ids[:-1]]]))
        logits = logits.index_fill(-1, torch.tensor(suppressed, dtype=torch.long), -torch.inf)
        found.append(logits[0].log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)].sum())
    return torch.stack(found)


def rewards_of(outputs: Sequence[list[int]], reference: list[int]) -> np.ndarray:
    texts = [[ids[:-1] if ids[-1] == END else ids for ids in outputs]]
    return SentenceReward("gleu")(texts, [reference], [[]])[0]


def hypotheses(outputs: Sequence[list[int]], scores: Sequence[float] | None = None) -> list[Hypothesis]:
    values = scores or [0.0] * len(outputs)
    return [
        Hypothesis(ids[:-1] if ids[-1] == END else ids, value, value, ids[-1] == END)
        for ids, value in zip(outputs, values, strict=True)
    ]


def expected_reward(model: Any, source: list[int] = SOURCE, reference: list[int] = REFERENCE) -> Tensor:
    """E[r], by all outputs."""
    return (log_probs(model, source, OUTPUTS).exp() * torch.tensor(rewards_of(OUTPUTS, reference))).sum()


def gradients(value: Tensor, model: Any) -> Tensor:
    """All gradients in one vector."""
    found = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
    pairs = zip(found, model.parameters(), strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


# ---- the estimator, against the exact gradient ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", [{}, {"suppress_tokens": (2,)}, {"suppress_tokens": (2,), "head_bias": True}])
def test_all_outputs_by_their_probabilities_give_the_exact_gradient(kind: str, changes: dict[str, Any]) -> None:
    """float64; the sums differ in their order alone. Tokens that are never sampled have no probability."""
    model = tiny_model(kind, **changes)
    suppressed = list(model.config.suppress_tokens)
    outputs = [ids for ids in OUTPUTS if not set(ids) & set(suppressed)]
    p = log_probs(model, SOURCE, outputs, suppressed).exp()
    assert p.sum().item() == pytest.approx(1.0, abs=1e-12)
    rewards = torch.tensor(rewards_of(outputs, REFERENCE))
    weights = (p.detach() * rewards)[None]
    values = torch.stack([weights.sum(1), torch.zeros(1)], 1)
    sums = make_objective(model).loss_from_samples(
        make_batch([(SOURCE, REFERENCE)]), [hypotheses(outputs)], weights, values, torch.tensor([True])
    )
    expected = (p * rewards).sum()
    assert sums[0].item() == pytest.approx(-expected.item(), rel=1e-12)
    ours, exact = -gradients(sums[0], model), gradients(expected, model)
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-9 * exact.abs().max().item())


@pytest.mark.parametrize(("baseline", "factor"), [("leave-one-out", 1.0), ("mean", 2 / 3)])
def test_the_mean_over_draws_is_the_exact_gradient(baseline: str, factor: float) -> None:
    """A z-test of the whole estimator, sampling included, along the exact gradient and along random directions.

    With three samples the mean over all of them, the own one included, gives two thirds of the gradient. |z| < 5 fails once
    in two million times by chance, and the seed is fixed."""
    model = tiny_model()
    exact = gradients(expected_reward(model), model)
    directions = torch.randn(len(exact), 4, generator=torch.Generator().manual_seed(1)).double()
    directions = F.normalize(torch.cat([exact[:, None], directions], 1), dim=0)  # (P, 5)
    objective = make_objective(model, samples=3, baseline=baseline)
    rows, draws = 32, 40
    batch = make_batch([(SOURCE, REFERENCE)] * rows)
    torch.manual_seed(0)
    found = torch.stack([-gradients(objective(*batch)[0], model) @ directions / rows for _ in range(draws)])
    error = found.std(0) / math.sqrt(draws)
    z = (found.mean(0) - factor * (exact @ directions)) / error
    assert z.abs().max() < 5
    assert error[0] < 0.1 * exact.norm()  # the test could tell 2/3 from 1


def test_baselines_over_all_tuples_of_samples() -> None:
    """Three outcomes with probabilities p = softmax(x), whose grad log p_k is e_k - p; every tuple of n samples."""
    p, rewards = np.array([0.2, 0.5, 0.3]), np.array([0.9, 0.1, 0.4])
    exact = p * (rewards - p @ rewards)  # the gradient of sum p r in x
    for n, (baseline, factor) in itertools.product(
        (2, 3, 4), [("leave-one-out", lambda n: 1), ("mean", lambda n: 1 - 1 / n)]
    ):
        total = np.zeros(3)
        for outcome in itertools.product(range(3), repeat=n):
            drawn = list(outcome)
            weights, mean = weigh_samples([], rewards[drawn][None], RewardConfig(baseline=baseline))
            assert mean[0] == pytest.approx(rewards[drawn].mean())
            total += p[drawn].prod() * weights[0] @ (np.eye(3)[drawn] - p)
        np.testing.assert_allclose(total, factor(n) * exact, rtol=1e-12)


def test_minimum_risk_is_the_gradient_of_the_mean_by_normalized_probabilities() -> None:
    """Autograd through sum Q r over the distinct samples, Q ~ P^a; the gradient is divided by a. One sample comes twice."""
    a = 0.7
    log_p = torch.tensor([-1.0, -2.5, -0.3, -4.0], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([0.5, 0.1, 0.8, 0.3], dtype=torch.float64)
    risk = ((a * log_p).softmax(0) * rewards).sum()
    risk.backward()
    assert log_p.grad is not None
    outputs, order = [[1, END], [1, 2, END], [2, 2, 2], [END]], [0, 1, 2, 0, 3]
    drawn = [hypotheses([outputs[i] for i in order], [log_p[i].item() for i in order])]
    weights, mean = weigh_samples(drawn, rewards[order].numpy()[None], RewardConfig(form="minimum-risk", sharpness=a))
    assert mean[0] == pytest.approx(risk.item(), rel=1e-12)
    assert weights[0, 3] == 0
    np.testing.assert_allclose(weights[0, [0, 1, 2, 4]], log_p.grad.numpy() / a, rtol=1e-12)
    # Probabilities that underflow are no obstacle.
    far = [hypotheses(outputs, [-2000.0, -2001.0, -2002.0, -2003.0])]
    assert np.isfinite(
        weigh_samples(far, rewards.numpy()[None], RewardConfig(form="minimum-risk", sharpness=1.0))[0]
    ).all()


# ---- the sums ----------------------------------------------------------------------------------------------------------


class FixedSamples(RewardObjective):
    """An objective whose samples are given."""

    given: list[list[Hypothesis]]

    def draw_samples(self, sources: Sequence[list[int]], device: torch.device) -> list[list[Hypothesis]]:
        return self.given


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_by_torchs_cross_entropy(kind: str) -> None:
    """Two rows and one that is not scored, with smoothed likelihood; the oracle reads each sample in a row of its own."""
    model, alpha, smoothing = tiny_model(kind), 0.3, 0.1
    pairs = [(SOURCE, REFERENCE), ([1], [2, 1, 3]), ([3, 3], [1])]
    source, target, labels = make_batch(pairs)
    labels[2] = PAD
    drawn = [[[3, END], [2, 2, 2], [3, 3, END]], [[END], [2, 1, END], [2, 1, END]], [[1, END], [2, END], [1, 1, END]]]
    settings = RewardConfig(samples=3, likelihood_weight=alpha, baseline="leave-one-out")
    train = TrainConfig(label_smoothing=smoothing, reward=settings)
    objective = FixedSamples(model, train, DecodeConfig(), SentenceReward("gleu"), TEMPLATE)
    objective.given = [hypotheses(outputs) for outputs in drawn]
    sums = objective(source, target, labels)

    logits = model(source, target).flatten(0, 1)
    plain, smooth = (
        F.cross_entropy(logits, labels.flatten(), ignore_index=PAD, reduction="sum", label_smoothing=e)
        for e in (0.0, smoothing)
    )
    surrogate, means, variances = torch.zeros(()), [], []
    for (ids, reference), outputs in zip(pairs[:2], drawn[:2], strict=True):
        r = rewards_of(outputs, reference)
        others = [(r.sum() - own) / 2 for own in r]
        surrogate = surrogate - (torch.tensor(r - others) / 3 * log_probs(model, ids, outputs)).sum()
        means.append(r.mean())
        variances.append(r.var(ddof=1))
    expected = [alpha * smooth.item() - sum(means), plain.item(), 7, sum(means), sum(variances), 2]
    assert sums.tolist() == pytest.approx(expected, rel=1e-9)
    ours, exact = gradients(sums[0], model), gradients(alpha * smooth + surrogate, model)
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-9 * exact.abs().max().item())
    said = objective.describe_sums(sums[3:].tolist())
    assert said == {
        "reward": pytest.approx(sum(means) / 2),
        "reward_sd": pytest.approx(math.sqrt(sum(variances) / 2)),
    }


def test_start_tokens_are_read_and_not_scored() -> None:
    """Decoders of some imported models start with two tokens, such as the end token and that of a language."""
    model, template = tiny_model(), replace(TEMPLATE, start=(3, 1))
    target, labels = make_objective(model, template)._teacher_forcing(
        hypotheses([[2, END], [2, 3, 2], [END]]), torch.device("cpu")
    )
    assert target.tolist() == [[3, 1, 2, PAD], [3, 1, 2, 3], [3, 1, PAD, PAD]]
    assert labels.tolist() == [[PAD, 2, END, PAD], [PAD, 2, 3, 2], [PAD, END, PAD, PAD]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampling_leaves_the_gradient_alone(dtype: torch.dtype) -> None:
    """Under autocast too, which may keep weights that it converted: they need a gradient below."""
    model = tiny_model().float()
    objective, batch = make_objective(model, likelihood_weight=0.1, samples=4), make_batch([(SOURCE, REFERENCE)] * 3)
    fixed = FixedSamples(model, TrainConfig(), DecodeConfig(), objective.reward, TEMPLATE)
    fixed.settings, fixed.label_smoothing = objective.settings, 0.0
    found = []
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        sources = [SOURCE] * 3
        torch.manual_seed(3)
        fixed.given = objective.draw_samples(sources, torch.device("cpu"))
    for each in (objective, fixed):
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            sums = each(*batch)
        found.append(gradients(sums[0], model))
    assert torch.equal(*found)
    assert found[0].abs().max() > 0


def test_dropout_is_off_while_sampling_and_on_while_scoring() -> None:
    model = tiny_model(dropout=0.5)
    objective, batch = make_objective(model, samples=4), make_batch([(SOURCE, REFERENCE)] * 2)
    device = torch.device("cpu")
    torch.manual_seed(0)
    first = objective.draw_samples([SOURCE] * 2, device)
    assert model.training
    model.eval()
    torch.manual_seed(0)
    assert objective.draw_samples([SOURCE] * 2, device) == first
    assert not model.training
    model.train()
    fixed = FixedSamples(model, TrainConfig(reward=objective.settings), DecodeConfig(), objective.reward, TEMPLATE)
    fixed.given = first
    assert fixed(*batch)[1] != fixed(*batch)[1]  # the likelihood of the references under two masks
    torch.manual_seed(1)
    assert objective.draw_samples([SOURCE] * 2, device) != first


# ---- learning ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [{}, {"form": "minimum-risk"}], ids=["reinforce", "minimum-risk"])
def test_the_expected_reward_rises(reward: dict[str, Any]) -> None:
    """Two sources whose best outputs differ; the expected reward of each is exact, before and after."""
    pairs = [(SOURCE, [3]), ([1, 1], [2])]
    model = tiny_model()
    objective = make_objective(model, **reward)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    before = [expected_reward(model, *pair).item() for pair in pairs]
    batch = make_batch(pairs * 4)
    torch.manual_seed(0)
    for _ in range(40):
        optimizer.zero_grad()
        objective(*batch)[0].backward()
        optimizer.step()
    after = [expected_reward(model, *pair).item() for pair in pairs]
    assert max(before) < 0.2
    assert min(after) > 0.8


# ---- the reward of texts -----------------------------------------------------------------------------------------------


def test_rewards_compare_words_of_the_target_language() -> None:
    texts = ["the cat sat on the mat .", "你好 世界", "the cat sat on mat ."]
    tokenizer = Tokenizer.train(texts * 3, TokenizerConfig(kind="char"))
    sample, reference = (tokenizer.encode(text) for text in ("the cat sat on mat.", "the cat sat on the mat."))
    # 13a splits the full stop off: 6 + 4 + 2 + 1 matches of the 7 + 6 + 5 + 4 n-grams of the reference.
    reward = SentenceReward("gleu", tokenizer, "en", {7: "zh"})
    found = reward([[sample, reference]], [reference], [[5, 6]])
    np.testing.assert_allclose(found, [[13 / 22, 1.0]], rtol=1e-12)
    # The token in front of the source names Chinese, whose words are characters: 3 + 2 + 1 of 4 + 3 + 2 + 1 n-grams.
    ours, theirs = tokenizer.encode("你好世"), tokenizer.encode("你好世界")
    assert reward([[ours]], [theirs], [[7, 5]])[0, 0] == pytest.approx(6 / 10, rel=1e-12)
    assert reward([[ours]], [theirs], [[5, 7]])[0, 0] == 0
    assert SentenceReward("chrf", tokenizer, "en")([[ours]], [ours], [[5]])[0, 0] == 1


@pytest.mark.parametrize("kind", ["word", "split"])
def test_positional_unknown_words_are_words_of_their_own(kind: str) -> None:
    lines = ["der Hund schläft .", "die Katze schläft ."]
    tokenizer = Tokenizer.train(lines * 3, TokenizerConfig(kind=kind, vocab_size=60, positional_unknown=2))
    names = {distance: id for id, distance in tokenizer.positional_unknown().items()}
    der, schläft = tokenizer.encode("der schläft")
    reference = [der, names[1], schläft]  # 3 words, 2 pairs and 1 triple
    samples = [
        reference,
        [der, names[-1], schläft],  # two words are right
        [der, names[None], schläft],
        [der, schläft],
        [*reference, names[1]],  # 4 + 3 + 2 + 1 n-grams
        [*reference, *[names[0]] * 5],  # 8 + 7 + 6 + 5
    ]
    found = SentenceReward("gleu", tokenizer, "en")([samples], [reference], [[5]])
    np.testing.assert_allclose(found, [[1, 2 / 6, 2 / 6, 2 / 6, 6 / 10, 6 / 26]], rtol=1e-12)
    for metric in ("bleu", "chrf"):
        scores = SentenceReward(metric, tokenizer, "en")([samples], [reference], [[5]])[0]
        assert scores[0] == pytest.approx(1)
        assert max(scores[1:]) < 1
        assert scores[5] < scores[4]


def test_unknown_words_that_will_be_replaced_are_words_of_their_own() -> None:
    """<unk> is not text, so that samples with and without it would have the same reward."""
    tokenizer = Tokenizer.train(["der Hund schläft ."] * 3, TokenizerConfig(kind="word", vocab_size=60))
    unk, (der, schläft) = DEFAULT_SPECIAL_TOKENS.unk, tokenizer.encode("der schläft")
    reference = [der, unk, schläft]
    reward = SentenceReward("gleu", tokenizer, "en", allow_tokens=[unk])
    np.testing.assert_allclose(reward([[reference, [der, schläft]]], [reference], [[5]]), [[1, 2 / 6]], rtol=1e-12)
    without = SentenceReward("gleu", tokenizer, "en")
    assert without([[reference, [der, schläft]]], [reference], [[5]]).tolist() == [[1, 1]]


@pytest.mark.parametrize("allowed", [(), (2,)])
def test_suppressed_tokens_are_sampled_only_where_they_are_allowed(allowed: tuple[int, ...]) -> None:
    """Token 2 is by far the likeliest. Where it is allowed, it keeps its probability in the gradient."""
    model = tiny_model(suppress_tokens=(2,), head_bias=True)
    with torch.no_grad():
        model.head.bias[2] = 30.0
    settings = TrainConfig(objective="reward", reward=RewardConfig(metric="gleu", samples=4, likelihood_weight=0.0))
    objective = RewardObjective(
        model,
        settings,
        DecodeConfig(max_len_a=0.0, max_len_b=LIMIT, allow_tokens=allowed),
        SentenceReward("gleu"),
        TEMPLATE,
    )
    (samples,) = objective.draw_samples([SOURCE], torch.device("cpu"))
    assert [2 in each.tokens for each in samples] == [bool(allowed)] * 4
    assert (objective.sampling_bias() is model.head.bias) == bool(allowed)


# ---- runs --------------------------------------------------------------------------------------------------------------

RUN = {
    "train.objective": "reward",
    "train.reward.metric": "chrf",
    "train.reward.samples": 3,
    "train.label_smoothing": 0.0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reward")
    write_corpus(made)
    fit(made / "base", **{"train.steps": 8})
    return made


def test_an_interrupted_run_resumes_to_the_same_run(folder: Path) -> None:
    settings = {**RUN, "train.init_from": str(folder / "base"), "train.steps": 6}
    fit(folder / "whole", **settings)
    fit_until(folder / "stopped", 3, **settings)
    fit(folder / "stopped", **settings)
    assert_same_run(folder / "stopped", folder / "whole")
    lines = [line for line in metrics(folder / "whole") if line["kind"] == "train"]
    assert len(lines) == 3
    for line in lines:
        assert 0 < line["reward"] < 1
        assert 0 < line["reward_sd"] < 1
        assert line["nll"] > 0
    curves = {panel.title: panel.curves for panel in read_training_curves([folder / "whole"]).panels()}
    assert curves["mean reward of sampled translations"]["whole"][1].tolist() == [line["reward"] for line in lines]


def test_what_cannot_work_is_refused(folder: Path) -> None:
    data = {"train": ["a.tsv"]}
    base = {"objective": "reward", "init_from": str(folder / "base")}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"objective": "reward"}, r"needs a trained translator.*train\.init_from"),
        ({**base, "parallel": "fsdp"}, r"set train\.parallel ddp"),
        ({**base, "mesh": {"tensor": 2}}, r"leave train\.mesh\.tensor out"),
        ({**base, "reward": {"sharpness": 0.1}}, r"train\.reward\.sharpness is for train\.reward\.form minimum-risk"),
        (
            {**base, "reward": {"form": "minimum-risk", "baseline": "leave-one-out"}},
            r"train\.reward\.baseline is for train\.reward\.form reinforce",
        ),
        ({"reward": {"samples": 5}}, r"train\.reward\.samples is for train\.objective reward"),
        ({**base, "reward": {"samples": 1}}, r"'train\.reward\.samples' must be a number from 2 up"),
    ]
    for train, message in cases:
        with pytest.raises(RegardError, match=message):
            make_config({"data": data, "train": train}, {})
    language_model = {"task": "causal-lm", "data": data, "model": {"preset": "gpt-tiny", "architecture": "gpt"}}
    with pytest.raises(RegardError, match=r"train\.objective reward is for translation, and this is causal-lm"):
        make_config({**language_model, "train": base}, {})
    with pytest.raises(RegardError, match=r"train\.r_drop is not for this kind of translation"):
        fit(folder / "refused", **RUN, **{"train.init_from": str(folder / "base"), "train.r_drop": 1.0})
