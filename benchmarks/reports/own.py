"""Tables and picture of `smcserve eval` over a pair and problems of one's own.

`python -m benchmarks.reports.own FILE .. [--markdown OUT] [--picture OUT]` prints the tables of a record, or of
several that were measured at the same time with `--numerics invariant`. Knows records; knows nothing about engines."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.own_record import TARGET, OwnRecord, OwnRow
from benchmarks.reports import interval, number_cell
from benchmarks.reports.quality import COLOURS
from smc.terminal import check_drawing, out, print_warning
from smc.types import Numerics

HEADERS = (
    *("decoding", "solved", "95%", "- target", "95%", "cut", "same", "log p"),
    *("round", "log Z", "tok", "tok/s", "in flight"),
)
LEGEND = (
    "solved: of the answers that came to an end; 95%: its interval; - target: percentage points solved more than the "
    "target, over the problems that both answers end for, and its interval; cut: answers that reached --max-tokens "
    "first; same: share of problems whose answer is the target's own, token by token; log p: mean log-probability of "
    "an answer token under the target's distribution, minus that of the target's own answers; round: tokens that a "
    "round confirms; accepted by depth: share of rounds in which the first, the first two, .. drafted tokens were "
    "accepted; log Z: of SMC, a token, far below 0 where the draft does not know the text; tok: tokens of an answer; "
    "tok/s: tokens a second of all requests in flight, prompts apart; a model alone queues as many tokens a round as "
    "the first setting with both models drafts (K)."
)
BIT_FOR_BIT = "Exact decoding by walk gives the target's own answers bit for bit, with --numerics invariant."
SMC_MEANING = "SMC draws other answers, from a distribution that nears the target's as N grows: see solved and log p."
MEANINGS = {
    "exact": "Exact decoding by walk gives the target's own answers in float32. In other types sums depend on the rows "
    "of a pass, so near ties between tokens may fall otherwise, and the answers differ from there on.",
    "rejection": "Exact decoding by rejection follows the target's distribution, but draws other answers from it.",
    "independent": SMC_MEANING,
    "distinct": SMC_MEANING,
    "draft": "The draft answers by itself: it shows what is lost without the target.",
}
"""What agreement with the target's answers means, by `DecodingSetting.kind`."""
Part = tuple[str, float, list[OwnRow]]
"""Problems, temperature, and the rows for them."""


MARGINS = (1, 3)
"""Points about which it is said who is so near to the target."""
PANELS = 4
"""Maximum number of panels of a picture beside each other."""
NUMBER = re.compile(r"=(\d+)")
ALL = "all files"
"""Name of the problems of all files together."""


def parts(record: OwnRecord) -> Iterator[Part]:
    """Yield the rows by temperature and problems; for each temperature with several files that have expected answers,
    also their answers together. Rows of one kind stand together, the smallest N first."""
    rows = list(record.rows.values())
    temperatures = list(dict.fromkeys(row.temperature for row in rows))
    files = list(dict.fromkeys(row.problems for row in rows))
    kinds = list(dict.fromkeys(row.decoding.split()[0] for row in rows))
    rows.sort(key=lambda row: (kinds.index(row.decoding.split()[0]), [int(n) for n in NUMBER.findall(row.decoding)]))
    for temperature in temperatures:
        here = [row for row in rows if row.temperature == temperature]
        names = [name for name in files if any(row.problems == name for row in here)]
        yield from ((name, temperature, [row for row in here if row.problems == name]) for name in names)
        graded = {row.problems for row in here if row.accuracy} & set(record.conditions["problems"])
        if len(graded) > 1:
            yield ALL, temperature, _together(here, graded)


def _together(rows: Sequence[OwnRow], names: Collection[str]) -> list[OwnRow]:
    """Return a row for each setting with all of these problems, whose answers are those to all of them."""
    found = []
    for decoding in dict.fromkeys(row.decoding for row in rows):
        several = [row for row in rows if row.decoding == decoding and row.problems in names]
        if len(several) == len(names):
            answers = tuple(answer for row in sorted(several, key=lambda row: row.problems) for answer in row.answers)
            seconds = sum(row.seconds for row in several)
            found.append(OwnRow(ALL, rows[0].temperature, decoding, 0, None, (), None, seconds, answers))
    return found


def print_report(record: OwnRecord, kinds: Sequence[str]) -> None:
    """Print a table for each file and temperature, what it says in words, and what its columns mean. `kinds`: those of
    the settings."""
    for problems, temperature, rows in parts(record):
        out.print(
            f"{problems}: {len(rows[0].answers)} problems, temperature {temperature:g}", style="bold", markup=False
        )
        out.print(own_table(rows), *findings(rows), *margins(rows), *depths(rows), sep="\n", soft_wrap=True)
        if all(row.accuracy is None and not row.cut for row in rows):
            out.print("The file has no answers, so the share of solved problems is not known.", style="dim")
    if not record.rows:
        return
    in_one_order = record.conditions.get("numerics") == Numerics.INVARIANT
    meanings = MEANINGS | ({"exact": BIT_FOR_BIT} if in_one_order else {})
    out.print(LEGEND, *dict.fromkeys(meanings[kind] for kind in kinds if kind in meanings), sep="\n", soft_wrap=True)


def findings(rows: Sequence[OwnRow]) -> list[str]:
    """Return for each setting but the target what its comparison with the target says."""
    target = target_among(rows)
    return [] if target is None else [finding(row, target) for row in rows if row.key != target.key]


def finding(row: OwnRow, target: OwnRow) -> str:
    difference, name = row.difference_from(target), row.decoding
    if row.same_as(target) == 1:
        return f"{name}: every answer is the target's own."
    if difference is None:
        return f"{name}: {row.same_as(target):.0%} of the answers are the target's own."
    points, low, high = (100 * each for each in (difference.mean, difference.low, difference.high))
    both = f"{points:+.1f} points, 95% interval {low:+.1f} to {high:+.1f}, {difference.problems} problems"
    if low <= 0 <= high:
        return f"{name}: these problems show no difference from the target ({both})."
    return f"{name}: solves {'more' if low > 0 else 'fewer'} problems than the target ({both})."


def margins(rows: Sequence[OwnRow]) -> list[str]:
    """Return for each of `MARGINS` the settings of which the whole interval lies no more than so many points below the
    target, and those of which it lies no more above it either."""
    target = target_among(rows)
    if target is None:
        return []
    others = [(row.decoding, row.difference_from(target)) for row in rows if row.key != target.key]
    intervals = [(name, 100 * each.low, 100 * each.high) for name, each in others if each is not None]
    if not intervals:
        return []
    found = []
    for points in MARGINS:
        good = [(name, high) for name, low, high in intervals if low >= -points]
        near = ", ".join(name for name, high in good if high <= points) or "none"
        found.append(
            f"by the whole 95% interval, no more than {points} below the target: "
            f"{', '.join(name for name, _ in good) or 'none'}; nor above it: {near}"
        )
    return found


def own_table(rows: Sequence[OwnRow]) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), show_edge=False)
    for header in HEADERS:
        table.add_column(header, justify="left" if header == "decoding" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row, target_among(rows)))
    return table


def depths(rows: Sequence[OwnRow]) -> list[str]:
    """Return a line for each setting with accepted tokens by depth."""
    return [
        f"accepted by depth, {row.decoding}: {' '.join(f'{share:.0%}' for share in row.accepted_by_depth)}"
        for row in rows
        if row.accepted_by_depth
    ]


def target_among(rows: Sequence[OwnRow]) -> OwnRow | None:
    return next((row for row in rows if row.decoding == TARGET), None)


def cells(row: OwnRow, target: OwnRow | None) -> list[str]:
    """Return the cells of a row in the order of HEADERS. `target`: the row of the target for the same problems."""
    accuracy, other = row.accuracy, None if target is None or row.key == target.key else target
    difference = other and row.difference_from(other)
    base = None if target is None else target.mean_logp
    return [
        row.decoding,
        f"{accuracy.share:.1%}" if accuracy else "",
        interval(accuracy) if accuracy else "",
        number_cell(100 * difference.mean if difference else None, "+.1f"),
        f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}" if difference else "",
        str(row.cut),
        number_cell(row.same_as(other) if other else None, ".0%"),
        number_cell(None if row.mean_logp is None or base is None else row.mean_logp - base, "+.3f"),
        number_cell(row.tokens_a_round, ".2f"),
        number_cell(row.log_evidence, "+.3f"),
        f"{row.mean_tokens:.1f}",
        number_cell(row.tokens_per_second, ",.0f"),
        number_cell(row.in_flight or None, "d"),
    ]


def in_words(row: OwnRow, target: OwnRow | None) -> str:
    """Return a row as a line."""
    named = zip(HEADERS[1:], cells(row, target)[1:])
    values = ", ".join(f"{name} {value}" for name, value in named if value)
    return f"{row.problems}, T = {row.temperature:g}, {row.decoding}: {values}; {row.seconds:.1f} s"


def markdown(record: OwnRecord) -> str:
    """Return the tables as Markdown, with the conditions of the measurement above and the legend below."""
    conditions = {name: value for name, value in record.conditions.items() if name != "problems"}
    lines = [", ".join(f"{name} {value}" for name, value in conditions.items() if value is not None), ""]
    for problems, temperature, rows in parts(record):
        table = [list(HEADERS), [":---", *["---:"] * (len(HEADERS) - 1)]]
        table += [cells(row, target_among(rows)) for row in rows]
        lines += [f"**{problems}**, {len(rows[0].answers)} problems, temperature {temperature:g}", ""]
        lines += ["| " + " | ".join(line) + " |" for line in table] + [""]
    return "\n".join([*lines, LEGEND, ""])


def draw(record: OwnRecord, path: Path) -> None:
    """Draw the share solved with its 95% interval: a panel for each file and temperature that has expected answers."""
    from matplotlib.figure import Figure

    graded = [(name, temperature, [row for row in rows if row.accuracy]) for name, temperature, rows in parts(record)]
    graded = [part for part in graded if part[2]]
    if not graded:
        print_warning(f"no answer could be graded, so {path} is not drawn")
        return
    tall, wide = max(len(rows) for _, _, rows in graded), min(len(graded), PANELS)
    tiers = -(-len(graded) // wide)
    figure = Figure(figsize=(4.5 * wide, tiers * (1.2 + 0.24 * tall)), layout="constrained")
    for index, (name, temperature, rows) in enumerate(graded):
        axes = figure.add_subplot(tiers, wide, index + 1)
        axes.set_title(f"{name}, temperature {temperature:g}", fontsize=9, loc="left")
        axes.set_xlabel("problems solved, with 95% interval")
        axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axes.set_yticks(range(len(rows)), [row.decoding for row in rows], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.grid(axis="x", alpha=0.25)
        for place, row in enumerate(rows):
            assert row.accuracy is not None
            low, high = row.accuracy.interval
            share, colour = row.accuracy.share, COLOURS[row.decoding.split()[0]]
            axes.errorbar(share, place, xerr=[[share - low], [high - share]], fmt="o", color=colour, capsize=2)
        if (target := target_among(rows)) is not None and target.accuracy is not None:
            axes.axvline(target.accuracy.share, color="0.6", linewidth=1, zorder=0)
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "records", type=Path, nargs="+", help="files of smcserve eval --problems FILE --json, measured alike"
    )
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    parser.add_argument("--picture", type=Path, help="draw the shares solved to this PNG file")
    given = parser.parse_args(arguments)
    record = OwnRecord.joined(given.records)
    print_report(record, list(dict.fromkeys(row.decoding.split()[0] for row in record.rows.values())))
    if given.markdown:
        given.markdown.write_text(markdown(record), encoding="utf-8")
    if given.picture:
        check_drawing()
        draw(record, given.picture)


if __name__ == "__main__":
    main(sys.argv[1:])
