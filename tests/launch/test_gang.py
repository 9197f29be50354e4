from __future__ import annotations

import pytest
from ray.exceptions import RayTaskError

from services.launch.config import GangConfig
from services.launch.errors import GangError
from services.launch.gang import Gang


@pytest.mark.parametrize(
    "error", [ValueError("no such file"), RayTaskError("start", "a long traceback", ValueError("no such file"))]
)
def test_a_start_that_fails_says_why(monkeypatch, error):
    """Also if it failed in a process of Ray's, whose error begins with that process's address."""

    def fail(self: Gang) -> None:
        raise error

    monkeypatch.setattr(Gang, "_start", fail)
    with pytest.raises(GangError, match=r"^the gang did not start: no such file$"):
        Gang(GangConfig(), None, epoch=1).start()
