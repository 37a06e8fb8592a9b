"""Run work when it is due and make its effects happen once."""

from __future__ import annotations

__version__ = "0.1.0"
