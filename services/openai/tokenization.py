"""`/tokenize` and `/detokenize`, as vLLM's server has them: the token ids of a prompt or a chat, and their text."""

from __future__ import annotations

from typing import Any

from services.gateway.request_handler import RequestHandler
from services.openai.bodies import BadRequest, check_model
from services.openai.requests import Served, understood

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
COMMON = ("model", "add_special_tokens", "return_token_strs")
FIELDS = {
    "messages": (
        *COMMON,
        "messages",
        "tools",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
    ),
    "prompt": (*COMMON, "prompt"),
    "tokens": ("model", "tokens"),
}
"""Fields that a body may have, by the field that it must have."""


async def tokenize(document: Any, names: tuple[str, ...], handler: RequestHandler) -> dict[str, Any]:
    """Return the reply to a body of `/tokenize`. Raises BadRequest and ValueError as for completions: a prompt longer
    than the context is refused."""
    ignores = handler.config.unknown_fields == "ignore"
    needed = "messages" if isinstance(document, dict) and "messages" in document else "prompt"
    given = _given(document, needed, ignores)
    chat = "messages" in given
    adds_special = given.pop("add_special_tokens", True)
    # False is vLLM's default for chats: only the template adds special tokens.
    if adds_special is not True and not (chat and adds_special is False):
        raise BadRequest(f"add_special_tokens={adds_special!r}; allowed: true", "add_special_tokens")
    wants_strings = given.pop("return_token_strs", False)
    if not isinstance(wants_strings, bool):
        raise BadRequest(f"return_token_strs={wants_strings!r}; allowed: true, false", "return_token_strs")
    pair = handler.pair
    completion = understood(given, chat, Served(names, pair.tokenizer))
    if len(completion.prompts) != 1:
        raise BadRequest(f"prompt has {len(completion.prompts)} prompts; allowed: one", "prompt")
    tokens = [int(token) for token in await handler.prompts.tokens(completion.prompts[0])]
    strings = [pair.tokenizer.token(token) or "" for token in tokens] if wants_strings else None
    return {"count": len(tokens), "max_model_len": pair.context, "tokens": tokens, "token_strs": strings}


def detokenize(document: Any, names: tuple[str, ...], handler: RequestHandler) -> dict[str, Any]:
    """Return the reply to a body of `/detokenize`. Raises BadRequest."""
    given = _given(document, "tokens", handler.config.unknown_fields == "ignore")
    size = handler.pair.tokenizer.size
    check_model(given.get("model", names[0]), names)
    tokens = given["tokens"]
    if not isinstance(tokens, list):
        raise BadRequest(f"tokens={tokens!r}; allowed: a list of token ids", "tokens")
    for token in tokens:
        if type(token) is not int or not 0 <= token < size:
            raise BadRequest(f"tokens contains {token!r}; allowed: 0 to {size - 1}", "tokens")
    return {"prompt": handler.pair.tokenizer.decode(tokens)}


def _given(document: Any, needed: str, ignores: bool) -> dict[str, Any]:
    """Return the given fields of a body. `needed`: the field that it must have; `ignores`: drop unknown fields instead
    of refusing them. Raises BadRequest."""
    if not isinstance(document, dict):
        raise BadRequest("the body is not a JSON object; allowed: an object with the request")
    given = {name: value for name, value in document.items() if value is not None}
    if needed not in given:
        raise BadRequest(f"{needed} is missing", needed)
    if ignores:
        return {name: value for name, value in given.items() if name in FIELDS[needed]}
    if unknown := sorted(given.keys() - set(FIELDS[needed])):
        raise BadRequest(
            f"{unknown[0]} is not a field beside {needed}; allowed: {', '.join(sorted(FIELDS[needed]))}", unknown[0]
        )
    return given
