"""Starting a Ray cluster, and joining one. A start that times out on a busy machine is tried once more."""

from __future__ import annotations

import pytest

from services.launch import cluster

SLOW = [
    "The current node timed out during startup. This could happen because some of the Ray processes failed to startup.",
    "Timed out waiting for file /tmp/ray/session_1/gcs_server_port_2",
]


@pytest.fixture
def starts(monkeypatch) -> list[str]:
    """The error message of each start of Ray, in order; "" is a start that succeeds."""
    said: list[str] = []

    def init(**_: object) -> None:
        if error := said.pop(0):
            raise RuntimeError(error)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    return said


@pytest.mark.parametrize("error", SLOW)
def test_a_start_that_was_too_slow_is_tried_once_more(starts, error):
    starts += [error, ""]
    assert cluster.connect(None) and not starts


@pytest.mark.parametrize(("errors", "left"), [((SLOW[1], SLOW[1], ""), 1), (("no such address", ""), 1)])
def test_other_start_errors_are_raised(starts, errors, left):
    """A start that times out twice, or fails for another reason, raises Ray's error."""
    starts += errors
    with pytest.raises(RuntimeError, match=errors[0]):
        cluster.connect(None)
    assert len(starts) == left


@pytest.mark.parametrize("asks", [False, True])
def test_a_cluster_that_asks_for_no_token_is_reported(starts, monkeypatch, caplog, asks):
    monkeypatch.setattr(cluster, "is_token_auth_enabled", lambda: asks)
    starts += [""]
    assert not cluster.connect("10.0.0.1:6379")
    said = "the Ray cluster at 10.0.0.1:6379 asks for no token: every program that reaches its ports"
    assert (said in caplog.text) != asks
