"""Named sets of settings: those that are shipped, or a file of one's own in the same words."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from loadtest.settings import Settings

SHIPPED = Path(__file__).with_name("profiles.toml")


def shipped() -> dict[str, dict[str, Any]]:
    return tomllib.loads(SHIPPED.read_text())


def load(name: str) -> dict[str, Any]:
    """Settings of the profile `name`, or of the file of that name. Raises ValueError for what is neither, or no
    setting."""
    profiles = shipped()
    if name in profiles:
        profile = profiles[name]
    elif name.endswith(".toml"):
        try:
            profile = tomllib.loads(Path(name).read_text())
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"--profile {name!r}: {error}; give a TOML file of settings") from error
    else:
        raise ValueError(f"--profile {name!r}; allowed: {', '.join(profiles)}, or a file whose name ends in .toml")
    settings = {key: value for key, value in profile.items() if key != "about"}
    known = {field.name for field in fields(Settings)}
    if unknown := settings.keys() - known:
        raise ValueError(f"--profile {name!r} sets {min(unknown)}; allowed: about, {', '.join(sorted(known))}")
    return settings
