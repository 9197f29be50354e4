"""The engine's batches and results as protobuf messages, and back. Layout: proto/smc/v1/particles.proto."""

from __future__ import annotations

import numpy as np

from services.pb import particles_pb2 as pb
from smc.engine.messages import ExtendBatch, ExtendResult, Keys, Pending, Rows, SampleBatch, SampleResult
from smc.kv.tables import PrefixMerge, RowMoves
from smc.laws import LawSpec
from smc.philox import Purpose

_I32, _I64, _F32 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")


def move_command(moves: RowMoves) -> pb.MoveCommand:
    return pb.MoveCommand(dst=_bytes(moves.dst_M, _I32), src=_bytes(moves.src_M, _I32), start=_bytes(moves.start_M, _I32))


def to_moves(command: pb.MoveCommand) -> RowMoves:
    return RowMoves(_i32(command.dst), _i32(command.src), _i32(command.start))


def merge_command(merge: PrefixMerge) -> pb.MergeCommand:
    arrays = {"dst": merge.dst_M, "src": merge.src_M, "start": merge.start_M, "end": merge.end_M}
    return pb.MergeCommand(**{name: _bytes(array, _I32) for name, array in arrays.items()})


def to_merge(command: pb.MergeCommand) -> PrefixMerge:
    return PrefixMerge(_i32(command.dst), _i32(command.src), _i32(command.start), _i32(command.end))


def sample_command(batch: SampleBatch) -> pb.SampleCommand:
    return pb.SampleCommand(
        input=_rows(batch.input),
        branch_rows=_bytes(batch.branch_rows_RF, _I32),
        steps=batch.steps,
        law=law_message(batch.law),
        mixture=batch.mixture,
        keys=_keys(batch.keys),
        publish=batch.publish,
    )


def to_sample_batch(command: pb.SampleCommand) -> SampleBatch:
    rows = _to_rows(command.input)
    return SampleBatch(
        input=rows,
        branch_rows_RF=_i32(command.branch_rows).reshape(len(rows.rows_R), -1),
        steps=command.steps,
        law=to_law(command.law),
        mixture=command.mixture,
        keys=_to_keys(command.keys),
        publish=command.publish,
    )


def sample_outcome(result: SampleResult) -> pb.SampleOutcome:
    _, branches, steps = result.tokens_RFK.shape
    tokens, logq = _bytes(result.tokens_RFK, _I32), _bytes(result.logq_RFK, _F32)
    return pb.SampleOutcome(tokens=tokens, logq=logq, branches=branches, steps=steps)


def to_sample_result(outcome: pb.SampleOutcome) -> SampleResult:
    shape = (-1, outcome.branches, outcome.steps)
    return SampleResult(_i32(outcome.tokens).reshape(shape), _f32(outcome.logq).reshape(shape))


def extend_command(batch: ExtendBatch, published: int = 0, shape_RF: tuple[int, int] = (0, 0)) -> pb.ExtendCommand:
    """`published`: sequence number of the sample command that `batch.next_of` stands for; `shape_RF`: of its first tokens."""
    command = pb.ExtendCommand(input=_rows(batch.input), published=published)
    if batch.labels_T is not None:
        command.labels = _bytes(batch.labels_T, _I32)
    if batch.draws is not None:
        command.draws.CopyFrom(_keys(batch.draws))
    if batch.law is not None:
        command.law.CopyFrom(law_message(batch.law))
    if published:
        command.published_rows, command.published_branches = shape_RF
        command.next_index = _bytes(batch.next_index_R, _I32)
    return command


def to_extend_batch(command: pb.ExtendCommand, next_of: Pending[SampleResult] | None) -> ExtendBatch:
    return ExtendBatch(
        input=_to_rows(command.input),
        labels_T=_i32(command.labels).astype(np.int64) if command.HasField("labels") else None,
        draws=_to_keys(command.draws) if command.HasField("draws") else None,
        next_of=next_of,
        next_index_R=_i32(command.next_index).astype(np.int64) if next_of is not None else None,
        law=to_law(command.law) if command.HasField("law") else None,
    )


_OUTCOME = {"logp": "logp_T", "next_logp": "next_logp_RF", "drawn": "drawn_RD", "drawn_logp": "drawn_logp_RD", "log_z": "log_z_R"}
_WIDE = ("next_logp", "drawn", "drawn_logp")


def extend_outcome(result: ExtendResult) -> pb.ExtendOutcome:
    outcome = pb.ExtendOutcome()
    for name, attribute in _OUTCOME.items():
        array = getattr(result, attribute)
        if array is not None:
            setattr(outcome, name, _bytes(array, _I32 if name == "drawn" else _F32))
            if name in _WIDE:
                outcome.width = array.shape[1]
    return outcome


def to_extend_result(outcome: pb.ExtendOutcome) -> ExtendResult:
    arrays = {}
    for name, attribute in _OUTCOME.items():
        if outcome.HasField(name):
            array = (_i32 if name == "drawn" else _f32)(getattr(outcome, name))
            arrays[attribute] = array.reshape(-1, outcome.width) if name in _WIDE else array
    return ExtendResult(**arrays)


def _rows(rows: Rows) -> pb.RowBatch:
    arrays = {
        "rows": rows.rows_R,
        "starts": rows.starts_R,
        "counts": rows.counts_R,
        "tokens": rows.tokens_T,
        "bounds": rows.bounds_S,
        "shared": rows.shared_S,
    }
    return pb.RowBatch(**{name: _bytes(array, _I32) for name, array in arrays.items()})


def _to_rows(batch: pb.RowBatch) -> Rows:
    wide = (_i32(array).astype(np.int64) for array in (batch.tokens, batch.bounds, batch.shared))
    return Rows(_i32(batch.rows), _i32(batch.starts), _i32(batch.counts), *wide)


def law_message(law: LawSpec) -> pb.Law:
    return pb.Law(
        temperature=_bytes(law.temperature_R, _F32),
        top_k=_bytes(law.top_k_R, _I32),
        top_p=_bytes(law.top_p_R, _F32),
        min_p=_bytes(law.min_p_R, _F32),
        alpha=_bytes(law.alpha_R, _F32),
    )


def to_law(law: pb.Law) -> LawSpec:
    return LawSpec.of(_f32(law.temperature), _i32(law.top_k).astype(np.int64), _f32(law.top_p), _f32(law.min_p), _f32(law.alpha))


def _keys(keys: Keys) -> pb.RandomKeys:
    arrays = {"round": keys.round_R, "stream": keys.stream_RD}
    return pb.RandomKeys(
        seed=_bytes(keys.seed_R, _I64), purpose=int(keys.purpose), **{name: _bytes(array, _I32) for name, array in arrays.items()}
    )


def _to_keys(keys: pb.RandomKeys) -> Keys:
    seed_R = np.frombuffer(keys.seed, dtype=_I64)
    return Keys(
        seed_R,
        _i32(keys.round).astype(np.int64),
        _i32(keys.stream).astype(np.int64).reshape(len(seed_R), -1),
        Purpose(keys.purpose),
    )


def _bytes(array: np.ndarray, dtype: np.dtype) -> bytes:
    return array.astype(dtype, copy=False).tobytes()


def _i32(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=_I32).copy()  # a view would be read-only, which torch does not take


def _f32(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=_F32).copy()
