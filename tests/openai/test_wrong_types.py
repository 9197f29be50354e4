"""Values of wrong types in every field of every body: the error names the field, shows the value and says which type or
which values are allowed."""

from __future__ import annotations

import json
import re

import pytest

from services.openai.anthropic import FORM as MESSAGES
from services.openai.bodies import CHAT, COMPLETIONS, BadRequest
from services.openai.requests import CHAT_FORM, COMPLETION_FORM, Served
from services.openai.responses import FORM as RESPONSES
from services.openai.server import DIALECTS
from services.openai.tool_calls import ToolFormat
from tests.openai.asking import user
from tests.openai.test_strict_tools import with_template

F = {"name": "f"}
BODIES = {
    CHAT: ({"messages": user("x"), "tools": [{"type": "function", "function": F}]}, CHAT_FORM.names),
    COMPLETIONS: ({"prompt": "x"}, COMPLETION_FORM.names),
    RESPONSES.endpoint: ({"input": "x", "tools": [{"type": "function"} | F]}, RESPONSES.names),
    MESSAGES.endpoint: ({"messages": user("x"), "tools": [F | {"input_schema": {}}]}, MESSAGES.names),
}
WRONG = (5, 5.5, True, "x", [], {}, [5], ["x"], [{}], {"type": 5}, {"type": "function"})
SAYS = re.compile(r"; allowed: |; leave it out$| is missing$| has no effect |is not a field of | cannot render ")
INNER = re.compile(r"literal\[|dict\[|list\[|Input should|valid|validation|function-|<|NoneType|\.str\b|\.bool\b")
"""What an error must not show: words of the library that checks types."""


@pytest.fixture(scope="module")
def served(pair) -> Served:
    return Served(("demo",), with_template(pair.tokenizer, ToolFormat.HERMES))


def error_of(served: Served, path: str, **fields: object) -> BadRequest | ValueError | None:
    try:
        DIALECTS[path].read(BODIES[path][0] | fields, served)
    except ValueError as error:
        return error
    return None


@pytest.mark.parametrize("path", BODIES)
def test_every_field_says_what_it_allows(served, path: str):
    count = 0
    for name in sorted(BODIES[path][1]):
        for value in WRONG:
            error = error_of(served, path, **{name: value})
            if error is None or "cannot render" in str(error):
                continue
            count += 1
            assert isinstance(error, BadRequest) and error.param is not None, (name, value, error)
            assert re.split(r"[.\[]", error.param)[0] == name, (name, value, error, error.param)
            assert str(error).startswith(name) and SAYS.search(str(error)), (name, value, error)
            said = str(error).replace(repr(value), "")
            assert not INNER.search(re.sub(r"[<>]=? |< 2", "", said)), (name, value, error)
    assert count > 200


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        (CHAT, {"max_tokens": 5.0}, "max_tokens=5.0; allowed: an integer, >= 1"),
        (CHAT, {"max_completion_tokens": "5"}, "max_completion_tokens='5'; allowed: an integer, >= 1"),
        (RESPONSES.endpoint, {"max_output_tokens": 5.0}, "max_output_tokens=5.0; allowed: an integer, >= 1"),
        (COMPLETIONS, {"seed": 5.0}, "seed=5.0; allowed: a 64-bit signed integer"),
        (COMPLETIONS, {"temperature": "1"}, "temperature='1'; allowed: a number, > 0"),
        (COMPLETIONS, {"n": 1.0}, "n=1.0; allowed: an integer"),
        (CHAT, {"stop": 5}, "stop=5; allowed: a string, or a list of strings"),
        (CHAT, {"guided_json": 5}, "guided_json=5; allowed: an object, or its JSON as a string"),
        *((CHAT, {"tool_choice": value}, '"function": {"name": "NAME"}') for value in ("any", 5, {"type": "function"})),
        *((RESPONSES.endpoint, {"tool_choice": value}, '"name": "NAME"}') for value in ("any", {"type": "function"})),
        *((MESSAGES.endpoint, {"tool_choice": value}, '{"type": "any"}') for value in ("any", 5, {"type": "function"})),
    ],
)
def test_errors_offer_the_right_type(served, path: str, fields: dict, says: str):
    error = error_of(served, path, **fields)
    assert says in str(error), error
    (name,) = fields
    assert isinstance(error, BadRequest) and error.param == name
    assert json.dumps(str(error)), "it can be sent"


def test_a_field_that_is_null_is_not_named(served):
    error = error_of(served, CHAT, max_tokens=None, max_completion_tokens=0)
    assert isinstance(error, BadRequest) and error.param == "max_completion_tokens"
    assert str(error).startswith("max_completion_tokens=0; allowed: >= 1")
