"""Sampling weights: how often an epoch reads each corpus, by its own weight and by the temperature of directions."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tokens import EOS

from regard.config import Config, recipes
from regard.data.batches import PairBatches, draw_rows
from regard.data.parallel_corpus import ParallelCorpus
from regard.data.token_cache import FilterReport, Filters, Store, TokenStore
from regard.errors import RegardError
from regard.tasks.run_config import check_sampling
from regard.tasks.translation import sampling_weights


def corpus(*specs: str, split: str = "train") -> ParallelCorpus:
    return ParallelCorpus(specs, "en", "de", Path("."), split)


def test_a_weight_is_taken_off_the_spec_and_both_directions_have_it() -> None:
    found = corpus("a.{lang}.xz@en>de*2.5", "b.{lang}.xz@en<>fr*0.5", "c.{lang}.xz@de>en")
    assert found.specs == ("a.{lang}.xz@en>de", "b.{lang}.xz@en>fr", "b.{lang}.xz@fr>en", "c.{lang}.xz@de>en")
    assert found.weights == (2.5, 0.5, 0.5, 1.0)
    assert found.directions == ("en>de", "en>fr", "fr>en", "de>en")


def test_a_corpus_has_no_weight_in_validation_and_none_of_zero() -> None:
    with pytest.raises(RegardError, match="training corpora"):
        corpus("a.{lang}.xz*2", split="valid")
    with pytest.raises(RegardError, match="weight 0"):
        corpus("a.{lang}.xz*0")


def test_a_recipe_takes_tables_and_strings() -> None:
    values = {"data": {"train": ["a.tsv", {"corpus": "b.tsv@en<>de", "weight": 2.5}]}}
    built = recipes.build(values, Config)
    assert built.data.train == ("a.tsv", "b.tsv@en<>de*2.5")
    assert recipes.build({"data": {"train": list(built.data.train)}}, Config) == built  # as a run folder stores it


def test_other_tasks_refuse_weights_and_temperature() -> None:
    for data in ({"train": ["a.txt*2"]}, {"train": ["a.txt"], "temperature": 2.0}):
        with pytest.raises(RegardError, match="translation"):
            check_sampling(recipes.build({"task": "causal-lm", "data": data}, Config))


def test_an_epoch_reads_a_corpus_as_often_as_its_weight_says() -> None:
    sizes, weights = (10, 8, 5), (2.0, 0.5, 1.4)
    first, second = (Counter(draw_rows(sizes, weights, np.random.default_rng(seed)).tolist()) for seed in (0, 1))
    for found in (first, second):
        assert [found[i] for i in range(10)] == [2] * 10
        assert sorted(found[i] for i in range(10, 18)) == [0] * 4 + [1] * 4
        assert sorted(found[i] for i in range(18, 23)) == [1] * 3 + [2] * 2
    assert first != second  # the fraction is drawn anew


def test_batches_hold_each_row_as_often_as_it_was_drawn() -> None:
    n = (4, 6)
    ids = [[10 + i] * (1 + i % 3) for i in range(sum(n))]
    side = TokenStore(np.array([x for row in ids for x in row], np.uint16), np.cumsum([0, *map(len, ids)]))
    store = Store((side, side), FilterReport(Filters(), kept=sum(n)), rows_of_specs=n)
    batches = PairBatches(store, 8, 0, weights=(3.0, 1.0))
    scored: Counter[int] = Counter()
    for batch in batches.iterate_once():
        for row in batch.labels.tolist():
            if EOS in row:
                scored[row[0] - 10] += 1
    assert scored == {**dict.fromkeys(range(4), 3), **dict.fromkeys(range(4, 10), 1)}


def test_the_temperature_by_hand() -> None:
    found = corpus("a@en<>de", "b@en<>fr*2", "c@en<>fr")
    rows = (400, 400, 25, 25, 50, 50)  # with their weights, 400 pairs en>de and 100 pairs en>fr
    assert sampling_weights(found, rows, 1.0) == (1, 1, 2, 2, 1, 1)
    # In proportion to the square root, 20 to 10: an epoch reads 400 pairs and 200, so en>fr twice as often.
    assert sampling_weights(found, rows, 2.0) == pytest.approx((1, 1, 4, 4, 2, 2))
