"""The dashboards, as code: `python deploy/grafana/build.py` writes deploy/grafana/dashboards/*.json. What is shown, and
why, is here."""

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
"""Of SMC and of exact decoding, counted once for each request that took part: what happens to a population is seen per
such round."""
TOKENS_PER_SECOND = "suffix: tok/s"
FULL = {"yellow": 0.8, "red": 0.95}
PAGES, CACHED = (total(f"smc_kv_pages_{what}", "group") for what in ("used", "cached"))
IN_USE = ratio(f"({PAGES} - {CACHED})", total("smc_kv_pages_capacity", "group"))
"""What only the prefix cache holds makes room whenever it is needed. Where memory is short it holds nothing, and this
is exact."""


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
            number("Calls", "Generate calls that ended, whatever their status.", "reqps", calls),
            number("Answer tokens", "Tokens sent to callers.", TOKENS_PER_SECOND, ANSWER),
            number(
                "First token, p99",
                "99 of 100 answers begin sooner.",
                "s",
                quantile(first, 0.99),
                {"yellow": 1, "red": 2.5},
            ),
            number(
                "Whole answer, p99",
                "99 of 100 are complete sooner.",
                "s",
                quantile(whole, 0.99),
                {"yellow": 30, "red": 60},
            ),
            number("Failed", "UNAVAILABLE or INTERNAL.", "percentunit", ratio_or_zero(failed, calls), {"red": 0.001}),
            number("Budget burn, 1 h", "Of the worst objective; 1 is just within it.", "none", f"max({burn})", pace),
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
                *("Answers by finish reason", "Why answers ended. Much `length`: max_tokens is too small.", "reqps"),
                {"{{finish_reason}}": rate("smc_requests_total", "finish_reason", 'status="OK"')},
                stacked=True,
            ),
            graph(
                *("Tokens", "Of prompts, cached ones among them, and of answers that were sent.", TOKENS_PER_SECOND),
                {"prompt": rate("smc_prompt_tokens_total"), "answer": ANSWER},
            ),
        ],
        "Latency": [
            graph(
                *(
                    "Time to first token",
                    "From a call's arrival to its first tokens. Objective: 99% within 2.5 s.",
                    "s",
                ),
                quantiles(first, 0.5, 0.95, 0.99),
                limits={"red": 2.5},
            ),
            graph(
                "Between tokens", "Tokens that come together share the wait.", "s", quantiles(between, 0.5, 0.95, 0.99)
            ),
            graph(
                *("Whole answer", "From a call's arrival to the end of its answer. Objective: 99% within 60 s.", "s"),
                quantiles(whole, 0.5, 0.95, 0.99),
                limits={"red": 60},
            ),
        ],
        "Distributions and objectives": [
            buckets("Time to first token, distribution", "Answers, by the time to their first tokens.", "s", first),
            buckets("Whole answer, distribution", "Answers, by the time they took.", "s", whole),
            graph(
                *(
                    "Error budget burn, 1 h",
                    "How many times too fast each objective's budget is used up; 14.4 wakes somebody.",
                    "none",
                ),
                {"{{slo}}": f"max by (slo) ({burn})"},
                limits=pace,
            ),
        ],
        "Sizes": [
            graph(
                *("Size of prompts", "Tokens of one, of answered requests.", "suffix: tok"),
                quantiles("smc_request_prompt_tokens", 0.5, 0.9, 0.99),
            ),
            graph(
                *("Size of answers", "Tokens of one.", "suffix: tok"),
                quantiles("smc_request_generation_tokens", 0.5, 0.9, 0.99),
            ),
        ],
        "Where answers spend their time": [
            graph(
                *("Means of an answer", "Waiting to be taken up, until its first token, until its end.", "s"),
                {part: mean(f"smc_request_{part}_time_seconds") for part in ("queue", "prefill", "decode")},
                stacked=True,
            ),
            graph(
                *("Waiting to be taken up", "It grows where slots or KV pages are short.", "s"),
                quantiles("smc_request_queue_time_seconds", 0.5, 0.95, 0.99),
            ),
            graph(
                *("Cached tokens of a prompt", "That need not be run.", "suffix: tok"),
                quantiles("smc_request_cached_tokens", 0.5, 0.9, 0.99),
            ),
        ],
        "Not answered": [
            graph(
                *("Rejections", "Calls that were not let in, by cause.", "reqps"),
                {"{{cause}}": rate("smc_requests_rejected_total", "cause")},
                stacked=True,
            ),
            graph(
                *("Cancellations", "Requests that ended early, by whom or what.", "reqps"),
                {"{{by}}": rate("smc_requests_cancelled_total", "by")},
                stacked=True,
            ),
        ],
    }
    return board("smc-traffic", "Traffic and latency", "What callers ask, what they get, and how long it takes.", rows)


def particles() -> Dashboard:
    share, lag, alike = "smc_ess_share_ratio", "smc_committed_lag_tokens", {"yellow": 0.1, "green": 0.3}
    resampled, collapsed = (ratio(rate(f"smc_{what}_total"), ROUNDS) for what in ("resamples", "collapses"))
    alone, tree_rows = (rate(f"smc_spec_decode_num_{what}_total") for what in ("alone_rounds", "rows"))
    low, kept = (
        f"max({pick('namespace_job:smc_ess_share_low:ratio_rate30m')})",
        ratio(ANSWER, f"({ROUNDS} + {DRAFTS} + {alone})"),
    )
    drafted, accepted = (rate(f"smc_spec_decode_num_{what}_tokens_total") for what in ("draft", "accepted"))
    hits, misses = (rate(f"smc_spec_decode_num_{what}_total") for what in ("hits", "misses"))
    by_position = rate("smc_spec_decode_num_accepted_tokens_per_pos_total", "position")
    rows = {
        "Now": [
            number("ESS share, median", "Of independent particles.", "percentunit", quantile(share, 0.5), alike),
            number(
                "Degenerate, 30 min",
                "Rounds whose ESS share is at most 0.2.",
                "percentunit",
                low,
                {"yellow": 0.3, "red": 0.5},
            ),
            number("Resampled", "Share of rounds.", "percentunit", resampled),
            number(
                "Collapsed",
                "Share of rounds with all weights zero.",
                "percentunit",
                collapsed,
                {"yellow": 1e-6, "red": 0.01},
            ),
            number("Tokens a round", "Answer tokens of one request.", "none", kept),
            number("Lag, median", "Tokens that are not final yet.", "suffix: tok", quantile(lag, 0.5)),
        ],
        "Weights": [
            graph(
                *(
                    "ESS share",
                    "Effective sample size over N, of independent particles: low where the models disagree.",
                    "percentunit",
                ),
                quantiles(share, 0.1, 0.5, 0.9),
            ),
            buckets("ESS share, distribution", "Rounds, by ESS share.", "percentunit", share),
            graph(
                *(
                    "Degenerate rounds",
                    "Share of rounds whose ESS share is at most 0.2, over 30 minutes.",
                    "percentunit",
                ),
                {"of rounds": low},
                limits={"red": 0.5},
            ),
        ],
        "Population": [
            graph(
                "Resampled rounds",
                "Share of rounds after which particles were copied.",
                "percentunit",
                {"of rounds": resampled},
            ),
            graph(
                *("Collapses", "Rounds a minute after which all weights were zero. Any is worth a look.", "cpm"),
                {"collapses": f"60 * {rate('smc_collapses_total')}"},
            ),
            graph(
                *(
                    "Committed lag",
                    "Tokens between what is final and the longest particle: what streaming waits for.",
                    "suffix: tok",
                ),
                quantiles(lag, 0.5, 0.9, 0.99),
            ),
        ],
        "Efficiency": [
            graph(
                *("Tokens run for one of the answer", "By each model, over all particles and branches.", "none"),
                {"{{group}}": ratio(rate("smc_model_tokens_total", "group"), ANSWER, per="group")},
            ),
            graph(
                "Answer tokens a round", "Of one request. Block + 1: every token was kept.", "none", {"tokens": kept}
            ),
            buckets(
                "Committed lag, distribution", "Rounds, by the tokens that were not final after them.", "none", lag
            ),
        ],
        "Exact decoding": [
            graph(
                *(
                    "Accepted by position",
                    "Share of rounds whose drafted token at this position, from 0, the target drew as well.",
                ),
                *("percentunit", {"{{position}}": ratio(by_position, DRAFTS, per="position")}),
            ),
            graph(
                *(
                    "Tokens confirmed a round",
                    "Of one request. What was not drafted ahead ends with a token of the target's own.",
                    "none",
                ),
                {"accepted": ratio(accepted, DRAFTS), "confirmed": ratio(f"({accepted} + {DRAFTS} - {hits})", DRAFTS)},
            ),
            graph(
                *(
                    "Acceptance and hits",
                    "Drafted tokens that the target drew as well; rounds whose next block, drafted ahead, was right.",
                ),
                *("percentunit", {"accepted": ratio(accepted, drafted), "hits": ratio(hits, f"({hits} + {misses})")}),
            ),
        ],
        "What costs decide": [
            graph("Rows", "Of a request's tree, on average: costs decide.", "none", {"rows": ratio(tree_rows, DRAFTS)}),
            graph(
                *(
                    "Without a draft",
                    "Share of rounds in which the target decoded alone: nothing drafted would have been faster.",
                ),
                *("percentunit", {"alone": ratio(alone, f"({alone} + {DRAFTS})")}),
            ),
        ],
    }
    return board(
        "smc-particles",
        "Particles",
        "How well populations of particles and exact decoding do, and what they cost.",
        rows,
    )


def groups() -> Dashboard:
    part, whole = "smc_round_part_seconds", "smc_round_seconds"
    in_rounds, both = rate(f"{whole}_sum"), 'part=~"draft|target"'
    ready, build = total("smc_group_healthy", "group"), pick("smc_build_info")
    by_weights = f"on (namespace, job, instance, pod) group_left (weights) {build}"
    age = f"time() - {pick('process_start_time_seconds')} and on (instance) {pick('smc_serving')}"
    hour = f"round({gain('smc_worker_restarts_total', '1h')})"
    minutes = {
        name: f"round({gain(f'smc_{one}_restarts_total', '5m')})"
        for name, one in (("all", "worker"), ("draft alone", "draft"))
    }
    rows = {
        "Now": [
            number("Serving", "Instances that let requests in.", "none", total("smc_serving"), {"green": 1}),
            number("Ready now", "Instances whose group is ready.", "none", ready, {"green": 1}, "{{group}}"),
            number(
                "Latest epoch",
                "Starts of the workers, or of a draft alone, so far.",
                "none",
                f"max({pick('smc_epoch')})",
            ),
            number("Restarts, 1 h", "After a loss.", "none", hour, {"yellow": 1, "red": 3}),
            number("Up", "The youngest instance.", "s", f"min({age})"),
            name(
                "Runs",
                "Version, form, link.",
                f"group by (version, form, link) ({build})",
                "{{version}} {{form}} {{link}}",
            ),
        ],
        "Models at work": [
            graph(
                *(
                    "Busy",
                    "Share of all time that each group works: both near 100% is the aim of look-ahead.",
                    "percentunit",
                ),
                {"{{part}}": f"avg by (part) (rate({pick(f'{part}_sum', both)}[$__rate_interval]))"},
            ),
            graph(
                *("Stalled", "Share of rounds' time that a group waits.", "percentunit"),
                {"{{group}}": ratio(rate("smc_stall_seconds_total", "group"), in_rounds, per="group")},
            ),
            graph(
                *("Link", "Share of rounds' time that nobody works: messages are on their way.", "percentunit"),
                {"link": ratio(rate(f"{part}_sum", where='part="link"'), in_rounds)},
            ),
        ],
        "Rounds": [
            graph(
                "Parts of a round",
                "Mean time; draft and target overlap in look-ahead form.",
                "s",
                {"{{part}}": mean(part, "part")},
            ),
            graph("Round", "From the first command to the last decision.", "s", quantiles(whole, 0.5, 0.95, 0.99)),
            buckets("Round, distribution", "Rounds, by their duration.", "s", whole),
        ],
        "KV memory": [
            graph(
                *("KV pages in use", "Share of each pool that requests hold, of the fullest instance.", "percentunit"),
                {"{{group}}": f"max by (group) ({pick('smc_kv_cache_usage_ratio')})"},
                limits=FULL,
            ),
            graph(
                *("KV pages leaked", "Held while nothing ran: anything but 0 is a bug.", "none"),
                {"{{group}}": total("smc_kv_pages_leaked", "group")},
            ),
        ],
        "Life": [
            graph("Ready", "Instances whose group is ready.", "none", {"{{group}}": ready}),
            graph(
                "Epoch", "Which life of its workers each instance is in.", "none", {"{{instance}}": pick("smc_epoch")}
            ),
            graph(
                *("Restarts", "Times that workers were started again after a loss, in five minutes.", "none"),
                minutes,
            ),
            graph(
                *(
                    "Since the last round",
                    "Grows while nothing runs; while requests run, a sign that something is stuck.",
                    "s",
                ),
                {"{{instance}}": pick("smc_last_round_age_seconds")},
            ),
        ],
    }
    rows["Weights of the target"] = [
        graph(
            *("Serving, by weights", "Instances that let requests in; two lines are a rollout, and cross.", "none"),
            {"{{weights}}": f"sum by (weights) ({pick('smc_serving')} * {by_weights})"},
        ),
        graph(
            *("Answers, by weights", "Calls that ended with an answer.", "reqps"),
            {
                "{{weights}}": f"""sum by (weights) (rate({pick("smc_requests_total", 'status="OK"')}[$__rate_interval]) * {by_weights})"""
            },
        ),
    ]
    return board("smc-groups", "Groups", "Draft and target: who works, who waits, who is ill.", rows)


def capacity() -> Dashboard:
    slots, ours = total("smc_slots_capacity"), pick("smc_serving")
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
                "Share of calls: the queue was full.",
                "percentunit",
                refused,
                {"yellow": 1e-6, "red": 0.05},
            ),
            number("Slots in all", "Particles that can run at once.", "none", slots),
            number("Answer tokens", "Tokens sent to callers.", TOKENS_PER_SECOND, ANSWER),
            number("Tokens a slot", "Of answers, per slot in use.", TOKENS_PER_SECOND, ratio(ANSWER, used)),
        ],
        "Saturation": [
            dial("Slots in use", "Slots that running requests hold.", held, FULL),
            dial(
                "KV pages in use",
                "Pages of each pool that requests hold, without the prefix cache's.",
                IN_USE,
                FULL,
                "{{group}}",
            ),
            dial(
                "Headroom",
                "What is left of whatever is scarcest.",
                f"1 - max({IN_USE} or {held})",
                {"yellow": 0.05, "green": 0.2},
            ),
        ],
        "Load": [
            graph(
                "Requests",
                "Those that hold slots, and those that wait.",
                "none",
                {"running": running, "waiting": waiting},
            ),
            graph(
                "Slots",
                "Particles of running requests, and how many there can be.",
                "none",
                {"used": used, "capacity": slots},
            ),
            graph(
                *("Refused", "Calls that found the queue full.", "reqps"),
                {"queue full": rate("smc_requests_rejected_total", where=full)},
            ),
        ],
        "KV memory": [
            graph(
                *(f"KV pages of the {group}", "Held by requests alone, by the prefix cache, by nobody.", "none"),
                _pages(f'group="{group}"'),
                stacked=True,
            )
            for group in ("draft", "target")
        ],
        "Prefix cache, and what happens where memory is short": [
            graph(
                *(
                    "Prefix cache hits",
                    "Share of prompt tokens that had been computed for an earlier request.",
                    "percentunit",
                ),
                {"{{group}}": ratio(hits, queries)},
            ),
            graph(
                *(
                    "Preemptions",
                    "Requests a minute that gave up their memory to others; what they held is computed again.",
                    "cpm",
                ),
                {"preemptions": f"60 * {rate('smc_preemptions_total')}"},
                limits={"red": 1},
            ),
            graph(
                *(
                    "Populations shrunk",
                    "Populations a minute that were made smaller, as far as their requests allow it.",
                    "cpm",
                ),
                {"shrinks": f"60 * {rate('smc_population_shrinks_total')}"},
            ),
        ],
        "The gateway's process": [
            graph(
                *("Paused", "Share of time in which it answered nobody, of pauses longer than 0.25 s.", "percentunit"),
                {"{{instance}}": f"rate({pick('smc_gateway_paused_seconds_total')}[$__rate_interval])"},
            ),
            graph(
                *("Memory", "Resident. Coordinator and ranks are other processes.", "bytes"),
                {"{{instance}}": f"{pick('process_resident_memory_bytes')} and on (instance) {ours}"},
            ),
            graph(
                *("CPU", "Cores in use.", "none"),
                {
                    "{{instance}}": f"rate({pick('process_cpu_seconds_total')}[$__rate_interval]) and on (instance) {ours}"
                },
            ),
            graph(
                *("Open files", "Share of the limit; connections are among them.", "percentunit"),
                {"{{instance}}": f"{pick('process_open_fds')} / {pick('process_max_fds')} and on (instance) {ours}"},
            ),
        ],
    }
    return board(
        "smc-capacity", "Capacity", "How full the service is, what fills it, and how much more it can take.", rows
    )


def _pages(where: str) -> dict[str, str]:
    """Parts of a pool, by legend."""
    used, cached, free = (total(f"smc_kv_pages_{what}", where=where) for what in ("used", "cached", "free"))
    return {"requests": f"{used} - {cached}", "cached": cached, "free": free}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER, help="where to write; default: where they belong")
    out = parser.parse_args().out
    for dashboard in (traffic(), particles(), groups(), capacity()):
        text = json.dumps(dashboard, cls=JSONEncoder, indent=2, sort_keys=True)
        (out / f"{dashboard.uid.removeprefix('smc-')}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
