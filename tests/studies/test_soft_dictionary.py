"""The soft look-up against a plain loop, and its two limits: the mean of all values, and the dictionary."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import RegardError
from regard.studies.soft_dictionary import QUERIES, STORE, TEMPERATURES, make_vectors, run, show


def test_weights_and_answers_are_those_of_a_plain_loop() -> None:
    result = run([3.0], seed=5)
    keys = dict(zip(STORE, make_vectors(list(STORE), 5).numpy(), strict=True))
    for i, query in enumerate(QUERIES):
        powers = {
            name: math.exp(float(np.dot(keys[query], key)) / math.sqrt(len(key)) / 3.0) for name, key in keys.items()
        }
        weights = [power / sum(powers.values()) for power in powers.values()]
        assert result["weights"][0][i] == pytest.approx(weights, rel=1e-12)
        assert result["answers"][0][i] == pytest.approx(sum(map(math.prod, zip(weights, STORE.values(), strict=True))))


@given(seed=st.integers(0, 2**31))
def test_hot_is_the_mean_and_cold_is_the_dictionary(seed: int) -> None:
    result = run([1e9, 1e-3], seed)
    hot, cold = result["answers"]
    assert hot == pytest.approx([sum(STORE.values()) / len(STORE)] * 2, rel=1e-6)
    assert cold == [STORE[query] for query in QUERIES] == result["dictionary"]
    assert result["weights"][1] == [[float(name == query) for name in STORE] for query in QUERIES]


def test_the_colder_the_more_weight_on_the_right_key() -> None:
    result, names = run(), list(STORE)
    for i, query in enumerate(QUERIES):
        right = [weights[i][names.index(query)] for weights in result["weights"]]
        assert right == sorted(right)
        assert right[0] < 0.3
        assert right[-1] > 0.99


def test_keys_that_share_more_digits_with_the_query_weigh_more() -> None:
    weights = np.mean([run([4.0], seed)["weights"][0][0] for seed in range(50)], axis=0)  # of order_100
    by_name = dict(zip(STORE, weights, strict=True))
    assert by_name["order_100"] > by_name["order_101"] > by_name["order_211"]
    assert by_name["order_200"] > by_name["order_211"]


def test_the_result_survives_json_and_depends_on_its_seed_alone() -> None:
    result = run(seed=3)
    assert json.loads(json.dumps(result)) == result == run(TEMPERATURES, 3)
    assert result["weights"] != run(seed=4)["weights"]


def test_the_table_shows_every_temperature_for_both_queries() -> None:
    lines = show(run([2.0, 0.125])).splitlines()
    assert [line.split()[:2] for line in lines[4:]] == [
        [first, query] for first in ("2", "0.125", "dictionary") for query in QUERIES
    ]
    assert lines[-1].split()[-1] == f"{STORE['order_110']:.2f}" == lines[-3].split()[-1]
    assert max(map(len, lines[2:])) <= 80


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_that_is_none_is_refused(temperature: float) -> None:
    with pytest.raises(RegardError, match="above 0"):
        run([1.0, temperature])
