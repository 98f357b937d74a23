"""The objective against torch's cross-entropy, and by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from regard.config import TrainConfig
from regard.data.batches import Batch
from regard.text.tokenizer import PAD
from regard.training.objective import Objective, RDropObjective, token_objective


def objective(smoothing: float) -> Objective:
    return Objective(nn.Identity(), smoothing)


def check_equal(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> None:
    """(loss, nll, logits) of both: the two values, and the gradient of the loss in the logits."""
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        assert a.item() == pytest.approx(b.item(), rel=1e-5, abs=1e-5)
    ours[0].backward()
    theirs[0].backward()
    assert ours[2].grad is not None
    assert theirs[2].grad is not None
    torch.testing.assert_close(ours[2].grad, theirs[2].grad.float(), atol=1e-5, rtol=1e-5)


def test_two_pieces_by_hand() -> None:
    # Logits 0 and ln 3 are probabilities 1/4 and 3/4; the label is the likelier piece, a second position is padding.
    logits = torch.tensor([[[0.0, math.log(3)], [5.0, -5.0]]])
    loss, nll, scored = objective(0.1).losses(logits, torch.tensor([[1, PAD]])).tolist()
    assert scored == 1
    assert nll == pytest.approx(0.287682, abs=1e-6)  # -ln 3/4
    assert loss == pytest.approx(0.342613, abs=1e-6)  # 0.9 * 0.287682 + 0.1 * (1.386294 + 0.287682) / 2


@settings(max_examples=40)
@given(
    b=st.integers(1, 3),
    t=st.integers(1, 5),
    vocab=st.integers(2, 12),
    smoothing=st.sampled_from([0.0, 0.1, 0.3]),
    seed=st.integers(0, 99),
)
def test_it_is_torchs_cross_entropy_with_its_gradient(b: int, t: int, vocab: int, smoothing: float, seed: int) -> None:
    torch.manual_seed(seed)
    labels = torch.randint(0, vocab, (b, t))  # PAD among them
    ours = (3 * torch.randn(b, t, vocab)).requires_grad_()
    theirs = ours.detach().double().requires_grad_()
    loss, nll, scored = objective(smoothing).losses(ours, labels)
    assert scored == (labels != PAD).sum()
    expected, plain = (
        F.cross_entropy(
            theirs.flatten(0, 1), labels.flatten(), ignore_index=PAD, reduction="sum", label_smoothing=amount
        )
        for amount in (smoothing, 0.0)
    )
    check_equal((loss, nll, ours), (expected, plain, theirs))
    assert ours.grad is not None
    assert (ours.grad[labels == PAD] == 0).all()


def test_only_padding_scores_nothing() -> None:
    logits = torch.randn(2, 3, 7, requires_grad=True)
    sums = objective(0.1).losses(logits, torch.full((2, 3), PAD))
    assert sums.tolist() == [0.0, 0.0, 0.0]
    sums[0].backward()
    assert logits.grad is not None
    assert (logits.grad == 0).all()


def test_batches_add_up() -> None:
    """Sums, not means: two halves of a batch give its loss, however unevenly the tokens fall."""
    logits, labels = torch.randn(4, 6, 9), torch.randint(1, 9, (4, 6))
    labels[0, 1:] = labels[1, 3:] = PAD
    score = objective(0.1).losses
    torch.testing.assert_close(score(logits[:1], labels[:1]) + score(logits[1:], labels[1:]), score(logits, labels))


def test_low_precision_logits_are_summed_in_fp32() -> None:
    logits, labels = torch.randn(8, 64, 50).bfloat16(), torch.randint(1, 50, (8, 64))
    sums = objective(0.1).losses(logits, labels)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums, objective(0.1).losses(logits.float(), labels))


class Counted(nn.Module):
    """Logits that show what the model was given: source token times target token, plus the piece's number."""

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return (source * target)[..., None] * torch.arange(5.0)


def test_a_batch_goes_through_the_model() -> None:
    batch = Batch((torch.tensor([[1, 2]]), torch.tensor([[1, 1]]), torch.tensor([[4, 3]])), 2)
    by_hand = [math.log(sum(math.exp(k * i) for i in range(5))) - k * label for k, label in ((1, 4), (2, 3))]
    assert Objective(Counted(), 0.0)(*batch.inputs)[1].item() == pytest.approx(sum(by_hand), rel=1e-5)


# ---- R-Drop ----------------------------------------------------------------------------------------------------------


def test_r_drop_by_hand() -> None:
    # Two readings of one token say (1/4, 3/4) and (1/2, 1/2): KL one way 0.130812, the other way 0.143841.
    logits = torch.tensor([[[0.0, math.log(3)]], [[0.0, 0.0]]])
    loss, nll, scored = RDropObjective(nn.Identity(), 0.0, weight=5.0).losses(logits, torch.tensor([[1], [1]])).tolist()
    assert scored == 1
    assert nll == pytest.approx((0.287682 + 0.693147) / 2, abs=1e-6)
    assert loss == pytest.approx(nll + 5.0 / 2 * (0.130812 + 0.143841) / 2, abs=1e-5)


@settings(max_examples=30)
@given(b=st.integers(1, 3), t=st.integers(1, 4), vocab=st.integers(2, 9), weight=st.sampled_from([0.5, 5.0]))
def test_r_drop_is_two_cross_entropies_and_two_divergences(b: int, t: int, vocab: int, weight: float) -> None:
    labels = torch.randint(0, vocab, (b, t))
    ours = (2 * torch.randn(2 * b, t, vocab)).requires_grad_()
    theirs = ours.detach().double().requires_grad_()
    loss, nll, _ = RDropObjective(nn.Identity(), 0.1, weight).losses(ours, labels.repeat(2, 1))

    twice = labels.repeat(2, 1).flatten()
    expected, plain = (
        F.cross_entropy(theirs.flatten(0, 1), twice, ignore_index=PAD, reduction="sum", label_smoothing=amount) / 2
        for amount in (0.1, 0.0)
    )
    p, q = theirs.log_softmax(-1).chunk(2)
    scored = labels != PAD
    there, back = (F.kl_div(x[scored], y[scored], log_target=True, reduction="sum") for x, y in ((p, q), (q, p)))
    expected = expected + weight / 2 * (there + back) / 2
    check_equal((loss, nll, ours), (expected, plain, theirs))


class Noisy(nn.Module):
    """Logits that differ between readings, as dropout makes them; keeps what it was given."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        self.given = source, target
        logits = (source + target)[..., None] * torch.linspace(-1, 1, 6)
        return logits + self.noise * torch.randn_like(logits)


def test_r_drop_reads_each_row_twice_and_punishes_disagreement_alone() -> None:
    batch = (torch.tensor([[5, 6], [7, 8]]), torch.tensor([[1, 2], [3, 4]]), torch.tensor([[4, 3], [5, PAD]]))
    still, noisy = Noisy(0.0), Noisy(1.0)
    torch.testing.assert_close(RDropObjective(still, 0.1, 5.0)(*batch), Objective(still, 0.1)(*batch))
    RDropObjective(still, 0.1, 5.0)(*batch)
    assert still.given[0].tolist() == [[5, 6], [7, 8], [5, 6], [7, 8]]
    assert still.given[1].tolist() == [[1, 2], [3, 4], [1, 2], [3, 4]]
    gentle, strict = (RDropObjective(noisy, 0.1, weight) for weight in (0.0, 5.0))
    torch.manual_seed(0)
    without = gentle(*batch)
    torch.manual_seed(0)
    assert strict(*batch)[0] > without[0] + 0.01


def test_r_drop_is_chosen_by_its_weight() -> None:
    plain, twice = (token_objective(nn.Identity(), TrainConfig(r_drop=weight)) for weight in (0.0, 5.0))
    assert type(plain) is Objective
    assert isinstance(twice, RDropObjective)
    assert (plain.label_smoothing, twice.label_smoothing, twice.weight) == (0.1, 0.1, 5.0)
