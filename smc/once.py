"""Warnings that a process gives once, however often their cause is met: an evaluation makes an engine for every way of
decoding. Knows nothing about what the warnings say."""

from __future__ import annotations

import logging
from functools import cache


def warn_once(logger: logging.Logger, message: str, *values: object) -> None:
    """Log a warning, unless this logger has given the same text in this process. `values` are put into `message` as in
    `logging`."""
    _warn(logger, message % values)


@cache
def _warn(logger: logging.Logger, text: str) -> None:
    logger.warning("%s", text)
