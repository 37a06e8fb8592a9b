"""The settings of a command: its options, the environment, and the file in this folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from duly import settings
from duly.errors import ConfigError


def read_settings(options: Mapping[str, Any]) -> settings.Settings:
    """Read the settings for a command run here."""
    file = Path("duly.toml")
    try:
        text = file.read_text("utf-8") if file.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file.absolute()} cannot be read ({error}): mend it, or take it away") from error
    return settings.load(options, os.environ, text, str(file))
