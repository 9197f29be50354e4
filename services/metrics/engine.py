"""Metrics of the engine: what waits and runs, what memory is held, what rounds bring and where their time goes."""

from __future__ import annotations

import time

from services.metrics.families import GROUPS, Families
from smc.api.sampling_params import VERIFICATIONS
from smc.scheduler.stats import EngineStats, SpecStats

PARTS = ("draft", "target", "link", "coordinator")
ROUND_BUCKETS = (
    0.0002,
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
SHARE_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
LAG_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class EngineMetrics(Families):
    """Methods may be called from any thread."""

    def observe_step(self, stats: EngineStats) -> None:
        """The engine's state after a step, and what happened since the last."""
        self._queued.set(stats.queued)
        self._running.set(stats.running)
        self._slots_free.set(stats.slots_free)
        for group, total in stats.pages_total.items():
            used = stats.pages_used.get(group, 0)
            self._pages_used.labels(group).set(used)
            self._pages_cached.labels(group).set(stats.pages_cached.get(group, 0))
            self._pages_free.labels(group).set(total - used)
            self._pages_capacity.labels(group).set(total)
            self._kv_usage.labels(group).set((used - stats.pages_cached.get(group, 0)) / total if total else 0.0)
            self._prefix_queries.labels(group).inc(stats.prefix_queries.get(group, 0))
            self._prefix_hits.labels(group).inc(stats.prefix_hits.get(group, 0))
        for group, leaked in stats.pages_leaked.items():
            self._pages_leaked.labels(group).set(leaked)
        self._preemptions.inc(stats.preemptions)
        self._shrinks.inc(stats.shrinks)
        self._resamples.inc(stats.resamples)
        self._collapses.inc(stats.collapses)
        for verification, counts in stats.spec.items():
            self._count_exact(verification, counts)
        self._alone_rounds.inc(stats.spec_alone_rounds)
        for share in stats.ess_shares:
            self._ess_share.observe(share)
        for lag in stats.committed_lags:
            self._lag.observe(lag)

    def observe_round(
        self,
        whole: float,
        draft: float,
        target: float,
        link: float,
        coordinator: float,
        draft_stall: float,
        target_stall: float,
    ) -> None:
        """Seconds of one round, and of each of its parts; groups may work at the same time, so parts can exceed the
        whole."""
        self._last_round = time.monotonic()
        self._round.observe(whole)
        for part, seconds in zip(PARTS, (draft, target, link, coordinator), strict=True):
            self._round_part.labels(part).observe(seconds)
        for group, seconds in zip(GROUPS, (draft_stall, target_stall), strict=True):
            self._stall.labels(group).inc(max(seconds, 0.0))

    def _count_exact(self, verification: str, counts: SpecStats) -> None:
        for metric, count in (
            (self._drafts, counts.rounds),
            (self._draft_tokens, counts.draft_tokens),
            (self._accepted_tokens, counts.accepted_tokens),
            (self._hits, counts.hits),
            (self._misses, counts.misses),
            (self._tree_rows, counts.rows),
        ):
            metric.labels(verification).inc(count)
        for position, count in enumerate(counts.accepted_by_position):
            self._accepted_at.labels(verification, position).inc(count)

    def _make_engine_metrics(self) -> None:
        self._queued = self._gauge("smc_requests_queued", "Requests that wait for slots and pages.")
        self._running = self._gauge("smc_requests_running", "Requests that hold slots.")
        self._slots_free = self._gauge("smc_slots_free", "Particles that could start now.")
        self._slots_capacity = self._gauge("smc_slots_capacity", "Particles of all running requests together, at most.")
        self._pages_used = self._gauge(
            "smc_kv_pages_used", "KV pages that are not free, cached ones among them.", group=GROUPS
        )
        self._pages_cached = self._gauge(
            "smc_kv_pages_cached", "KV pages of the prefix cache, whoever else uses them.", group=GROUPS
        )
        self._pages_free = self._gauge("smc_kv_pages_free", "KV pages that hold nothing.", group=GROUPS)
        self._pages_capacity = self._gauge("smc_kv_pages_capacity", "KV pages of the pool.", group=GROUPS)
        self._kv_usage = self._gauge(
            "smc_kv_cache_usage_ratio",
            "KV pages that requests hold, of the pool; what the prefix cache alone holds is free.",
            group=GROUPS,
        )
        self._pages_leaked = self._gauge(
            "smc_kv_pages_leaked",
            "KV pages, and references to them, of nobody, when last nothing ran; anything but 0 is a bug.",
            group=GROUPS,
        )
        self._prefix_queries = self._counter(
            "smc_prefix_cache_queries_total",
            "Tokens that the prefix cache was asked for, of prompts to be started.",
            group=GROUPS,
        )
        self._prefix_hits = self._counter(
            "smc_prefix_cache_hits_total", "Of those, tokens that it had: they need not be run.", group=GROUPS
        )
        self._preemptions = self._counter(
            "smc_preemptions_total", "Requests that gave up their KV memory to others for a while."
        )
        self._shrinks = self._counter(
            "smc_population_shrinks_total", "Populations that were made smaller for want of KV memory."
        )
        self._resamples = self._counter(
            "smc_resamples_total", "Rounds of a request after which its particles were resampled."
        )
        self._collapses = self._counter(
            "smc_collapses_total", "Rounds of a request after which all its weights were zero."
        )
        self._ess_share = self._histogram(
            "smc_ess_share_ratio",
            "Effective sample size over N before resampling, one per request of independent particles and round.",
            SHARE_BUCKETS,
        )
        self._lag = self._histogram(
            "smc_committed_lag_tokens",
            "Tokens between what is final and the longest particle, one per request and round.",
            LAG_BUCKETS,
        )

    def _make_exact_metrics(self) -> None:
        """Names and meanings are vLLM's, but for the last four; each by how exact decoding makes sure of the target's
        law."""
        each = {"verification": VERIFICATIONS}
        self._drafts = self._counter(
            "smc_spec_decode_num_drafts_total", "Rounds of exact decoding, one for each request that took part.", **each
        )
        self._draft_tokens = self._counter(
            "smc_spec_decode_num_draft_tokens_total",
            "Tokens drafted in them, counted along one path of each tree.",
            **each,
        )
        self._accepted_tokens = self._counter(
            "smc_spec_decode_num_accepted_tokens_total",
            "Of those, tokens that the target drew as well, or kept.",
            **each,
        )
        self._accepted_at = self._counter(
            "smc_spec_decode_num_accepted_tokens_per_pos_total",
            "Accepted tokens by their position in the draft, from 0.",
            **each,
            position=(),
        )
        self._hits = self._counter(
            "smc_spec_decode_num_hits_total",
            "Rounds of exact decoding whose next block, drafted ahead, went on as the target did.",
            **each,
        )
        self._misses = self._counter(
            "smc_spec_decode_num_misses_total",
            "Rounds of exact decoding after which the draft had to begin anew.",
            **each,
        )
        self._tree_rows = self._counter(
            "smc_spec_decode_num_rows_total", "Rows of the trees, or chains, of all rounds of exact decoding.", **each
        )
        self._alone_rounds = self._counter(
            "smc_spec_decode_num_alone_rounds_total",
            "Rounds of such requests in which nothing was drafted: plain decoding was faster.",
        )

    def _make_round_metrics(self) -> None:
        self._round = self._histogram(
            "smc_round_seconds", "One round, from its first command to its last decision.", ROUND_BUCKETS
        )
        self._round_part = self._histogram(
            "smc_round_part_seconds", "Parts of a round; draft and target may overlap.", ROUND_BUCKETS, part=PARTS
        )
        self._stall = self._counter(
            "smc_stall_seconds_total", "Time that a group had no work while a round was on.", group=GROUPS
        )

        self._last_round = time.monotonic()
        age = self._gauge(
            "smc_last_round_age_seconds", "Since the last round ended, or since the start; grows while nothing runs."
        )
        age.set_function(lambda: time.monotonic() - self._last_round)
