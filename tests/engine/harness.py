"""Runs requests through a real engine and looks inside it between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from smc.engine.config import EngineConfig
from smc.engine.engine import Engine
from smc.engine.group import Phase
from smc.engine.local import ModelPair, local_engine
from smc.engine.request import Answer, Output, Request, SamplingParams
from smc.engine.worker import ModelWorker
from smc.resident.forward import StaticForward, StaticRows
from smc.resident.sides import Side
from smc.resident.stages import Stages

FORMS = [
    EngineConfig(form="lockstep", block=3),
    EngineConfig(form="lookahead", block=3, branches=1),
    EngineConfig(form="lookahead", block=3, branches=4),
]


def config_id(config: EngineConfig) -> str:
    return f"{config.form}-K{config.block}-F{config.branches}"


def request(prompt: Sequence[int] = (0, 1, 2), request_id: str = "r", **params) -> Request:
    return Request(request_id, tuple(prompt), SamplingParams(**params))


def answers(engine: Engine, requests: Iterable[Request]) -> dict[str, Answer]:
    """Every request's answer; afterwards the engine must be empty."""
    done = {output.answer.request_id: output.answer for output in engine.run(requests) if output.answer}
    assert_empty(engine)
    return done


def answer(pair: ModelPair, config: EngineConfig, **params) -> Answer:
    return answers(local_engine(pair, config), [request(**params)])["r"]


def workers(engine: Engine) -> dict[str, ModelWorker]:
    return engine.workers


def assert_empty(engine: Engine) -> None:
    """Nothing reserved, nothing claimed, every page free, every reference accounted for."""
    engine.check_books()
    for worker in workers(engine).values():
        worker.tables.check()
        assert worker.tables.allocator.num_free == worker.tables.allocator.capacity


def step_through(engine: Engine, check: Callable[[Engine], None]) -> list[Output]:
    outputs = []
    while not engine.idle:
        outputs += engine.step()
        check(engine)
    return outputs


class TokenLedger:
    """Knows which token each KV page was written for: listens to what a side runs through its model, and where it stores it."""

    def __init__(self, engine: Engine, side: str) -> None:
        worker = engine.workers[side]
        self.token_of_page = np.full(worker.tables.allocator.capacity + 1, -1, dtype=np.int64)
        model = worker.model

        def listening(tokens_T: torch.Tensor, rope_T2D: torch.Tensor, attend) -> torch.Tensor:
            new = attend.__self__.new
            stored_X = tokens_T if new.index_X is None else tokens_T[new.index_X]
            self.token_of_page[new.pages_X.numpy()] = stored_X.numpy()
            return model(tokens_T, rope_T2D, attend)

        worker.model = Listening(model, listening)
        for part in (side_of(engine, side), side_of(engine, side, alone=True)):
            part._model.forward.model = worker.model

    def tokens(self, pages: Sequence[int]) -> list[int]:
        return self.token_of_page[pages].tolist()


class Listening:
    """A model whose calls go through a listener first."""

    def __init__(self, model, call: Callable) -> None:
        self.logits, self.config, self.embed, self._call = model.logits, model.config, model.embed, call

    def __call__(self, *arguments):
        return self._call(*arguments)


def side_of(engine: Engine, side: str, *, alone: bool = False) -> Side:
    """What carries out one side's part of rounds of an engine in this process."""
    runner = engine._smc.rounds.runner
    return runner.plain[side] if alone else {"draft": runner._draft, "target": runner._target}[side]


@torch.inference_mode()
def next_log_probs(part: Side, slot: int, held: int, token: int) -> torch.Tensor:
    """log p [V] after feeding `token` to the first `held` positions of a slot, from its paged KV, which is left as it was."""
    model = part._model
    forward = StaticForward(model.forward.model, copy.deepcopy(part.worker.pool), part.worker.rope)
    one = torch.ones(1, dtype=torch.int32)
    rows = StaticRows(model.state.table_SL[slot : slot + 1], one * held, one, one, one * 0, queries=1, short=False)
    hidden = forward(torch.tensor([token]), rows)
    return torch.log_softmax(forward.logits(hidden)[-1].double(), -1)


class Padding(Stages):
    """As on a GPU, where rounds are padded to few shapes and a round is asked for before the last is read; but run as they are."""

    records = True


def running(engine: Engine) -> list:
    return [group for group in engine._groups.values() if group.phase is Phase.RUNNING]
