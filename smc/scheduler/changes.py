"""How a request of exact decoding changes over: to the target alone, and back to rounds of the pair. When it shall is said by others."""

from __future__ import annotations

from smc.scheduler.methods import TARGET_ALONE, Decoding, decoding_of
from smc.scheduler.prefill import Starts
from smc.scheduler.registry import Registry
from smc.scheduler.sequence_group import Group, Phase


class Changes:
    """Of the requests that a registry knows."""

    def __init__(self, registry: Registry, starts: Starts) -> None:
        self._registry, self._starts = registry, starts
        self.has_draft = True
        """There is one to come back to."""

    def go_alone(self, group: Group) -> None:
        """From now on the target decodes it by itself, whatever phase it is in. Nothing more is asked of the draft for it; rounds of both
        models that are under way are not waited for, and count for nothing."""
        group.turn = None
        if group.alone or group.error:
            return
        if group.phase is Phase.RUNNING:
            self._change(group, TARGET_ALONE, 1)
        elif group.phase is Phase.PREFILL:
            self._starts.go_alone(group, TARGET_ALONE)
        else:
            group.decode_by(TARGET_ALONE)
            group.needs = None

    def rejoin(self, group: Group, rows: int | None = None) -> None:
        """The opposite: as soon as no round of it is under way, the draft runs what it lacks, and the request takes part in rounds of the
        pair again, with so many rows or all it may have. Where there are not enough slots or pages for that, or no draft, it stays as it
        is."""
        if not self.has_draft or group.answer is not None or not self._fits_pair(group):
            return
        rows = rows or group.most_rows
        if group.alone and group.phase is not Phase.QUEUED:
            group.turn = rows
        elif group.alone:
            group.decode_by(decoding_of(group.params), rows)
            group.needs = None

    def take_turns(self) -> None:
        """Those that shall change, and of which no round is under way, do."""
        for group in [group for group in self._registry.admitted if group.turn is not None]:
            if group.phase is Phase.RUNNING and not group.in_flight:
                self._change(group, *group.turned)
                group.turn = None

    def _fits_pair(self, group: Group) -> bool:
        """Another draft may have fewer pages than the one that a request was let in with."""
        config, capacity = self._starts.config, self._starts.memory.capacity
        needs = decoding_of(group.params).most_pages(config, group.params, group.prompt_size, negative=group.negative_size)
        return all(pages <= capacity[side] for side, pages in needs.items())

    def _change(self, group: Group, decoding: Decoding, rows: int) -> None:
        rounds = self._registry.cohorts[group.decoding.program]
        if not group.error and not self._registry.complete(group) and self._starts.change(group, decoding, rows):
            rounds.leave(group)
