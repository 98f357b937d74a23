"""Times of day: English "2:30 p.m." as "14:30", before it is translated to a language that counts 24 hours.

A model that has seen few such times drops the "p.m.", and the time becomes another one.
"""

from __future__ import annotations

import re

HOUR = r"(?:1[0-2]|0?[1-9])"
CLOCK = rf"({HOUR})(?:[:.]([0-5]\d))?"
HALF = r"(?:([ap])\.\s?m\.|([apAP])[mM]\b)"
TIME = re.compile(rf"(?<![\w:.,/-])(?:{CLOCK}(\s?(?:-|–|to|and|until)\s?))?{CLOCK}\s?{HALF}", re.IGNORECASE)


def to_24_hours(text: str) -> str:
    """Return English text with 12-hour times as 24-hour times; both ends of "2 to 4 p.m." are in the afternoon."""

    def convert(found: re.Match[str]) -> str:
        first_hour, first_minute, between, hour, minute, dotted, plain = found.groups()
        half = (dotted or plain).lower()
        stop = "." if dotted and not text[found.end() :].strip() else ""  # that of the sentence too
        last = clock(int(hour), minute, half) + ("" if minute else " o'clock") + stop
        if not between:
            return last
        # "11 to 2 p.m." begins before noon.
        own = half if int(first_hour) % 12 <= int(hour) % 12 else "a"
        return clock(int(first_hour), first_minute, own) + between + last

    return TIME.sub(convert, text)


def clock(hour: int, minute: str | None, half: str) -> str:
    """Return a 24-hour time, given the hour from 1 to 12, the minute, and "a" or "p"."""
    return str(hour % 12 + 12 * (half == "p")) + (f":{minute}" if minute else "")
