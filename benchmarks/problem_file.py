"""Reads prompts and problems from a file of JSON lines, in our own format or in public formats.

| a line has | format | prompt | answer |
| --- | --- | --- | --- |
| `prompt` or `messages` | ours | this field | `answer`, compared by `check`, if given |
| `body` | OpenAI's batch files | `messages` or `prompt` of the body | none |
| `question` | GSM8K | this field | the number behind `####` of `answer` |
| `turns` | MT-Bench | the first turn | none |

Knows tokenizers; knows nothing about engines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.answer_code import passes
from smc.model.tokenizer import Tokenizer

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
LETTER = re.compile(r"\b([A-Z])\b")
RESULT = "####"
"""Mark before the result in GSM8K."""
OURS = ("prompt", "messages", "answer", "check", "choices", "id")
BATCH = ("custom_id", "method", "url", "body")
KEYS = ("prompt", "messages", "body", "question", "turns")
"""Fields that determine the format of a line; it has exactly one of them."""


@dataclass(frozen=True)
class FileProblem:
    """The problem of one line."""

    number: int
    """Number of the line in the file, from 1."""
    prompt: str | tuple[Mapping[str, str], ...]
    """A text, or the messages of a conversation."""
    answer: str | None = None
    """Expected answer; None: there is none, and the problem is not graded."""
    check: str = "exact"
    """Name of the comparison in `CHECKS`."""

    def tokens(self, tokenizer: Tokenizer, raw: bool) -> list[int]:
        """Return the token ids of the prompt. A text is a user's message, unless `raw` or the model has no chat
        template."""
        if isinstance(self.prompt, str) and (raw or not tokenizer.has_chat_template):
            return tokenizer.encode(self.prompt)
        messages = [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt
        return tokenizer.chat([dict(message) for message in messages])

    def grade(self, text: str) -> bool | None:
        """Return whether an answer is right; None if no answer is expected."""
        return None if self.answer is None else CHECKS[self.check](text, self.answer)


def _is_number(text: str, answer: str) -> bool:
    """Compare the first number behind the last `####`, or without `####` the last number."""
    _, mark, tail = text.rpartition(RESULT)
    found = NUMBER.findall(tail if mark else text)
    return bool(found) and _value(found[0 if mark else -1]) == _value(answer)


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def _is_choice(text: str, answer: str) -> bool:
    """Compare the last capital letter that stands alone. A letter alone on the last line takes precedence, since `I`
    and `A` also occur as words."""
    lines = [line.strip(" .()*:") for line in text.strip().splitlines()]
    found = [line for line in lines[-1:] if len(line) == 1] or LETTER.findall(text)
    return bool(found) and found[-1] == answer


CHECKS: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda text, answer: text.split() == answer.split(),
    "number": _is_number,
    "regex": lambda text, answer: re.search(answer, text) is not None,
    "choice": _is_choice,
    "python": passes,
}
"""Comparisons of an answer's text with the expected answer. `exact` ignores differences in white space; `python` runs
the answer's code with the expected answer, which is code of tests (`benchmarks.answer_code`)."""


def read_problems(path: Path) -> list[FileProblem]:
    """Return the problem of every line that is not blank. Raises ValueError naming file, line, what was given and what
    is allowed."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file; a file of JSON lines is needed")
    problems = []
    for number, raw in enumerate(path.read_bytes().splitlines(), 1):
        if raw.strip():
            try:
                problems.append(_problem(number, raw))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not problems:
        raise ValueError(f"{path} has no line; allowed: JSON objects with one of {', '.join(KEYS)}")
    return problems


def _problem(number: int, raw: bytes) -> FileProblem:
    try:
        line = json.loads(raw)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is not JSON: {error.msg} at character {error.pos + 1}") from error
    except UnicodeDecodeError as error:
        raise ValueError("this is not UTF-8") from error
    if not isinstance(line, dict):
        raise ValueError(f"this is {line!r:.60}; allowed: a JSON object with one of {', '.join(KEYS)}")
    keys = [key for key in KEYS if key in line]
    if len(keys) != 1:
        given = " and ".join(keys) if keys else ", ".join(map(str, line)) or "nothing"
        raise ValueError(f"the object has {given}; allowed: exactly one of {', '.join(KEYS)}")
    (key,) = keys
    if key == "body":
        _require_fields(line, BATCH)
        body = line["body"] if isinstance(line["body"], dict) else {}
        (key, *more) = [name for name in ("messages", "prompt") if name in body] or [""]
        if not key or more:
            raise ValueError(f"body={line['body']!r:.60}; allowed: an object with messages, or with prompt")
        return FileProblem(number, _prompt(key, body[key]))
    if key == "turns":
        turns = line["turns"]
        if not isinstance(turns, list) or not turns:
            _refuse("turns", turns, "a list of strings, of which the first is asked")
        return FileProblem(number, _prompt("turns[0]", turns[0]))
    if key == "question":
        return FileProblem(number, _prompt(key, line[key]), *_gsm8k_answer(line.get("answer")))
    _require_fields(line, OURS)
    return FileProblem(number, _with_choices(_prompt(key, line[key]), line.get("choices")), *_expected(line))


def _require_fields(line: Mapping[str, Any], fields: tuple[str, ...]) -> None:
    if unknown := [name for name in line if name not in fields]:
        raise ValueError(f"{unknown[0]} is not a field of such a line; allowed: {', '.join(fields)}")


def _prompt(name: str, value: Any) -> str | tuple[Mapping[str, str], ...]:
    if name != "messages":
        return value if isinstance(value, str) and value else _refuse(name, value, "a string that is not empty")
    fits = isinstance(value, list) and value
    if not fits or not all(
        isinstance(each, dict) and all(isinstance(each.get(field), str) for field in ("role", "content"))
        for each in value
    ):
        _refuse(name, value, "a list of objects with role and content, which are strings")
    return tuple({"role": each["role"], "content": each["content"]} for each in value)


def _with_choices(prompt: str | tuple[Mapping[str, str], ...], choices: Any) -> str | tuple[Mapping[str, str], ...]:
    """Return the prompt with the choices below it, each after its letter."""
    if choices is None:
        return prompt
    if not isinstance(choices, list) or not 2 <= len(choices) <= 26 or not all(isinstance(one, str) for one in choices):
        _refuse("choices", choices, "a list of 2 to 26 strings")
    if not isinstance(prompt, str):
        raise ValueError("choices is given beside messages; allowed: beside prompt")
    return "\n".join([prompt, *(f"{chr(ord('A') + i)}. {one}" for i, one in enumerate(choices))])


def _expected(line: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return answer and check of a line in our own format. Default of check: `number` for a number, `choice` if the
    line has choices, otherwise `exact`."""
    answer = line.get("answer")
    is_number = isinstance(answer, (int, float)) and not isinstance(answer, bool)
    usual = "number" if is_number else "choice" if "choices" in line else "exact"
    check = line.get("check", usual)
    if check not in CHECKS:
        _refuse("check", check, ", ".join(CHECKS))
    if answer is None:
        if "check" in line:
            raise ValueError(f"check={check!r} is given without answer; give both, or neither")
        return None, check
    text = str(answer) if is_number else answer
    if not isinstance(text, str) or not text:
        _refuse("answer", answer, "a string that is not empty, or a number")
    if check == "number" and not NUMBER.fullmatch(text.strip()):
        _refuse("answer", answer, "a number, with check=number")
    if check == "choice" and not LETTER.fullmatch(text):
        _refuse("answer", answer, "a capital letter, with check=choice")
    if check == "regex":
        try:
            re.compile(text)
        except re.error as error:
            raise ValueError(f"answer={answer!r:.60} is no regular expression: {error}") from error
    if check == "python":
        try:
            compile(text, "answer", "exec")
        except SyntaxError as error:
            raise ValueError(f"answer={answer!r:.60} is no Python code: {error}") from error
    return text, check


def _gsm8k_answer(answer: Any) -> tuple[str | None, str]:
    if answer is None:
        return None, "number"
    mark, tail = answer.rpartition(RESULT)[1:] if isinstance(answer, str) else ("", "")
    if not mark or not NUMBER.fullmatch(tail.strip()):
        _refuse("answer", answer, f"a text that ends in '{RESULT} ' and a number")
    return tail.strip(), "number"


def _refuse(name: str, value: Any, allowed: str) -> NoReturn:
    raise ValueError(f"{name}={value!r:.60}; allowed: {allowed}")
