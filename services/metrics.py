"""Every metric of the service: name, help, labels and the method that updates it. Knows nothing about its callers.

Labels come from fixed sets, and every series exists from the start, so that a rate of zero is a zero and not a gap."""

from __future__ import annotations

import time
from collections.abc import Iterable

import prometheus_client as prom
from prometheus_client import ProcessCollector

from services.metrics_page import Families, Page
from smc.api.request import Answer
from smc.api.sampling_params import VERIFICATIONS
from smc.scheduler.stats import EngineStats, ExactStats, RoundTimes

GROUPS = ("draft", "target")
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
EXPONENT_BUCKETS = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0)
EVIDENCE_BUCKETS = (-10.0, -5.0, -3.0, -2.0, -1.0, -0.5, -0.3, -0.2, -0.1, -0.05, 0.0, 0.1, 0.5)
MASK_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)
CALL_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
LAG_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
FINISH_REASONS = ("eos", "stop_token", "stop_string", "length", "time_budget", "queue_time")
REJECTIONS = {
    "invalid": "INVALID_ARGUMENT",
    "duplicate": "ALREADY_EXISTS",
    "unauthenticated": "UNAUTHENTICATED",
    "host": "PERMISSION_DENIED",
    "queue_full": "RESOURCE_EXHAUSTED",
    "slow_sender": "RESOURCE_EXHAUSTED",
    "too_large": "RESOURCE_EXHAUSTED",
    "unavailable": "UNAVAILABLE",
}
"""Status codes of rejections, by cause."""
CANCELLATIONS = ("client", "deadline", "abort", "slow_reader", "drain")
STATUSES = (
    *("OK", "CANCELLED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT", "ALREADY_EXISTS"),
    *("RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL"),
)
# vLLM's buckets, so that its dashboards fit, after smaller ones for faster models and rounds.
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
E2E_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.1, 0.2),
    *(
        0.3,
        0.5,
        0.8,
        1.0,
        1.5,
        2.0,
        2.5,
        5.0,
        10.0,
        15.0,
        20.0,
        30.0,
        40.0,
        50.0,
        60.0,
        120.0,
        240.0,
        480.0,
        960.0,
        1920.0,
        7680.0,
    ),
)
TOKEN_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class WorkerGroupMetrics(Families):
    """Metrics of one worker group: of its engine's steps and rounds, and of its health. Methods may be called from any
    thread."""

    def __init__(self) -> None:
        super().__init__()
        self._max_slots: int = 0
        self._slots: int = 0
        """Slots, or 0 while the worker group does not serve."""
        self._make_engine_metrics()
        self._make_exact_metrics()
        self._make_round_metrics()
        self._make_health_metrics()

    def set_health(self, draft: bool, target: bool) -> None:
        for group, healthy in zip(GROUPS, (draft, target), strict=True):
            self._group_healthy.labels(group).set(healthy)
        if target != (self._slots > 0):
            self._slots = self._max_slots if target else 0
            self._slots_capacity.set(self._slots)
            self._slots_free.set(self._slots)

    def set_incarnation(self, incarnation: int) -> None:
        self._epoch.set(incarnation)

    def workers_restarted(self) -> None:
        """Record that all workers were started again after a loss."""
        self._restarts.inc()

    def draft_restarted(self) -> None:
        """Record that the draft alone was started again after a loss."""
        self._draft_restarts.inc()

    def set_size(self, max_slots: int, block: int) -> None:
        """Record the number of slots, and of tokens drafted a round. Call it once, before the worker group serves."""
        self._max_slots = max_slots
        for verification in VERIFICATIONS:
            for position in range(block):
                self._accepted_at.labels(verification, position)

    def observe_step(self, stats: EngineStats) -> None:
        """Record the engine's state after a step, and what happened since the last one."""
        self._queued.set(stats.queued)
        self._running.set(stats.running)
        self._slots_free.set(min(stats.slots_free, self._slots))
        for group, total in stats.pages_total.items():
            used = stats.pages_used.get(group, 0)
            self.pages_used.labels(group).set(used)
            self.pages_cached.labels(group).set(stats.pages_cached.get(group, 0))
            self.pages_free.labels(group).set(total - used)
            self.pages_capacity.labels(group).set(total)
            held = max(0, used - stats.pages_cached.get(group, 0))
            self._kv_usage.labels(group).set(held / total if total else 0.0)
            self._prefix_queries.labels(group).inc(stats.prefix_queries.get(group, 0))
            self._prefix_hits.labels(group).inc(stats.prefix_hits.get(group, 0))
        for group, leaked in stats.pages_leaked.items():
            self.pages_leaked.labels(group).set(leaked)
        self._preemptions.inc(stats.preemptions)
        self._shrinks.inc(stats.shrinks)
        self._resamples.inc(stats.resamples)
        self._collapses.inc(stats.collapses)
        for verification, counts in stats.exact.items():
            self._count_exact(verification, counts)
        self._alone_rounds.inc(stats.exact_alone_rounds)
        for share in stats.ess_shares:
            self._ess_share.observe(share)
        for lag in stats.committed_lags:
            self._lag.observe(lag)
        for seconds in stats.mask_seconds:
            self._mask.observe(seconds)
        for seconds in stats.potentials.seconds:
            self._potential.observe(seconds)
        self._potential_errors.inc(stats.potentials.errors)
        self._potential_timeouts.inc(stats.potentials.timeouts)

    def observe_round(self, times: RoundTimes) -> None:
        """Record the times of one round. Draft and target may work at the same time, so the sum of the parts can exceed
        the whole."""
        self._last_round = time.monotonic()
        self._round.observe(times.whole)
        for part in PARTS:
            self._round_part.labels(part).observe(getattr(times, part))
        for group, seconds in zip(GROUPS, (times.draft_stall, times.target_stall), strict=True):
            self._stall.labels(group).inc(max(seconds, 0.0))

    def _count_exact(self, verification: str, counts: ExactStats) -> None:
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
        self._slots_free = self._gauge("smc_slots_free", "Free slots; 0 while the worker group does not serve.")
        self._slots_capacity = self._gauge(
            "smc_slots_capacity",
            "Slots for the particles of all running requests together; 0 while the worker group does not serve.",
        )
        self.pages_used = self._gauge(
            "smc_kv_pages_used", "KV pages that requests or the prefix cache hold.", group=GROUPS
        )
        self.pages_cached = self._gauge(
            "smc_kv_pages_cached",
            "KV pages that only the prefix cache holds, besides those of prompts that are being run.",
            group=GROUPS,
        )
        self.pages_free = self._gauge("smc_kv_pages_free", "KV pages that are free.", group=GROUPS)
        self.pages_capacity = self._gauge("smc_kv_pages_capacity", "KV pages of the pool.", group=GROUPS)
        self._kv_usage = self._gauge(
            "smc_kv_cache_usage_ratio",
            "Share of the pool's KV pages that requests hold; pages that only the prefix cache holds count as free.",
            group=GROUPS,
        )
        self.pages_leaked = self._gauge(
            "smc_kv_pages_leaked",
            "KV pages and page references without an owner, when the engine was last idle; anything but 0 is a bug.",
            group=GROUPS,
        )
        self._prefix_queries = self._counter(
            "smc_prefix_cache_queries_total",
            "Prompt tokens looked up in the prefix cache.",
            group=GROUPS,
        )
        self._prefix_hits = self._counter(
            "smc_prefix_cache_hits_total",
            "Prompt tokens that were found in the prefix cache, and are not run again.",
            group=GROUPS,
        )
        self._preemptions = self._counter(
            "smc_preemptions_total", "Requests that released their KV memory to others and were resumed later."
        )
        self._shrinks = self._counter(
            "smc_population_shrinks_total", "Populations that lost particles because KV memory was short."
        )
        self._resamples = self._counter(
            "smc_resamples_total", "Rounds of a request after which its particles were resampled."
        )
        self._collapses = self._counter(
            "smc_collapses_total", "Rounds of a request after which all its weights were zero."
        )
        self._ess_share = self._histogram(
            "smc_ess_share_ratio",
            "Effective sample size over N before resampling, one value per request of independent particles and round.",
            SHARE_BUCKETS,
        )
        self._lag = self._histogram(
            "smc_committed_lag_tokens",
            "Tokens of the longest particle beyond the committed prefix, one value per request and round.",
            LAG_BUCKETS,
        )

        self._mask = self._histogram(
            "smc_constraint_mask_seconds",
            "Time to compute the masks of constrained requests in a round, for one model, which runs meanwhile.",
            MASK_BUCKETS,
        )
        self._potential = self._histogram(
            "smc_potential_call_seconds", "Time of a call of a potential, for all particles of a request.", CALL_BUCKETS
        )
        self._potential_errors = self._counter(
            "smc_potential_errors_total",
            "Requests that ended because their potential failed, or returned values that are not log phi.",
        )
        self._potential_timeouts = self._counter(
            "smc_potential_timeouts_total", "Requests that ended because their potential took too long."
        )

    def _make_exact_metrics(self) -> None:
        """Create the metrics of exact decoding, all but the last one by verification. Names and meanings are vLLM's,
        except for the last four."""
        each = {"verification": VERIFICATIONS}
        self._drafts = self._counter(
            "smc_spec_decode_num_drafts_total",
            "Rounds of exact decoding, counted once for each request in them.",
            **each,
        )
        self._draft_tokens = self._counter(
            "smc_spec_decode_num_draft_tokens_total",
            "Tokens drafted in exact decoding, counted along one path of each tree.",
            **each,
        )
        self._accepted_tokens = self._counter(
            "smc_spec_decode_num_accepted_tokens_total",
            "Drafted tokens that the target drew as well (walk) or kept (rejection).",
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
            "Rounds of exact decoding in which the next block, drafted ahead, matched the target's tokens.",
            **each,
        )
        self._misses = self._counter(
            "smc_spec_decode_num_misses_total",
            "Rounds of exact decoding after which the draft had to start again from the target's token.",
            **each,
        )
        self._tree_rows = self._counter(
            "smc_spec_decode_num_rows_total", "Rows of the trees, or chains, of all rounds of exact decoding.", **each
        )
        self._alone_rounds = self._counter(
            "smc_spec_decode_num_alone_rounds_total",
            "Rounds of requests of exact decoding in which nothing was drafted, because plain decoding was faster.",
        )

    def _make_round_metrics(self) -> None:
        self._round = self._histogram(
            "smc_round_seconds",
            "Time of a round, from its first command to its last decision, and of taking in new requests.",
            ROUND_BUCKETS,
        )
        self._round_part = self._histogram(
            "smc_round_part_seconds",
            "Time of the parts of a round; draft and target may overlap.",
            ROUND_BUCKETS,
            part=PARTS,
        )
        self._stall = self._counter(
            "smc_stall_seconds_total", "Time in which a group had no work during a round.", group=GROUPS
        )

        self._last_round = time.monotonic()
        age = self._gauge(
            "smc_last_round_age_seconds",
            "Time since the end of the last round, or since the start; grows while no request runs.",
        )
        age.set_function(lambda: time.monotonic() - self._last_round)

    def _make_health_metrics(self) -> None:
        self._group_healthy = self._gauge(
            "smc_group_healthy", "1 while every rank of the group is ready, otherwise 0.", group=GROUPS
        )
        self._epoch = self._gauge("smc_epoch", "Number of starts of all workers, or of the draft alone.")
        self._restarts = self._counter(
            "smc_worker_restarts_total", "Times that all workers were started again after a loss."
        )
        self._draft_restarts = self._counter(
            "smc_draft_restarts_total", "Times that the draft alone was started again after a loss."
        )


class RequestMetrics(Families):
    """Metrics of requests. Methods may be called from any thread."""

    def prompt_started(self, prompt_tokens: int, seconds: float) -> None:
        """Record the first tokens of an answer, `seconds` after the arrival of its request."""
        self._prompt_tokens.inc(prompt_tokens)
        self._first_token.observe(seconds)

    def tokens_generated(self, count: int) -> None:
        self._generation_tokens.inc(count)

    def tokens_followed(self, count: int, seconds: float) -> None:
        """Record `count` tokens that came together, `seconds` after the previous ones: each is given an equal share of
        that time."""
        for _ in range(count):
            self._inter_token.observe(seconds / count)

    def constraint_compiled(self, seconds: Iterable[float], hits: int) -> None:
        """Record constraints of requests. `seconds`: compile times of new ones; `hits`: number that were already
        compiled."""
        for each in seconds:
            self._compile.observe(each)
        self._compile_hits.inc(hits)

    def constraint_broken(self) -> None:
        """Record an answer that ended by itself although its constraint does not allow it."""
        self._invalid_ends.inc()

    def request_answered(self, answer: Answer, seconds: float, follows_target: bool = True) -> None:
        """Record an answer, `seconds` after the arrival of its request. `follows_target`: the true log Z of its
        particles is 0."""
        self._requests.labels("OK", answer.finish_reason.value).inc()
        self._duration.observe(seconds)
        self._prompt_size.observe(answer.prompt_tokens)
        self._cached_size.observe(answer.cached_tokens)
        self._answer_size.observe(len(answer.tokens))
        self._queue_time.observe(answer.times.queue)
        self._prefill_time.observe(answer.times.prefill)
        self._decode_time.observe(answer.times.decode)
        self._model_tokens.labels("draft").inc(answer.statistics.draft_tokens)
        self._model_tokens.labels("target").inc(answer.statistics.target_tokens)
        if answer.statistics.draft_exponent:
            self._draft_exponent.observe(answer.statistics.draft_exponent)
        if answer.statistics.mean_ess and answer.tokens and follows_target:
            # log Z is -inf for a population that lost all weight, which would spoil the histogram's sum.
            self._log_evidence.observe(max(answer.statistics.log_z / len(answer.tokens), 2 * EVIDENCE_BUCKETS[0]))

    def request_failed(self, status: str) -> None:
        """Record a request that ended without an answer, for any reason. Rejections and cancellations are also counted
        separately."""
        self._requests.labels(status, "none").inc()

    def request_rejected(self, code: str, cause: str) -> None:
        assert REJECTIONS[cause] == code, f"{cause} is rejected by {REJECTIONS[cause]}, not {code}"
        self._rejections.labels(code, cause).inc()

    def request_cancelled(self, by: str) -> None:
        assert by in CANCELLATIONS, by
        self._cancellations.labels(by).inc()

    def _make_request_metrics(self) -> None:
        self._compile = self._histogram(
            "smc_constraint_compile_seconds",
            "Time to compile a constraint, before its request is queued.",
            (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
        )
        self._compile_hits = self._counter(
            "smc_constraint_cache_hits_total", "Constraints that were already compiled for an earlier request."
        )
        self._invalid_ends = self._counter(
            "smc_constraint_invalid_ends_total",
            "Answers that ended by themselves although their constraint does not allow them; anything but 0 is a bug.",
        )
        self._requests = self._counter(
            "smc_requests_total",
            "Generate calls that ended, by status code and, of answers, finish reason.",
            status=(),
            finish_reason=(),
        )
        for reason in FINISH_REASONS:
            self._requests.labels("OK", reason)
        for status in STATUSES[1:]:
            self._requests.labels(status, "none")
        self._rejections = self._counter(
            "smc_requests_rejected_total", "Calls that were rejected, by status code and cause.", code=(), cause=()
        )
        for cause, code in REJECTIONS.items():
            self._rejections.labels(code, cause)
        self._cancellations = self._counter(
            "smc_requests_cancelled_total", "Requests that ended early, by cause.", by=CANCELLATIONS
        )
        self._prompt_tokens = self._counter(
            "smc_prompt_tokens_total", "Tokens of prompts whose answers have begun, including cached tokens."
        )
        self._generation_tokens = self._counter("smc_generation_tokens_total", "Tokens of answers that were sent.")
        self._model_tokens = self._counter(
            "smc_model_tokens_total",
            "Tokens that each model ran for answers, over all particles and branches.",
            group=GROUPS,
        )
        self._first_token = self._histogram(
            "smc_time_to_first_token_seconds",
            "Time from a request's arrival to the first tokens of its answer.",
            TTFT_BUCKETS,
        )
        self._inter_token = self._histogram(
            "smc_inter_token_latency_seconds",
            "Time between tokens of an answer; tokens that arrive together share it equally.",
            INTER_TOKEN_BUCKETS,
        )
        self._duration = self._histogram(
            "smc_e2e_request_latency_seconds", "Time from a request's arrival to the end of its answer.", E2E_BUCKETS
        )
        self._prompt_size = self._histogram(
            "smc_request_prompt_tokens", "Tokens of the prompt of an answered request.", TOKEN_BUCKETS
        )
        self._cached_size = self._histogram(
            "smc_request_cached_tokens",
            "Tokens of the prompt of an answered request that were found in the prefix cache.",
            TOKEN_BUCKETS,
        )
        self._answer_size = self._histogram("smc_request_generation_tokens", "Tokens of an answer.", TOKEN_BUCKETS)
        self._queue_time = self._histogram(
            "smc_request_queue_time_seconds",
            "Time from an answered request's arrival to the start of its prefill.",
            E2E_BUCKETS,
        )
        self._prefill_time = self._histogram(
            "smc_request_prefill_time_seconds",
            "Time from the start of an answered request's prefill until all models of its method have run the prompt.",
            E2E_BUCKETS,
        )
        self._decode_time = self._histogram(
            "smc_request_decode_time_seconds",
            "Time from the end of an answered request's prefill to the end of its answer.",
            E2E_BUCKETS,
        )
        self._draft_exponent = self._histogram(
            "smc_spec_decode_draft_exponent",
            "Exponent of the draft's probabilities at the end of an answer by exact decoding.",
            EXPONENT_BUCKETS,
        )
        self._log_evidence = self._histogram(
            "smc_log_evidence_per_token",
            "log Z-hat of an answer by SMC divided by its number of tokens; far below 0 if the draft "
            "does not know the text.",
            EVIDENCE_BUCKETS,
        )


class Metrics(RequestMetrics):
    """All metrics of a service: those of requests, of each worker group, and of the service's own health. Methods may
    be called from any thread."""

    def __init__(self, worker_groups: int = 1) -> None:
        super().__init__()
        self.groups = [WorkerGroupMetrics() for _ in range(worker_groups)]
        self._scraped = self.page = Page(self.registry, [group.registry for group in self.groups])
        ProcessCollector(registry=self.registry)
        self._make_request_metrics()
        self._make_service_metrics()

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return prom.generate_latest(self.page)

    def set_serving(self, serving: bool) -> None:
        self._serving.set(serving)

    def gateway_paused(self, seconds: float) -> None:
        """Record that the gateway's event loop was blocked for `seconds`."""
        self._paused.inc(seconds)

    def set_build_info(
        self,
        version: str,
        model: str,
        form: str,
        link: str,
        max_slots: int,
        block: int,
        weights: dict[str, str],
        placement: str,
    ) -> None:
        """Describe this service. Call it once, at the start, while no request holds a slot. `model`: the name under
        which the pair is served; `weights`: fingerprints of both models' weights, by role."""
        self.page.model = model
        self.page.pair = f"{weights['target'][:8]}-{weights['draft'][:8]}"
        for group in self.groups:
            group.set_size(max_slots, block)
        # `weights` are the target's: answers depend on them, so a rollout is about them.
        fingerprints = {"weights": weights["target"], "draft_weights": weights["draft"]}
        self._build.info({"version": version, "form": form, "link": link, "placement": placement, **fingerprints})

    def _make_service_metrics(self) -> None:
        self._serving = self._gauge("smc_serving", "1 while requests are accepted, otherwise 0.")
        self._paused = self._counter(
            "smc_gateway_paused_seconds_total",
            "Total time of the pauses longer than 0.25 s in which the gateway's event loop was blocked.",
        )
        self._build = prom.Info(
            "smc_build", "Version, form, link and placement of the service, and its models.", registry=self.registry
        )


class BatchMetrics(Families):
    """Metrics of a run of `smcserve batch`. Methods may be called from any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._lines = self._gauge("smc_batch_lines", "Lines of the input that are done.", result=("answered", "failed"))
        self._left = self._gauge("smc_batch_lines_left", "Lines of the input that are not done yet.")
        self._tokens = self._counter("smc_batch_generation_tokens", "Tokens of this run's answers.")
        self._seconds_left = self._gauge(
            "smc_batch_left_seconds", "Expected time until the run is done; NaN while it is not known."
        )
        self._groups = self._gauge("smc_batch_worker_groups", "Worker groups.", state=("starting", "ready"))
        self._decoded = 0

    def set_progress(self, answered: int, failed: int, left: int, tokens: int, seconds_left: float | None) -> None:
        """Record the progress of the run. `tokens`: tokens of this run's answers so far; they can become fewer, when
        lines of a lost worker group are subtracted."""
        self._lines.labels("answered").set(answered)
        self._lines.labels("failed").set(failed)
        self._left.set(left)
        self._tokens.inc(max(tokens - self._decoded, 0))
        self._decoded = max(tokens, self._decoded)
        self._seconds_left.set(float("nan") if seconds_left is None else seconds_left)

    def set_worker_groups(self, starting: int, ready: int) -> None:
        self._groups.labels("starting").set(starting)
        self._groups.labels("ready").set(ready)
