"""Both sides of resident rounds in one process, over the pages of two workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from smc.engine.config import EngineConfig
from smc.engine.messages import Done
from smc.engine.worker import ModelWorker
from smc.kv.pages import DUMMY_PAGE
from smc.resident.draft import ResidentDraft
from smc.resident.forward import StaticForward
from smc.resident.plan import Joining, RoundPlan, RoundResult
from smc.resident.target import ResidentTarget


@dataclass(frozen=True)
class Start:
    """A group whose prompt both models have run, as the host tells it."""

    slots_N: np.ndarray
    prompt_row: dict[str, int]
    """Row of each worker's tables that holds the prompt."""
    prompt_size: int
    max_tokens: int
    first_N: np.ndarray
    ended_N: np.ndarray
    logw_N: np.ndarray
    stop_ids: list[int]


class LocalPair:
    """Plays both sides in turn. Pages that a group may need are taken when it joins and given back when it leaves."""

    def __init__(
        self, config: EngineConfig, workers: dict[str, ModelWorker], forward: Callable[..., StaticForward] = StaticForward
    ) -> None:
        self.config, self.workers = config, workers
        draft, target = workers["draft"], workers["target"]
        sizes = {"slots": config.max_slots, "vocab_size": draft.vocab_size, "block": config.block, "lookahead": config.lookahead}
        self._draft = ResidentDraft(
            forward(draft.model, draft.pool, draft.rope),
            width=draft.tables.table_RL.shape[1] + config.block,
            branches=config.branches,
            mixture=config.defensive_share,
            **sizes,
        )
        self._target = ResidentTarget(
            forward(target.model, target.pool, target.rope), width=target.tables.table_RL.shape[1] + config.block, **sizes
        )
        self._held: dict[tuple[str, int], np.ndarray] = {}

    def join(self, start: Start) -> None:
        for side, half in (("draft", self._draft), ("target", self._target)):
            half.join(self._joining(side, start))

    def leave(self, slots_N: np.ndarray) -> None:
        """Give back the pages of the group in these slots."""
        for side, worker in self.workers.items():
            pages = self._held.pop((side, int(slots_N[0])))
            worker.tables.allocator.exchange(pages, np.full_like(pages, DUMMY_PAGE))

    def round(self, plan: RoundPlan) -> Done[RoundResult]:
        drafted = self._draft.draft(plan)
        choice, result = self._target.choose(plan, drafted)
        self._draft.follow(plan, drafted, choice)
        return Done(result)

    def _joining(self, side: str, start: Start) -> Joining:
        tables, n = self.workers[side].tables, len(start.slots_N)
        block, spare = self.config.block, self.config.branches - 1 if side == "draft" else 0
        answer = start.max_tokens + (block if side == "draft" else 0)
        pages = tables.allocator.allocate(n * (answer + spare * (block - 1)))
        self._held[side, int(start.slots_N[0])] = pages
        own_NL, spare_N = np.split(pages, [n * answer])
        prompt_L = tables.table_RL[start.prompt_row[side], : start.prompt_size]
        return Joining(
            slots_N=start.slots_N,
            pages_NL=np.concatenate((np.tile(prompt_L, (n, 1)), own_NL.reshape(n, answer)), axis=1),
            spare_NFB=spare_N.reshape(n, spare, block - 1),
            prompt_size=start.prompt_size,
            first_N=start.first_N,
            ended_N=start.ended_N,
            logw_N=start.logw_N,
            stop_ids=start.stop_ids,
        )
