"""`smcserve bench --advise`: which split of GPUs, and which N, F, K, decode how many requests fastest: foretold from
measured costs."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from smc.evaluation.reports.costs import costs_tables
from smc.terminal import err, out

if TYPE_CHECKING:
    from smc.evaluation.advise import Acceptance, Foretold, Settings
    from smc.evaluation.ttft import PromptMachine
    from smc.scheduler.latency_model import LatencyModel

LOADS = (1, 8, 64)
MOST_ROWS = 512
"""Of a timed draft step."""
LEGEND = (
    "foretold for exact decoding{law}, of {how}; requests of {context:,} tokens each, prompts left out. tok a round: by which an answer "
    "grows; tok/s: of one request, and of all. x plain: against the fastest plain decoding on the same number of GPUs, as services side by "
    "side or with the target split."
)
COLUMNS = "GPUs N F K tok_a_round tok/s total x_plain"


@dataclass(frozen=True)
class AdvisePlan:
    """What is asked. Raises ValueError naming the option, the value and what is allowed."""

    gpus: int
    degrees: Sequence[int]
    """GPUs of the target that are tried."""
    loads: Sequence[int]
    """Requests side by side."""
    context: int
    """Tokens of each."""
    particles: Sequence[int] | None
    branches: Sequence[int] | None
    blocks: Sequence[int] | None
    acceptance: float | None
    """Of one row; None: measured."""
    law: Mapping[str, Any]
    """Of `SamplingParams`, by name."""
    json: Path | None
    picture: Path | None

    def __post_init__(self) -> None:
        from smc.api.engine_config import EngineConfig
        from smc.api.sampling_params import Method, SamplingParams

        SamplingParams(method=Method.EXACT, **self.law)
        if self.acceptance is not None and not 0 < self.acceptance < 1:
            raise ValueError(f"--acceptance {self.acceptance:g}; allowed: between 0 and 1, both excluded")
        if self.context < 1:
            raise ValueError(f"--context {self.context}; allowed: >= 1")
        if self.gpus < 1:
            raise ValueError(f"--gpus {self.gpus}; allowed: >= 1")
        among = self.settings
        for particles, branches, block in product(among.particles, among.branches, among.blocks):
            SamplingParams(method=Method.EXACT, particles=particles)
            EngineConfig(block=block, branches=branches)
        if too_many := [degree for degree in self.degrees if degree > self.gpus]:
            raise ValueError(f"--target-tp {too_many[0]}; allowed with {self.gpus} GPUs: 1..{self.gpus}")

    @property
    def settings(self) -> Settings:
        from smc.evaluation.advise import Settings

        given = {"particles": self.particles, "branches": self.branches, "blocks": self.blocks}
        return Settings(**{name: tuple(values) for name, values in given.items() if values})

    @property
    def rows(self) -> int:
        """Of a draft step, at most; beyond what is timed, costs are foretold to grow in proportion."""
        among = self.settings
        return min(MOST_ROWS, max(self.loads) * max(among.particles) * max(among.branches))

    def split(self, degree: int) -> tuple[int, int]:
        """GPUs of draft and target when its costs are timed: apart where the target is split, and there is one more."""
        return (1, degree) if 1 < degree < self.gpus else (0, degree)


def run(plan: AdvisePlan, machine: PromptMachine, compiles: bool) -> None:
    """Measure, then print what follows. `compiles`: rounds of a kind are compiled and recorded there before they can be
    timed."""
    from smc.calibration.costs import STEADY, THOROUGH
    from smc.evaluation.advise import Acceptance, advise, arrangements
    from smc.evaluation.probes import measure_acceptance, measure_costs
    from smc.evaluation.speed import PLAIN_BLOCK

    curves = {}
    for degree in plan.degrees:
        err.print(f"timing rounds, the target on {degree}", style="dim")
        curves[degree] = measure_costs(machine, plan.split(degree), THOROUGH if compiles else STEADY, plan.rows)
    if plan.acceptance is not None:
        acceptance = Acceptance(plan.acceptance)
    else:
        err.print("answering problems, to see what is accepted", style="dim")
        acceptance = measure_acceptance(machine, plan.split(plan.degrees[0]), plan.law)

    def speeds(loads: Sequence[int]) -> list[Foretold]:
        return advise(arrangements(plan.gpus, curves), loads, acceptance, plan.settings, PLAIN_BLOCK, plan.context)

    report(plan, curves, acceptance, speeds)


def report(
    plan: AdvisePlan,
    curves: Mapping[int, LatencyModel],
    acceptance: Acceptance,
    speeds: Callable[[Sequence[int]], list[Foretold]],
) -> None:
    """Tables; the same numbers, and a picture, where they are wanted. `speeds`: of some loads."""
    how = (
        f"whose draft, with one row, has the target's next token with probability {acceptance.one:.3f}"
        f" ({'given' if plan.acceptance else 'measured'}), and with N rows misses it N^{acceptance.gain:.2f} times less often"
    )
    law = "".join(f", {name} {value:g}" for name, value in plan.law.items())
    found = speeds(plan.loads)
    for table in costs_tables(curves):
        out.print(table)
    out.print(advice_table(found), LEGEND.format(law=law, how=f"a pair {how}", context=plan.context), sep="\n")
    if plan.json is not None:
        plan.json.write_text(json_module.dumps(_record(curves, acceptance, found), indent=1) + "\n")
    if plan.picture is not None:
        from smc.evaluation.advise_picture import draw

        most = max(plan.loads)
        doubling = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
        title = (
            f"exact decoding on {plan.gpus} GPUs{law}, foretold for contexts of {plan.context:,} tokens: "
            f"a drafted row has the target's token with probability {acceptance.one:.3f}"
        )
        draw(speeds(sorted({*doubling, *plan.loads})), plan.picture, title)


def advice_table(speeds: Sequence[Foretold]) -> Table:
    """Every load's arrangements, the fastest first."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=0)
    table.add_column("requests", justify="right", no_wrap=True)
    table.add_column("arrangement", no_wrap=True)
    for header in COLUMNS.split():
        table.add_column("\n".join(header.replace("_", " ").rsplit(" ", 1)), justify="right", no_wrap=True)
    last = None
    for speed in speeds:
        arrangement, setting, new = speed.arrangement, speed.setting, speed.requests != last
        if new and last is not None:
            table.add_section()
        last = speed.requests
        shape = (
            ("", "", "")
            if setting is None
            else (setting.particles, setting.branches if arrangement.form == "look-ahead" else "")
        )
        shape = shape if setting is None else (*shape, setting.block)
        base = plain_of(speeds, speed.requests)
        rates = (
            f"{speed.tokens:.1f}",
            f"{speed.per_request:,.0f}",
            f"{speed.total:,.0f}",
            f"{speed.per_request / base:.2f}",
        )
        used = arrangement.gpus * arrangement.copies
        table.add_row(
            str(speed.requests) if new else "",
            arrangement.name,
            str(used),
            *map(str, shape),
            *rates,
            style="bold" if new else None,
        )
    return table


def plain_of(speeds: Sequence[Foretold], requests: int) -> float:
    """Tokens a second of a request by the fastest plain decoding."""
    return max(speed.per_request for speed in speeds if speed.requests == requests and speed.setting is None)


def _record(
    curves: Mapping[int, LatencyModel], acceptance: Acceptance, speeds: Sequence[Foretold]
) -> dict[str, object]:
    rows = [
        {
            "requests": speed.requests,
            "arrangement": speed.arrangement.name,
            "gpus": speed.arrangement.gpus * speed.arrangement.copies,
            "setting": speed.setting and asdict(speed.setting),
            "tokens": speed.tokens,
            "seconds": speed.seconds,
            "per_request": speed.per_request,
            "total": speed.total,
        }
        for speed in speeds
    ]
    costs = {str(degree): json_module.loads(each.to_json()) for degree, each in curves.items()}
    return {"costs": costs, "acceptance": asdict(acceptance), "speeds": rows}
