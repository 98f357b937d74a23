"""Times of day in 12 and in 24 hours, by hand."""

import pytest

from regard.text.clock_times import to_24_hours


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("The meeting is at 2:30 p.m. on Monday.", "The meeting is at 14:30 on Monday."),
        ("It opens at 9 a.m.", "It opens at 9 o'clock."),
        ("Call me at 9:45pm or 10 PM.", "Call me at 21:45 or 22 o'clock."),
        ("12 p.m. is noon, 12 a.m. is midnight.", "12 o'clock is noon, 0 o'clock is midnight."),
        ("We are open from 2 to 4 p.m. today.", "We are open from 14 to 16 o'clock today."),
        ("It lasts 11-2 p.m. today.", "It lasts 11-14 o'clock today."),
        ("Version 2.3 pm is a project manager.", "Version 2.3 pm is a project manager."),  # no minutes of one digit
        ("I am 5 years old; it is 5 amps.", "I am 5 years old; it is 5 amps."),
        ("14:30 and 2:30 stay.", "14:30 and 2:30 stay."),
        ("He scored 30 p.m.", "He scored 30 p.m."),
    ],
)
def test_times(text: str, said: str) -> None:
    assert to_24_hours(text) == said
