"""Requests of every kind that nobody would send: each ends with a status that says something, and nothing of it is left
behind.

`python -m tests.gateway.fuzz` sends as many as are asked for, to a whole service.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.gateway.fuzz import CODES, fuzz

BESIDE = {"max_tokens": 40, "ignore_eos": True, "seed": 1}
"""An answer that does not depend on what else is decoded."""


@pytest.mark.slow
def test_whatever_is_asked_is_answered_or_refused(shared):
    """Beside two long answers."""
    with ThreadPoolExecutor(2) as pool, shared.client() as client:
        alone = client.generate("x", method="target", **BESIDE).tokens
        beside = [pool.submit(client.generate, "x", method=method, **BESIDE) for method in ("exact", "target")]
        found = fuzz(shared.address, range(40), seed=1)
        assert [call.result(120).tokens for call in beside] == [alone] * 2
    shared.wait_until_free(30.0)
    assert set(found) <= CODES, found
    assert found["OK"] >= 1 and found["INVALID_ARGUMENT"] > 5
