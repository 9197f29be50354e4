"""Which way a draft's passes run: in one launch or in many. What they compute is tested on a GPU
(`tests/gpu/test_megakernel.py`)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from smc.executor.masks import Sharing
from smc.executor.whole_pass import WholePassForward
from smc.executor.worker import ModelWorker
from smc.model.presets import NoText
from smc.round.plan import Contexts
from smc.round.tensors import Rows
from smc.stops import TokenBytes
from smc.types import ModelRole
from tests.model.tiny import random_decoder, tiny_config

VOCAB, WIDTH = 30, 64


@pytest.mark.parametrize("leader", [True, False])
def test_the_leader_decides_for_all_ranks_that_have_the_whole_model(leader, monkeypatch):
    """Another rank measures the opposite of what the leader does."""
    shape = tiny_config(vocab_size=VOCAB, num_layers=1, head_dim=16, max_context=WIDTH)
    sizes = {"width": WIDTH, "pages": 8, "vocab_size": VOCAB, "token_bytes": TokenBytes.of(NoText(VOCAB))}
    sharing = Sharing(leads=False, broadcast=lambda tensor: tensor.fill_(int(leader)))
    worker = ModelWorker(ModelRole.DRAFT, random_decoder(shape, 1), **sizes, sharing=sharing)
    forward, measured = WholePassForward(worker), []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(forward, "_whole", object())
    monkeypatch.setattr(forward, "_measure", lambda kind, rows: (measured.append(kind), not leader)[1])
    zero_R = torch.zeros(3, dtype=torch.int32)
    rows = Rows(zero_R[None], zero_R, None, None, *[zero_R] * 6, queries=1, contexts=Contexts.SHORT)
    assert [forward._runs_whole(zero_R.long(), rows) for _ in range(2)] == [leader] * 2
    assert len(measured) == 1
