"""Lines of a comparison of types: the contexts are the same, so differences have errors of their own."""

from __future__ import annotations

from benchmarks.tree_acceptance import lines_of


def test_differences_are_of_pairs():
    lines = list(lines_of({"bfloat16": [5, 0, 3, 4], "int4": [5, 0, 2, 4]}))
    assert lines == [
        "bfloat16: 3.00 +- 1.08 on 4 contexts",
        "int4: 2.75 +- 1.11, less the first -0.250 +- 0.250 on 4 contexts",
    ]
