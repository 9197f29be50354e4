"""`smcserve check`: whether two model directories can serve as target and draft."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from services.cli import options
from smc.terminal import out

if TYPE_CHECKING:
    from smc.model.check import ModelReport, PairReport


def check(target: options.Target = None, draft: options.Draft = None, as_json: options.JsonFlag = False) -> int:
    """Say whether two model directories fit together; no weight is loaded."""
    from smc.loading import pair_directories
    from smc.model.check import check_pair

    directories = pair_directories(target, draft)
    report = check_pair(*directories)
    if as_json:
        print(json.dumps({"ok": not report.problems, **asdict(report)}))
    else:
        _print(report, directories)
    return 1 if report.problems else 0


def _print(report: PairReport, directories: tuple[Path, Path]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 3, 0, 0))
    headers: tuple[tuple[str, JustifyMethod], ...] = (("", "left"), ("target", "right"), ("draft", "right"))
    for title, justify in headers:
        table.add_column(title, justify=justify, overflow="fold")
    columns = [_column(model) for model in (report.target, report.draft)]
    for name in columns[0]:
        table.add_row(Text(name, style="dim"), *(column[name] for column in columns))
    for role, directory in zip(("target", "draft"), directories):
        out.print(Text.assemble((f"{role:7}", "dim"), str(directory)), soft_wrap=True)
    out.print()
    for problem in report.problems:
        out.print(Text.assemble(("problem: ", "bold red"), problem), soft_wrap=True)
    if report.target or report.draft:
        out.print(*([""] if report.problems else []), table, "", sep="\n")
    if not report.problems:
        what = f": {report.vocab_size:,} shared token ids, contexts up to {report.max_context:,} tokens"
        out.print(Text.assemble(("ok", "bold green"), what), soft_wrap=True)


def _column(model: ModelReport | None) -> dict[str, str]:
    names = ("architecture", "layers", "hidden size", "query / KV heads", "vocabulary", "context", "parameters", "size")
    if model is None:
        return dict.fromkeys(names, "refused")
    config = model.config
    values = (
        config.family,
        str(config.num_layers),
        f"{config.hidden_size:,}",
        f"{config.num_heads} / {config.num_kv_heads}",
        f"{config.vocab_size:,}",
        f"{config.max_context:,}",
        f"{model.parameters / 1e9:.2f} B" if model.parameters >= 1e8 else f"{model.parameters / 1e6:.2f} M",
        f"{model.bytes / 2**30:.2f} GiB" if model.bytes >= 2**28 else f"{model.bytes / 2**20:.2f} MiB",
    )
    return dict(zip(names, values))
