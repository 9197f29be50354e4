"""The web page at / of OpenAI's port: its files, and the settings that it offers, read from their definitions. Knows
nothing about how a request is served: the page calls the same API as every client."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from importlib import resources
from types import MappingProxyType, UnionType
from typing import Any, get_args, get_type_hints

from aiohttp import web

from services.gateway.request_handler import RequestHandler
from services.openai.requests import understood
from smc.api.constraint import KINDS
from smc.api.sampling_params import SETTINGS, Method, SamplingParams
from smc.api.settings import Biases, Holds, Items, OneOf, Scope, Setting

PAGE, SETTINGS_PATH = "/", "/page/settings"
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
"""Content types by the ending of a file's name."""
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""The page loads its own files and nothing else, and no other page may show it in a frame."""
METHODS = {
    Scope.ALL: tuple(Method),
    Scope.BOTH: (Method.SMC, Method.EXACT),
    Scope.EXACT: (Method.EXACT,),
    Scope.SMC: (Method.SMC,),
    Scope.PROPOSAL: (Method.SMC, Method.EXACT),
    Scope.INDEPENDENT: (Method.SMC,),
    Scope.CONSTRAINED: (Method.SMC,),
}
"""Methods that settings of a scope can have an effect with."""
ELSEWHERE = {"method", "constraint"}
"""Settings that the page has fields of its own for."""
PROBE = {
    "messages": [{"role": "user", "content": "a"}],
    "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}],
}


class Playground:
    """Routes of the page."""

    def __init__(self, handler: RequestHandler, names: Sequence[str]) -> None:
        """`names`: those that the model is served by."""
        self._handler, self._names = handler, tuple(names)
        folder = resources.files("services.openai") / "page"
        read = {one.name: one.read_bytes() for one in folder.iterdir() if one.name.rpartition(".")[2] in TYPES}
        self.files = {PAGE if name == "index.html" else f"/page/{name}": (name, data) for name, data in read.items()}
        """By path: name and content. They hold no secrets."""

    def add_to(self, router: web.UrlDispatcher) -> None:
        for path in self.files:
            router.add_get(path, self._file)
        router.add_get(SETTINGS_PATH, self._settings)

    async def _file(self, request: web.Request) -> web.Response:
        name, data = self.files[request.path]
        return web.Response(body=data, headers=HEADERS | {"content-type": TYPES[name.rpartition(".")[2]]})

    async def _settings(self, request: web.Request) -> web.Response:
        return web.json_response(self._document, headers={"cache-control": "no-store"})

    @cached_property
    def _document(self) -> dict[str, Any]:
        pair, config = self._handler.pair, self._handler.config
        return {
            "model": self._names[0],
            "context": pair.context,
            "method": config.default_method or Method.SMC.value,
            "methods": [method.value for method in Method],
            "constraints": list(KINDS),
            "tools": self._has_tools(),
            # A chat goes on for as long as the context has room.
            "settings": settings_document({"max_tokens": None} | dict(pair.sampling)),
        }

    def _has_tools(self) -> bool:
        """The chat template reads them."""
        tokenizer = self._handler.pair.tokenizer
        try:
            understood(PROBE, True, self._names, tokenizer.size).with_tool_format(tokenizer)
        except ValueError:
            return False
        return True


def settings_document(defaults: Mapping[str, Any] = MappingProxyType({})) -> list[dict[str, Any]]:
    """Every setting: its kind, what is allowed, its default and the methods that it can have an effect with.
    `defaults`: by name, where they are not the library's."""
    hints = get_type_hints(SamplingParams)
    defaults = {one.name: one.default for one in fields(SamplingParams)} | dict(defaults)
    return [
        {
            "name": name,
            "kind": _kind(hints[name], known),
            "allowed": _allowed(known),
            "default": defaults[name],
            "help": _help(known),
            "methods": [method.value for method in METHODS[known.scope]],
            "report": known.report,
        }
        | ({"choices": list(known.check.names)} if isinstance(known.check, OneOf) else {})
        for name, known in SETTINGS.items()
        if name not in ELSEWHERE
    ]


def _kind(hint: Any, known: Setting) -> str:
    """`choice`, `biases`, `flag`, `integer`, `number`, `text`, `texts` or `integers`."""
    if isinstance(known.check, OneOf):
        return "choice"
    if isinstance(known.check, Biases):
        return "biases"
    kinds = {bool: "flag", int: "integer", float: "number", str: "text"}
    kinds |= {tuple[str, ...]: "texts", tuple[int, ...]: "integers"}
    return next(kinds[one] for one in (get_args(hint) if isinstance(hint, UnionType) else (hint,)) if one in kinds)


def _allowed(known: Setting) -> str:
    """In the words of the error for what is not."""
    match known.check:
        case OneOf(names):
            return ", ".join(names)
        case Items(_, allowed, most, unit):
            return f"{allowed}, at most {most} {unit}"
        case Biases(most, largest):
            return f"-{largest:g} to {largest:g} by token id, at most {most} tokens"
        case Holds(_, allowed):
            return allowed
    return ""


def _help(known: Setting) -> str:
    """That of commands, where a setting is `--min-tokens`, in the names of the API."""
    text = known.option.help if known.option else ""
    return re.sub(r"--([a-z][a-z-]*)", lambda found: found[1].replace("-", "_"), text)
