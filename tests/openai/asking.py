"""Raw HTTP requests and their responses, without any client library."""

from __future__ import annotations

import http.client
import json
import re
from dataclasses import dataclass
from typing import Any

from services.openai.bodies import CHAT
from smc.demo.problems import generate
from tests.gateway.harness import Service

QUESTIONS = [problem.question for problem in generate(1, 16, "test")]
LONG = {"method": "smc", "particles": 16, "max_tokens": 440, "ignore_eos": True, "seed": 1}
"""Settings, among them fields of our own, of an answer that takes seconds."""
ADD = {
    "x-guidance": {"whitespace_pattern": ""},
    "type": "object",
    "properties": {"a": {"enum": [1, 22]}, "b": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
"""Schema of a tool's arguments."""


@dataclass(frozen=True)
class Said:
    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def error(self) -> dict[str, Any]:
        """The error object of the response. Fails if it does not have OpenAI's shape."""
        error = self.json["error"]
        assert (
            set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"] and error["code"]
        ), error
        return error


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def chat(text: str = "x", **fields: Any) -> bytes:
    return json.dumps({"messages": user(text), **fields}).encode()


def connect(service: Service) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", service.gateway.http_port, timeout=60)


def post(service: Service, body: bytes, path: str = CHAT, **headers: str) -> Said:
    return ask(service, "POST", path, body, **{"content-type": "application/json", **headers})


def ask(service: Service, method: str, path: str, body: bytes | None = None, **headers: str) -> Said:
    connection = connect(service)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return Said(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
    finally:
        connection.close()


def events(data: bytes) -> list[Any]:
    """Return the events of a stream as JSON; the final "[DONE]" as a string."""
    parts = [part.removeprefix("data: ") for part in data.decode().split("\n\n") if part]
    return [part if part == "[DONE]" else json.loads(part) for part in parts]


def is_error(said: Said, status: int, code: str, message: str, hint: bool = False, param: str | None = None) -> None:
    assert said.status == status, said.data
    error = said.error
    assert (error["code"], error["param"]) == (code, param) and re.search(message, error["message"]), error
    assert said.headers["x-should-retry"] == ("true" if hint else "false")
    assert said.headers.get("retry-after") == ("1" if hint else None)
