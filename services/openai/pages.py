"""The web page at /, and the descriptions `/openapi.json` and `/docs`, all generated from the definitions of settings
and fields. Knows nothing about how a request is served: the page calls the same API as every client."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from importlib import resources
from types import MappingProxyType, UnionType
from typing import Any, get_args, get_type_hints

from aiohttp import web

from services.gateway.request_handler import RequestHandler
from services.openai import anthropic, responses
from services.openai.bodies import CHAT, COMPLETIONS, Neutral
from services.openai.requests import CHAT_FORM, COMPLETION_FORM, BodyForm, Served, understood
from smc.api.constraint import KINDS
from smc.api.sampling_params import SETTINGS, Method, SamplingParams, methods_of
from smc.api.settings import Biases, Holds, Items, OneOf, Setting

PAGE, SETTINGS_PATH = "/", "/page/settings"
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
"""Content types by the ending of a file's name."""
PAGE_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""The page loads its own files and nothing else, and no other page may show it in a frame."""
ELSEWHERE = {"method", "constraint"}
"""Settings for which the page has separate fields."""
PROBE = {
    "messages": [{"role": "user", "content": "a"}],
    "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}],
}
OPENAPI, DOCS = "/openapi.json", "/docs"
DOCS_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
"""Headers of `/docs`, a page that loads nothing."""
SCHEMAS: dict[str, dict[str, Any]] = {
    "flag": {"type": "boolean"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "choice": {"type": "string"},
    "text": {"type": "string"},
    "texts": {"type": "array", "items": {"type": "string"}},
    "integers": {"type": "array", "items": {"type": "integer"}},
    "biases": {"type": "object", "additionalProperties": {"type": "number"}},
}
"""JSON schemas, by the kinds of settings."""
ALSO: dict[str, list[dict[str, Any]]] = {
    "stop": [{"type": "string"}],
    "logprobs": [{"type": "integer"}],
}
"""Further schemas of settings that bodies accept in other forms as well."""
STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
color-scheme: light dark } table { border-collapse: collapse; width: 100% } td { padding: 0.2rem 0.6rem;
vertical-align: top; border-top: 1px solid #8884 } code { font-family: ui-monospace, monospace }"""


class Playground:
    """Serves the files of the web page, and the settings that it shows."""

    def __init__(self, handler: RequestHandler, names: Sequence[str]) -> None:
        """`names`: names under which the model is served."""
        self._handler, self._names = handler, tuple(names)
        folder = resources.files("services.openai") / "page"
        read = {one.name: one.read_bytes() for one in folder.iterdir() if one.name.rpartition(".")[2] in TYPES}
        self.files = {PAGE if name == "index.html" else f"/page/{name}": (name, data) for name, data in read.items()}
        """Name and content of each file, by path. They hold no secrets."""

    def add_to(self, router: web.UrlDispatcher) -> None:
        for path in self.files:
            router.add_get(path, self._file)
        router.add_get(SETTINGS_PATH, self._settings)

    async def _file(self, request: web.Request) -> web.Response:
        name, data = self.files[request.path]
        return web.Response(body=data, headers=PAGE_HEADERS | {"content-type": TYPES[name.rpartition(".")[2]]})

    async def _settings(self, request: web.Request) -> web.Response:
        groups = [group.document() for group in self._handler.status().groups]
        return web.json_response(self._document | {"worker_groups": groups}, headers={"cache-control": "no-store"})

    @cached_property
    def _document(self) -> dict[str, Any]:
        pair, config = self._handler.pair, self._handler.config
        return {
            "model": self._names[0],
            "context": pair.context,
            "method": config.default_method,
            "methods": [method.value for method in Method],
            "constraints": list(KINDS),
            "tools": self._has_tools(),
            # The service's default is less where the context leaves less.
            "settings": settings_document({"max_tokens": None} | dict(pair.sampling)),
        }

    def _has_tools(self) -> bool:
        """Return whether the chat template reads tools."""
        tokenizer = self._handler.pair.tokenizer
        try:
            understood(PROBE, True, Served(self._names, tokenizer)).with_tool_format(tokenizer)
        except ValueError:
            return False
        return True


def settings_document(defaults: Mapping[str, Any] = MappingProxyType({})) -> list[dict[str, Any]]:
    """Return a description of every setting: its kind, what is allowed, its default and the methods with which it can
    have an effect. `defaults`: defaults that differ from the library's, by name."""
    hints = get_type_hints(SamplingParams)
    defaults = {one.name: one.default for one in fields(SamplingParams)} | dict(defaults)
    return [
        {
            "name": name,
            "kind": _kind(hints[name], known),
            "allowed": _allowed(known),
            "default": defaults[name],
            "help": _help(known),
            "methods": [method.value for method in methods_of(known)],
            "report": known.report,
        }
        | ({"choices": list(known.check.names)} if isinstance(known.check, OneOf) else {})
        for name, known in SETTINGS.items()
        if name not in ELSEWHERE
    ]


def _kind(hint: Any, known: Setting) -> str:
    """Return `choice`, `biases`, `flag`, `integer`, `number`, `text`, `texts` or `integers`."""
    if isinstance(known.check, OneOf):
        return "choice"
    if isinstance(known.check, Biases):
        return "biases"
    kinds = {bool: "flag", int: "integer", float: "number", str: "text"}
    kinds |= {tuple[str, ...]: "texts", tuple[int, ...]: "integers"}
    return next(kinds[one] for one in (get_args(hint) if isinstance(hint, UnionType) else (hint,)) if one in kinds)


def _allowed(known: Setting) -> str:
    """Return the allowed values, in the words of the error for other values."""
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
    """Return the help text of the setting's command line option, with settings as the API names them (`min_tokens` for
    `--min-tokens`)."""
    return re.sub(r"--([a-z][a-z-]*)", lambda found: found[1].replace("-", "_"), known.help)


BODIES: dict[str, tuple[str, BodyForm[Any]]] = {
    CHAT: ("OpenAI's chats", CHAT_FORM),
    COMPLETIONS: ("OpenAI's completions", COMPLETION_FORM),
    responses.RESPONSES: ("OpenAI's responses", responses.FORM),
    anthropic.MESSAGES: ("Anthropic's messages", anthropic.FORM),
    anthropic.COUNT_TOKENS: ("Tokens of Anthropic's messages", anthropic.FORM),
}
"""What bodies are, as text, and their form, by path."""


def document(routes: Mapping[str, tuple[str, ...]], version: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document. `routes`: the methods of every path."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for path, methods in sorted(routes.items()):
        paths[path] = {method.lower(): _operation(path, schemas) for method in sorted(methods)}
    token = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "smcserve", "version": version},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"token": token}},
        "security": [{}, {"token": []}],
    }


def _operation(path: str, schemas: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {"responses": {"200": {"description": "OK"}, "default": {"description": "An error"}}}
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if path not in BODIES:
        return operation
    summary, form = BODIES[path]
    name = form.body.__name__
    if name not in schemas:
        schema = form.body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        for known, field in form.body.model_fields.items():
            for one in field.metadata:
                if isinstance(one, Neutral):
                    schema["properties"][known] |= {"enum": [None, *one.values], "description": "Without effect."}
        schema["properties"] |= _settings(form.replaced)
        schemas[name] = schema
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return operation | {"summary": summary, "requestBody": {"required": True, "content": content}}


def _settings(without: frozenset[str]) -> dict[str, Any]:
    found = {}
    for setting in settings_document():
        name, allowed = setting["name"], setting["allowed"]
        schema = dict(SCHEMAS[setting["kind"]])
        if "choices" in setting:
            schema["enum"] = setting["choices"]
        text = setting["help"] + (f" Allowed: {allowed}." if allowed else "")
        found[name] = ({"anyOf": [schema, *ALSO[name]]} if name in ALSO else schema) | {"description": text}
    found["constraint"] = {"type": "object", "description": "Constraint that the answer must satisfy."}
    found["method"] = {"type": "string", "enum": [method.value for method in Method]}
    return {name: found[name] for name in SETTINGS if name not in without}


def page(document: Mapping[str, Any]) -> str:
    """Return an OpenAPI document as HTML for people, without scripts."""
    schemas = document["components"]["schemas"]
    parts = [
        f"<h1>smcserve {html.escape(document['info']['version'])}</h1>",
        f'<p><a href="{OPENAPI}">{OPENAPI}</a></p>',
    ]
    for path, methods in document["paths"].items():
        names = ", ".join(method.upper() for method in methods)
        operation = next(iter(methods.values()))
        parts.append(f"<h2>{names} <code>{html.escape(path)}</code></h2>")
        if "requestBody" in operation:
            reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            parts.append(f"<p>{html.escape(operation['summary'])}</p>")
            parts += ["<table>", *_rows(schemas[reference.rpartition("/")[2]]), "</table>"]
    head = f'<meta charset="utf-8"><title>smcserve</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'


def _rows(schema: Mapping[str, Any]) -> Iterator[str]:
    required = schema.get("required", ())
    for name, one in schema["properties"].items():
        kinds = "required" if name in required else ""
        kind = " or ".join(dict.fromkeys(_kinds(one)))
        cells = (f"<code>{name}</code>", html.escape(kind), kinds, html.escape(one.get("description", "")))
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _kinds(schema: Mapping[str, Any]) -> Iterator[str]:
    for one in schema.get("anyOf", (schema,)):
        if "enum" in one:
            yield ", ".join(map(str, one["enum"]))
        elif "$ref" in one:
            yield one["$ref"].rpartition("/")[2]
        elif one.get("type") != "null":
            yield one.get("type", "")
