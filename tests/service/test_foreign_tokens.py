"""A service with a draft whose tokenizer differs from the target's in added tokens: its start names them, and its
answers are those of the in-process engine."""

from __future__ import annotations

import pytest

from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.local_engine import ModelPair, local_engine
from tests.model.foreign import RELATIVES_VOCAB, USER, save_relatives
from tests.service.asked import LOOKAHEAD

pytestmark = pytest.mark.xdist_group("ray")


@pytest.mark.slow
def test_a_service_with_foreign_ids(start, tmp_path, caplog):
    """Prompts have both foreign ids: one is another token in the draft, the other is past its embedding, which each of
    its two ranks extends."""
    target, draft = save_relatives(tmp_path)
    pair = ModelPair.load(target, draft)
    think, opening = RELATIVES_VOCAB - 1, pair.tokenizer.chat([{"role": "user", "content": "What is 7 + 5?"}])
    assert USER in opening
    kinds = [
        {"method": "exact", "particles": 3},
        {"method": "smc", "particles": 4},
        {"method": "draft"},
        {"method": "target"},
    ]
    asked = [
        ((*opening, think)[: len(opening) + i % 2], {"seed": i, "max_tokens": 12, **k})
        for i, k in enumerate(2 * kinds[:4])
    ]
    engine = local_engine(pair, EngineConfig(**LOOKAHEAD | {"micro_batches": 1}))
    requests = [Request(str(i), prompt, SamplingParams(**law)) for i, (prompt, law) in enumerate(asked)]
    expected = {one.answer.request_id: one.answer.tokens for one in engine.run(requests) if one.answer}
    caplog.clear()
    with (
        caplog.at_level("INFO", logger="smc.model.source"),
        start(target=target, draft=draft, draft_tp=2, engine=EngineConfig(**LOOKAHEAD)) as running,
        running.client() as client,
    ):
        assert client.model_info().eos_token_ids == (1, think)
        for i, (prompt, law) in enumerate(asked):
            assert client.generate(list(prompt), timeout=60, **law).tokens == expected[str(i)]
    (foreign, ends) = [record.getMessage() for record in caplog.records if record.name == "smc.model.source"]
    assert foreign.endswith("2 (<|user|>; draft: <|human|>), 512 (<|think|>; draft: no token)")
    assert ends == "texts end at the target's end ids (1, 512), not at the draft's (1)"
