"""Writes the generated files of the chart: copies of other files in files/, the README with a table of all values that
have a comment `# -- ..`, and in values.schema.json the keys of the configuration files of `serve` and `batch`.

The files are copied, not linked, because some tools that fetch charts drop links.

python deploy/helm/smcserve/generate.py
"""

from __future__ import annotations

import json
import re
from functools import reduce
from pathlib import Path

import yaml

from services.cli.options import COUNT_OR_WORD, keys_of, value_kind
from services.cli.service_options import BatchOptions, ServeOptions

HERE = Path(__file__).parent
DEPLOY = HERE.parents[1]
TABLE = "<!-- values -->"
CONFIGS = {"serveConfig": ServeOptions, "batchConfig": BatchOptions}
"""Definition in the schema -> the record that a command reads from its configuration file."""
KINDS: dict[tuple[object, type | None], tuple[str, dict[str, object]]] = {
    (int, None): ("wholeKey", {"type": ["integer", "string", "null"], "pattern": r"^[-+]?[0-9]+$"}),
    (float, None): (
        "numberKey",
        {"type": ["number", "string", "null"], "pattern": r"^[-+]?[0-9.]+([eE][-+]?[0-9]+)?$"},
    ),
    (COUNT_OR_WORD, None): ("countKey", {"type": ["integer", "string", "null"], "pattern": r"^([0-9]+|[a-z]+)$"}),
    (str, None): ("textKey", {"type": ["string", "null"]}),
    (Path, None): ("textKey", {"type": ["string", "null"]}),
    (bool, None): ("truthKey", {"type": ["boolean", "null"]}),
    (str, list): ("textsKey", {"type": ["string", "array", "null"], "items": {"type": "string"}}),
    (str, dict): ("mappingKey", {"type": ["object", "null"], "additionalProperties": {"type": "string"}}),
}
"""Type and container of a key's value -> name and schema of what the commands accept: numbers also as text, null for a
key that is not given."""


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


def config_schema(record: type) -> dict[str, object]:
    """Schema of the configuration file of a command, which takes names with dashes or underscores."""
    keys = sorted((key.name, KINDS[value_kind(key)][0]) for key in keys_of(record).values())
    patterns = {f"^{name.replace('-', '[-_]')}$": {"$ref": f"#/definitions/{kind}"} for name, kind in keys}
    return {"type": "object", "additionalProperties": False, "patternProperties": patterns}


def schema() -> str:
    """The schema of the values, with the keys of both configuration files."""
    text = json.loads((HERE / "values.schema.json").read_text())
    text["definitions"] |= dict(KINDS.values()) | {name: config_schema(record) for name, record in CONFIGS.items()}
    return json.dumps(text, indent=2) + "\n"


def generated() -> dict[Path, str]:
    """Path -> expected contents of every generated file."""
    copies = {"values.yaml": HERE / "values.yaml"}
    copies |= {path.name: path for path in DEPLOY.glob("prometheus/*.yml") if path.stem in ("rules", "alerts")}
    copies |= {f"dashboards/{path.name}": path for path in DEPLOY.glob("grafana/dashboards/*.json")}
    index = sorted([*copies, *(f"scripts/{path.name}" for path in HERE.glob("files/scripts/*") if path.is_file())])
    texts = {name: path.read_text() for name, path in copies.items()} | {"index.txt": "\n".join(index) + "\n"}
    made = {HERE / "README.md": readme(), HERE / "values.schema.json": schema()}
    return made | {HERE / "files" / name: text for name, text in texts.items()}


if __name__ == "__main__":
    for target, text in generated().items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
