"""Rows of `smcserve eval` over a pair and problems of one's own, and the file that holds them. Every answer is kept, so
that rows can be compared problem by problem. Knows nothing about engines."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from smc.api.request import Answer, FinishReason
from smc.demo.problems import Accuracy

VERSION = 1
TARGET = "target alone"
"""Name of the setting that all others are compared with."""
Z95 = 1.96
"""Standard deviations to either side of a 95% interval."""
RowKey = tuple[str, float, str]
"""Problems, temperature, and name of the setting."""


@dataclass(frozen=True)
class OwnAnswer:
    """One answer."""

    text: str
    tokens: int
    tokens_sha256: str
    """First digits of a hash of the token ids, by which answers are compared."""
    cut: bool
    """Whether the answer reached the maximum number of tokens."""
    solved: bool | None
    """None: no answer is expected, or the answer was cut."""
    logp: float | None
    """Sum of the log-probabilities of its tokens under the target's distribution; None for the draft alone."""
    log_evidence: float | None
    """log Z; SMC only."""

    @staticmethod
    def of(answer: Answer, solved: bool | None, *, is_smc: bool) -> OwnAnswer:
        """`solved`: the grade of the text."""
        cut = answer.finish_reason is FinishReason.LENGTH
        return OwnAnswer(
            text=answer.text,
            tokens=len(answer.tokens),
            tokens_sha256=hashlib.sha256(repr(answer.tokens).encode()).hexdigest()[:16],
            cut=cut,
            solved=None if cut else solved,
            logp=None if answer.logprobs is None else sum(answer.logprobs),
            log_evidence=answer.statistics.log_z if is_smc else None,
        )


@dataclass(frozen=True)
class Difference:
    """Share solved minus the target's, over the problems that both answers end for, with its 95% interval: Wald's after
    half a problem is added to each of the four outcomes (Agresti and Min, 2005)."""

    problems: int
    """Number of these problems."""
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class OwnRow:
    """Results of one setting on one file of problems at one temperature. None: the method has no such value."""

    problems: str
    """Name of the file."""
    temperature: float
    decoding: str
    """Name of the setting."""
    in_flight: int
    """Number of requests in flight."""
    tokens_a_round: float | None
    """Exact decoding only."""
    accepted_by_depth: tuple[float, ...]
    tokens_per_second: float | None
    """Answer tokens per second while all `in_flight` requests run; None if no round had them all."""
    seconds: float
    """Duration of the measurement, first uses of shapes included."""
    answers: tuple[OwnAnswer, ...]
    """In the order of the problems."""

    @property
    def key(self) -> RowKey:
        return self.problems, self.temperature, self.decoding

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def mean_tokens(self) -> float:
        """Mean length of an answer."""
        return self.tokens / len(self.answers)

    @property
    def cut(self) -> int:
        return sum(answer.cut for answer in self.answers)

    @property
    def accuracy(self) -> Accuracy | None:
        """Of the answers that came to an end and have an expected answer; None: there are none."""
        grades = [answer.solved for answer in self.answers if answer.solved is not None]
        return Accuracy(sum(grades), len(grades)) if grades else None

    @property
    def mean_logp(self) -> float | None:
        """Mean log-probability of an answer token under the target's distribution, temperature included."""
        return self._a_token([answer.logp for answer in self.answers])

    @property
    def log_evidence(self) -> float | None:
        """log Z, a token."""
        return self._a_token([answer.log_evidence for answer in self.answers])

    def _a_token(self, values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / self.tokens if known and self.tokens else None

    def same_as(self, target: OwnRow) -> float:
        """Return the share of answers that are the target's, token by token."""
        pairs = zip(self.answers, target.answers, strict=True)
        return sum(one.tokens_sha256 == other.tokens_sha256 for one, other in pairs) / len(self.answers)

    def difference_from(self, target: OwnRow) -> Difference | None:
        """Return the difference in problems solved, problem by problem; None if no problem has both grades."""
        pairs = zip(self.answers, target.answers, strict=True)
        grades = [
            (one.solved, other.solved) for one, other in pairs if one.solved is not None and other.solved is not None
        ]
        if not grades:
            return None
        won = sum(one and not other for one, other in grades)
        lost = sum(other and not one for one, other in grades)
        count = len(grades) + 2
        middle = (won - lost) / count
        spread = Z95 * math.sqrt(((won + lost + 1) / count - middle**2) / count)
        low, high = max(-1.0, middle - spread), min(1.0, middle + spread)
        return Difference(len(grades), (won - lost) / len(grades), low, high)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, and for readers of the file the values that follow from the answers."""
        accuracy = self.accuracy
        found = {
            "count": len(self.answers),
            "cut": self.cut,
            "graded": accuracy.count if accuracy else 0,
            "correct": accuracy.correct if accuracy else 0,
            "accuracy": accuracy.share if accuracy else None,
            "interval_95": list(accuracy.interval) if accuracy else None,
            "mean_logp": self.mean_logp,
            "log_evidence": self.log_evidence,
            "mean_tokens": self.mean_tokens,
        }
        fields = asdict(self)
        answers = fields.pop("answers")
        return {**fields, **found, "answers": answers}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> OwnRow:
        fields = {name: values[name] for name in OwnRow.__dataclass_fields__}
        fields["accepted_by_depth"] = tuple(fields["accepted_by_depth"])
        fields["answers"] = tuple(OwnAnswer(**answer) for answer in fields["answers"])
        return OwnRow(**fields)


class OwnRecord:
    """Rows measured under one set of conditions, in a file if `path` is given."""

    def __init__(self, path: Path | None, conditions: Mapping[str, Any], rows: Sequence[OwnRow] = ()) -> None:
        self.path, self.conditions = path, dict(conditions)
        self.rows: dict[RowKey, OwnRow] = {row.key: row for row in rows}

    @staticmethod
    def open(path: Path | None, conditions: Mapping[str, Any], resume: bool) -> OwnRecord:
        """Return a new record, or with `resume` the one in the file, if there is one. Conditions named `problems` are
        united, all others must be equal. Raises ValueError if the file exists without `resume`, or cannot be used."""
        if path is None and resume:
            raise ValueError("--resume has no effect without --json FILE; leave it out")
        if path is None or not path.exists():
            return OwnRecord(path, conditions)
        if not resume:
            raise ValueError(f"{path} exists already; use --resume to continue it, or another file")
        found = OwnRecord.read(path)
        if different := found._differences(conditions):
            words = "; ".join(f"{name} was {before!r} and is now {now!r}" for name, before, now in different)
            raise ValueError(f"{path} cannot be resumed: {words}")
        found.conditions["problems"] |= conditions["problems"]
        return found

    @staticmethod
    def joined(paths: Sequence[Path]) -> OwnRecord:
        """Return the rows of several files as one record without a file; of rows with the same key, those of the first
        file. Raises ValueError unless all conditions but the names of `problems` are equal, or if the target's answers
        differ, with which other rows are compared."""
        records = [OwnRecord.read(path) for path in paths]
        joined = OwnRecord(None, records[0].conditions, list(records[0].rows.values()))
        for path, record in zip(paths[1:], records[1:]):
            if different := joined._differences(record.conditions):
                words = "; ".join(f"{name} {now!r} instead of {before!r}" for name, before, now in different)
                raise ValueError(f"{path} cannot be joined to {paths[0]}: it has {words}")
            joined.conditions["problems"] = joined.conditions["problems"] | record.conditions["problems"]
            for key, row in record.rows.items():
                known = joined.rows.setdefault(key, row)
                if row.decoding == TARGET and row.same_as(known) < 1:
                    raise ValueError(
                        f"{path} cannot be joined to {paths[0]}: the target's answers to {row.problems} differ; "
                        "measure with --numerics invariant"
                    )
        return joined

    def _differences(self, conditions: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        """Return name, own and other value of each condition that differs. Problems of other names do not."""
        before, now = dict(self.conditions), dict(conditions)
        files, more = before.pop("problems"), now.pop("problems")
        before |= {f"problems {name}": value for name, value in files.items() if name in more}
        now |= {f"problems {name}": value for name, value in more.items() if name in files}
        names = [name for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name)]
        return [(name, before.get(name), now.get(name)) for name in names]

    @staticmethod
    def read(path: Path) -> OwnRecord:
        """Read a file. Raises ValueError if it is no such record."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["version"] != VERSION:
                raise ValueError(f"its version is {found['version']!r}, not {VERSION}")
            return OwnRecord(path, found["conditions"], [OwnRow.from_dict(row) for row in found["rows"]])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not a record of smcserve eval --problems FILE ({type(error).__name__}: {error}); "
                "use another file"
            ) from error

    def add(self, row: OwnRow) -> None:
        """Add a row and write the file anew: whole, or not at all."""
        self.rows[row.key] = row
        if self.path is None:
            return
        content = {
            "version": VERSION,
            "conditions": self.conditions,
            "rows": [each.as_dict() for each in self.rows.values()],
        }
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(part, self.path)

    def target_of(self, row: OwnRow) -> OwnRow | None:
        """Return the target's row for the same problems and temperature."""
        return self.rows.get((row.problems, row.temperature, TARGET))
