"""Writes the chart's README: what README.md.in says, with a table of every value that has a comment `# -- ..` in values.yaml.

python deploy/helm/smcserve/readme.py
"""

from __future__ import annotations

import json
import re
from functools import reduce
from pathlib import Path

import yaml

HERE = Path(__file__).parent
TABLE = "<!-- values -->"


def rows(text: str) -> list[tuple[str, object, str]]:
    """Dotted name, default and comment of each, in the order of the file."""
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
    body = "\n".join(f"| `{name}` | `{json.dumps(value)}` | {said} |" for name, value, said in rows((HERE / "values.yaml").read_text()))
    return (HERE / "README.md.in").read_text().replace(TABLE, f"| value | default | |\n| :--- | :--- | :--- |\n{body}")


if __name__ == "__main__":
    (HERE / "README.md").write_text(readme())
