"""Converts the engine's commands to workers, and their results, to protobuf messages and back. Layout:
proto/smc/internal/v1/particles.proto."""

from __future__ import annotations

from typing import Any

import numpy as np

from services.pb import particles_pb2 as pb
from smc.algorithm.expansion import PopulationKind
from smc.api.constraint import Constraint
from smc.distributions import DistributionSpec
from smc.executor.messages import DraftReport, Draws, Lineage, PromptBatch, PromptResult, RoundResult, TopLogprobsSpec
from smc.executor.plan import (
    ConstrainedRows,
    Contexts,
    Penalties,
    Program,
    RoundPlan,
    SequenceHandoff,
    UnconditionalRows,
)
from smc.philox import Purpose
from smc.stops import StopMachine

_PLAN = {
    "slot": ("slot_A", "<i4"),
    "group": ("group_A", "<i4"),
    "particle": ("particle_A", "<i4"),
    "seed": ("seed_A", "<i8"),
    "round": ("round_A", "<i4"),
    "alpha": ("alpha_A", "<f8"),
    "exponent": ("exponent_A", "<f4"),
    "first": ("first_G", "<i4"),
    "size": ("size_G", "<i4"),
    "count": ("count_G", "<i4"),
    "draws": ("draws_G", "<i4"),
    "shared": ("shared_G", "<i4"),
    "threshold": ("threshold_G", "<f8"),
    "kind": ("kind_G", "<i4"),
    "chain": ("chain_C", "<i4"),
    "chain_distribution": ("distribution_C", "<i4"),
    "scheme": ("scheme_G", "<i4"),
    "target_pages": ("target_pages_AQ", "<i4"),
    "begin_pages": ("begin_pages_AP", "<i4"),
    "branch_pages": ("branch_pages_XB", "<i4"),
}
"""Field of the message -> attribute of `RoundPlan`, and NumPy type in the message. The tables below are alike."""
_WIDE = ("slot", "group", "particle", "round", "chain", "chain_distribution")
"""Fields that are int64 in `RoundPlan`."""
_UNCONDITIONAL = {
    "scale": ("scale_A", "<f4"),
    "of": ("of_A", "<i4"),
    "index": ("index_U", "<i4"),
    "slot": ("slot_U", "<i4"),
    "shift": ("shift_U", "<i4"),
    "group": ("group_U", "<i4"),
    "first": ("first_U", "<i4"),
    "size": ("size_U", "<i4"),
    "shared": ("shared_U", "<i4"),
    "pages": ("pages_UW", "<i4"),
}
_PENALTIES = {
    "presence": ("presence_A", "<f4"),
    "frequency": ("frequency_A", "<f4"),
    "repetition": ("repetition_A", "<f4"),
    "prompt": ("prompt_A", "<i8"),
}
_CONSTRAINTS = {"entry": ("entry_A", "<i4"), "prompt": ("prompt_A", "<i8"), "by_answer": ("by_answer_A", "|b1")}
_JOIN = {
    "slots": ("slots_N", "<i4"),
    "pages": ("pages_XL", "<i4"),
    "end": ("end_N", "<i4"),
    "pending_tokens": ("pending_NQ", "<i4"),
    "pending": ("pending_N", "<i4"),
    "logq": ("logq_NQ", "<f4"),
    "ended": ("ended_N", "|b1"),
    "alive": ("alive_N", "|b1"),
    "text": ("text_N", "<i4"),
    "weights": ("logw_N", "<f8"),
}
_RESULT = {
    "ancestor": ("ancestor_A", "<i4"),
    "alive": ("alive_A", "|b1"),
    "cut": ("cut_A", "<i4"),
    "grown": ("grown_AQ", "<i4"),
    "count": ("count_A", "<i4"),
    "ended": ("ended_A", "|b1"),
    "weights": ("logw_A", "<f8"),
    "logq": ("logq_AQ", "<f4"),
    "logp": ("logp_AQ", "<f4"),
    "first_logp": ("first_logp_A", "<f4"),
    "log_z": ("log_z_G", "<f8"),
    "ess": ("ess_G", "<f8"),
    "resampled": ("resampled_G", "|b1"),
    "collapsed": ("collapsed_G", "|b1"),
    "draft_nan": ("draft_nan_G", "|b1"),
    "target_nan": ("target_nan_G", "|b1"),
    "hit": ("hit_G", "|b1"),
}
_LINEAGE = {"path": ("path_AW", "<i4"), "kept": ("kept_A", "<i4"), "dropped": ("dropped_A", "<i4")}


def prompt_command(batch: PromptBatch) -> pb.PromptCommand:
    command = pb.PromptCommand(
        pages=_bytes(batch.pages_X, "<i4"),
        starts=_bytes(batch.starts_R, "<i4"),
        counts=_bytes(batch.counts_R, "<i4"),
        tokens=_bytes(batch.tokens_T, "<i4"),
    )
    if batch.draws is not None:
        command.draws.CopyFrom(_draws_message(batch.draws))
    if batch.top_logprobs is not None:
        command.top_logprobs.CopyFrom(_top_logprobs_message(batch.top_logprobs))
    return command


def to_prompt_batch(command: pb.PromptCommand) -> PromptBatch:
    return PromptBatch(
        pages_X=_array(command.pages, "<i4"),
        starts_R=_array(command.starts, "<i4"),
        counts_R=_array(command.counts, "<i4"),
        tokens_T=_array(command.tokens, "<i4").astype(np.int64),
        draws=_to_draws(command.draws) if command.HasField("draws") else None,
        top_logprobs=_to_top_logprobs(command.top_logprobs) if command.HasField("top_logprobs") else None,
    )


def prompt_outcome(result: PromptResult[np.ndarray]) -> pb.PromptOutcome:
    arrays = {"drawn": (result.drawn_RD, "<i4"), "drawn_logp": (result.drawn_logp_RD, "<f4")}
    arrays |= {"weights": (result.logw_RD, "<f8"), "log_z": (result.log_z_R, "<f4")}
    arrays |= {"top": (result.top_YK, "<i4"), "top_logp": (result.top_logp_YK, "<f4")}
    arrays |= {"given_logp": (result.given_logp_Y, "<f4"), "given_rank": (result.given_rank_Y, "<i4")}
    return pb.PromptOutcome(
        top_logprobs=result.top_YK.shape[1], **{name: _bytes(array, kind) for name, (array, kind) in arrays.items()}
    )


def to_prompt_result(outcome: pb.PromptOutcome) -> PromptResult[np.ndarray]:
    log_z_R = _array(outcome.log_z, "<f4")
    rows = len(log_z_R)
    columns = ((outcome.drawn, "<i4"), (outcome.drawn_logp, "<f4"), (outcome.weights, "<f8"))
    drawn_RD, drawn_logp_RD, logw_RD = (_rows(*column, rows) for column in columns)
    shape = (-1, outcome.top_logprobs) if outcome.top_logprobs else (0, 0)
    top_YK, top_logp_YK = _array(outcome.top, "<i4").reshape(shape), _array(outcome.top_logp, "<f4").reshape(shape)
    given = (_array(outcome.given_logp, "<f4"), _array(outcome.given_rank, "<i4"))
    return PromptResult(drawn_RD, drawn_logp_RD, logw_RD, log_z_R, top_YK, top_logp_YK, *given)


def join_command(group: SequenceHandoff) -> pb.JoinCommand:
    numbers: dict[str, Any] = {name: getattr(group, name) for name in ("base", "limit", "least", "stops")}
    command = pb.JoinCommand(page_rows=len(group.pages_XL), **numbers, **_fields(group, _JOIN))
    if group.tokens_XL is not None:
        command.tokens = _bytes(group.tokens_XL, "<i4")
    if group.machine is not None:
        command.machine.CopyFrom(_machine_message(group.machine))
    return command


def to_join(command: pb.JoinCommand) -> SequenceHandoff:
    arrays = _attributes(command, _JOIN)
    particles = len(arrays["slots_N"])
    rows = {"pages_XL": command.page_rows, "pending_NQ": particles, "logq_NQ": particles}
    arrays |= {name: arrays[name].reshape(count, -1) for name, count in rows.items()}
    machine = _to_machine(command.machine) if command.HasField("machine") else None
    tokens_XL = _rows(command.tokens, "<i4", command.page_rows) if command.HasField("tokens") else None
    numbers = {name: getattr(command, name) for name in ("base", "limit", "least", "stops")}
    return SequenceHandoff(machine=machine, tokens_XL=tokens_XL, **numbers, **arrays)


def _machine_message(machine: StopMachine) -> pb.StopMachine:
    biased, bias = zip(*machine.biases) if machine.biases else ((), ())
    message = pb.StopMachine(token_ids=machine.stop_ids, strings=machine.strings, biased=biased, bias=bias)
    if machine.constraint is not None:
        message.constraint.CopyFrom(_constraint_message(machine.constraint))
    message.bad_words.extend(pb.Word(token_ids=word) for word in machine.bad_words)
    return message


def _to_machine(machine: pb.StopMachine) -> StopMachine:
    constraint = _to_constraint(machine.constraint) if machine.HasField("constraint") else None
    biases = tuple(zip(machine.biased, machine.bias))
    bad_words = [tuple(word.token_ids) for word in machine.bad_words]
    return StopMachine.of(machine.token_ids, list(machine.strings), biases, constraint, bad_words)


def _constraint_message(constraint: Constraint) -> pb.Constraint:
    return pb.Constraint(**vars(constraint))


def _to_constraint(message: pb.Constraint) -> Constraint:
    return Constraint(message.kind, message.text, message.after if message.HasField("after") else None)


def round_command(plan: RoundPlan[np.ndarray]) -> pb.RoundCommand:
    unconditional = plan.target_unconditional
    return pb.RoundCommand(
        program=plan.program,
        contexts=plan.contexts,
        columns=plan.columns,
        biased=plan.biased,
        kinds=sorted(map(int, plan.kinds)),
        branches=plan.branches,
        steps=plan.steps or 0,
        target_distribution=_distribution_message(plan.target_distribution),
        draft_distribution=_distribution_message(plan.draft_distribution),
        **_fields(plan, _PLAN),
        target_unconditional=pb.UnconditionalRows(**_fields(unconditional, _UNCONDITIONAL)) if unconditional else None,
        penalties=pb.Penalties(**_fields(plan.penalties, _PENALTIES)) if plan.penalties else None,
        constraints=_constraints_message(plan.constraints) if plan.constraints else None,
        weights=b"" if plan.weights_A is None else _bytes(plan.weights_A, "<f8"),
    )


def to_plan(command: pb.RoundCommand) -> RoundPlan[np.ndarray]:
    arrays = _attributes(command, _PLAN)
    arrays |= {_PLAN[name][0]: arrays[_PLAN[name][0]].astype(np.int64) for name in _WIDE}
    batch_size = len(arrays["slot_A"])
    arrays["target_pages_AQ"] = _rows(command.target_pages, "<i4", batch_size)
    arrays["begin_pages_AP"] = _rows(command.begin_pages, "<i4", batch_size)
    arrays["branch_pages_XB"] = _rows(command.branch_pages, "<i4", batch_size * command.branches)
    return RoundPlan(
        program=Program(command.program),
        contexts=Contexts(command.contexts),
        columns=command.columns,
        biased=command.biased,
        steps=command.steps or None,
        kinds=frozenset(map(PopulationKind, command.kinds)),
        target_distribution=_to_distribution(command.target_distribution),
        draft_distribution=_to_distribution(command.draft_distribution),
        target_unconditional=_to_unconditional(command.target_unconditional)
        if command.HasField("target_unconditional")
        else None,
        penalties=Penalties(**_attributes(command.penalties, _PENALTIES)) if command.HasField("penalties") else None,
        constraints=_to_constraints(command.constraints) if command.HasField("constraints") else None,
        weights_A=_array(command.weights, "<f8") if command.weights else None,
        **arrays,
    )


def _constraints_message(rows: ConstrainedRows[np.ndarray]) -> pb.ConstrainedRows:
    message = pb.ConstrainedRows(**_fields(rows, _CONSTRAINTS))
    message.every_step, message.has_answers = rows.every_step, rows.has_answers
    return message


def _to_constraints(message: pb.ConstrainedRows) -> ConstrainedRows[np.ndarray]:
    flags = {"every_step": message.every_step, "has_answers": message.has_answers}
    return ConstrainedRows(**_attributes(message, _CONSTRAINTS), **flags)


def _to_unconditional(message: pb.UnconditionalRows) -> UnconditionalRows[np.ndarray]:
    arrays = _attributes(message, _UNCONDITIONAL)
    arrays |= {name: arrays[name].astype(np.int64) for name in ("of_A", "index_U", "slot_U", "shift_U", "group_U")}
    return UnconditionalRows(**arrays | {"pages_UW": _rows(message.pages, "<i4", len(arrays["index_U"]))})


def round_outcome(result: RoundResult[np.ndarray] | DraftReport[np.ndarray]) -> pb.RoundOutcome:
    if isinstance(result, DraftReport):
        return pb.RoundOutcome(**_fields(result.lineage, _LINEAGE), observed=_bytes(result.observed_3A, "<f4"))
    return pb.RoundOutcome(**_fields(result, _RESULT), **_fields(result.lineage, _LINEAGE))


def to_result(outcome: pb.RoundOutcome) -> RoundResult[np.ndarray]:
    arrays = _attributes(outcome, _RESULT)
    batch_size = len(arrays["ancestor_A"])
    arrays |= {name: array.reshape(batch_size, -1) for name, array in arrays.items() if name.endswith("_AQ")}
    return RoundResult(**arrays, lineage=_to_lineage(outcome))


def to_draft_report(outcome: pb.RoundOutcome) -> DraftReport[np.ndarray]:
    return DraftReport(_to_lineage(outcome), _rows(outcome.observed, "<f4", 3))


def _to_lineage(outcome: pb.RoundOutcome) -> Lineage[np.ndarray]:
    kept_A = _array(outcome.kept, "<i4")
    return Lineage(_rows(outcome.path, "<i4", len(kept_A)), kept_A, _array(outcome.dropped, "<i4"))


def _draws_message(draws: Draws) -> pb.Draws:
    guidance = {}
    if draws.unconditional_R is not None and draws.scale_R is not None:
        guidance = {"unconditional": _bytes(draws.unconditional_R, "<i4"), "scale": _bytes(draws.scale_R, "<f4")}
    return pb.Draws(
        **guidance,
        distribution=_distribution_message(draws.distribution),
        seed=_bytes(draws.seed_R, "<i8"),
        round=_bytes(draws.round_R, "<i4"),
        stream=_bytes(draws.stream_RD, "<i4"),
        purpose=int(draws.purpose),
        count=_bytes(draws.count_R, "<i4"),
        kind=_bytes(draws.kind_R, "<i4"),
        biased=_bytes(draws.biased_2Y, "<i4"),
        bias=_bytes(draws.bias_Y, "<f4"),
        seen=_bytes(draws.seen_2Z, "<i4"),
        repetition=_bytes(draws.repetition_Z, "<f4"),
        machines=[_machine_message(machine) for machine in draws.machines if machine is not None],
        masked=_bytes(np.array([row for row, machine in enumerate(draws.machines) if machine is not None]), "<i4"),
        rows=len(draws.machines),
        by_answer=b"" if draws.by_answer_R is None else _bytes(draws.by_answer_R, "|b1"),
    )


def _to_draws(draws: pb.Draws) -> Draws:
    seed_R = _array(draws.seed, "<i8")
    machines = dict(zip(_array(draws.masked, "<i4").tolist(), map(_to_machine, draws.machines)))
    round_R, stream_X = (_array(data, "<i4").astype(np.int64) for data in (draws.round, draws.stream))
    count_R, kind_R = (_array(data, "<i4") for data in (draws.count, draws.kind))
    guidance: dict[str, Any] = (
        {"unconditional_R": _array(draws.unconditional, "<i4"), "scale_R": _array(draws.scale, "<f4")}
        if draws.unconditional
        else {}
    )
    return Draws(
        distribution=_to_distribution(draws.distribution),
        seed_R=seed_R,
        round_R=round_R,
        stream_RD=stream_X.reshape(len(seed_R), -1),
        purpose=Purpose(draws.purpose),
        count_R=count_R,
        kind_R=kind_R,
        biased_2Y=_array(draws.biased, "<i4").reshape(2, -1),
        bias_Y=_array(draws.bias, "<f4"),
        seen_2Z=_array(draws.seen, "<i4").reshape(2, -1),
        repetition_Z=_array(draws.repetition, "<f4"),
        machines=tuple(machines.get(row) for row in range(draws.rows)),
        by_answer_R=_array(draws.by_answer, "|b1") if draws.by_answer else None,
        **guidance,
    )


def _top_logprobs_message(spec: TopLogprobsSpec) -> pb.TopLogprobsSpec:
    guidance = {}
    if spec.unconditional_R is not None and spec.scale_R is not None:
        guidance = {"unconditional": _bytes(spec.unconditional_R, "<i4"), "scale": _bytes(spec.scale_R, "<f4")}
    machines = {row: machine for row, machine in enumerate(spec.machines) if machine is not None}
    given = {} if spec.given_Y is None else {"given": _bytes(spec.given_Y, "<i4")}
    return pb.TopLogprobsSpec(
        **guidance,
        **given,
        distribution=_distribution_message(spec.distribution),
        count=spec.count,
        scored=_bytes(spec.scored_R, "<i4"),
        least=_bytes(spec.least_R, "<i4"),
        biased=_bytes(np.array([*machines]), "<i4"),
        machines=map(_machine_message, machines.values()),
    )


def _to_top_logprobs(spec: pb.TopLogprobsSpec) -> TopLogprobsSpec:
    least_R = _array(spec.least, "<i4")
    machines = dict(zip(_array(spec.biased, "<i4").tolist(), map(_to_machine, spec.machines)))
    guidance = (
        {"unconditional_R": _array(spec.unconditional, "<i4"), "scale_R": _array(spec.scale, "<f4")}
        if spec.unconditional
        else {}
    )
    return TopLogprobsSpec(
        distribution=_to_distribution(spec.distribution),
        count=spec.count,
        scored_R=_array(spec.scored, "<i4"),
        least_R=least_R,
        machines=tuple(machines.get(row) for row in range(len(least_R))),
        given_Y=_array(spec.given, "<i4").astype(np.int64) if spec.given else None,
        **guidance,
    )


def _distribution_message(distribution: DistributionSpec[np.ndarray]) -> pb.Distribution:
    return pb.Distribution(
        temperature=_bytes(distribution.temperature_R, "<f4"),
        top_k=_bytes(distribution.top_k_R, "<i4"),
        top_p=_bytes(distribution.top_p_R, "<f4"),
        min_p=_bytes(distribution.min_p_R, "<f4"),
        alpha=_bytes(distribution.alpha_R, "<f4"),
        active=sorted(distribution.active),
    )


def _to_distribution(distribution: pb.Distribution) -> DistributionSpec[np.ndarray]:
    top_k_R = _array(distribution.top_k, "<i4").astype(np.int64)
    temperature_R, top_p_R, min_p_R, alpha_R = (
        _array(data, "<f4")
        for data in (distribution.temperature, distribution.top_p, distribution.min_p, distribution.alpha)
    )
    return DistributionSpec(temperature_R, top_k_R, top_p_R, min_p_R, alpha_R, active=frozenset(distribution.active))


def _bytes(array: np.ndarray, kind: str) -> bytes:
    return array.astype(kind, copy=False).tobytes()


def _array(data: bytes, kind: str) -> np.ndarray:
    return np.frombuffer(data, dtype=kind).copy()  # a view would be read-only, which torch does not take


def _fields(values: object, table: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Return a message's fields from the arrays of an object."""
    return {name: _bytes(getattr(values, attribute), kind) for name, (attribute, kind) in table.items()}


def _attributes(message: object, table: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Return an object's arrays from the fields of a message. All have one dimension."""
    return {attribute: _array(getattr(message, name), kind) for name, (attribute, kind) in table.items()}


def _rows(data: bytes, kind: str, rows: int) -> np.ndarray:
    return _array(data, kind).reshape(rows, -1) if data else np.zeros((rows, 0), dtype=kind)
