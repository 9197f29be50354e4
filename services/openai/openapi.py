"""`/openapi.json` and `/docs`: what this port serves, written from the definitions of the fields. Knows nothing about how
requests are served."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from services.openai import messages_api, responses_api
from services.openai.playground import settings_document
from services.openai.requests import CHAT, COMPLETIONS, ChatBody, CompletionBody, Neutral
from smc.api.sampling_params import SETTINGS, Method

OPENAPI, DOCS = "/openapi.json", "/docs"
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
"""The page loads nothing."""


@dataclass(frozen=True)
class BodyOf:
    """A body with fields of its own, and the library's settings."""

    summary: str
    model: type[BaseModel]
    without: frozenset[str] = frozenset()
    """Settings that it does not have."""


BODIES = {
    CHAT: BodyOf("OpenAI's chats", ChatBody),
    COMPLETIONS: BodyOf("OpenAI's completions", CompletionBody),
    responses_api.RESPONSES: BodyOf("OpenAI's responses", responses_api.ResponsesBody, responses_api.FORM.replaced),
    messages_api.MESSAGES: BodyOf("Anthropic's messages", messages_api.MessagesBody, messages_api.FORM.replaced),
    messages_api.COUNT_TOKENS: BodyOf(
        "Tokens of Anthropic's messages", messages_api.MessagesBody, messages_api.FORM.replaced
    ),
}
KINDS: dict[str, dict[str, Any]] = {
    "flag": {"type": "boolean"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "choice": {"type": "string"},
    "text": {"type": "string"},
    "texts": {"type": "array", "items": {"type": "string"}},
    "integers": {"type": "array", "items": {"type": "integer"}},
    "biases": {"type": "object", "additionalProperties": {"type": "number"}},
}
"""Schemas, by the kinds of settings."""
ALSO: dict[str, list[dict[str, Any]]] = {
    "stop": [{"type": "string"}],
    "logprobs": [{"type": "integer"}],
}
"""What bodies may have besides."""


def document(routes: Mapping[str, tuple[str, ...]], version: str) -> dict[str, Any]:
    """OpenAPI 3.1. `routes`: methods by path, all that there are."""
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
    body = BODIES[path]
    name = body.model.__name__
    if name not in schemas:
        schema = body.model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        for known, field in body.model.model_fields.items():
            for one in field.metadata:
                if isinstance(one, Neutral):
                    schema["properties"][known] |= {"enum": [None, *one.values], "description": "Without effect."}
        schema["properties"] |= _settings(body.without)
        schemas[name] = schema
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return operation | {"summary": body.summary, "requestBody": {"required": True, "content": content}}


def _settings(without: frozenset[str]) -> dict[str, Any]:
    found = {}
    for setting in settings_document():
        name, allowed = setting["name"], setting["allowed"]
        schema = dict(KINDS[setting["kind"]])
        if "choices" in setting:
            schema["enum"] = setting["choices"]
        text = setting["help"] + (f" Allowed: {allowed}." if allowed else "")
        found[name] = ({"anyOf": [schema, *ALSO[name]]} if name in ALSO else schema) | {"description": text}
    found["constraint"] = {"type": "object", "description": "What the answer may be."}
    found["method"] = {"type": "string", "enum": [method.value for method in Method]}
    return {name: found[name] for name in SETTINGS if name not in without}


STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
color-scheme: light dark } table { border-collapse: collapse; width: 100% } td { padding: 0.2rem 0.6rem;
vertical-align: top; border-top: 1px solid #8884 } code { font-family: ui-monospace, monospace }"""


def page(document: Mapping[str, Any]) -> str:
    """The same for people: HTML without scripts."""
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
