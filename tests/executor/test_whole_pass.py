"""Which way a draft's passes run: in one launch or in many. What they compute is tested on a GPU
(`tests/gpu/test_megakernel.py`)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from smc.executor.invariant_forward import InvariantForward
from smc.executor.masks import Sharing
from smc.executor.triton_ops import TritonOps
from smc.executor.whole_pass import WholePassForward, rows_at
from smc.executor.worker import ModelWorker
from smc.memory.pages import DUMMY_PAGE
from smc.model.presets import NoText
from smc.round.plan import Contexts
from smc.round.tensors import RowGroups, Rows, RowSpans, RowTables
from smc.stops import TokenBytes
from smc.types import Decoding, ModelRole, Numerics
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
    tables, spans, groups = RowTables(zero_R[None], zero_R), RowSpans(*[zero_R] * 2), RowGroups(*[zero_R] * 4)
    rows = Rows(tables, spans, groups, queries=1, contexts=Contexts.SHORT)
    assert [forward._runs_whole(zero_R.long(), rows) for _ in range(2)] == [leader] * 2
    assert len(measured) == 1


def test_with_one_order_of_sums_only_rounds_of_walks_run_in_the_fastest_way():
    shape = tiny_config(vocab_size=VOCAB, num_layers=1, head_dim=16, max_context=WIDTH)
    sizes = {"width": WIDTH, "pages": 8, "vocab_size": VOCAB, "token_bytes": TokenBytes.of(NoText(VOCAB))}
    model = random_decoder(shape, 1).bfloat16()

    def forward_of(role: ModelRole, *decodings: Decoding) -> type:
        worker = ModelWorker(role, model, **sizes, numerics=Numerics.INVARIANT)
        return type(TritonOps().forward(worker).of(frozenset(decodings)))

    assert forward_of(ModelRole.DRAFT, Decoding.WALK) is WholePassForward
    for also in (Decoding.REJECTION, Decoding.INDEPENDENT, Decoding.DISTINCT, Decoding.DRAFT):
        assert issubclass(forward_of(ModelRole.DRAFT, Decoding.WALK, also), InvariantForward)
        assert issubclass(forward_of(ModelRole.DRAFT, also), InvariantForward)
    assert forward_of(ModelRole.TARGET, Decoding.WALK) is InvariantForward


def test_timed_rows_read_pages_of_their_own_and_store_in_the_dummy_page():
    table_SL, three_R, one_G = torch.zeros(4, 9, dtype=torch.int32), torch.arange(3), torch.zeros(1, dtype=torch.int64)
    like = Rows(
        RowTables(table_SL, three_R.int(), table_SL, three_R),
        RowSpans(three_R, three_R),
        RowGroups(three_R, one_G, one_G, one_G),
        queries=2,
        contexts=Contexts.SHORT,
    )
    rows = rows_at(5, like, pages=20)
    tables, spans = rows.tables, rows.spans
    assert (
        tables.table_SL.tolist() == [[1, 2, 3, 4, 5, DUMMY_PAGE, DUMMY_PAGE]] and tables.table_SL.dtype == torch.int32
    )
    assert spans.start_R.tolist() == [5, 5, 5] and spans.count_R.tolist() == [2, 2, 2]
    assert rows.groups.shared_G.tolist() == [5]
    assert tables.slot_R.tolist() == [0, 0, 0] and tables.tail_RB is None and rows.queries == 2
    assert rows_at(5, like, pages=3).tables.table_SL.tolist() == [[1, 2, 3, 1, 2, DUMMY_PAGE, DUMMY_PAGE]]
