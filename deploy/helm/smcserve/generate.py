"""Writes the generated files of the chart: copies of other files in files/, and the README with a table of all values
that have a comment `# -- ..`.

The files are copied, not linked, because some tools that fetch charts drop links.

python deploy/helm/smcserve/generate.py
"""

from __future__ import annotations

import json
import re
from functools import reduce
from pathlib import Path

import yaml

HERE = Path(__file__).parent
DEPLOY = HERE.parents[1]
TABLE = "<!-- values -->"


def rows(text: str) -> list[tuple[str, object, str]]:
    """(dotted name, default, comment) of each documented value, in the order of the file."""
    values, found, keys, comment = yaml.safe_load(text), [], [], []
    for line in text.splitlines():
        if line.lstrip().startswith("# -- "):
            comment = [line.lstrip().removeprefix("# -- ")]
        elif comment and line.lstrip().startswith("# "):
            comment.append(line.lstrip().removeprefix("# "))
        elif named := re.match(r"( *)([A-Za-z]\w*):", line):
            keys = [*keys[: len(named[1]) // 2], named[2]]
            if comment:
                found.append((".".join(keys), reduce(lambda inside, key: inside[key], keys, values), " ".join(comment)))
            comment = []
    return found


def readme() -> str:
    """The chart's README, with the table of values."""
    body = "\n".join(
        f"| `{name}` | `{json.dumps(value)}` | {description} |"
        for name, value, description in rows((HERE / "values.yaml").read_text())
    )
    return (HERE / "README.md.in").read_text().replace(TABLE, f"| value | default | |\n| :--- | :--- | :--- |\n{body}")


def generated() -> dict[Path, str]:
    """Path -> expected contents of every generated file."""
    copies = {"values.yaml": HERE / "values.yaml"}
    copies |= {path.name: path for path in DEPLOY.glob("prometheus/*.yml") if path.stem in ("rules", "alerts")}
    copies |= {f"dashboards/{path.name}": path for path in DEPLOY.glob("grafana/dashboards/*.json")}
    index = sorted([*copies, *(f"scripts/{path.name}" for path in HERE.glob("files/scripts/*") if path.is_file())])
    texts = {name: path.read_text() for name, path in copies.items()} | {"index.txt": "\n".join(index) + "\n"}
    return {HERE / "README.md": readme()} | {HERE / "files" / name: text for name, text in texts.items()}


if __name__ == "__main__":
    for target, text in generated().items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
