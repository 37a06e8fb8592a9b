"""Values as error messages show them."""

from __future__ import annotations


def brief(value: object) -> str:
    """Write a value for a message: at most 60 characters of it."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write the digits
        return "a number of more than 4,300 digits"
    return text if len(text) <= 60 else f"{text[:60]}…"
