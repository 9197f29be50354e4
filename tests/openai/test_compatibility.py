"""The table of vLLM's endpoints and fields in docs/openai.md is the one that follows from the code. Endpoints and
fields that it lists as missing are refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel

from services.openai import pages, tokenization
from services.openai.bodies import CHAT, COMPLETIONS, ChatBody, CompletionBody, Neutral
from services.openai.requests import CHAT_FORM, COMPLETION_FORM
from services.openai.server import DIALECTS, HEALTH, LOAD, METRICS, MODELS, PING, VERSION
from tests.openai.asking import ask, chat, post

PAGE = Path(__file__).resolve().parents[2] / "docs" / "openai.md"
BEGIN, END = "<!--begin-vllm-->", "<!--end-vllm-->"
_BOTH = """model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream
stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids
include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
truncate_prompt_tokens prompt_logprobs allowed_token_ids echo add_special_tokens structured_outputs priority request_id
logits_processors return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs"""
_CHAT = """messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning
parallel_tool_calls bad_words add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
mm_processor_kwargs"""
_COMPLETIONS = "prompt suffix prompt_embeds"
_ENDPOINTS = """/health /ping /version /load /metrics /v1/models /v1/completions /v1/chat/completions /v1/responses
/v1/messages /v1/messages/count_tokens /tokenize /detokenize /openapi.json /docs /v1/embeddings /pooling /classify
/score /rerank /v1/audio/transcriptions /v1/audio/translations /invocations"""
FIELDS = {path: (own + " " + _BOTH).split() for path, own in ((CHAT, _CHAT), (COMPLETIONS, _COMPLETIONS))}
"""Fields of vLLM's `ChatCompletionRequest` and `CompletionRequest` in its source at commit d5dba2d."""
ENDPOINTS = tuple(_ENDPOINTS.split())
"""Endpoints of vLLM's server."""
OWN = {*DIALECTS, HEALTH, PING, VERSION, LOAD, METRICS, MODELS}
OWN |= {tokenization.TOKENIZE, tokenization.DETOKENIZE, pages.OPENAPI, pages.DOCS}
"""Endpoints of this server."""


def table() -> str:
    """Return the table in Markdown."""
    rows = ["| of vLLM's | here | with a neutral value only | not here |", "| :--- | --: | :--- | :--- |"]
    rows.append(_row("endpoints", ENDPOINTS, OWN, set()))
    of_chats, of_completions = (CHAT_FORM.names, _neutral(ChatBody)), (COMPLETION_FORM.names, _neutral(CompletionBody))
    same = [
        name
        for name in FIELDS[CHAT]
        if name in FIELDS[COMPLETIONS] and [name in one for one in of_chats] == [name in one for one in of_completions]
    ]
    rows.append(_row("fields of both", same, *of_chats))
    for title, path, fields in (("of chats", CHAT, of_chats), ("of completions", COMPLETIONS, of_completions)):
        rows.append(_row(title, [name for name in FIELDS[path] if name not in same], *fields))
    return "\n".join(rows)


def _row(title: str, listed: Sequence[str], own: Iterable[str], neutral: set[str]) -> str:
    known = set(own)
    here = [name for name in listed if name in known and name not in neutral]
    only, missing = [name for name in listed if name in neutral], [name for name in listed if name not in known]
    cells = (f"{len(here)} of {len(listed)}", *(", ".join(f"`{name}`" for name in names) for names in (only, missing)))
    return f"| {title} | " + " | ".join(cells) + " |"


def _neutral(model: type[BaseModel]) -> set[str]:
    fields = model.model_fields.items()
    return {name for name, field in fields if any(isinstance(one, Neutral) for one in field.metadata)}


def test_the_page_has_the_table_of_the_code():
    _, begin, rest = PAGE.read_text().partition(BEGIN)
    written, end, _ = rest.partition(END)
    assert begin and end
    assert written.strip() == table(), f"paste this into the page:\n{table()}"


def test_endpoints_are_those_of_the_server(service):
    assert set(ask(service, "GET", "/openapi.json").json["paths"]) >= OWN
    missing = set(ENDPOINTS) - OWN
    assert missing
    for path in missing:
        assert post(service, b"{}", path).status == 404


def test_fields_that_are_not_here_are_refused(service):
    """Fields that the table lists as missing are refused by name."""
    missing = set(FIELDS[CHAT]) - CHAT_FORM.names
    assert missing
    for name in missing:
        assert post(service, chat(**{name: 1})).error["param"] == name
