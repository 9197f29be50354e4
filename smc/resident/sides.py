"""The two sides of a round, each over the pages of one worker, in one process or in two: what is run when, and what is told.

On GPUs nothing here waits: a round is queued on the side's stream, and the host waits for its result alone. From its second time on,
a stage of a round is the replay of a CUDA graph.
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
from smc.philox import Purpose
from smc.resident.channel import Channel
from smc.resident.draft import ResidentDraft
from smc.resident.forward import StaticForward
from smc.resident.plan import Choice, Drafted, Joining, PlanBuffer, RoundPlan, RoundResult, Start
from smc.resident.sampling import Sampling
from smc.resident.stages import Reading, Stages
from smc.resident.target import ResidentTarget


@dataclass(frozen=True)
class Parts:
    """How a model is run and tokens are drawn: the reference, or kernels."""

    forward: Callable[[ModelWorker], StaticForward] = lambda worker: StaticForward(worker.model, worker.pool, worker.rope)
    sampling: Callable[[int], Sampling] = Sampling
    stages: Callable[[torch.device], Stages] = Stages
    select: Callable[..., Selection] = select


class Side:
    """A worker's part in rounds. Pages that a group may need are taken when it joins and given back when it leaves."""

    _model: ResidentDraft | ResidentTarget

    def __init__(self, config: EngineConfig, worker: ModelWorker, stages: Stages, *, beyond: int = 0, branches: int = 1) -> None:
        """A particle has pages for `beyond` tokens past its longest answer, and for a block of every branch but the first."""
        self.config, self.worker, self.stages = config, worker, stages
        self._beyond, self._spare_FB = beyond, (branches - 1, config.block - 1)
        # Prompts are run where rounds are: a page changes hands in the order in which this is asked for.
        worker.working = stages.working
        self._plans: dict[tuple, PlanBuffer] = {}
        self._held: dict[int, np.ndarray] = {}

    def join(self, start: Start) -> None:
        """A group takes part from the next round on."""
        with self.stages.working():
            self._model.join(self._joining(start))

    def leave(self, slots_N: np.ndarray) -> None:
        """Give back the pages of the group in these slots."""
        self.worker.tables.allocator.free(self._held.pop(int(slots_N[0])))

    def _joining(self, start: Start) -> Joining:
        tables, n, spare_FB = self.worker.tables, len(start.slots_N), self._spare_FB
        answer = start.max_tokens + self._beyond
        pages = tables.allocator.allocate(n * (answer + spare_FB[0] * spare_FB[1]))
        self._held[int(start.slots_N[0])] = pages
        own_NL, spare_N = np.split(pages, [n * answer])
        prompt_L = tables.table_RL[start.prompt_row, : start.prompt_size]
        pages_NL = np.concatenate((np.tile(prompt_L, (n, 1)), own_NL.reshape(n, answer)), axis=1)
        return Joining(start, pages_NL, spare_N.reshape(n, *spare_FB))

    def _load(self, plan: RoundPlan) -> RoundPlan:
        """The plan, on the device. Called at work."""
        if plan.key not in self._plans:
            self._plans[plan.key] = PlanBuffer(plan, self.worker.device)
        return self._plans[plan.key].load(plan)

    def _sizes(self) -> dict[str, int]:
        """Of a model's state."""
        config = self.config
        return {"slots": config.max_slots, "width": self.worker.tables.table_RL.shape[1] + config.block, "block": config.block}


class DraftSide(Side):
    """Drafts blocks, then follows what the target chose."""

    def __init__(self, config: EngineConfig, worker: ModelWorker, parts: Parts, stages: Stages, channel: Channel) -> None:
        super().__init__(config, worker, stages, beyond=config.block, branches=config.branches)
        self._channel = channel
        branching = {"branches": config.branches, "mixture": config.defensive_share, "lookahead": config.lookahead}
        self._model = ResidentDraft(parts.forward(worker), parts.sampling(worker.vocab_size), **self._sizes(), **branching)
        self._round: tuple[tuple, RoundPlan, Drafted] | None = None

    @torch.inference_mode()
    def draft(self, plan: RoundPlan) -> Reading:
        """Queue the draft's part of a round up to the choice. What is read is that it is there."""
        stages, model, key, record = self.stages, self._model, plan.key, plan.recordable
        with stages.working():
            self._channel.settle()
            here = self._load(plan)
            began = stages.mark()
            first = stages.run(key, "begin", lambda: model.begin(here), record)
            if self.config.lookahead:
                self._channel.give("first", first.all_2KAF)
            drafted = stages.run(key, "extend", lambda: model.extend(here, first), record)
            ended = stages.mark()
            self._channel.give("blocks", drafted.all_2KAF)
        self._round = (key, here, drafted)
        return Reading(None, ended, {"draft": (began, ended)})

    @torch.inference_mode()
    def follow(self) -> None:
        """Queue the rest of it: the chosen branches become the particles."""
        key, plan, drafted = self._round
        with self.stages.working():
            choice = Choice(self._channel.take("choice", (3, len(plan.slots_A)), torch.int64))
            self.stages.run(key, "follow", lambda: self._model.follow(plan, drafted, choice), plan.recordable)


class TargetSide(Side):
    """Scores blocks and chooses."""

    def __init__(self, config: EngineConfig, worker: ModelWorker, parts: Parts, stages: Stages, channel: Channel) -> None:
        super().__init__(config, worker, stages)
        self._channel = channel
        sampling, choosing = parts.sampling(worker.vocab_size), {"lookahead": config.lookahead, "select": parts.select}
        self._model = ResidentTarget(parts.forward(worker), sampling, **self._sizes(), **choosing)

    @torch.inference_mode()
    def round(self, plan: RoundPlan) -> Reading:
        """Queue the target's part of a round."""
        with self.stages.working():
            self._channel.settle()
            here = self._load(plan)
            return self._lookahead(plan.key, here) if self.config.lookahead else self._lockstep(plan.key, here)

    def _lookahead(self, key: tuple, plan: RoundPlan) -> Reading:
        stages, model, record = self.stages, self._model, plan.recordable
        began = stages.mark()
        scored = stages.run(key, "score", lambda: model.score(plan), record)
        ended = stages.mark()
        first = self._take("first", plan, 1)
        heard = stages.mark()
        choice, result = stages.run(key, "choose", lambda: model.choose(plan, scored, first), record)
        chosen = stages.mark()
        self._channel.share(choice.all_3A)
        self._channel.give("choice", choice.all_3A)
        blocks = self._take("blocks", plan, self.config.block)
        told = stages.mark()
        grown = stages.run(key, "go_on", lambda: model.go_on(plan, scored, blocks, choice), record)
        marks = {"target": (began, ended), "choose": (heard, chosen), "go on": (told, stages.mark())}
        return stages.read(key, result, grown, marks)

    def _lockstep(self, key: tuple, plan: RoundPlan) -> Reading:
        stages, model = self.stages, self._model
        blocks = self._take("blocks", plan, self.config.block)
        began = stages.mark()

        def choose() -> tuple:
            model.complete(plan, blocks)
            scored = model.score(plan)
            return scored, *model.choose(plan, scored, None)

        scored, choice, result = stages.run(key, "choose", choose, plan.recordable)
        self._channel.share(choice.all_3A)
        self._channel.give("choice", choice.all_3A)
        grown = stages.run(key, "go_on", lambda: model.go_on(plan, scored, blocks, choice), plan.recordable)
        ended = stages.mark()
        return stages.read(key, result, grown, {"target": (began, ended)})

    def _take(self, name: str, plan: RoundPlan, steps: int) -> Drafted:
        return Drafted(self._channel.take(name, (2, steps, len(plan.slots_A), self.config.branches), torch.int32))


class PlainSide(Side):
    """Plain decoding by one model through the same stages: a draft with one branch, all of whose tokens are kept. A `pair.Runner`."""

    def __init__(self, config: EngineConfig, worker: ModelWorker, parts: Parts, stages: Stages) -> None:
        super().__init__(config, worker, stages, beyond=config.block)
        self.alone, self.records, self.waits = worker.name, stages.records, stages.records
        alone = {"branches": 1, "lookahead": True, "mixture": 0.0, "purpose": Purpose.TARGET}
        self._model = ResidentDraft(parts.forward(worker), parts.sampling(worker.vocab_size), **self._sizes(), **alone)

    @torch.inference_mode()
    def round(self, plan: RoundPlan) -> Reading:
        """Queue a round of K tokens."""
        stages, key = self.stages, (self.alone, plan.key)
        with stages.working():
            here = self._load(plan)
            began = stages.mark()
            result, grown = stages.run(key, "plain", lambda: self._decode(here))
            ended = stages.mark()
            return stages.read(key, result, grown, {self.alone: (began, ended)})

    def _decode(self, plan: RoundPlan) -> tuple[RoundResult, tuple[Tensor, Tensor, Tensor]]:
        model, slots_A = self._model, plan.slots_A
        plan = replace(plan, draft_law=plan.draft_law if self.alone == "draft" else plan.target_law)
        drafted = model.extend(plan, model.begin(plan))
        place_A = torch.arange(len(slots_A), device=slots_A.device)
        zero_A, zero_G = torch.zeros_like(slots_A), torch.zeros_like(plan.threshold_G)
        tokens_AK, logq_AK = drafted.tokens_AFK[:, 0], drafted.logq_AFK[:, 0]
        open_A = ~model.state.ended_S[slots_A]
        count_A = model.state.grow(plan, slots_A, tokens_AK, plan.room_A).count_A
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
            draft_nan_G=nan_G if self.alone == "draft" else zero_G > 0,
            target_nan_G=nan_G if self.alone == "target" else zero_G > 0,
        )
        return result, (tokens_AK, torch.where(open_A, count_A, 0), model.state.ended_S[slots_A])
