"""Both sides of resident rounds in one process, over the pages of two workers: on one device, or on two.

On GPUs nothing here waits: a round is queued on a stream for each device, events order what passes between them, and the host waits for
the result alone. From its second time on, a stage of a round is the replay of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.selection import Selection, select
from smc.engine.config import EngineConfig
from smc.engine.worker import ModelWorker
from smc.kv.pages import DUMMY_PAGE
from smc.philox import Purpose
from smc.resident.draft import ResidentDraft
from smc.resident.forward import StaticForward
from smc.resident.plan import Choice, Drafted, Joining, PlanBuffer, RoundPlan, RoundResult
from smc.resident.sampling import Sampling
from smc.resident.stages import Reading, Stages
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


@dataclass(frozen=True)
class Parts:
    """How a model is run and tokens are drawn: the reference, or kernels."""

    forward: Callable[[ModelWorker], StaticForward] = lambda worker: StaticForward(worker.model, worker.pool, worker.rope)
    sampling: Callable[[int], Sampling] = Sampling
    stages: Callable[[torch.device], Stages] = Stages
    select: Callable[..., Selection] = select


class LocalPair:
    """Plays both sides. Pages that a group may need are taken when it joins and given back when it leaves."""

    def __init__(self, config: EngineConfig, workers: dict[str, ModelWorker], parts: Parts = Parts()) -> None:
        self.config, self.workers = config, workers
        width = next(iter(workers.values())).tables.table_RL.shape[1] + config.block
        sizes = {"slots": config.max_slots, "width": width, "block": config.block, "lookahead": config.lookahead}
        sampling = parts.sampling(workers["draft"].vocab_size)
        branching = {"branches": config.branches, "mixture": config.defensive_share}
        self._draft = ResidentDraft(parts.forward(workers["draft"]), sampling, **sizes, **branching)
        self._target = ResidentTarget(parts.forward(workers["target"]), sampling, **sizes, select=parts.select)
        self._at = {side: parts.stages(worker.device) for side, worker in workers.items()}
        self.plain = {side: LocalPlain(config, side, worker, parts, self._at[side]) for side, worker in workers.items()}
        self._plans: dict[tuple, dict[str, PlanBuffer]] = {}
        self._held: dict[tuple[str, int], np.ndarray] = {}

    @property
    def records(self) -> bool:
        """Rounds of few shapes are preferred."""
        return self._at["target"].records

    def join(self, start: Start) -> None:
        for side, half in (("draft", self._draft), ("target", self._target)):
            with self._at[side].working():
                half.join(self._joining(side, start))

    def leave(self, slots_N: np.ndarray) -> None:
        """Give back the pages of the group in these slots."""
        for side, worker in self.workers.items():
            pages = self._held.pop((side, int(slots_N[0])))
            worker.tables.allocator.exchange(pages, np.full_like(pages, DUMMY_PAGE))

    @torch.inference_mode()
    def round(self, plan: RoundPlan) -> Reading:
        """Queue a round."""
        buffers = self._plans.get(plan.key)
        if buffers is None:
            buffers = self._plans[plan.key] = {side: PlanBuffer(plan, worker.device) for side, worker in self.workers.items()}
        run = self._lookahead if self.config.lookahead else self._lockstep
        draft, target = self._at["draft"], self._at["target"]
        with draft.working():
            on_draft = buffers["draft"].load(plan)
        with target.working():
            on_target = buffers["target"].load(plan)
        return run(plan.key, draft, target, on_draft, on_target)

    def _lookahead(self, key: tuple, draft: Stages, target: Stages, on_draft: RoundPlan, on_target: RoundPlan) -> Reading:
        marks = {}
        with draft.working():
            marks["draft"] = draft.mark()
            first = draft.run(key, "begin", lambda: self._draft.begin(on_draft), on_draft.recordable)
            first_there = draft.mark()
            drafted = draft.run(key, "extend", lambda: self._draft.extend(on_draft, *first), on_draft.recordable)
            marks["drafted"] = all_there = draft.mark()
        with target.working():
            marks["score"] = target.mark()
            scored = target.run(key, "score", lambda: self._target.score(on_target), on_draft.recordable)
            marks["scored"] = target.mark()
            target.wait(first_there)
            heard = target.take(key, "first", first)
            choice, result = target.run(key, "choose", lambda: self._target.choose(on_target, scored, *heard), on_draft.recordable)
            marks["chosen"] = chosen = target.mark()
            target.wait(all_there)
            blocks = Drafted(*target.take(key, "blocks", vars(drafted).values()))
            taken = target.mark()
            grown = target.run(key, "go_on", lambda: self._target.go_on(on_target, scored, blocks, choice), on_draft.recordable)
            reading = target.read(key, result, grown, marks)
        self._follow(key, draft, on_draft, drafted, choice, chosen)
        draft.wait(taken)
        return reading

    def _lockstep(self, key: tuple, draft: Stages, target: Stages, on_draft: RoundPlan, on_target: RoundPlan) -> Reading:
        marks = {}
        with draft.working():
            marks["draft"] = draft.mark()
            first = draft.run(key, "begin", lambda: self._draft.begin(on_draft), on_draft.recordable)
            drafted = draft.run(key, "extend", lambda: self._draft.extend(on_draft, *first), on_draft.recordable)
            marks["drafted"] = all_there = draft.mark()
        with target.working():
            target.wait(all_there)
            marks["score"] = target.mark()
            blocks = Drafted(*target.take(key, "blocks", vars(drafted).values()))

            def finish() -> tuple:
                self._target.complete(on_target, blocks)
                scored = self._target.score(on_target)
                choice, result = self._target.choose(on_target, scored, None, None)
                return choice, result, self._target.go_on(on_target, scored, blocks, choice)

            choice, result, grown = target.run(key, "finish", finish, on_draft.recordable)
            marks["scored"] = chosen = target.mark()
            reading = target.read(key, result, grown, marks)
        self._follow(key, draft, on_draft, drafted, choice, chosen)
        return reading

    def _follow(self, key: tuple, draft: Stages, on_draft: RoundPlan, drafted: Drafted, choice: Choice, chosen: object) -> None:
        with draft.working():
            draft.wait(chosen)
            heard = Choice(*draft.take(key, "choice", vars(choice).values()))
            draft.run(key, "follow", lambda: self._draft.follow(on_draft, drafted, heard), on_draft.recordable)

    def _joining(self, side: str, start: Start) -> Joining:
        drafts = side == "draft"
        extra, spare = (self.config.block, self.config.branches - 1) if drafts else (0, 0)
        joining, pages = _with_pages(self.workers[side], side, start, start.max_tokens + extra, (spare, self.config.block - 1))
        self._held[side, int(start.slots_N[0])] = pages
        return joining


class LocalPlain:
    """Plain decoding by one model through the same stages: a draft with one branch whose every token is kept."""

    def __init__(self, config: EngineConfig, side: str, worker: ModelWorker, parts: Parts, stages: Stages) -> None:
        self.config, self.side, self.worker, self._stages = config, side, worker, stages
        self._model = ResidentDraft(
            parts.forward(worker),
            parts.sampling(worker.vocab_size),
            slots=config.max_slots,
            width=worker.tables.table_RL.shape[1] + config.block,
            block=config.block,
            branches=1,
            lookahead=True,
            mixture=0.0,
            purpose=Purpose.TARGET,
        )
        self._plans: dict[tuple, PlanBuffer] = {}
        self._held: dict[int, np.ndarray] = {}

    @property
    def records(self) -> bool:
        """See `LocalPair.records`."""
        return self._stages.records

    def join(self, start: Start) -> None:
        joining, pages = _with_pages(self.worker, self.side, start, start.max_tokens + self.config.block, (0, self.config.block - 1))
        self._held[int(start.slots_N[0])] = pages
        with self._stages.working():
            self._model.join(joining)

    def leave(self, slots_N: np.ndarray) -> None:
        pages = self._held.pop(int(slots_N[0]))
        self.worker.tables.allocator.exchange(pages, np.full_like(pages, DUMMY_PAGE))

    @torch.inference_mode()
    def round(self, plan: RoundPlan) -> Reading:
        """Queue a round of K tokens."""
        if plan.key not in self._plans:
            self._plans[plan.key] = PlanBuffer(plan, self.worker.device)
        stages = self._stages
        with stages.working():
            here = self._plans[plan.key].load(plan)
            marks = {"draft": stages.mark()}
            result, grown = stages.run((self.side, plan.key), "plain", lambda: self._decode(here))
            marks["drafted"] = stages.mark()
            return stages.read((self.side, plan.key), result, grown, marks)

    def _decode(self, plan: RoundPlan) -> tuple[RoundResult, tuple[Tensor, Tensor, Tensor]]:
        model, slots_A = self._model, plan.slots_A
        plan = replace(plan, draft_law=plan.draft_law if self.side == "draft" else plan.target_law)
        drafted = model.extend(plan, *model.begin(plan))
        place_A = torch.arange(len(slots_A), device=slots_A.device)
        zero_A, zero_G = torch.zeros_like(slots_A), torch.zeros_like(plan.threshold_G)
        tokens_AK, logq_AK = drafted.tokens_AFK[:, 0], drafted.logq_AFK[:, 0]
        open_A = ~model.state.ended_S[slots_A]
        count_A, _ = model.state.grow(slots_A, tokens_AK, plan.room_A)
        exists_AK = torch.arange(tokens_AK.shape[1], device=slots_A.device) < count_A[:, None]
        nan_G = (torch.isnan(logq_AK) & exists_AK).any(-1)
        model.follow(plan, drafted, Choice(torch.stack((place_A, zero_A, zero_A))))
        result = RoundResult(
            ancestor_A=place_A,
            grown_AQ=zero_A,
            count_A=zero_A,
            ended_A=zero_A,
            logw_A=zero_A.double(),
            logp_AQ=torch.cat((logq_AK, logq_AK[:, :1]), 1),
            first_logp_A=torch.full_like(logq_AK[:, 0], torch.nan),
            log_z_G=zero_G,
            ess_G=zero_G + 1,
            resampled_G=zero_G > 0,
            collapsed_G=zero_G > 0,
            draft_nan_G=nan_G if self.side == "draft" else zero_G > 0,
            target_nan_G=nan_G if self.side == "target" else zero_G > 0,
        )
        return result, (tokens_AK, torch.where(open_A, count_A, 0), model.state.ended_S[slots_A])


def _with_pages(worker: ModelWorker, side: str, start: Start, answer: int, spare_FB: tuple[int, int]) -> tuple[Joining, np.ndarray]:
    """What joins, with pages for `answer` tokens of every particle and for spare branches; and those pages."""
    tables, n = worker.tables, len(start.slots_N)
    pages = tables.allocator.allocate(n * (answer + spare_FB[0] * spare_FB[1]))
    own_NL, spare_N = np.split(pages, [n * answer])
    prompt_L = tables.table_RL[start.prompt_row[side], : start.prompt_size]
    joining = Joining(
        slots_N=start.slots_N,
        pages_NL=np.concatenate((np.tile(prompt_L, (n, 1)), own_NL.reshape(n, answer)), axis=1),
        spare_NFB=spare_N.reshape(n, *spare_FB),
        prompt_size=start.prompt_size,
        first_N=start.first_N,
        ended_N=start.ended_N,
        logw_N=start.logw_N,
        stop_ids=start.stop_ids,
    )
    return joining, pages
