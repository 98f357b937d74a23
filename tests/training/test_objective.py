"""The objective against torch's cross-entropy, and by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tokens import EOS
from torch import Tensor, nn

from regard.config import ModelConfig, TrainConfig
from regard.data.batches import Batch
from regard.data.text_batches import PackedBatches
from regard.data.token_cache import TokenStore
from regard.layers.quantization import quantize_model
from regard.models.architectures import make_model, preset
from regard.models.gpt import GPT
from regard.text.special_tokens import PAD
from regard.training.objective import (
    ClassificationObjective,
    LanguageModelAuxiliaryObjective,
    Objective,
    PackedObjective,
    RDropObjective,
    RegressionObjective,
    make_token_objective,
)


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
    loss, nll, scored = objective(0.1).loss_from_outputs(logits, torch.tensor([[1, PAD]])).tolist()
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
    labels = torch.randint(PAD, vocab, (b, t))  # PAD among them
    ours = (3 * torch.randn(b, t, vocab)).requires_grad_()
    theirs = ours.detach().double().requires_grad_()
    loss, nll, scored = objective(smoothing).loss_from_outputs(ours, labels)
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
    sums = objective(0.1).loss_from_outputs(logits, torch.full((2, 3), PAD))
    assert sums.tolist() == [0.0, 0.0, 0.0]
    sums[0].backward()
    assert logits.grad is not None
    assert (logits.grad == 0).all()


def test_batches_add_up() -> None:
    """Sums, not means: two halves of a batch give its loss, however unevenly the tokens fall."""
    logits, labels = torch.randn(4, 6, 9), torch.randint(1, 9, (4, 6))
    labels[0, 1:] = labels[1, 3:] = PAD
    score = objective(0.1).loss_from_outputs
    torch.testing.assert_close(score(logits[:1], labels[:1]) + score(logits[1:], labels[1:]), score(logits, labels))


def test_low_precision_logits_are_summed_in_fp32() -> None:
    logits, labels = torch.randn(8, 64, 50).bfloat16(), torch.randint(1, 50, (8, 64))
    sums = objective(0.1).loss_from_outputs(logits, labels)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums, objective(0.1).loss_from_outputs(logits.float(), labels))


class Counted(nn.Module):
    """Logits that show what the model was given: source token times target token, plus the piece's number."""

    head = nn.Identity()

    def head_input(self, source: Tensor, target: Tensor) -> Tensor:
        return (source * target)[..., None] * torch.arange(5.0)


def test_a_batch_goes_through_the_model() -> None:
    batch = Batch((torch.tensor([[1, 2]]), torch.tensor([[1, 1]]), torch.tensor([[4, 3]])), 2)
    by_hand = [math.log(sum(math.exp(k * i) for i in range(5))) - k * label for k, label in ((1, 4), (2, 3))]
    assert Objective(Counted(), 0.0)(*batch.inputs)[1].item() == pytest.approx(sum(by_hand), rel=1e-5)


# ---- R-Drop ----------------------------------------------------------------------------------------------------------


def test_r_drop_by_hand() -> None:
    # Two readings of one token say (1/4, 3/4) and (1/2, 1/2): KL one way 0.130812, the other way 0.143841.
    logits = torch.tensor([[[0.0, math.log(3)]], [[0.0, 0.0]]])
    loss, nll, scored = (
        RDropObjective(nn.Identity(), 0.0, weight=5.0).loss_from_outputs(logits, torch.tensor([[1], [1]])).tolist()
    )
    assert scored == 1
    assert nll == pytest.approx((0.287682 + 0.693147) / 2, abs=1e-6)
    assert loss == pytest.approx(nll + 5.0 / 2 * (0.130812 + 0.143841) / 2, abs=1e-5)


@settings(max_examples=30)
@given(b=st.integers(1, 3), t=st.integers(1, 4), vocab=st.integers(2, 9), weight=st.sampled_from([0.5, 5.0]))
def test_r_drop_is_two_cross_entropies_and_two_divergences(b: int, t: int, vocab: int, weight: float) -> None:
    labels = torch.randint(PAD, vocab, (b, t))
    ours = (2 * torch.randn(2 * b, t, vocab)).requires_grad_()
    theirs = ours.detach().double().requires_grad_()
    loss, nll, _ = RDropObjective(nn.Identity(), 0.1, weight).loss_from_outputs(ours, labels.repeat(2, 1))

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
        self.noise, self.head = noise, nn.Identity()

    def head_input(self, source: Tensor, target: Tensor) -> Tensor:
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
    plain, twice = (
        make_token_objective(nn.Identity(), TrainConfig(r_drop=weight, z_loss=1e-4)) for weight in (0.0, 5.0)
    )
    assert type(plain) is Objective
    assert isinstance(twice, RDropObjective)
    assert (plain.label_smoothing, twice.label_smoothing, twice.weight) == (0.1, 0.1, 5.0)
    assert (plain.z_loss, twice.z_loss) == (1e-4, 1e-4)


# ---- z-loss ----------------------------------------------------------------------------------------------------------


def test_z_loss_by_hand() -> None:
    # Exponentials 1 and 3 sum to 4: (ln 4)^2 = 1.921812 beside what is descended, nothing beside what is reported.
    logits, labels = torch.tensor([[[0.0, math.log(3)], [5.0, -5.0]]]), torch.tensor([[1, PAD]])
    without, with_z = (Objective(nn.Identity(), 0.1, z).loss_from_outputs(logits, labels) for z in (0.0, 0.5))
    assert (with_z - without).tolist() == pytest.approx([0.5 * 1.921812, 0, 0], abs=1e-6)


# ---- models -------------------------------------------------------------------------------------------------------------


def tiny(**settings: object) -> ModelConfig:
    sizes = {"n_decoder_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 16, "max_len": 16, "target_vocab": 12}
    return preset("gpt-tiny", **{**sizes, "dropout": 0.0, **settings})


IDS = torch.tensor([[5, 6, 7, EOS], [8, 9, PAD, PAD]])
NEXT = torch.tensor([[6, 7, EOS, PAD], [9, EOS, PAD, PAD]])


# ---- in chunks, without all logits at once ---------------------------------------------------------------------------


def old_formula(logits: Tensor, labels: Tensor, smoothing: float, z: float) -> Tensor:
    """On all logits at once, in the open."""
    scored = labels != PAD
    log_z = logits.logsumexp(-1)
    nll = (log_z - logits.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)).where(scored, 0)
    even = (log_z - logits.mean(-1)) * scored
    loss = (1 - smoothing) * nll + smoothing * even + z * log_z**2 * scored
    return torch.stack([loss.sum(), nll.sum(), scored.sum()])


def token_model(kind: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A small model with each kind of head, and what it reads."""
    sizes = {"d_model": 16, "n_heads": 2, "d_ff": 16, "max_len": 16, "dropout": 0.0, "target_vocab": 12}
    ids = torch.randint(5, 12, (3, 6))
    if kind == "bert":
        sizes |= {"n_encoder_layers": 1, "source_vocab": 12}
        return make_model(preset("bert-tiny", **sizes)), (ids, torch.zeros_like(ids))
    if kind == "transformer":
        changes = {"n_encoder_layers": 1, "n_decoder_layers": 1, "source_vocab": 12, "tie": "all", "scale_logits": True}
        return make_model(preset("transformer-tiny", **sizes, **changes)), (ids.flip(0), ids)
    return make_model(tiny(head_bias=True, tie="decoder")), (ids,)


@pytest.mark.parametrize("kind", ["gpt", "bert", "transformer", "documents"])
@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 0.01)])
def test_every_model_loses_and_learns_what_all_its_logits_say(kind: str, smoothing: float, z: float) -> None:
    torch.manual_seed(3)
    model, given = token_model(kind)
    labels = torch.randint(5, 12, (3, 6))
    labels[0, 2:] = labels[2, 1] = PAD
    if kind == "documents":
        assert isinstance(model, GPT)
        given = (*given, torch.tensor([0, 1, 2, 0, 1, 2]).expand(3, -1))
        ours, logits = PackedObjective(model, smoothing, z)(*given, labels), model.packed(*given)
    else:
        ours, logits = Objective(model, smoothing, z)(*given, labels), model(*given)
    theirs = old_formula(logits, labels, smoothing, z)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    used = [p for n, p in model.named_parameters() if "pooler" not in n]
    for a, b in zip(*(torch.autograd.grad(sums[0] / 7, used) for sums in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_model_packed_for_a_cpu_is_scored_as_well() -> None:
    torch.manual_seed(0)
    model = make_model(tiny()).eval()
    before = Objective(model)(IDS, NEXT)
    with torch.no_grad():
        after = Objective(quantize_model(model, "fp16"))(IDS, NEXT)
    torch.testing.assert_close(after, before, rtol=1e-2, atol=0)


# ---- documents in packed rows ----------------------------------------------------------------------------------------


def gpt(positions: str) -> GPT:
    torch.manual_seed(1)
    model = make_model(tiny(positions=positions, n_decoder_layers=2))
    assert isinstance(model, GPT)
    return model.eval()


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rope", "alibi", "t5", "shaw", "fire", "cope"])
@settings(max_examples=8)
@given(lengths=st.lists(st.integers(2, 12), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_packed_documents_lose_what_they_lose_alone(positions: str, lengths: list[int], seed: int) -> None:
    model, rng = gpt(positions), np.random.default_rng(seed)
    texts = [rng.integers(5, 12, n) for n in lengths]
    store = TokenStore(np.concatenate(texts), np.cumsum([0, *lengths]))
    together = sum(PackedObjective(model, 0.1)(*b.inputs) for b in PackedBatches(store, 16, 32, seed).iterate_once())
    rows = [torch.from_numpy(text)[None] for text in texts]
    alone = sum(Objective(model, 0.1)(row[:, :-1], row[:, 1:]) for row in rows)
    assert isinstance(together, Tensor)
    assert together[2] == sum(lengths) - len(lengths)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-4)


def test_packed_logits_are_those_of_each_document_to_the_last_digits() -> None:
    model = gpt("rope").double()
    a, b = torch.tensor([[5, 6, 7]]), torch.tensor([[8, 9, 10, 11]])
    ids = F.pad(torch.cat([a, b], 1), (0, 2), value=PAD)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, -1, -1]])
    both = model.packed(ids, positions)[:, :7]
    torch.testing.assert_close(both, torch.cat([model(a), model(b)], 1), rtol=1e-12, atol=1e-12)


# ---- classes and numbers ---------------------------------------------------------------------------------------------


def test_classes_by_hand() -> None:
    # Probabilities 1/4 and 3/4; the first row is class 0 (which is no padding here), the second is not scored.
    logits = torch.tensor([[0.0, math.log(3)], [1.0, 2.0]], requires_grad=True)
    sums = ClassificationObjective(nn.Identity(), 0.1).loss_from_outputs(logits, torch.tensor([0, -1]))
    assert sums.tolist() == pytest.approx(
        [0.9 * math.log(4) + 0.1 * (math.log(4) + math.log(4 / 3)) / 2, math.log(4), 1]
    )
    sums[0].backward()
    assert logits.grad is not None
    assert logits.grad[1].tolist() == [0, 0]


def test_tags_are_classes_of_tokens() -> None:
    logits, labels = torch.randn(2, 4, 3), torch.tensor([[-1, 0, 2, -1], [1, -1, -1, -1]])
    loss, nll, scored = ClassificationObjective(nn.Identity()).loss_from_outputs(logits, labels)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum")
    assert (loss.item(), nll.item(), scored) == (pytest.approx(expected.item()), pytest.approx(expected.item()), 3)


def test_classes_are_smoothed_over_classes() -> None:
    model = make_model(tiny(prediction_head="sequence", n_classes=3)).eval()
    types, labels = torch.zeros_like(IDS), torch.tensor([2, 0])
    loss = ClassificationObjective(model, 0.1)(IDS, types, labels)[0]
    expected = F.cross_entropy(model(IDS, types), labels, reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)


def test_numbers_by_hand() -> None:
    outputs = torch.tensor([[1.0], [5.0], [-2.0]], requires_grad=True)
    sums = RegressionObjective(nn.Identity()).loss_from_outputs(outputs, torch.tensor([3.0, float("nan"), -2.5]))
    assert sums.tolist() == [4.25, 4.25, 2.0]  # 2 squared and a half squared
    sums[0].backward()
    assert outputs.grad is not None
    assert outputs.grad.flatten().tolist() == [-4.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "config",
    [tiny(), preset("lstm-small", d_model=16, dropout=0.0, target_vocab=12, **{"recurrent.d_hidden": 16})],
    ids=["gpt", "lstm"],
)
def test_the_auxiliary_loss_is_each_rows_mean_over_its_own_tokens(config: ModelConfig) -> None:
    """Row by row without padding, by torch; the third row only fills the batch."""
    torch.manual_seed(2)
    model = make_model(replace(config, prediction_head="sequence", n_classes=3)).eval()
    rows = [[5, 6, 7, EOS], [8, EOS], [5, 6, 7, EOS]]
    ids = torch.tensor([row + [PAD] * (4 - len(row)) for row in rows])
    labels = torch.tensor([1, 0, -1])
    loss, nll, scored = LanguageModelAuxiliaryObjective(model, 0.0, weight=0.5)(ids, torch.zeros_like(ids), labels)
    text, classes = 0.0, 0.0
    for row, label in zip(rows[:2], (1, 0), strict=True):
        one = torch.tensor([row])
        text += F.cross_entropy(model.body(one)[0, :-1], one[0, 1:]).item()  # type: ignore[operator]
        classes += F.cross_entropy(model(one, torch.zeros_like(one)), torch.tensor([label])).item()
    assert (nll.item(), scored) == (pytest.approx(classes, rel=1e-5), 2)
    assert loss.item() == pytest.approx(classes + 0.5 * text, rel=1e-5)


def test_the_auxiliary_loss_of_tagged_rows() -> None:
    model = make_model(replace(tiny(), prediction_head="token", n_classes=3)).eval()
    ids, types = torch.tensor([[5, 6, EOS], [5, 6, EOS]]), torch.zeros(2, 3, dtype=torch.long)
    labels = torch.tensor([[0, 2, -1], [-1, -1, -1]])  # the second row only fills the batch
    plain = ClassificationObjective(model)(ids, types, labels)
    loss, nll, scored = LanguageModelAuxiliaryObjective(model, 0.0, weight=1.0)(ids, types, labels)
    text = F.cross_entropy(model.body(ids[:1])[0, :-1], ids[0, 1:])  # type: ignore[operator]
    torch.testing.assert_close(torch.stack([loss - text, nll, scored]), plain)
