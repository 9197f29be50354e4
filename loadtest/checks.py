"""Checks whether a run was good: the objective, errors, what the run left behind, behaviour under overload. Pure
functions of the measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.monitor import RAY, ServerSample
from loadtest.settings import LoadSettings
from loadtest.summary import RunSummary
from smc.terminal import number

BROKEN = ("INTERNAL", "UNKNOWN", "DATA_LOSS", "UNIMPLEMENTED")
"""Codes that no load excuses."""
REFUSALS = ("RESOURCE_EXHAUSTED", "UNAVAILABLE")
"""Codes that tell a caller to come back later."""
OVERWHELMED = ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "CANCELLED")
"""Codes that load alone explains, and the code of requests that clients cancel."""
OVERLOAD_SHARE = 0.8
"""Share of the capacity that goodput must reach under overload."""
QUEUE_GROWTH = 1.25
"""Maximum factor by which the mean queue grows between the second and the last third of the time in which requests are
sent. A bounded queue has reached its bound by then."""
QUEUE_SLACK = 2.0
"""Number of requests by which a nearly empty queue may grow."""
MEMORY_GROWTH, MEMORY_SLACK = 0.02, 8 << 20
"""Maximum growth of a process's memory in the last two thirds of the time in which requests are sent: a share of the
memory at the beginning of these two thirds, or a number of bytes if that is more."""
COUNT_SLACK = 8
"""Number of additional threads, or open files, that a process may have, because requests come and go."""
ENOUGH_SAMPLES = 9
"""Minimum number of samples for a trend."""


@dataclass(frozen=True)
class RunCheck:
    name: str
    passed: bool | None
    """Whether the check passed; None: it could not be measured."""
    text: str


def check_run(
    summary: RunSummary, settings: LoadSettings, incarnation: int, during: Sequence[ServerSample], after: ServerSample
) -> list[RunCheck]:
    """Check a run. `incarnation`: that of the workers before the run. `during`: samples during the run. `after`: the
    sample after it."""
    checks = [_errors(summary), _workers(incarnation, after)]
    if settings.capacity is not None:
        checks += overload(summary, settings, during)
    elif settings.goodput is not None:
        checks.append(_objective(summary, settings))
    if settings.flat:
        checks += flat([sample for sample in during if sample.at <= summary.last_send], settings.capacity is None)
    return checks + left_behind(after)


def _objective(summary: RunSummary, settings: LoadSettings) -> RunCheck:
    if summary.attainment is None:
        return RunCheck("objective", None, "no ordinary request was sent (neither cancelled nor read slowly)")
    assert settings.goodput is not None
    met = summary.attainment >= settings.attainment
    share = (
        f"{summary.good} of {summary.ordinary} requests ({summary.attainment:.1%}) met it; "
        f"at least {settings.attainment:.1%} must meet it"
    )
    return RunCheck("objective", met, f"{settings.goodput.sentence}: {share}")


def _errors(summary: RunSummary) -> RunCheck:
    broken = {code: count for code, count in summary.codes.items() if code in BROKEN}
    if broken:
        return RunCheck("errors", False, f"failed: {counts(broken)}")
    if summary.ordinary and not summary.completed:
        return RunCheck("errors", False, f"no request was answered: {counts(summary.codes)}")
    return RunCheck("errors", True, f"no request failed with {' or '.join(BROKEN[:2])}: {counts(summary.codes)}")


def overwhelmed(summary: RunSummary) -> bool:
    """Whether no request was answered, for reasons that load alone explains."""
    return not summary.completed and bool(summary.codes) and set(summary.codes) <= set(OVERWHELMED)


def _workers(before: int, after: ServerSample) -> RunCheck:
    name = "no worker was lost"
    if after.incarnation is None:
        return RunCheck(name, None, "the service did not report its incarnation")
    if after.incarnation == before:
        return RunCheck(name, True, f"incarnation {before} before and after")
    change = f"incarnation {before} before, {after.incarnation} after"
    return RunCheck(name, False, f"{change}: the workers were lost and started again")


def overload(summary: RunSummary, settings: LoadSettings, during: Sequence[ServerSample]) -> list[RunCheck]:
    """Check a run above capacity. `settings.capacity` must be given."""
    # After the last request the queue empties and memory may be freed, which says nothing about overload.
    sending = [sample for sample in during if sample.at <= summary.last_send]
    rate, capacity = summary.good_of_sent, settings.capacity
    assert rate is not None and capacity is not None
    share = f"{rate / capacity:.0%} of the capacity of {capacity:g}; at least {OVERLOAD_SHARE:.0%} is required"
    unanswered = {code: n for code, n in summary.codes.items() if code not in ("OK", "CANCELLED", *REFUSALS)}
    refused = counts({code: summary.codes.get(code, 0) for code in REFUSALS})
    answered = f"{summary.completed} answered; refused: {refused}" + (
        f"; neither answered nor refused: {counts(unanswered)}" if unanswered else ""
    )
    return [
        RunCheck(
            "goodput under overload",
            rate >= OVERLOAD_SHARE * capacity,
            f"{rate:.2f} requests/s met the objective, {share}",
        ),
        _queue(sending),
        RunCheck("answered or refused", not unanswered, answered),
        *_memory(sending),
    ]


def left_behind(after: ServerSample) -> list[RunCheck]:
    """Check that the run left nothing behind: nothing runs, nothing waits, and the service reports no leaked KV
    pages."""
    if after.error:
        return [RunCheck("after the run", False, f"the service did not answer: {after.error}")]
    idle = not after.running and not after.queued
    checks = [RunCheck("after the run", idle, f"{after.running} running, {after.queued} waiting")]
    leaked = after.total("smc_kv_pages_leaked")
    text = "not measured; give --metrics" if leaked is None else f"{leaked:g}"
    return [*checks, RunCheck("KV pages leaked", None if leaked is None else leaked == 0, text)]


def _queue(during: Sequence[ServerSample]) -> RunCheck:
    queued = [sample.queued for sample in during if sample.queued is not None]
    if len(queued) < ENOUGH_SAMPLES:
        return _too_few("queue bounded", len(queued), "samples of the queue")
    third = len(queued) // 3
    middle, last = float(np.mean(queued[third:-third])), float(np.mean(queued[-third:]))
    bounded = last <= max(QUEUE_GROWTH * middle, middle + QUEUE_SLACK)
    return RunCheck(
        "queue bounded",
        bounded,
        f"at most {max(queued)} requests waited; on average {middle:.1f} in the second third and {last:.1f} in the "
        "last",
    )


def _memory(during: Sequence[ServerSample]) -> list[RunCheck]:
    """Check the memory of each process of the service, except Ray's own processes."""
    series = memory_series(during)
    if not series:
        return [RunCheck("memory flat", None, "not measured; give --metrics, --watch-pid or --serve")]
    return [_flat(name, times, values) for name, (times, values) in series.items() if name != RAY]


def flat(during: Sequence[ServerSample], memory: bool) -> list[RunCheck]:
    """Check the threads and open files of each process of the service, except Ray's own, and with `memory` also its
    memory."""
    checks = _memory(during) if memory else []
    seen = [sample for sample in during if sample.held]
    if not seen and any(not sample.error for sample in during):  # the service answered, but its process id is unknown
        return [*checks, RunCheck("threads and files flat", None, "not measured; give --watch-pid or --serve")]
    if len(seen) < ENOUGH_SAMPLES:
        return [*checks, _too_few("threads and files flat", len(seen), "samples of the processes")]
    third = len(seen) // 3
    for name in sorted(seen[-1].held.keys() - {RAY}):
        for what in ("threads", "files"):
            middle, last = (
                max(getattr(sample.held[name], what) for sample in part if name in sample.held)
                for part in (seen[third:-third], seen[-third:])
            )
            text = f"at most {middle} in the second third, {last} in the last; allowed: up to {COUNT_SLACK} more"
            checks.append(RunCheck(f"{what} flat: {name}", last <= middle + COUNT_SLACK, text))
    return checks


def memory_series(during: Sequence[ServerSample]) -> dict[str, tuple[list[float], list[float]]]:
    """Return times and resident bytes by process; of the gateway alone if only its metrics are known."""
    series: dict[str, tuple[list[float], list[float]]] = {}
    for sample in during:
        resident = sample.metrics.get("process_resident_memory_bytes")
        known: Mapping[str, float] = {name: held.resident for name, held in sample.held.items()}
        if not known and resident is not None:
            known = {"gateway": resident}
        for name, value in known.items():
            times, values = series.setdefault(name, ([], []))
            times.append(sample.at)
            values.append(value)
    return series


def _flat(name: str, times: list[float], values: list[float]) -> RunCheck:
    """Check the growth of a straight line through a process's memory. The first third, in which buffers grow to their
    size, is left out."""
    title = f"memory flat: {name}"
    if len(values) < ENOUGH_SAMPLES:
        return _too_few(title, len(values), "samples")
    begin = len(values) // 3
    slope = float(np.polyfit(times[begin:], values[begin:], 1)[0])
    growth = slope * (times[-1] - times[begin])
    allowed = max(MEMORY_SLACK, MEMORY_GROWTH * values[begin])
    mib = 1 << 20
    seen = f"{number(60 * slope / mib, '+.2f')} MiB a minute, {values[-1] / mib:.0f} MiB at the end"
    text = f"{seen}; allowed: growth by {allowed / mib:.0f} MiB in the last two thirds of the run"
    return RunCheck(title, growth <= allowed, text)


def _too_few(name: str, count: int, samples: str) -> RunCheck:
    """Return the result of a check for which too few samples were taken. `samples`: what was counted."""
    return RunCheck(
        name,
        None,
        f"{count} {samples} while requests were sent; at least {ENOUGH_SAMPLES} are needed: give a longer --duration "
        "or a shorter --interval",
    )


def counts(codes: dict[str, int]) -> str:
    return ", ".join(f"{count} {code}" for code, count in codes.items()) or "none"
