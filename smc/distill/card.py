"""What a run leaves beside the draft's weights: a card, its numbers as JSON, and a picture of them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smc.distill.measure import BLOCK, Measurement
from smc.terminal import finite

CARD, PICTURE = "README.md", "distill.png"


def write_card(directory: Path, record: dict[str, Any], history: Sequence[Measurement], record_name: str) -> None:
    """`record`: of the run, with the history as plain numbers."""
    (directory / record_name).write_text(json.dumps(finite(record), indent=2) + "\n", encoding="utf-8")
    if not history:
        return
    drawn = importlib.util.find_spec("matplotlib") is not None
    if drawn:
        draw(history, directory / PICTURE)
    (directory / CARD).write_text(_card(record, history[-1], drawn), encoding="utf-8")


def _card(record: dict[str, Any], last: Measurement, drawn: bool) -> str:
    losses = {
        "tv": "total variation, for exact decoding",
        "chi2": "log(1 + chi-square), for SMC",
        "kl": "KL divergence",
    }
    speeds = record["tokens_a_second"]
    prompts = f", and answers to {record['prompts']:,} given prompts" if record["prompts"] else ""
    lines = [
        f"# Draft for {record['target']}",
        "",
        f"A draft for speculative decoding of {record['target']}, trained by `smcserve distill` on what this target wrote.",
        "",
        f"- **Draft**: {record['draft']}; {record['trained_weights']:,} weights were trained.",
        f"- **Data**: {record['conversations']:,} conversations with {last.written_tokens:,} answer tokens, written by the "
        f"target at temperatures {', '.join(f'{each:g}' for each in sorted(set(record['temperatures_written'])))}: user "
        f"turns of its own{prompts}. Seed {record['seed']}.",
        f"- **Loss**: {losses[record['loss']]}, after KL divergence at the beginning. {last.step:,} steps, "
        f"{last.trained_tokens:,} answer tokens seen, in {record['seconds']:,.0f} s on {record['processes']} x "
        f"{record['device']} ({speeds['written']:,.0f} tokens a second written, {speeds['trained']:,.0f} learnt from).",
        "",
        f"Measured on {record['held_out']} conversations that were held out ({last.positions:,} answer tokens, "
        f"{last.contexts} contexts of trees):",
        "",
        "| | |",
        "| :--- | ---: |",
        f"| overlap, sum of min(p, q) at temperature 1 | {last.overlap:.3f} |",
        f"| KL divergence, nats a token | {last.kl:.3f} |",
        f"| log(1 + chi-square) | {last.chi2:.3f} |",
        f"| same likeliest token | {last.same_likeliest:.3f} |",
        f"| entropy of the target, nats a token | {last.entropy:.3f} |",
        "",
        f"Tokens of {BLOCK} that a tree of coupled drafting holds, and the expected speed of exact decoding on that "
        "machine, of one request in lockstep, as a multiple of the target's alone:",
        "",
        "| temperature | rows | tokens | held by depth | speed |",
        "| ---: | ---: | ---: | :--- | ---: |",
        *(
            f"| {each.temperature:g} | {each.rows} | {each.held:.2f} | "
            f"{', '.join(f'{share:.0%}' for share in each.held_by_depth)} | "
            f"{'' if each.speed is None else f'{each.speed:.2f}x'} |"
            for each in last.trees
        ),
        "",
        *([f"![The draft over time]({PICTURE})", ""] if drawn else []),
        "    smcserve generate --target TARGET --draft THIS --method exact",
        "",
    ]
    return "\n".join(lines)


def draw(history: Sequence[Measurement], path: Path) -> None:
    """Overlap, tokens held and, where they were measured, expected speeds over the time of the run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    minutes = [each.seconds / 60 for each in history]
    titles = ["held-out answers", f"tokens of {BLOCK} that a tree holds"]
    if any(tree.speed is not None for tree in history[-1].trees):
        titles.append("expected speed, of the target alone")
    figure, panels = pyplot.subplots(1, len(titles), figsize=(13 / 3 * len(titles), 3.8), layout="constrained")
    panels[0].plot(minutes, [each.overlap for each in history], "o-", label="overlap")
    panels[0].plot(minutes, [each.same_likeliest for each in history], "o--", label="same likeliest")
    for index, tree in enumerate(history[-1].trees):
        name = f"T={tree.temperature:g} N={tree.rows}"
        panels[1].plot(minutes, [each.trees[index].held for each in history], "o-", label=name)
        if tree.speed is not None:
            panels[2].plot(minutes, [each.trees[index].speed for each in history], "o-", label=name)
    for axes, title in zip(panels, titles):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("minutes")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
