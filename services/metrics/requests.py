"""Metrics of requests: how many there are, how they end, and how long they take."""

from __future__ import annotations

from services.metrics.families import GROUPS, Families
from smc.api.outputs import Answer

FINISH_REASONS = ("eos", "stop_token", "stop_string", "length", "time_budget", "queue_time")
REJECTIONS = {
    "invalid": "INVALID_ARGUMENT",
    "duplicate": "ALREADY_EXISTS",
    "unauthenticated": "UNAUTHENTICATED",
    "queue_full": "RESOURCE_EXHAUSTED",
    "slow_sender": "RESOURCE_EXHAUSTED",
    "too_large": "RESOURCE_EXHAUSTED",
    "unavailable": "UNAVAILABLE",
}
"""Causes, and the status code that each has."""
CANCELLATIONS = ("client", "deadline", "abort", "slow_reader", "drain")
STATUSES = (
    *("OK", "CANCELLED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT", "ALREADY_EXISTS"),
    *("RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL"),
)

# vLLM's buckets, so that its dashboards fit; what comes before them is for models and rounds that are faster.
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


class RequestMetrics(Families):
    """Methods may be called from any thread."""

    def prompt_started(self, prompt_tokens: int, seconds: float) -> None:
        """The first tokens of an answer have come, `seconds` after its request."""
        self._prompt_tokens.inc(prompt_tokens)
        self._first_token.observe(seconds)

    def tokens_generated(self, count: int) -> None:
        self._generation_tokens.inc(count)

    def tokens_followed(self, count: int, seconds: float) -> None:
        """`count` tokens came together, `seconds` after those before them: each counts as an equal share of the
        wait."""
        for _ in range(count):
            self._inter_token.observe(seconds / count)

    def request_answered(self, answer: Answer, seconds: float) -> None:
        """`seconds` since its request's arrival."""
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

    def request_failed(self, status: str) -> None:
        """Ended without an answer, for whatever reason; rejections and cancellations are counted besides."""
        self._requests.labels(status, "none").inc()

    def request_rejected(self, code: str, cause: str) -> None:
        assert REJECTIONS[cause] == code, f"{cause} is rejected by {REJECTIONS[cause]}, not {code}"
        self._rejections.labels(code, cause).inc()

    def request_cancelled(self, by: str) -> None:
        assert by in CANCELLATIONS, by
        self._cancellations.labels(by).inc()

    def _make_request_metrics(self) -> None:
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
            "smc_requests_rejected_total", "Calls that were not let in, by status code and cause.", code=(), cause=()
        )
        for cause, code in REJECTIONS.items():
            self._rejections.labels(code, cause)
        self._cancellations = self._counter(
            "smc_requests_cancelled_total", "Requests ended early, by whom or what.", by=CANCELLATIONS
        )
        self._prompt_tokens = self._counter(
            "smc_prompt_tokens_total", "Tokens of prompts whose answers have begun, cached ones among them."
        )
        self._generation_tokens = self._counter("smc_generation_tokens_total", "Tokens of answers that were sent.")
        self._model_tokens = self._counter(
            "smc_model_tokens_total",
            "Tokens that each model ran for answers, over all particles and branches.",
            group=GROUPS,
        )
        self._first_token = self._histogram(
            "smc_time_to_first_token_seconds",
            "From a request's arrival to the first tokens of its answer.",
            TTFT_BUCKETS,
        )
        self._inter_token = self._histogram(
            "smc_inter_token_latency_seconds",
            "Between tokens of an answer; tokens that come together share the wait.",
            INTER_TOKEN_BUCKETS,
        )
        self._duration = self._histogram(
            "smc_e2e_request_latency_seconds", "From a request's arrival to the end of its answer.", E2E_BUCKETS
        )
        self._prompt_size = self._histogram(
            "smc_request_prompt_tokens", "Tokens of the prompt of an answered request.", TOKEN_BUCKETS
        )
        self._cached_size = self._histogram(
            "smc_request_cached_tokens",
            "Of those, tokens that had been computed for an earlier request.",
            TOKEN_BUCKETS,
        )
        self._answer_size = self._histogram("smc_request_generation_tokens", "Tokens of an answer.", TOKEN_BUCKETS)
        self._queue_time = self._histogram(
            "smc_request_queue_time_seconds", "From an answered request's arrival until it was taken up.", E2E_BUCKETS
        )
        self._prefill_time = self._histogram(
            "smc_request_prefill_time_seconds", "From there until its first token.", E2E_BUCKETS
        )
        self._decode_time = self._histogram(
            "smc_request_decode_time_seconds", "From there to the end of its answer.", E2E_BUCKETS
        )
