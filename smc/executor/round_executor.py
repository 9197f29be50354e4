"""How rounds are carried out. The scheduler requests them from a `RoundExecutor`, which has a runner for each model:
both in one process (`LocalRoundExecutor`), or one in each of two (`OneModelExecutor`). A runner runs the stages of its
model in order, on the memory of one worker, and exchanges messages with the other one over a `Channel`:

draft -> target   blocks          those that were drafted again after a miss, in rounds that do so
draft -> target   rows            the drafted rows
draft -> target   distributions   that the tokens of chains were drawn from, if there are chains
target -> draft   selection       the rows that continue, and how

On GPUs a runner does not wait, except for the masks of constrained requests: a round is queued on the model's stream,
and the host waits only when it reads the result. From its second run on, a stage of a round is the replay of a CUDA
graph.

Local axes: P chains."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import cycle
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.selection import NextParticles, SelectionStatistics
from smc.api.engine_config import EngineConfig
from smc.arrays import FieldMemory, PackedFields, map_tensors, to_device
from smc.constraints import Compiler
from smc.distributions import DistributionSpec
from smc.executor.chains import DraftedChains
from smc.executor.draft import DraftStage
from smc.executor.graph_runner import AsyncResult, Event, StageRunner, TimeSpans
from smc.executor.guidance import GuidedPass, PassLogits
from smc.executor.logit_changes import LogitBiases
from smc.executor.masks import TokenMasks
from smc.executor.messages import Pending
from smc.executor.ops import RoundOps
from smc.executor.redraft import begin_redraft, report_of
from smc.executor.sampling import HeadSampling, Sampling
from smc.executor.select import SelectStage
from smc.executor.verify import VerifyStage
from smc.executor.worker import ModelWorker
from smc.philox import Purpose
from smc.round.plan import IN_FLIGHT, PARTS, RoundKind, RoundPlan, SequenceHandoff
from smc.round.tensors import (
    DraftedRows,
    DraftReport,
    GrownRows,
    InnerNodes,
    PageTokens,
    RedraftReport,
    RoundResult,
    RoundSelection,
    SlotState,
    VerifyInputs,
)
from smc.stops import StopTables
from smc.types import BOTH_MODELS, ModelRole

Share = Callable[[Tensor], None]
"""Replaces the values of a tensor by those of the leader, on every rank."""


OBSERVED_ROOTS = 64
"""Maximum number of roots of a round whose log q is kept, to fit the exponent of coupled drafting. Draws after further
roots are not observed."""


@dataclass(frozen=True)
class RoundReports:
    """What the host learns of a round from all models that took part."""

    by_model: dict[ModelRole, RoundResult[np.ndarray] | DraftReport[np.ndarray]]

    @property
    def result(self) -> RoundResult[np.ndarray]:
        """The report of the target, or of the model that decodes alone."""
        return next(report for report in self.by_model.values() if isinstance(report, RoundResult))

    @property
    def draft(self) -> DraftReport[np.ndarray] | None:
        """The draft's report about a round of both models; None: it was a round of one."""
        return next((report for report in self.by_model.values() if isinstance(report, DraftReport)), None)


class RoundExecutor(Protocol):
    """Carries out rounds, in the order in which they are requested."""

    pipelined: bool
    """A round runs without waiting for its result to be read, so that the next one can be requested meanwhile."""

    def join(self, role: ModelRole, group: SequenceHandoff) -> None:
        """Let particles take part at this model from the next round on."""
        ...

    def round(self, plan: RoundPlan[np.ndarray]) -> Pending[RoundReports]:
        """Request a round."""
        ...


@dataclass(frozen=True)
class RequestedRound:
    """A round that has been requested from its models."""

    readings: dict[ModelRole, Pending | AsyncResult]

    def result(self) -> RoundReports:
        """Wait for the round and return its outcome."""
        # Each result takes the time at which its own wait ends, from which `spans` counts back.
        return RoundReports({role: reading.result() for role, reading in self.readings.items()})

    def failures(self) -> Mapping[int, str]:
        """See `Pending.failures`."""
        return {group: why for reading in self.readings.values() for group, why in reading.failures().items()}

    def spans(self) -> dict[str, tuple[int, int]]:
        """See `Pending.spans`."""
        return {name: span for reading in self.readings.values() for name, span in reading.spans().items()}


class LocalRoundExecutor:
    """Both models in this process: on one device, or on two."""

    def __init__(
        self,
        config: EngineConfig,
        workers: Mapping[ModelRole, ModelWorker],
        ops: RoundOps,
        share: Share | None = None,
    ) -> None:
        """`share`: see `Channel.share`; None if this process holds the whole models."""
        draft, target = workers[ModelRole.DRAFT], workers[ModelRole.TARGET]
        stages = ops.stage_runner(target.device)
        # In lockstep the models of one device take turns, so they use one stream. In look-ahead they work at a time.
        takes_turns = draft.device == target.device and not config.lookahead
        of_draft = stages.beside() if takes_turns else ops.stage_runner(draft.device)
        self.stages = {ModelRole.DRAFT: of_draft, ModelRole.TARGET: stages}
        channels = LocalChannel.between(of_draft, stages, share)
        # What a runner allocates is filled in the order of its own work.
        with of_draft.working():
            self._draft = DraftRunner(config, draft, ops, of_draft, channels[0])
        with stages.working():
            self._target = TargetRunner(config, target, ops, stages, channels[1])
        self.runners: dict[ModelRole, DraftRunner | TargetRunner] = {
            ModelRole.DRAFT: self._draft,
            ModelRole.TARGET: self._target,
        }
        self.pipelined = self.stages[ModelRole.TARGET].records

    def join(self, role: ModelRole, group: SequenceHandoff) -> None:
        self.runners[role].join(group)

    def round(self, plan: RoundPlan[np.ndarray]) -> RequestedRound:
        if plan.kind.roles != BOTH_MODELS:
            (role,) = plan.kind.roles
            return RequestedRound({role: self.runners[role].round(plan)})
        self._target.begin(plan)
        self._draft.draft(plan)
        target = self._target.round(plan)
        return RequestedRound({ModelRole.DRAFT: self._draft.remap(), ModelRole.TARGET: target})


class OneModelExecutor:
    """One model in this process: its part in rounds. The other model, if a round has one, is in another process."""

    def __init__(self, runner: DraftRunner | TargetRunner) -> None:
        self._runner = runner

    def join(self, role: ModelRole, group: SequenceHandoff) -> None:
        self._runner.join(group)

    def round(self, plan: RoundPlan[np.ndarray]) -> RequestedRound:
        return RequestedRound({self._runner.worker.name: self._runner.round(plan)})


class PlanBuffer:
    """Memory for the arrays of plans of one kind, in one piece, so that one copy brings a plan to a device."""

    def __init__(self, plan: RoundPlan[np.ndarray], device: torch.device) -> None:
        memory = FieldMemory(plan.parts)
        # Used in turn: the next plan is written while those before it are still being copied.
        pinned, nbytes = device.type == "cuda", memory.nbytes
        hosts = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(IN_FLIGHT if pinned else 1)]
        copied = [torch.cuda.Event() if pinned else None for _ in hosts]
        arrays = [map_tensors(Tensor.numpy, memory.views(host)) for host in hosts]
        self._hosts = cycle(zip(hosts, arrays, copied))
        self._there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._tensors = memory.views(self._there)

    def load(self, plan: RoundPlan[np.ndarray]) -> RoundPlan[Tensor]:
        """Copy a plan to the device. Returns it over tensors that are the same in every call. Waits only where the
        device has not yet copied the plan whose host memory is next. Nobody reads the results of a rank that does not
        lead: if a kind of round has no sums over ranks, nothing else bounds how far it falls behind."""
        host, arrays, copied = next(self._hosts)
        if copied is not None:
            copied.synchronize()
        map_tensors(np.copyto, arrays, plan.parts)
        self._there.copy_(host, non_blocking=True)
        if copied is not None:
            copied.record()
        return replace(cast(Any, plan), **dict(zip(PARTS, self._tensors)))


class ModelRunner:
    """One model's part in rounds: the state of all slots, and decoding with this model alone."""

    def __init__(
        self, config: EngineConfig, worker: ModelWorker, ops: RoundOps, stages: StageRunner, pending: int
    ) -> None:
        """`pending`: maximum number of tokens that are still to be run when a round begins."""
        self.config, self.worker, self.stages = config, worker, stages
        # Prompts use the same runner as rounds, so that later work finds what they have written.
        worker.stages, worker.ops = stages, ops
        stop_tables = StopTables.allocate(config.max_stops, worker.vocab_size, worker.token_bytes, worker.device)
        self.state = SlotState.allocate(config.max_slots, worker.width, pending, stop_tables, worker.device)
        self._forward = ops.forward(worker)
        self._sampling = ops.sampling(worker.vocab_size)
        self._biases = LogitBiases(config.max_stops, worker.vocab_size, worker.device)
        self._all_biases = [self._biases]
        beside_B = torch.zeros(worker.pages + 1, dtype=torch.int32, device=worker.device)
        self._page_tokens = PageTokens(torch.zeros_like(beside_B), worker.vocab_size)
        self._masks = TokenMasks(Compiler.of(worker.token_bytes), self.state, self._page_tokens, stages, worker.sharing)
        self._run = GuidedPass(
            forward=self._forward,
            logits=self._forward.logits,
            state=self.state,
            guide=self._sampling.guide,
            penalise=ops.penalise,
            remap_block_table=ops.remap_block_table,
            role=worker.name,
            beside_B=beside_B,
            page_tokens=self._page_tokens,
        )
        self._alone = DraftStage(
            run=self._run,
            sampling=self._sampling,
            state=self.state,
            ops=ops,
            biases=self._biases.tables,
            nan=torch.full((1,), torch.nan, device=worker.device),
            # The target's plain decoding must not depend on the round's number: exact decoding makes the same draws in
            # other rounds.
            block=config.block,
            by_round=worker.name == ModelRole.DRAFT,
            mixture=0.0,
            purpose=Purpose.TARGET,
        )

    def join(self, group: SequenceHandoff) -> None:
        """Let particles take part from the next round on."""
        with self.stages.working():
            if group.tokens_RL is not None:
                pages_RL, tokens_RL = (
                    to_device(of_RL, self.worker.device) for of_RL in (group.pages_RL, group.tokens_RL)
                )
                self._page_tokens.set(pages_RL, tokens_RL)
            self._masks.join(group)
            self._join(group)

    def _join(self, group: SequenceHandoff) -> None:
        self._enter(group)

    def _enter(self, group: SequenceHandoff) -> Tensor:
        """Write particles to their slots. Returns the slots as an index."""
        if group.machine is not None:
            for biases in self._all_biases:
                biases.set(group.stops, group.machine)
        return self.state.join(group)

    def _load(self, plan: RoundPlan[np.ndarray]) -> RoundPlan[Tensor]:
        """Return the plan on the device. Call it inside `working()`. Raises RuntimeError if a pass of an earlier round
        has failed. Readers of results notice it themselves, but nobody reads those of a rank that does not lead, and
        its rows would no longer be those of the other ranks."""
        self._forward.check()
        device_plan = self.stages.keep(plan.kind, "plan", lambda: PlanBuffer(plan, self.worker.device)).load(plan)
        if plan.weights_A is not None:
            self.stages.run(plan.kind, "reweigh", lambda: self.state.reweigh(device_plan))
        return device_plan

    @torch.inference_mode()
    def _decode(self, plan: RoundPlan[np.ndarray]) -> AsyncResult:
        """Queue a round of K tokens by this model alone."""
        stages = self.stages
        with stages.working():
            device_plan = self._load(plan)
            is_draft = self.worker.name == ModelRole.DRAFT
            distribution = device_plan.draft_distribution if is_draft else device_plan.target_distribution
            began = stages.event()
            if plan.constraints is None:
                result = stages.run(
                    plan.kind,
                    "alone",
                    lambda: self._end_alone(device_plan, self._alone.draft(device_plan, distribution)[1]),
                )
            else:
                _, grown = self._draft_constrained(self._alone, plan, device_plan, distribution)
                result = stages.run(plan.kind, "end", lambda: self._end_alone(device_plan, grown))
            ended = stages.event()
            return self._read(plan.kind, result, {self.worker.name: (began, ended)})

    def _read(
        self, kind: RoundKind, result: RoundResult[Tensor] | DraftReport[Tensor], spans: TimeSpans
    ) -> AsyncResult:
        """Start copying a round's result to the host, with what is known of its masks."""
        masks = self._masks
        spans = spans | masks.take_span(self.worker.name)
        return self.stages.read(kind, result, spans, masks.take_failures(), self._forward.check)

    def _draft_constrained(
        self,
        drafter: DraftStage,
        plan: RoundPlan[np.ndarray],
        device_plan: RoundPlan[Tensor],
        distribution: DistributionSpec[Tensor],
    ) -> tuple[PackedFields[DraftedRows], GrownRows]:
        """Run `DraftStage.draft` with masks. On GPUs the masks of later steps are made only if the plan says so,
        because the host waits for the device in each of these steps."""
        run, masks = partial(self.stages.run, plan.kind), self._masks
        assert plan.constraints is not None and device_plan.constraints is not None, "a round with constrained requests"
        # This copy is queued before everything else of the round, so the host waits for nothing of this round.
        particles = masks.answers(plan, device_plan, pending=True)
        inputs = run("begin", lambda: drafter.begin(device_plan, distribution))
        after = run("pass 0", lambda: drafter.run_pending(device_plan, inputs))
        mask_AW = masks.of_particles(plan, particles)
        grown = [run("extend 0", lambda: drafter.extend(device_plan, inputs, after, 0, mask_RW=mask_AW))]
        steps = plan.kind.steps or drafter.block
        if self.stages.records and not plan.kind.every_step:
            steps = 1
        for step in range(1, steps):
            before = grown[-1]
            masks_of_rows = masks.of_rows(plan, before.tree, before.last, step, particles)
            after = run(f"pass {step}", partial(drafter.run_rows, device_plan, inputs, before))
            mask_XW = masks_of_rows()
            extend = partial(drafter.extend, device_plan, inputs, after, step, before, mask_XW)
            grown.append(run(f"extend {step}", extend))
        return run("rest", lambda: drafter.finish(device_plan, inputs, tuple(grown)))

    def _end_alone(self, plan: RoundPlan[Tensor], grown: GrownRows) -> RoundResult[Tensor]:
        drafter, state, slot_A = self._alone, self.state, plan.arrays.slot_A
        tree = grown.tree
        index_A = plan.index_of_rows(1)
        zero_A, alive_A = torch.zeros_like(slot_A), state.alive_S[slot_A]
        selection = RoundSelection(
            particles=NextParticles(index_A, index_A, alive_A, zero_A.double()),
            taken_A=tree.count_X,
            cut_A=zero_A,
            bonus_A=zero_A - 1,
            ended_A=tree.ended_X,
            text_A=tree.text_X,
        )
        lineage = drafter.remap(plan, grown, selection).lineage
        logq_AK = tree.logq_XK
        exists_AK = torch.arange(drafter.block, device=slot_A.device) < tree.count_X[:, None]
        nan_G = plan.any_of_group((torch.isnan(logq_AK) & exists_AK).any(-1))
        zero_G = torch.zeros_like(plan.arrays.threshold_G)
        never_G = zero_G > 0
        return RoundResult(
            selection=selection,
            grown_AQ=tree.tokens_XK,
            logq_AQ=logq_AK,
            logp_AQ=torch.cat((logq_AK, logq_AK[:, :1]), 1),
            first_logp_A=torch.full_like(logq_AK[:, 0], torch.nan),
            raw_logp_AQ=logq_AK[:, :0] if grown.raw_logp_XK is None else grown.raw_logp_XK,
            statistics=SelectionStatistics(zero_G, zero_G + 1, never_G, never_G),
            draft_nan_G=nan_G if self.worker.name == ModelRole.DRAFT else never_G,
            target_nan_G=nan_G if self.worker.name == ModelRole.TARGET else never_G,
            hit_G=never_G,
            lineage=lineage,
        )


class DraftRunner(ModelRunner):
    """The draft's part in rounds: drafts rows, then follows the target's selection."""

    def __init__(
        self, config: EngineConfig, worker: ModelWorker, ops: RoundOps, stages: StageRunner, channel: Channel
    ) -> None:
        super().__init__(config, worker, ops, stages, pending=config.begin_tokens)
        self._channel = channel
        run, biases, head = self._run, self._biases.tables, worker.draft_head
        sampling: Sampling | HeadSampling = self._sampling
        if head is not None:
            sampling = ops.head_sampling(head.vocab, worker.device)
            run = replace(
                run,
                logits=partial(self._forward.logits, head=head.matrix),
                page_tokens=self._page_tokens._replace(ids_M=sampling.ids_M),
            )
            own_biases = LogitBiases(config.max_stops, len(head.vocab.ids_M), worker.device, head.vocab.ids_M)
            self._all_biases.append(own_biases)
            biases = own_biases.tables
        nodes = None
        if config.lookahead and config.block > 1:
            nodes = InnerNodes.allocate(config.max_slots, config.block, sampling.columns, worker.device)
        self._chains = DraftedChains(config, worker.vocab_size, worker.device)
        self._drafter = replace(
            self._alone,
            run=run,
            sampling=sampling,
            biases=biases,
            by_round=True,
            mixture=config.defensive_share,
            purpose=Purpose.PROPOSAL,
            kept_RV=torch.empty(min(config.max_slots, OBSERVED_ROOTS), sampling.columns, device=worker.device),
            inner_nodes=nodes,
            chains=self._chains,
        )
        self._round: tuple[RoundPlan[Tensor], GrownRows, TimeSpans] | None = None
        self._redrafted: RedraftReport[Tensor] | None = None
        """What the round that `draft` began has drafted again."""

    def round(self, plan: RoundPlan[np.ndarray]) -> AsyncResult:
        """Queue the draft's part of a round. The result is a `DraftReport` for a round of both models, otherwise a
        `RoundResult`."""
        if plan.kind.roles == (ModelRole.DRAFT,):
            return self._decode(plan)
        self.draft(plan)
        return self.remap()

    @torch.inference_mode()
    def draft(self, plan: RoundPlan[np.ndarray]) -> None:
        """Queue the draft's part of a round of both models, up to the selection."""
        stages, drafter, kind = self.stages, self._drafter, plan.kind
        with stages.working():
            self._channel.settle()
            device_plan = self._load(plan)
            chains, ahead = len(plan.arrays.chain_P), self.config.lookahead
            if chains and ahead and self.config.block > 1:
                stages.run(kind, "distributions", lambda: self._chains.gather_sent(device_plan))
                self._channel.send(kind, "distributions", self._chains.sent(chains), keeps=True)
            spans: TimeSpans = {}
            if kind.redrafted:
                begins = stages.event()
                self._redrafted = self._redraft(device_plan)
                spans["redraft"] = (begins, stages.event())
            began = stages.event()
            if plan.constraints is None:
                drafted, grown = stages.run(
                    kind, "draft", lambda: drafter.draft(device_plan, device_plan.draft_distribution)
                )
            else:
                drafted, grown = self._draft_constrained(drafter, plan, device_plan, device_plan.draft_distribution)
            ended = stages.event()
            if chains and not ahead:
                self._channel.send(kind, "distributions", self._chains.sent(chains), keeps=True)
            self._channel.send(kind, "rows", drafted.memory)
        self._round = (device_plan, grown, spans | {ModelRole.DRAFT.value: (began, ended)})

    def _redraft(self, plan: RoundPlan[Tensor]) -> RedraftReport[Tensor]:
        """Draft again for groups after a miss, and send their blocks."""
        stages, drafter, kind = self.stages, self._drafter, plan.kind
        nodes = drafter.inner_nodes
        assert nodes is not None, "a round of look-ahead with blocks of several tokens"
        start = stages.run(kind, "begin again", lambda: begin_redraft(self.state, nodes, plan))
        again, host_waits = partial(drafter.redraft, plan, start), self._channel.host_waits
        stages.run_if(start.any_1, kind, "draft again", again, host_waits=host_waits)
        self._channel.send(kind, "blocks", start.message.memory)
        return report_of(start)

    @torch.inference_mode()
    def remap(self) -> AsyncResult:
        """Queue the rest of the round that `draft` began: the selected rows become the particles."""
        assert self._round is not None, "what is followed has been drafted"
        plan, grown, spans = self._round
        with self.stages.working():
            memory = RoundSelection.memory(plan.kind.batch_size)
            message = self._channel.receive(plan.kind, "selection", (memory.nbytes,), torch.uint8)
            report = self.stages.run(plan.kind, "remap", lambda: self._remap(plan, grown, memory.views(message)))
            redrafted = self._redrafted if plan.kind.redrafted else None
            return self._read(plan.kind, report._replace(redrafted=redrafted), spans)

    def _remap(
        self, plan: RoundPlan[Tensor], grown: GrownRows, selection: RoundSelection[Tensor]
    ) -> DraftReport[Tensor]:
        if self.config.lookahead and len(plan.arrays.chain_P):
            self._chains.follow(plan, selection.particles.row_A)
        return self._drafter.remap(plan, grown, selection)

    def _join(self, group: SequenceHandoff) -> None:
        slots_N = self._enter(group)
        if self._drafter.inner_nodes is not None:
            self._drafter.inner_nodes.forget(slots_N)


@dataclass(frozen=True)
class QueuedPass:
    """The target's queued pass of a constrained round, for which the host still makes masks."""

    plan: RoundPlan[Tensor]
    inputs: VerifyInputs
    after: PassLogits
    """Logits after all tokens."""
    masks: Callable[[], Tensor]
    """Waits for the tokens that the masks depend on, and returns the masks."""
    span: tuple[Event, Event]
    """When the pass began and ended."""


class TargetRunner(ModelRunner):
    """The target's part in rounds: verifies blocks and selects."""

    def __init__(
        self, config: EngineConfig, worker: ModelWorker, ops: RoundOps, stages: StageRunner, channel: Channel
    ) -> None:
        super().__init__(config, worker, ops, stages, pending=config.target_tokens)
        self._channel = channel
        sampling, state = self._sampling, self.state
        chains = config.chains(worker.vocab_size)
        self._verify = VerifyStage(
            self._run,
            sampling,
            state,
            ops,
            self._biases.tables,
            block=config.block,
            lookahead=config.lookahead,
            chains=chains,
        )
        self._select = SelectStage(sampling, state, ops, lookahead=config.lookahead)
        self._queued: QueuedPass | None = None
        """The pass that `begin` has queued."""

    @torch.inference_mode()
    def begin(self, plan: RoundPlan[np.ndarray]) -> None:
        """Queue the pass of a constrained round in look-ahead, which needs nothing that this round drafts. So the
        target works while the host waits for the tokens that the draft's masks depend on. Other rounds begin in
        `round`."""
        self._queued = None
        if plan.kind.roles != BOTH_MODELS or plan.constraints is None or not self.config.lookahead:
            return
        with self.stages.working():
            self._channel.settle()
            self._queued = self._queue_pass(plan, self._load(plan), None)

    @torch.inference_mode()
    def round(self, plan: RoundPlan[np.ndarray]) -> AsyncResult:
        """Queue the target's part of a round, or what remains of it after `begin`. In look-ahead the pass comes before
        the drafted rows are received; in lockstep it runs over them."""
        if plan.kind.roles == (ModelRole.TARGET,):
            return self._decode(plan)
        if self._queued is None:
            self.begin(plan)
        stages, verify, kind = self.stages, self._verify, plan.kind
        queued, self._queued = self._queued, None
        with stages.working():
            if queued is None:
                self._channel.settle()
            device_plan = self._load(plan) if queued is None else queued.plan
            self._receive_distributions(device_plan)
            if kind.redrafted:
                blocks = self._receive(kind, "blocks", kind.batch_size)
                stages.run(kind, "blocks", lambda: verify.redrafted(device_plan, blocks()))
            drafted = None if self.config.lookahead else self._receive_rows(kind)
            if queued is None and plan.constraints is not None:
                queued = self._queue_pass(plan, device_plan, drafted)
            if queued is None:
                began = stages.event()
                verified = stages.run(kind, "verify", lambda: verify.verify(device_plan, drafted and drafted()))
                span = (began, stages.event())
            else:
                inputs, after, mask_TW, span = queued.inputs, queued.after, queued.masks(), queued.span
                verified = stages.run(
                    kind, "read logits", lambda: verify.read_logits(device_plan, inputs, after, mask_TW)
                )
            if verified.nodes is not None:
                device_plan = device_plan.with_target_pages(verified.nodes.pages_AQ)
            rows = self._receive_rows(kind) if drafted is None else drafted
            heard = stages.event()
            applied = stages.run(kind, "select", lambda: self._select.select(device_plan, verified, rows()))
            selected = stages.event()
            self._channel.send(kind, "selection", self._channel.share(applied.memory))
            sent = stages.event()
            stages.run(kind, "remap", lambda: verify.remap(device_plan, rows(), applied.result.selection))
            spans = {"target": span, "select": (heard, selected), "remap": (sent, stages.event())}
            return self._read(kind, applied.result, spans)

    def _queue_pass(
        self, plan: RoundPlan[np.ndarray], device_plan: RoundPlan[Tensor], drafted: Callable[[], DraftedRows] | None
    ) -> QueuedPass:
        run, verify, began = partial(self.stages.run, plan.kind), self._verify, self.stages.event()
        inputs = run("lay out", lambda: verify.lay_out(device_plan, drafted and drafted()))
        masks = self._masks.of_blocks(plan, device_plan, inputs.blocks)
        after = run("pass", lambda: verify.run_blocks(device_plan, inputs))
        return QueuedPass(device_plan, inputs, after, masks, (began, self.stages.event()))

    def _join(self, group: SequenceHandoff) -> None:
        self._verify.join(group, self._enter(group))

    def _receive_distributions(self, plan: RoundPlan[Tensor]) -> None:
        """Receive the distributions that chains were drawn from, if there are any."""
        here_PKV = self._verify.chains.drawn_PKV[: len(plan.arrays.chain_P)]
        if here_PKV.numel():
            self._channel.receive(plan.kind, "distributions", tuple(here_PKV.shape), here_PKV.dtype, here_PKV)

    def _receive_rows(self, kind: RoundKind) -> Callable[[], DraftedRows]:
        return self._receive(kind, "rows", kind.batch_size * kind.branches)

    def _receive(self, kind: RoundKind, name: str, rows: int) -> Callable[[], DraftedRows]:
        """Receive drafted rows. Returns a function that finds them in the message: stages that are replayed do not ask
        for them."""
        memory = DraftedRows.memory(rows, self.config.block)
        message = self._channel.receive(kind, name, (memory.nbytes,), torch.uint8)
        return cache(lambda: memory.views(message))


class Channel(Protocol):
    """One model's end of the connection between the models. Tensors are on this model's device. Every call is made
    inside `StageRunner.working()`, and none waits for a GPU."""

    host_waits: bool
    """The host waits for every message, so that it may wait for this device, too. The same on every rank."""

    def send(self, key: Hashable, name: str, tensor: Tensor, *, keeps: bool = False) -> None:
        """Send a copy of a tensor under a name: the other model may receive it while the stages of other rounds, or of
        prompts, take its memory. `keeps`: the tensor has memory of its own that does not change until `settle`, and is
        sent without a copy."""
        ...

    def receive(
        self, key: Hashable, name: str, shape: tuple[int, ...], dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        """Return the tensor that the other model sent under this name: in `into`, or by default in a tensor that is
        always the same in rounds of one key."""
        ...

    def share(self, tensor: Tensor) -> Tensor:
        """Replace the tensor's values by those of the leader, on every rank that holds a part of this model. Returns
        the tensor."""
        ...

    def settle(self) -> None:
        """Let what is sent after this call take the memory of what was sent before."""
        ...


class LocalChannel:
    """One end of a channel within a process, between two devices or on one."""

    host_waits = False

    def __init__(self, stages: StageRunner, share: Share | None = None) -> None:
        """`share`: see `Channel.share`; None if this process holds the whole models."""
        self._stages, self._share = stages, share
        self._other = self
        self._sent: dict[str, tuple[Tensor, Event]] = {}
        self._kept: list[Tensor] = []
        """Sent tensors, until the other end has copied them: memory that is freed is reused at once, and the runner may
        release what it keeps."""
        self._received: Event | None = None

    @staticmethod
    def between(one: StageRunner, other: StageRunner, share: Share | None = None) -> tuple[LocalChannel, LocalChannel]:
        ends = LocalChannel(one, share), LocalChannel(other, share)
        ends[0]._other, ends[1]._other = ends[1], ends[0]
        return ends

    def send(self, key: Hashable, name: str, tensor: Tensor, *, keeps: bool = False) -> None:
        sent = tensor if keeps else self._stages.copy_of(key, f"sent {name}", tensor)
        self._sent[name] = (sent, self._stages.event())
        self._kept.append(sent)

    def receive(
        self, key: Hashable, name: str, shape: tuple[int, ...], dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        tensor, there = self._other._sent.pop(name)
        assert tensor.shape == shape and tensor.dtype == dtype, (
            f"{name}: {tensor.shape} {tensor.dtype} was sent, {shape} {dtype} expected"
        )
        self._stages.wait(there)
        here = (
            self._stages.copy_of(key, f"received {name}", tensor)
            if into is None
            else into.copy_(tensor, non_blocking=True)
        )
        self._other._received = self._stages.event()
        return here

    def share(self, tensor: Tensor) -> Tensor:
        if self._share is not None:
            self._share(tensor)
        return tensor

    def settle(self) -> None:
        if self._received is not None:
            self._stages.wait(self._received)
        self._kept.clear()
