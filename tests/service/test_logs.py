"""The log of a started service: pure JSON on demand; SIGHUP drains it, and it says so."""

from __future__ import annotations

import json
import signal

import pytest

from tests.service.test_sockets import command

pytestmark = pytest.mark.xdist_group("ray")


def test_json_lines_alone(tmp_path):
    """From all processes, with what Ray forwards, from the start to the end by SIGHUP."""
    log = tmp_path / "log"
    arguments = ("--port", 0, "--http-port", 0, "--max-slots", 16, "--log-format", "json")
    with command(*arguments, log=log) as process:
        process.send_signal(signal.SIGHUP)
        assert process.wait(120) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert all({"time", "level", "logger"} <= set(line) for line in lines)
    said = [(line.get("process", ""), line["message"]) for line in lines]
    assert any(
        process.startswith("smcserve: coordinator pid=") and "timed the models" in text for process, text in said
    )
    assert any("SIGHUP: draining, as after SIGTERM" in text for _, text in said)


def test_nohup_keeps_it_running(tmp_path):
    """Who starts a service by nohup wants it to survive the end of the terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with command("--port", 0, "--http-port", 0, "--max-slots", 16, log=tmp_path / "log") as process:
            process.send_signal(signal.SIGHUP)
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    text = (tmp_path / "log").read_text()
    assert "SIGTERM: draining" in text and "SIGHUP" not in text
