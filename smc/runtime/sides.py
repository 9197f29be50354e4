"""The two sides of a round, each over the memory of one worker, in one process or in two: what is run when, and what is sent.

On GPUs nothing here waits: a round is queued on the side's stream, and the host waits for its result alone. From its second time on,
a stage of a round is the replay of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smc import stops
from smc.algorithm.selection import Selection, select
from smc.philox import Purpose
from smc.runtime import tables
from smc.runtime.channel import Channel
from smc.runtime.config import EngineConfig
from smc.runtime.draft import Drafter
from smc.runtime.forward import StaticForward
from smc.runtime.plan import Choice, Drafted, Join, PlanBuffer, Program, RoundPlan, RoundResult
from smc.runtime.sampling import Sampling
from smc.runtime.stages import Reading, Stages
from smc.runtime.state import SlotState
from smc.runtime.target import Scorer
from smc.runtime.worker import ModelWorker


@dataclass(frozen=True)
class Parts:
    """How a model is run and tokens are drawn: the reference, or kernels."""

    forward: Callable[[ModelWorker], StaticForward] = lambda worker: StaticForward(worker.model, worker.pool, worker.rope)
    sampling: Callable[[int], Sampling] = Sampling
    stages: Callable[[torch.device], Stages] = Stages
    select: Callable[..., Selection] = select
    grow: tables.Grow = stops.grow
    reroot: tables.Reroot = tables.reroot


class Side:
    """One model's part in rounds: the state of all slots, and decoding alone."""

    def __init__(self, config: EngineConfig, worker: ModelWorker, parts: Parts, stages: Stages, pending: int) -> None:
        """`pending`: tokens at most that are to be run when a round begins."""
        self.config, self.worker, self.stages = config, worker, stages
        # Prompts are run where rounds are: what is written is there for what is asked for later.
        worker.working = stages.working
        stop_tables = stops.StopTables(config.max_stops, worker.vocab_size, worker.token_bytes, worker.device)
        self.state = SlotState(config.max_slots, worker.width, pending, stop_tables, worker.device)
        self._forward = parts.forward(worker)
        self._sampling = parts.sampling(worker.vocab_size)
        shared = (self._forward, self._sampling, self.state, parts.grow, parts.reroot)
        # Plain decoding of a target must not depend on rounds: exact decoding makes the same draws in others.
        alone = {"branches": 1, "bonus": False, "mixture": 0.0, "purpose": Purpose.TARGET, "by_round": worker.name == "draft"}
        self._alone = Drafter(*shared, block=config.block, **alone)
        self._parts = (*shared, parts.select)

    def join(self, group: Join) -> None:
        """Particles take part from the next round on."""
        with self.stages.working():
            self._join(group)

    def _join(self, group: Join) -> None:
        self.state.join(group)

    def _load(self, plan: RoundPlan) -> RoundPlan:
        """The plan, on the device. Called at work."""
        return self.stages.keep(plan.key, "plan", lambda: PlanBuffer(plan, self.worker.device)).load(plan)

    @torch.inference_mode()
    def _decode(self, plan: RoundPlan) -> Reading:
        """Queue a round of K tokens by this model alone."""
        stages = self.stages
        with stages.working():
            here = self._load(plan)
            began = stages.event()
            result = stages.run(plan.key, "alone", lambda: self._run_alone(here))
            ended = stages.event()
            return stages.read(plan.key, result, {self.worker.name: (began, ended)})

    def _run_alone(self, plan: RoundPlan) -> RoundResult:
        drafter, state, slot_A = self._alone, self.state, plan.slot_A
        law = plan.draft_law if self.worker.name == "draft" else plan.target_law
        drafted = drafter.extend(plan, law, drafter.begin(plan, law))
        place_A = torch.arange(len(slot_A), device=slot_A.device)
        zero_A, one_A = torch.zeros_like(slot_A), torch.ones_like(slot_A)
        end_A, open_A = state.end_S[slot_A], ~state.ended_S[slot_A]
        lineage = drafter.follow(plan, drafted, Choice(torch.stack((place_A, zero_A, zero_A, one_A))))
        tokens_AK, logq_AK = drafted.tokens_XK, drafted.logq_XK
        count_A = state.end_S[slot_A] - end_A
        exists_AK = torch.arange(tokens_AK.shape[1], device=slot_A.device) < count_A[:, None]
        nan_A = (torch.isnan(logq_AK) & exists_AK).any(-1)
        nan_G = torch.zeros_like(plan.threshold_G).index_add(0, plan.group_A, nan_A.double()) > 0
        zero_G = torch.zeros_like(plan.threshold_G)
        never_G = zero_G > 0
        return RoundResult(
            ancestor_A=place_A,
            alive_A=one_A > 0,
            grown_AQ=tokens_AK,
            count_A=torch.where(open_A, count_A, 0),
            ended_A=state.ended_S[slot_A],
            logw_A=zero_A.double(),
            logq_AQ=logq_AK,
            logp_AQ=torch.cat((logq_AK, logq_AK[:, :1]), 1),
            first_logp_A=torch.full_like(logq_AK[:, 0], torch.nan),
            log_z_G=zero_G,
            ess_G=zero_G + 1,
            resampled_G=never_G,
            collapsed_G=never_G,
            draft_nan_G=nan_G if self.worker.name == "draft" else never_G,
            target_nan_G=nan_G if self.worker.name == "target" else never_G,
            lineage=lineage,
        )


class DraftSide(Side):
    """Drafts blocks, then follows what the target chose."""

    def __init__(self, config: EngineConfig, worker: ModelWorker, parts: Parts, stages: Stages, channel: Channel) -> None:
        super().__init__(config, worker, parts, stages, pending=config.begin_tokens)
        self._channel = channel
        drafting = {"block": config.block, "branches": config.branches, "bonus": not config.lookahead, "mixture": config.defensive_share}
        self._drafter = Drafter(*self._parts[:-1], **drafting)
        self._round: tuple[RoundPlan, Drafted, tuple] | None = None

    def round(self, plan: RoundPlan) -> Reading:
        """Queue the draft's part of a round. What comes back of a round of the pair is its `Lineage`."""
        if plan.program is Program.DRAFT:
            return self._decode(plan)
        self.draft(plan)
        return self.follow()

    @torch.inference_mode()
    def draft(self, plan: RoundPlan) -> None:
        """Queue the draft's part of a round of the pair up to the choice."""
        stages, drafter, key = self.stages, self._drafter, plan.key
        with stages.working():
            self._channel.settle()
            here = self._load(plan)
            began = stages.event()
            first = stages.run(key, "begin", lambda: drafter.begin(here, here.draft_law))
            if self.config.lookahead:
                self._channel.send("first", first.all_2KX)
            drafted = stages.run(key, "extend", lambda: drafter.extend(here, here.draft_law, first))
            ended = stages.event()
            self._channel.send("blocks", drafted.all_2KX)
        self._round = (here, drafted, (began, ended))

    @torch.inference_mode()
    def follow(self) -> Reading:
        """Queue the rest of it: the chosen branches become the particles."""
        plan, drafted, span = self._round
        with self.stages.working():
            choice = Choice(self._channel.receive(plan.key, "choice", (4, len(plan.slot_A)), torch.int64))
            lineage = self.stages.run(plan.key, "follow", lambda: self._drafter.follow(plan, drafted, choice))
            return self.stages.read(plan.key, lineage, {"draft": span})


class TargetSide(Side):
    """Scores blocks and chooses."""

    def __init__(self, config: EngineConfig, worker: ModelWorker, parts: Parts, stages: Stages, channel: Channel) -> None:
        super().__init__(config, worker, parts, stages, pending=config.target_tokens)
        self._channel = channel
        self._scorer = Scorer(*self._parts, block=config.block, lookahead=config.lookahead)

    @torch.inference_mode()
    def round(self, plan: RoundPlan) -> Reading:
        """Queue the target's part of a round."""
        if plan.program is Program.TARGET:
            return self._decode(plan)
        with self.stages.working():
            self._channel.settle()
            here = self._load(plan)
            return self._lookahead(plan.key, here) if self.config.lookahead else self._lockstep(plan.key, here)

    def _join(self, group: Join) -> None:
        self._scorer.join(group, self.state.join(group))

    def _lookahead(self, key: tuple, plan: RoundPlan) -> Reading:
        stages, scorer = self.stages, self._scorer
        began = stages.event()
        scored = stages.run(key, "score", lambda: scorer.score(plan))
        ended = stages.event()
        first = self._receive(key, "first", plan, 1)
        heard = stages.event()
        choice, result = stages.run(key, "choose", lambda: scorer.choose(plan, scored, first))
        chosen = stages.event()
        self._send(choice)
        blocks = self._receive(key, "blocks", plan, self.config.block)
        told = stages.event()
        result = stages.run(key, "follow", lambda: _with_growth(result, scorer.follow(plan, scored, blocks, choice)))
        spans = {"target": (began, ended), "choose": (heard, chosen), "follow": (told, stages.event())}
        return stages.read(key, result, spans)

    def _lockstep(self, key: tuple, plan: RoundPlan) -> Reading:
        stages, scorer = self.stages, self._scorer
        blocks = self._receive(key, "blocks", plan, self.config.block)
        began = stages.event()

        def choose() -> tuple:
            scorer.complete(plan, blocks)
            scored = scorer.score(plan)
            return scored, *scorer.choose(plan, scored, None)

        scored, choice, result = stages.run(key, "choose", choose)
        self._send(choice)
        result = stages.run(key, "follow", lambda: _with_growth(result, scorer.follow(plan, scored, blocks, choice)))
        return stages.read(key, result, {"target": (began, stages.event())})

    def _send(self, choice: Choice) -> None:
        self._channel.share(choice.all_4A)
        self._channel.send("choice", choice.all_4A)

    def _receive(self, key: tuple, name: str, plan: RoundPlan, steps: int) -> Drafted:
        return Drafted(self._channel.receive(key, name, (2, steps, len(plan.slot_A) * self.config.branches), torch.int32))


def _with_growth(result: RoundResult, growth: tuple[Tensor, Tensor, Tensor, Tensor]) -> RoundResult:
    tokens_AQ, count_A, ended_A, logq_AQ = growth
    return replace(result, grown_AQ=tokens_AQ, count_A=count_A, ended_A=ended_A, logq_AQ=logq_AQ)
