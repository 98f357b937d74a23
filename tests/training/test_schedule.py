"""Learning rates worked by hand, and what holds for every schedule."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.config import TrainConfig
from regard.training.optimizer import scheduled_learning_rate

SCHEDULES = TrainConfig.__dataclass_fields__["schedule"].metadata["choices"]
every = pytest.mark.parametrize("schedule", SCHEDULES)


def rate(schedule: str, step: int, warmup: int = 100, steps: int = 1100) -> float:
    return scheduled_learning_rate(TrainConfig(lr=0.01, schedule=schedule, warmup=warmup, steps=steps), step)


@every
@pytest.mark.parametrize(("step", "by_hand"), [(1, 0.0001), (25, 0.0025), (50, 0.005), (99, 0.0099), (100, 0.01)])
def test_warm_up_is_linear(schedule: str, step: int, by_hand: float) -> None:
    assert rate(schedule, step) == pytest.approx(by_hand)


@pytest.mark.parametrize(
    ("schedule", "step", "by_hand"),
    [
        ("inverse-sqrt", 400, 0.005),  # sqrt(100 / 400) = 1/2
        ("inverse-sqrt", 900, 0.01 / 3),
        ("inverse-sqrt", 1100, 0.0030151),  # sqrt(1 / 11)
        ("inverse-sqrt", 10000, 0.001),  # the total does not matter
        ("cosine", 350, 0.00853553),  # a quarter down: (1 + cos 45 degrees) / 2
        ("cosine", 600, 0.005),
        ("cosine", 850, 0.00146447),
        ("cosine", 1100, 0.0),
        ("linear", 350, 0.0075),
        ("linear", 600, 0.005),
        ("linear", 1100, 0.0),
        ("constant", 101, 0.01),
        ("constant", 1100, 0.01),
    ],
)
def test_the_way_down(schedule: str, step: int, by_hand: float) -> None:
    assert rate(schedule, step) == pytest.approx(by_hand, rel=1e-4, abs=1e-12)


@pytest.mark.parametrize(
    ("schedule", "by_hand"),
    [
        ("inverse-sqrt", 0.005),
        ("cosine", 0.01 * (1 + math.cos(0.3 * math.pi)) / 2),
        ("linear", 0.007),
        ("constant", 0.01),
    ],
)
def test_without_warm_up_the_first_step_is_at_the_peak(schedule: str, by_hand: float) -> None:
    assert rate(schedule, 1, warmup=0, steps=11) == 0.01
    assert rate(schedule, 4, warmup=0, steps=11) == pytest.approx(by_hand)  # 3 of 10 steps down; sqrt(1 / 4)


@every
@given(warmup=st.integers(0, 500), steps=st.integers(1, 2000), step=st.integers(1, 3000))
def test_up_to_the_peak_then_never_up_again(schedule: str, warmup: int, steps: int, step: int) -> None:
    now, then = (rate(schedule, s, warmup, steps) for s in (step, step + 1))
    assert 0 <= now <= 0.01 * (1 + 1e-12)  # a rounding error apart
    assert now < then if step < warmup else now >= then - 1e-15


@every
def test_no_jump_where_warm_up_ends(schedule: str) -> None:
    before, peak, after = (rate(schedule, step, warmup=1000, steps=9000) for step in (999, 1000, 1001))
    assert peak == 0.01
    assert abs(peak - before) <= 0.01 / 1000 + 1e-12
    assert abs(peak - after) <= 0.01 / 1000


@every
def test_a_run_that_ends_within_warm_up(schedule: str) -> None:
    assert rate(schedule, 10, warmup=100, steps=10) == pytest.approx(0.001)
