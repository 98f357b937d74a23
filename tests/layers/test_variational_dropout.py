"""Dropout for recurrent networks: one mask for all steps, and dropout of whole words."""

import pytest
import torch

from regard.layers.variational_dropout import VariationalDropout, word_dropout


def test_one_mask_serves_all_steps_of_a_row_and_rows_have_their_own() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 9, 50) + 5
    kept = VariationalDropout(0.5)(x) / x
    assert torch.equal(kept.round(), kept[:, :1].expand_as(x).round())
    assert not torch.equal(kept[0, 0].round(), kept[1, 0].round())
    assert set(kept.round().unique().tolist()) == {0.0, 2.0}


def test_plain_dropout_takes_other_numbers_at_each_step() -> None:
    torch.manual_seed(0)
    kept = VariationalDropout(0.5, variational=False)(torch.ones(4, 9, 50))
    assert not torch.equal(kept[:, 0], kept[:, 1])


@pytest.mark.parametrize("variational", [False, True])
def test_the_mean_stays_and_evaluation_drops_nothing(variational: bool) -> None:
    torch.manual_seed(0)
    dropout, x = VariationalDropout(0.3, variational), torch.ones(300, 3, 300)
    assert dropout(x).mean() == pytest.approx(1, abs=0.01)
    assert dropout.eval()(x) is x
    assert VariationalDropout(0.0, variational)(x) is x


def test_word_dropout_takes_whole_words() -> None:
    torch.manual_seed(0)
    weight = torch.randn(4000, 6)
    dropped = word_dropout(weight, 0.25, True)
    gone = (dropped == 0).all(1)
    assert gone.double().mean() == pytest.approx(0.25, abs=0.03)
    torch.testing.assert_close(dropped[~gone], weight[~gone] / 0.75)
    assert word_dropout(weight, 0.25, False) is weight
    assert word_dropout(weight, 0.0, True) is weight
