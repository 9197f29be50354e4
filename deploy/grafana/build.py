"""Definitions of the Grafana dashboards: `python deploy/grafana/build.py` writes deploy/grafana/dashboards/*.json."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from panels import board, buckets, dial, graph, name, number
from queries import gain, mean, pick, quantile, quantiles, rate, ratio, ratio_or_zero, total

FOLDER = Path(__file__).parent / "dashboards"
ANSWER = rate("smc_generation_tokens_total")
ROUNDS, DRAFTS = rate("smc_committed_lag_tokens_count"), rate("smc_spec_decode_num_drafts_total")
"""Rounds per second of SMC and of exact decoding, counted once for each request in the round."""
TOKENS_PER_SECOND = "suffix: tok/s"
FULL = {"yellow": 0.8, "red": 0.95}
PAGES, CACHED = (total(f"smc_kv_pages_{what}", "group") for what in ("used", "cached"))
IN_USE = ratio(f"({PAGES} - {CACHED})", total("smc_kv_pages_capacity", "group"))
"""Share of KV pages held by requests. Pages held only by the prefix cache are excluded, because they are evicted when
needed."""


def traffic() -> Dashboard:
    first, whole, between = (
        "smc_time_to_first_token_seconds",
        "smc_e2e_request_latency_seconds",
        "smc_inter_token_latency_seconds",
    )
    calls, failed = rate("smc_requests_total"), rate("smc_requests_total", where='status=~"UNAVAILABLE|INTERNAL"')
    burn, pace = pick("namespace_job_slo:smc_error_budget_burn:rate1h"), {"yellow": 1, "orange": 6, "red": 14.4}
    rows = {
        "Now": [
            number("Calls", "Generate calls that ended, with any status.", "reqps", calls),
            number("Answer tokens", "Tokens sent to callers.", TOKENS_PER_SECOND, ANSWER),
            number(
                "First token, p99",
                "99% of answers begin within this time.",
                "s",
                quantile(first, 0.99),
                {"yellow": 1, "red": 2.5},
            ),
            number(
                "Whole answer, p99",
                "99% of answers are complete within this time.",
                "s",
                quantile(whole, 0.99),
                {"yellow": 30, "red": 60},
            ),
            number(
                "Failed",
                "Share of calls that ended with UNAVAILABLE or INTERNAL.",
                "percentunit",
                ratio_or_zero(failed, calls),
                {"red": 0.001},
            ),
            number(
                "Budget burn, 1 h",
                "Burn rate of the worst objective; 1 is exactly within the budget.",
                "none",
                f"max({burn})",
                pace,
            ),
        ],
        "Traffic": [
            graph(
                "Calls by status",
                "Generate calls that ended.",
                "reqps",
                {"{{status}}": rate("smc_requests_total", "status")},
                stacked=True,
            ),
            graph(
                "Answers by finish reason",
                "Why answers ended. A large share of `length` means that max_tokens is too small.",
                "reqps",
                {"{{finish_reason}}": rate("smc_requests_total", "finish_reason", 'status="OK"')},
                stacked=True,
            ),
            graph(
                "Tokens",
                "Tokens of prompts (including cached ones) and of answers sent to callers.",
                TOKENS_PER_SECOND,
                {"prompt": rate("smc_prompt_tokens_total"), "answer": ANSWER},
            ),
        ],
        "Latency": [
            graph(
                "Time to first token",
                "From the arrival of a call to its first tokens. Objective: 99% within 2.5 s.",
                "s",
                quantiles(first, 0.5, 0.95, 0.99),
                limits={"red": 2.5},
            ),
            graph(
                "Between tokens",
                "Time between two tokens. The wait is divided among tokens that arrive together.",
                "s",
                quantiles(between, 0.5, 0.95, 0.99),
            ),
            graph(
                "Whole answer",
                "From the arrival of a call to the end of its answer. Objective: 99% within 60 s.",
                "s",
                quantiles(whole, 0.5, 0.95, 0.99),
                limits={"red": 60},
            ),
        ],
        "Distributions and objectives": [
            buckets("Time to first token, distribution", "Number of answers by their time to first token.", "s", first),
            buckets("Whole answer, distribution", "Number of answers by their total time.", "s", whole),
            graph(
                "Error budget burn, 1 h",
                "Burn rate of each objective's error budget; 1 is exactly within it. 14.4 pages an operator.",
                "none",
                {"{{slo}}": f"max by (slo) ({burn})"},
                limits=pace,
            ),
        ],
        "Sizes": [
            graph(
                "Size of prompts",
                "Prompt tokens per answered request.",
                "suffix: tok",
                quantiles("smc_request_prompt_tokens", 0.5, 0.9, 0.99),
            ),
            graph(
                "Size of answers",
                "Answer tokens per request.",
                "suffix: tok",
                quantiles("smc_request_generation_tokens", 0.5, 0.9, 0.99),
            ),
        ],
        "Where answers spend their time": [
            graph(
                "Means of an answer",
                "Mean time in the queue, from there until the models have run the prompt, and from there to the end.",
                "s",
                {part: mean(f"smc_request_{part}_time_seconds") for part in ("queue", "prefill", "decode")},
                stacked=True,
            ),
            graph(
                "Waiting to be taken up",
                "Time in the queue. It grows when slots or KV pages run short.",
                "s",
                quantiles("smc_request_queue_time_seconds", 0.5, 0.95, 0.99),
            ),
            graph(
                "Cached tokens of a prompt",
                "Prompt tokens found in the prefix cache, which are not computed again.",
                "suffix: tok",
                quantiles("smc_request_cached_tokens", 0.5, 0.9, 0.99),
            ),
        ],
        "Not answered": [
            graph(
                "Rejections",
                "Calls that were rejected, by cause.",
                "reqps",
                {"{{cause}}": rate("smc_requests_rejected_total", "cause")},
                stacked=True,
            ),
            graph(
                "Cancellations",
                "Requests that ended early, by the origin of the cancellation.",
                "reqps",
                {"{{by}}": rate("smc_requests_cancelled_total", "by")},
                stacked=True,
            ),
        ],
    }
    return board("smc-traffic", "Traffic and latency", "Calls, answers, latencies and service-level objectives.", rows)


def particles() -> Dashboard:
    share, lag, alike = "smc_ess_share_ratio", "smc_committed_lag_tokens", {"yellow": 0.1, "green": 0.3}
    resampled, collapsed = (ratio(rate(f"smc_{what}_total"), ROUNDS) for what in ("resamples", "collapses"))
    alone, tree_rows = (rate(f"smc_spec_decode_num_{what}_total") for what in ("alone_rounds", "rows"))
    low, kept = (
        f"max({pick('namespace_job_pair:smc_ess_share_low:ratio_rate30m')})",
        ratio(ANSWER, f"({ROUNDS} + {DRAFTS} + {alone})"),
    )
    drafted, accepted = (rate(f"smc_spec_decode_num_{what}_tokens_total") for what in ("draft", "accepted"))
    hits, misses = (rate(f"smc_spec_decode_num_{what}_total") for what in ("hits", "misses"))
    by_position = rate("smc_spec_decode_num_accepted_tokens_per_pos_total", "position")
    rows = {
        "Now": [
            number(
                "ESS share, median",
                "Effective sample size over N, of independent particles.",
                "percentunit",
                quantile(share, 0.5),
                alike,
            ),
            number(
                "Degenerate, 30 min",
                "Share of rounds with an ESS share of at most 0.2.",
                "percentunit",
                low,
                {"yellow": 0.3, "red": 0.5},
            ),
            number("Resampled", "Share of rounds in which the population was resampled.", "percentunit", resampled),
            number(
                "Collapsed",
                "Share of rounds after which all weights were zero.",
                "percentunit",
                collapsed,
                {"yellow": 1e-6, "red": 0.01},
            ),
            number("Tokens a round", "Answer tokens per request and round.", "none", kept),
            number("Lag, median", "Tokens that are not committed yet.", "suffix: tok", quantile(lag, 0.5)),
        ],
        "Weights": [
            graph(
                "ESS share",
                "Effective sample size over N, of independent particles. Low if the models disagree.",
                "percentunit",
                quantiles(share, 0.1, 0.5, 0.9),
            ),
            buckets("ESS share, distribution", "Number of rounds by ESS share.", "percentunit", share),
            graph(
                "Degenerate rounds",
                "Share of rounds with an ESS share of at most 0.2, over 30 minutes.",
                "percentunit",
                {"of rounds": low},
                limits={"red": 0.5},
            ),
        ],
        "Population": [
            graph(
                "Resampled rounds",
                "Share of rounds in which the population was resampled.",
                "percentunit",
                {"of rounds": resampled},
            ),
            graph(
                "Collapses",
                "Rounds per minute after which all weights were zero. Any value above 0 should be investigated.",
                "cpm",
                {"collapses": f"60 * {rate('smc_collapses_total')}"},
            ),
            graph(
                "Committed lag",
                "Tokens between the committed prefix and the longest particle, which are not streamed yet.",
                "suffix: tok",
                quantiles(lag, 0.5, 0.9, 0.99),
            ),
            graph(
                "Evidence per token",
                "log Z-hat of an answer over its tokens. Far below 0 the draft does not know the text.",
                "none",
                quantiles("smc_log_evidence_per_token", 0.1, 0.5, 0.9),
            ),
        ],
        "Constraints": [
            graph(
                "Masks",
                "Seconds that masks of constrained requests took in a round, at one model. They are made while it "
                "runs.",
                "s",
                quantiles("smc_constraint_mask_seconds", 0.5, 0.9, 0.99),
            ),
            graph(
                "Compiled constraints",
                "Constraints that were compiled, and those that an earlier request had already.",
                "cpm",
                {
                    "compiled": f"60 * {rate('smc_constraint_compile_seconds_count')}",
                    "kept": f"60 * {rate('smc_constraint_cache_hits_total')}",
                },
            ),
            graph(
                "Compile time",
                "Seconds that it took to compile a constraint, before its request was queued.",
                "s",
                quantiles("smc_constraint_compile_seconds", 0.5, 0.9, 0.99),
            ),
            graph(
                "Invalid ends",
                "Answers per minute that ended by themselves and that their constraint does not allow: a bug.",
                "cpm",
                {"answers": f"60 * {rate('smc_constraint_invalid_ends_total')}"},
            ),
        ],
        "Potentials": [
            graph(
                "Potential calls",
                "Seconds that a call of a potential took, about all particles of a request. The request waits for it.",
                "s",
                quantiles("smc_potential_call_seconds", 0.5, 0.9, 0.99),
            ),
            graph(
                "Requests that potentials ended",
                "Requests per minute whose potential failed or took too long.",
                "cpm",
                {
                    "failed": f"60 * {rate('smc_potential_errors_total')}",
                    "too slow": f"60 * {rate('smc_potential_timeouts_total')}",
                },
            ),
        ],
        "Efficiency": [
            graph(
                "Tokens run for one of the answer",
                "Tokens computed by each model, over all particles and branches, per answer token.",
                "none",
                {"{{group}}": ratio(rate("smc_model_tokens_total", "group"), ANSWER, per="group")},
            ),
            graph(
                "Answer tokens a round",
                "Answer tokens per request and round. At block + 1, every drafted token was kept.",
                "none",
                {"tokens": kept},
            ),
            buckets(
                "Committed lag, distribution",
                "Number of rounds by the tokens that were not committed after them.",
                "none",
                lag,
            ),
        ],
        "Exact decoding": [
            graph(
                "Accepted by position",
                "Share of rounds in which the target accepted the drafted token at this position, counted from 0.",
                "percentunit",
                {"{{position}}": ratio(by_position, DRAFTS, per="position")},
            ),
            graph(
                "Tokens confirmed a round",
                "Tokens per request and round, with the target's own token after a block not drafted ahead.",
                "none",
                {"accepted": ratio(accepted, DRAFTS), "confirmed": ratio(f"({accepted} + {DRAFTS} - {hits})", DRAFTS)},
            ),
            graph(
                "Acceptance and hits",
                "Share of drafted tokens accepted; share of rounds whose block, drafted ahead, was a hit.",
                "percentunit",
                {"accepted": ratio(accepted, drafted), "hits": ratio(hits, f"({hits} + {misses})")},
            ),
            graph(
                "Draft exponent",
                "Exponent of coupled drafting at the end of an answer. Above 1 the target is more certain than the "
                "draft.",
                "none",
                quantiles("smc_spec_decode_draft_exponent", 0.1, 0.5, 0.9),
            ),
        ],
        "What the latency model decides": [
            graph(
                "Rows",
                "Mean rows of a request's draft tree, as chosen by the latency model.",
                "none",
                {"rows": ratio(tree_rows, DRAFTS)},
            ),
            graph(
                "Without a draft",
                "Share of rounds without drafting, because the latency model expects no draft to be faster.",
                "percentunit",
                {"alone": ratio(alone, f"({alone} + {DRAFTS})")},
            ),
        ],
    }
    return board(
        "smc-particles",
        "Particles",
        "Quality of particle populations, acceptance of exact decoding, and the cost of both.",
        rows,
    )


def groups() -> Dashboard:
    part, whole = "smc_round_part_seconds", "smc_round_seconds"
    in_rounds, both = rate(f"{whole}_sum"), 'part=~"draft|target"'
    ready, build = total("smc_group_healthy", "group"), pick("smc_build_info")
    answered = pick("smc_requests_total", 'status="OK"')
    by_weights = f"on (namespace, job, instance, pod) group_left (weights) {build}"
    age = f"time() - {pick('process_start_time_seconds')} and on (instance) {pick('smc_serving')}"
    hour = f"round({gain('smc_worker_restarts_total', '1h')})"
    minutes = {
        name: f"round({gain(f'smc_{one}_restarts_total', '5m')})"
        for name, one in (("all", "worker"), ("draft alone", "draft"))
    }
    rows = {
        "Now": [
            number("Serving", "Instances that accept requests.", "none", total("smc_serving"), {"green": 1}),
            number(
                "Ready now", "Worker groups whose draft or target is ready.", "none", ready, {"green": 1}, "{{group}}"
            ),
            number(
                "Latest incarnation",
                "Largest number of starts of a worker group, including restarts of its draft alone.",
                "none",
                f"max({pick('smc_epoch')})",
            ),
            number("Restarts, 1 h", "Restarts of workers after a loss.", "none", hour, {"yellow": 1, "red": 3}),
            number("Up", "Uptime of the youngest instance.", "s", f"min({age})"),
            name(
                "Runs",
                "Version, form of rounds (lockstep or look-ahead) and link.",
                f"group by (version, form, link) ({build})",
                "{{version}} {{form}} {{link}}",
            ),
        ],
        "Models at work": [
            graph(
                "Busy",
                "Share of time in which each group computes. Look-ahead aims at 100% for both.",
                "percentunit",
                {"{{part}}": f"avg by (part) (rate({pick(f'{part}_sum', both)}[$__rate_interval]))"},
            ),
            graph(
                "Stalled",
                "Share of the rounds' time in which a group waits.",
                "percentunit",
                {"{{group}}": ratio(rate("smc_stall_seconds_total", "group"), in_rounds, per="group")},
            ),
            graph(
                "Link",
                "Share of the rounds' time in which no group computes because messages are in transit.",
                "percentunit",
                {"link": ratio(rate(f"{part}_sum", where='part="link"'), in_rounds)},
            ),
        ],
        "Rounds": [
            graph(
                "Parts of a round",
                "Mean time of each part. Draft and target overlap in look-ahead.",
                "s",
                {"{{part}}": mean(part, "part")},
            ),
            graph(
                "Round",
                "Time from the first command to the last decision of a round.",
                "s",
                quantiles(whole, 0.5, 0.95, 0.99),
            ),
            buckets("Round, distribution", "Number of rounds by duration.", "s", whole),
        ],
        "KV memory": [
            graph(
                "KV pages in use",
                "Share of each page pool held by requests, in the fullest instance.",
                "percentunit",
                {"{{group}}": f"max by (group) ({pick('smc_kv_cache_usage_ratio')})"},
                limits=FULL,
            ),
            graph(
                "KV pages leaked",
                "Pages held while no request runs. Any value but 0 is a bug.",
                "none",
                {"{{group}}": total("smc_kv_pages_leaked", "group")},
            ),
        ],
        "Life": [
            graph("Ready", "Worker groups whose draft or target is ready.", "none", {"{{group}}": ready}),
            graph(
                "Incarnation",
                "Incarnation (number of starts) of each worker group.",
                "none",
                {"{{instance}} {{worker_group}}": pick("smc_epoch")},
            ),
            graph(
                "Restarts",
                "Restarts of workers after a loss, within five minutes.",
                "none",
                minutes,
            ),
            graph(
                "Since the last round",
                "Grows while no request runs. If it grows while requests run, rounds are stuck.",
                "s",
                {"{{instance}} {{worker_group}}": pick("smc_last_round_age_seconds")},
            ),
        ],
    }
    rows["Weights of the target"] = [
        graph(
            "Serving, by weights",
            "Instances that accept requests, by version of the weights. Two lines that cross show a rollout.",
            "none",
            {"{{weights}}": f"sum by (weights) ({pick('smc_serving')} * {by_weights})"},
        ),
        graph(
            "Answers, by weights",
            "Calls that ended with an answer, by version of the weights.",
            "reqps",
            {"{{weights}}": f"sum by (weights) (rate({answered}[$__rate_interval]) * {by_weights})"},
        ),
    ]
    return board("smc-groups", "Groups", "Draft and target groups: utilisation, waiting and health.", rows)


def capacity() -> Dashboard:
    slots, ours = total("smc_slots_capacity"), pick("smc_serving")
    cpu_seconds = pick("process_cpu_seconds_total")
    used = f"({slots} - {total('smc_slots_free')})"
    running, waiting = total("smc_requests_running"), total("smc_requests_queued")
    held = ratio(used, slots)
    queries, hits = rate("smc_prefix_cache_queries_total", "group"), rate("smc_prefix_cache_hits_total", "group")
    refused, full = f"max({pick('namespace_job:smc_requests_queue_full:ratio_rate5m')})", 'cause="queue_full"'
    rows = {
        "Now": [
            number("Running", "Requests that hold slots.", "none", running),
            number("Waiting", "Requests that wait for slots and pages.", "none", waiting, {"yellow": 1}),
            number(
                "Refused, 5 min",
                "Share of calls refused because the queue was full.",
                "percentunit",
                refused,
                {"yellow": 1e-6, "red": 0.05},
            ),
            number("Slots in all", "Number of particles that can run at once.", "none", slots),
            number("Answer tokens", "Tokens sent to callers.", TOKENS_PER_SECOND, ANSWER),
            number("Tokens a slot", "Answer tokens per slot in use.", TOKENS_PER_SECOND, ratio(ANSWER, used)),
        ],
        "Saturation": [
            dial("Slots in use", "Slots that running requests hold.", held, FULL),
            dial(
                "KV pages in use",
                "Share of each page pool held by requests, without the prefix cache.",
                IN_USE,
                FULL,
                "{{group}}",
            ),
            dial(
                "Headroom",
                "Free share of the scarcest resource: slots or KV pages.",
                f"1 - max({IN_USE} or {held})",
                {"yellow": 0.05, "green": 0.2},
            ),
        ],
        "Load": [
            graph(
                "Requests",
                "Running requests, which hold slots, and waiting requests.",
                "none",
                {"running": running, "waiting": waiting},
            ),
            graph(
                "Slots",
                "Slots held by running requests, and all slots.",
                "none",
                {"used": used, "capacity": slots},
            ),
            graph(
                "Refused",
                "Calls refused because the queue was full.",
                "reqps",
                {"queue full": rate("smc_requests_rejected_total", where=full)},
            ),
        ],
        "KV memory": [
            graph(
                f"KV pages of the {group}",
                "Pages held by requests, pages held only by the prefix cache, and free pages.",
                "none",
                _pages(f'group="{group}"'),
                stacked=True,
            )
            for group in ("draft", "target")
        ],
        "Prefix cache, and what happens where memory is short": [
            graph(
                "Prefix cache hits",
                "Share of prompt tokens that were already computed for an earlier request.",
                "percentunit",
                {"{{group}}": ratio(hits, queries)},
            ),
            graph(
                "Preemptions",
                "Preemptions per minute: requests whose KV pages were released for others and are computed again.",
                "cpm",
                {"preemptions": f"60 * {rate('smc_preemptions_total')}"},
                limits={"red": 1},
            ),
            graph(
                "Populations shrunk",
                "Populations per minute that were reduced, within the limits set by their requests.",
                "cpm",
                {"shrinks": f"60 * {rate('smc_population_shrinks_total')}"},
            ),
        ],
        "The gateway's process": [
            graph(
                "Paused",
                "Share of time in pauses longer than 0.25 s, in which the gateway answers no calls.",
                "percentunit",
                {"{{instance}}": f"rate({pick('smc_gateway_paused_seconds_total')}[$__rate_interval])"},
            ),
            graph(
                "Memory",
                "Resident memory of the gateway. Coordinator and ranks are separate processes.",
                "bytes",
                {"{{instance}}": f"{pick('process_resident_memory_bytes')} and on (instance) {ours}"},
            ),
            graph(
                "CPU",
                "CPU cores used by the gateway.",
                "none",
                {"{{instance}}": f"rate({cpu_seconds}[$__rate_interval]) and on (instance) {ours}"},
            ),
            graph(
                "Open files",
                "Open file descriptors, including connections, as a share of the limit.",
                "percentunit",
                {"{{instance}}": f"{pick('process_open_fds')} / {pick('process_max_fds')} and on (instance) {ours}"},
            ),
        ],
    }
    return board("smc-capacity", "Capacity", "Utilisation of slots and KV memory, and remaining capacity.", rows)


def _pages(where: str) -> dict[str, str]:
    """Legend -> expression of each part of a page pool."""
    used, cached, free = (total(f"smc_kv_pages_{what}", where=where) for what in ("used", "cached", "free"))
    return {"requests": f"{used} - {cached}", "cached": cached, "free": free}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER, help="directory to write to (default: %(default)s)")
    out = parser.parse_args().out
    for dashboard in (traffic(), particles(), groups(), capacity()):
        text = json.dumps(dashboard, cls=JSONEncoder, indent=2, sort_keys=True)
        (out / f"{dashboard.uid.removeprefix('smc-')}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
