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
from smc.engine.messages import Rows
from smc.engine.request import Answer, Output, Request, SamplingParams
from smc.engine.worker import ModelWorker

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
    """Knows which token each KV page was written for: listens to what a worker runs through its model, and where it stores it."""

    def __init__(self, worker: ModelWorker) -> None:
        self.worker = worker
        self.token_of_page = np.full(worker.tables.allocator.capacity + 1, -1, dtype=np.int64)
        model = worker.model

        def listening(tokens_T: torch.Tensor, rope_T2D: torch.Tensor, attend) -> torch.Tensor:
            self.token_of_page[attend.__self__.pages_T.numpy()] = tokens_T.numpy()
            return model(tokens_T, rope_T2D, attend)

        worker.model = Listening(model, listening)

    def tokens(self, row: int) -> list[int]:
        tables = self.worker.tables
        return self.token_of_page[tables.table_RL[row, : tables.length_R[row]]].tolist()


class Listening:
    """A model whose calls go through a listener first."""

    def __init__(self, model, call: Callable) -> None:
        self.logits, self._call = model.logits, call

    def __call__(self, *arguments):
        return self._call(*arguments)


@torch.inference_mode()
def next_log_probs(worker: ModelWorker, row: int, token: int) -> torch.Tensor:
    """log p [V] after feeding `token` to a row, from its paged KV. The worker itself is left as it was."""
    twin = copy.copy(worker)
    twin.tables, twin.pool = copy.deepcopy(worker.tables), copy.deepcopy(worker.pool)
    one = np.ones(1, dtype=np.int32)
    rows = Rows(one * row, twin.tables.length_R[[row]], one, np.array([token]), np.array([0, 1]), np.zeros(1, dtype=np.int64))
    hidden = ModelWorker._forward(twin, rows)
    return torch.log_softmax(twin._logits(hidden)[-1].double(), -1)


def running(engine: Engine) -> list:
    return [group for group in engine._groups.values() if group.phase is Phase.RUNNING]
