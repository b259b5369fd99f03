"""Reads fields that take a whole number: what Python reads as one is one, and what else was meant is said.

One rule for all of them. `'8192'` and `'8_192'` are numbers, as on Python's own command lines; `'8k'`, `'8,192'` and
`8192.0` are refused with the number to write, not guessed at.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from trl_budget.errors import SettingsError

_GROUPED = re.compile(r"[0-9]{1,3}(?:([,' ])[0-9]{3})(?:\1[0-9]{3})*")
_SCALED = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e\+?[0-9]{1,3})?) ?(?:([km])i?)?", re.IGNORECASE)
_FACTORS = {"": 1, "k": 2**10, "m": 2**20}


def number_or_word(value: Any) -> Any:
    """The value of a field that takes a number, a word or None; argparse hands all three over as strings.

    None for "none", in any case of letters. Without a word in its type `HfArgumentParser` would call `int` for a
    field and report what that says.
    """
    if not isinstance(value, str):
        return value
    if value.lower() == "none":
        return None
    try:
        return int(value)
    except ValueError:
        return value


def meant_number(value: object) -> int | None:
    """The positive whole number that `value` comes nearest to saying, or None if it says none.

    Thousands may be grouped, a point may be followed by what makes the number whole, and a suffix `k` or `m` stands
    for 1024 or its square, as in the names of context lengths.
    """
    if not isinstance(value, str | float):
        return None
    text = str(value).strip()
    if _GROUPED.fullmatch(text):
        text = re.sub("[,' ]", "", text)
    match = _SCALED.fullmatch(text)
    number = Fraction(match[1]) * _FACTORS[(match[2] or "").lower()] if match else Fraction(0)
    return int(number) if number > 0 and number.denominator == 1 else None


def refuse_other_spellings(name: str, value: object) -> None:
    """Refuses a number that is not written as one.

    Args:
        name: the field.
        value: what it was set to.

    Raises:
        SettingsError: names the value and the number to write.
    """
    if (number := meant_number(value)) is None:
        return
    raise SettingsError(
        f"{name}={value!r} is no whole number as Python reads one. Suffixes, points and separators other than '_' "
        "mean different things to different readers (8k: 8000 or 8192). "
        f"Set {name}={number} if that is what you meant."
    )
