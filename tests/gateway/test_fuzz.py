"""Malformed and extreme requests: each ends with a documented status and leaves nothing behind.

`python -m tests.gateway.fuzz` sends any number of them to a whole service."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.gateway.fuzz import CODES, fuzz

BESIDE = {"max_tokens": 40, "ignore_eos": True, "seed": 1}
"""Settings of an answer that does not depend on the rest of the batch."""


@pytest.mark.slow
def test_whatever_is_asked_is_answered_or_refused(shared):
    """Every random request is answered or refused, and two long answers that are decoded meanwhile are unchanged."""
    with ThreadPoolExecutor(2) as pool, shared.client() as client:
        alone = client.generate("x", method="target", **BESIDE).tokens
        beside = [pool.submit(client.generate, "x", method=method, **BESIDE) for method in ("exact", "target")]
        found = fuzz(shared.address, range(40), seed=1)
        assert [call.result(120).tokens for call in beside] == [alone] * 2
    shared.wait_until_free(30.0)
    assert set(found) <= CODES, found
    assert found["OK"] >= 1 and found["INVALID_ARGUMENT"] > 5
