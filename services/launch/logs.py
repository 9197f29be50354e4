"""The log of `smcserve serve`: text, or one JSON object a line, also for what Ray forwards from other processes. Knows
nothing about what is logged."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LINE = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) (\S+): (.*)", re.DOTALL)
"""A line that one of our processes has logged (`services.launch.cluster`)."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON: `time`, `level`, `logger`, `message`, and the record's `fields`, if it has
    any, in place of the message."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None)
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
        }
        line |= {"message": _COLOUR.sub("", record.getMessage())} if fields is None else fields
        if process := getattr(record, "from_process", None):
            line["process"] = process
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up(in_json: bool) -> None:
    """Log to standard error, as text or as JSON."""
    if not in_json:
        logging.basicConfig(level=logging.INFO, format=TEXT)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.captureWarnings(True)


def take_over_ray() -> None:
    """Log what Ray forwards from other processes, instead of printing it in colours. Call it when Ray is connected."""
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    dispatcher.remove_handler("ray_print_logs")
    dispatcher.add_handler("ray_print_logs", _log_forwarded)
    ours = logging.getLogger("ray")
    ours.handlers.clear()
    ours.propagate = True


def _log_forwarded(batch: dict[str, Any]) -> None:
    process = batch.get("actor_name") or batch.get("task_name") or "ray"
    for line in batch["lines"]:
        found = _LINE.fullmatch(_COLOUR.sub("", line))
        level, name, message = found.groups() if found else ("INFO", "ray", line)
        extra = {"from_process": f"{process} pid={batch.get('pid')}"}
        logging.getLogger(name).log(logging.getLevelNamesMapping()[level], "%s", message, extra=extra)
