"""The picture beside a draft has a panel for each kind of measurement, and no empty panel."""

from __future__ import annotations

import struct

import pytest

from smc.distill.measure import Measurement, TreeMeasurement, draw


@pytest.mark.parametrize(("speed", "panels"), [(None, 2), (1.4, 3)])
def test_panels(speed, panels, tmp_path):
    pytest.importorskip("matplotlib")
    tree = TreeMeasurement(temperature=1.0, rows=4, held_by_depth=(0.8, 0.5), speed=speed)
    one = Measurement(60.0, 10, 100, 100, 0.5, 0.3, 0.6, 0.1, 2.0, 10, 10, (tree,))
    draw([one], tmp_path / "distill.png")
    width, height = struct.unpack(">II", (tmp_path / "distill.png").read_bytes()[16:24])
    assert round(width / height / (13 / 3 / 3.8)) == panels
