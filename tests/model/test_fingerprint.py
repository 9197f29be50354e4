"""What tells one set of weights from another."""

from __future__ import annotations

import shutil

from smc import demo
from smc.model.files import fingerprint


def test_other_weights_have_another_fingerprint(tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(demo.DRAFT, copy)
    assert fingerprint(copy) == fingerprint(demo.DRAFT) != fingerprint(demo.TARGET)
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert fingerprint(copy) != fingerprint(demo.DRAFT)
