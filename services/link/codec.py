"""Converts the engine's commands to workers, and their results, to protobuf messages and back. Layout:
proto/smc/internal/v1/particles.proto."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

INT32, INT64, FLOAT32, FLOAT64, BOOL = map(np.dtype, ("<i4", "<i8", "<f4", "<f8", "|b1"))
_Table = dict[str, tuple[str, np.dtype] | tuple[str, np.dtype, np.dtype]]
"""Field of a message -> attribute of the object, type of the array in the message and, if it differs, in the object."""
_PLAN: _Table = {
    "slot": ("slot_A", INT32, INT64),
    "group": ("group_A", INT32, INT64),
    "particle": ("particle_A", INT32, INT64),
    "seed": ("seed_A", INT64),
    "round": ("round_A", INT32, INT64),
    "alpha": ("alpha_A", FLOAT64),
    "exponent": ("exponent_A", FLOAT32),
    "first": ("first_G", INT32),
    "size": ("size_G", INT32),
    "count": ("count_G", INT32),
    "draws": ("draws_G", INT32),
    "shared": ("shared_G", INT32),
    "threshold": ("threshold_G", FLOAT64),
    "kind": ("kind_G", INT32),
    "chain": ("chain_C", INT32, INT64),
    "chain_distribution": ("distribution_C", INT32, INT64),
    "scheme": ("scheme_G", INT32),
    "target_pages": ("target_pages_AQ", INT32),
    "begin_pages": ("begin_pages_AP", INT32),
    "branch_pages": ("branch_pages_XB", INT32),
}
_WEIGHTS: _Table = {"weights": ("weights_A", FLOAT64)}
_UNCONDITIONAL: _Table = {
    "scale": ("scale_A", FLOAT32),
    "of": ("of_A", INT32, INT64),
    "index": ("index_U", INT32, INT64),
    "slot": ("slot_U", INT32, INT64),
    "shift": ("shift_U", INT32, INT64),
    "group": ("group_U", INT32, INT64),
    "first": ("first_U", INT32),
    "size": ("size_U", INT32),
    "shared": ("shared_U", INT32),
    "pages": ("pages_UW", INT32),
}
_PENALTIES: _Table = {
    "presence": ("presence_A", FLOAT32),
    "frequency": ("frequency_A", FLOAT32),
    "repetition": ("repetition_A", FLOAT32),
    "prompt": ("prompt_A", INT64),
}
_CONSTRAINTS: _Table = {"entry": ("entry_A", INT32), "prompt": ("prompt_A", INT64), "by_answer": ("by_answer_A", BOOL)}
_JOIN: _Table = {
    "slots": ("slots_N", INT32),
    "pages": ("pages_XL", INT32),
    "end": ("end_N", INT32),
    "pending_tokens": ("pending_NQ", INT32),
    "pending": ("pending_N", INT32),
    "logq": ("logq_NQ", FLOAT32),
    "ended": ("ended_N", BOOL),
    "alive": ("alive_N", BOOL),
    "text": ("text_N", INT32),
    "weights": ("logw_N", FLOAT64),
}
_JOIN_NUMBERS = ("base", "limit", "least", "stops")
_RESULT: _Table = {
    "ancestor": ("ancestor_A", INT32),
    "alive": ("alive_A", BOOL),
    "cut": ("cut_A", INT32),
    "grown": ("grown_AQ", INT32),
    "count": ("count_A", INT32),
    "ended": ("ended_A", BOOL),
    "weights": ("logw_A", FLOAT64),
    "logq": ("logq_AQ", FLOAT32),
    "logp": ("logp_AQ", FLOAT32),
    "first_logp": ("first_logp_A", FLOAT32),
    "log_z": ("log_z_G", FLOAT64),
    "ess": ("ess_G", FLOAT64),
    "resampled": ("resampled_G", BOOL),
    "collapsed": ("collapsed_G", BOOL),
    "draft_nan": ("draft_nan_G", BOOL),
    "target_nan": ("target_nan_G", BOOL),
    "hit": ("hit_G", BOOL),
}
_LINEAGE: _Table = {"path": ("path_AW", INT32), "kept": ("kept_A", INT32), "dropped": ("dropped_A", INT32)}
_PROMPT: _Table = {
    "pages": ("pages_X", INT32),
    "starts": ("starts_R", INT32),
    "counts": ("counts_R", INT32),
    "tokens": ("tokens_T", INT32, INT64),
}
_PROMPT_RESULT: _Table = {
    "drawn": ("drawn_RD", INT32),
    "drawn_logp": ("drawn_logp_RD", FLOAT32),
    "weights": ("logw_RD", FLOAT64),
    "log_z": ("log_z_R", FLOAT32),
    "top": ("top_YK", INT32),
    "top_logp": ("top_logp_YK", FLOAT32),
    "given_logp": ("given_logp_Y", FLOAT32),
    "given_rank": ("given_rank_Y", INT32),
}
_DRAWS: _Table = {
    "seed": ("seed_R", INT64),
    "round": ("round_R", INT32, INT64),
    "stream": ("stream_RD", INT32, INT64),
    "count": ("count_R", INT32),
    "kind": ("kind_R", INT32),
    "biased": ("biased_2Y", INT32),
    "bias": ("bias_Y", FLOAT32),
    "seen": ("seen_2Z", INT32),
    "repetition": ("repetition_Z", FLOAT32),
}
_GUIDANCE: _Table = {"unconditional": ("unconditional_R", INT32), "scale": ("scale_R", FLOAT32)}
_BY_ANSWER: _Table = {"by_answer": ("by_answer_R", BOOL)}
_TOP_LOGPROBS: _Table = {"scored": ("scored_R", INT32), "least": ("least_R", INT32)}
_GIVEN: _Table = {"given": ("given_Y", INT32, INT64)}
_DISTRIBUTION: _Table = {
    "temperature": ("temperature_R", FLOAT32),
    "top_k": ("top_k_R", INT32, INT64),
    "top_p": ("top_p_R", FLOAT32),
    "min_p": ("min_p_R", FLOAT32),
    "alpha": ("alpha_R", FLOAT32),
}


def prompt_command(batch: PromptBatch) -> pb.PromptCommand:
    return pb.PromptCommand(
        **_fields(batch, _PROMPT),
        draws=None if batch.draws is None else _draws_message(batch.draws),
        top_logprobs=None if batch.top_logprobs is None else _top_logprobs_message(batch.top_logprobs),
    )


def to_prompt_batch(command: pb.PromptCommand) -> PromptBatch:
    return PromptBatch(
        **_arrays(command, _PROMPT),
        draws=_to_draws(command.draws) if command.HasField("draws") else None,
        top_logprobs=_to_top_logprobs(command.top_logprobs) if command.HasField("top_logprobs") else None,
    )


def prompt_outcome(result: PromptResult[np.ndarray]) -> pb.PromptOutcome:
    return pb.PromptOutcome(top_logprobs=result.top_YK.shape[1], **_fields(result, _PROMPT_RESULT))


def to_prompt_result(outcome: pb.PromptOutcome) -> PromptResult[np.ndarray]:
    arrays = _arrays(outcome, _PROMPT_RESULT)
    rows = len(arrays["log_z_R"])
    _shape(arrays, drawn_RD=rows, drawn_logp_RD=rows, logw_RD=rows)
    shape = (-1, outcome.top_logprobs) if outcome.top_logprobs else (0, 0)
    arrays |= {name: arrays[name].reshape(shape) for name in ("top_YK", "top_logp_YK")}
    return PromptResult(**arrays)


def join_command(group: SequenceHandoff) -> pb.JoinCommand:
    return pb.JoinCommand(
        page_rows=len(group.pages_XL),
        tokens=None if group.tokens_XL is None else _bytes(group.tokens_XL, INT32),
        machine=None if group.machine is None else _machine_message(group.machine),
        **{name: getattr(group, name) for name in _JOIN_NUMBERS},
        **_fields(group, _JOIN),
    )


def to_join(command: pb.JoinCommand) -> SequenceHandoff:
    arrays = _arrays(command, _JOIN)
    particles = len(arrays["slots_N"])
    if command.HasField("tokens"):
        arrays["tokens_XL"] = _array(command.tokens, INT32)
        _shape(arrays, tokens_XL=command.page_rows)
    _shape(arrays, pages_XL=command.page_rows, pending_NQ=particles, logq_NQ=particles)
    return SequenceHandoff(
        machine=_to_machine(command.machine) if command.HasField("machine") else None,
        **{name: getattr(command, name) for name in _JOIN_NUMBERS},
        **arrays,
    )


def _machine_message(machine: StopMachine) -> pb.StopMachine:
    biased, bias = zip(*machine.biases) if machine.biases else ((), ())
    return pb.StopMachine(
        token_ids=machine.stop_ids,
        strings=machine.strings,
        biased=biased,
        bias=bias,
        constraint=None if machine.constraint is None else pb.Constraint(**vars(machine.constraint)),
        bad_words=[pb.Word(token_ids=word) for word in machine.bad_words],
    )


def _to_machine(machine: pb.StopMachine) -> StopMachine:
    constraint = None
    if machine.HasField("constraint"):
        found = machine.constraint
        constraint = Constraint(found.kind, found.text, found.after if found.HasField("after") else None)
    biases = tuple(zip(machine.biased, machine.bias))
    bad_words = [tuple(word.token_ids) for word in machine.bad_words]
    return StopMachine.of(machine.token_ids, list(machine.strings), biases, constraint, bad_words)


def _machine_fields(machines: Sequence[StopMachine | None], rows_field: str) -> dict[str, Any]:
    """Return the fields of a message with the stop machines of rows. `rows_field`: name of the field with the rows that
    have one."""
    rows = [row for row, machine in enumerate(machines) if machine is not None]
    messages = [_machine_message(machine) for machine in machines if machine is not None]
    return {"machines": messages, rows_field: _bytes(np.array(rows), INT32)}


def _to_machines(rows: bytes, messages: Iterable[pb.StopMachine], count: int) -> tuple[StopMachine | None, ...]:
    """Return the stop machine of each of `count` rows, None for a row without one."""
    machines = dict(zip(_array(rows, INT32).tolist(), map(_to_machine, messages)))
    return tuple(machines.get(row) for row in range(count))


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
        **_fields(plan, _PLAN | _WEIGHTS),
        target_unconditional=pb.UnconditionalRows(**_fields(unconditional, _UNCONDITIONAL)) if unconditional else None,
        penalties=pb.Penalties(**_fields(plan.penalties, _PENALTIES)) if plan.penalties else None,
        constraints=_constraints_message(plan.constraints) if plan.constraints else None,
    )


def to_plan(command: pb.RoundCommand) -> RoundPlan[np.ndarray]:
    arrays = _arrays(command, _PLAN) | _given_arrays(command, _WEIGHTS)
    batch_size = len(arrays["slot_A"])
    _shape(
        arrays,
        target_pages_AQ=batch_size,
        begin_pages_AP=batch_size,
        branch_pages_XB=batch_size * command.branches,
    )
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
        penalties=Penalties(**_arrays(command.penalties, _PENALTIES)) if command.HasField("penalties") else None,
        constraints=_to_constraints(command.constraints) if command.HasField("constraints") else None,
        **arrays,
    )


def _constraints_message(rows: ConstrainedRows[np.ndarray]) -> pb.ConstrainedRows:
    fields = _fields(rows, _CONSTRAINTS)
    return pb.ConstrainedRows(**fields, every_step=rows.every_step, has_answers=rows.has_answers)


def _to_constraints(message: pb.ConstrainedRows) -> ConstrainedRows[np.ndarray]:
    arrays = _arrays(message, _CONSTRAINTS)
    return ConstrainedRows(**arrays, every_step=message.every_step, has_answers=message.has_answers)


def _to_unconditional(message: pb.UnconditionalRows) -> UnconditionalRows[np.ndarray]:
    arrays = _arrays(message, _UNCONDITIONAL)
    _shape(arrays, pages_UW=len(arrays["index_U"]))
    return UnconditionalRows(**arrays)


def round_outcome(result: RoundResult[np.ndarray] | DraftReport[np.ndarray]) -> pb.RoundOutcome:
    if isinstance(result, DraftReport):
        return pb.RoundOutcome(**_fields(result.lineage, _LINEAGE), observed=_bytes(result.observed_3A, FLOAT32))
    return pb.RoundOutcome(**_fields(result, _RESULT), **_fields(result.lineage, _LINEAGE))


def to_result(outcome: pb.RoundOutcome) -> RoundResult[np.ndarray]:
    arrays = _arrays(outcome, _RESULT)
    batch_size = len(arrays["ancestor_A"])
    _shape(arrays, grown_AQ=batch_size, logq_AQ=batch_size, logp_AQ=batch_size)
    return RoundResult(**arrays, lineage=_to_lineage(outcome))


def to_draft_report(outcome: pb.RoundOutcome) -> DraftReport[np.ndarray]:
    return DraftReport(_to_lineage(outcome), _array(outcome.observed, FLOAT32).reshape(3, -1))


def _to_lineage(outcome: pb.RoundOutcome) -> Lineage[np.ndarray]:
    arrays = _arrays(outcome, _LINEAGE)
    _shape(arrays, path_AW=len(arrays["kept_A"]))
    return Lineage(**arrays)


def _draws_message(draws: Draws) -> pb.Draws:
    return pb.Draws(
        distribution=_distribution_message(draws.distribution),
        purpose=int(draws.purpose),
        rows=len(draws.machines),
        **_fields(draws, _DRAWS | _GUIDANCE | _BY_ANSWER),
        **_machine_fields(draws.machines, "masked"),
    )


def _to_draws(draws: pb.Draws) -> Draws:
    arrays = _arrays(draws, _DRAWS) | _given_arrays(draws, _GUIDANCE | _BY_ANSWER)
    _shape(arrays, stream_RD=len(arrays["seed_R"]), biased_2Y=2, seen_2Z=2)
    return Draws(
        distribution=_to_distribution(draws.distribution),
        purpose=Purpose(draws.purpose),
        machines=_to_machines(draws.masked, draws.machines, draws.rows),
        **arrays,
    )


def _top_logprobs_message(spec: TopLogprobsSpec) -> pb.TopLogprobsSpec:
    return pb.TopLogprobsSpec(
        distribution=_distribution_message(spec.distribution),
        count=spec.count,
        **_fields(spec, _TOP_LOGPROBS | _GUIDANCE | _GIVEN),
        **_machine_fields(spec.machines, "biased"),
    )


def _to_top_logprobs(spec: pb.TopLogprobsSpec) -> TopLogprobsSpec:
    arrays = _arrays(spec, _TOP_LOGPROBS) | _given_arrays(spec, _GUIDANCE | _GIVEN)
    return TopLogprobsSpec(
        distribution=_to_distribution(spec.distribution),
        count=spec.count,
        machines=_to_machines(spec.biased, spec.machines, len(arrays["least_R"])),
        **arrays,
    )


def _distribution_message(distribution: DistributionSpec[np.ndarray]) -> pb.Distribution:
    return pb.Distribution(**_fields(distribution, _DISTRIBUTION), active=sorted(distribution.active))


def _to_distribution(distribution: pb.Distribution) -> DistributionSpec[np.ndarray]:
    return DistributionSpec(**_arrays(distribution, _DISTRIBUTION), active=frozenset(distribution.active))


def _bytes(array: np.ndarray, wire: np.dtype) -> bytes:
    return array.astype(wire, copy=False).tobytes()


def _array(data: bytes, wire: np.dtype, held: np.dtype | None = None) -> np.ndarray:
    """Return a one-dimensional array of type `held`; None: of the type `wire`, which it has in the message."""
    view = np.frombuffer(data, wire)
    return view.copy() if held is None else view.astype(held)  # torch does not take the view, which is read-only


def _fields(values: object, table: _Table) -> dict[str, Any]:
    """Return a message's fields from the arrays of an object, without those that are None."""
    fields = {}
    for name, (attribute, wire, *_) in table.items():
        if (array := getattr(values, attribute)) is not None:
            fields[name] = _bytes(array, wire)
    return fields


def _arrays(message: object, table: _Table) -> dict[str, Any]:
    """Return an object's arrays from the fields of a message. All have one dimension."""
    return {attribute: _array(getattr(message, name), *types) for name, (attribute, *types) in table.items()}


def _given_arrays(message: object, table: _Table) -> dict[str, Any]:
    """Like `_arrays`, without arrays whose field is empty: the object has none."""
    return _arrays(message, {name: column for name, column in table.items() if getattr(message, name)})


def _shape(arrays: dict[str, Any], **rows: int) -> None:
    """Give arrays a second dimension. `rows`: the number of rows of each of them."""
    for name, count in rows.items():
        arrays[name] = arrays[name].reshape(count, -1 if count else 0)
