"""The table of what changes the bits of a result, on a small model."""

from __future__ import annotations

import pytest

from benchmarks.invariance import main


def test_one_row_alone_is_itself(capsys):
    found = main(
        ["small", "--device", "cpu", "--sequences", "1,2", "--rows", "1,3", "--prompts", "3", "--context", "20"]
    )
    differ = {(name, column): count for name, column, count in found}
    assert not any(count for (_, column), count in differ.items() if column == "1"), "nothing stands beside it"
    assert differ["norm", "3"] == 0, "torch normalises every row by itself"
    assert differ["plain, other pages", "1"] == 0
    assert {"q k v", "down, residual, norm", "head", "plain, sequences", "prompt, chunk 20"} <= {
        name for name, *_ in found
    }
    assert "Logits of one position" in capsys.readouterr().out


@pytest.mark.slow
def test_sums_over_ranks_have_one_order():
    found = main(["--parts", "sums", "--ranks", "3", "--rows", "1,17,65", "--prompts", "2048"])
    assert len(found) == 16 and not [finding for finding in found if finding.differ]
