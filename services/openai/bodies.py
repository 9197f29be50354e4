"""What a body may hold besides settings, field by field; those are the library's to name and to check.

What is not had here is refused unless its value asks for nothing: no setting is ignored in silence.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError


def _neutral(*values: Any, why: str = "there is no such setting here") -> AfterValidator:
    """A field that is accepted with one of these values, which change nothing."""
    written = ", ".join(json.dumps(value) for value in values)

    def check(value: Any) -> Any:
        # True == 1, which JSON keeps apart.
        if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in values):
            raise PydanticCustomError("neutral", "{allowed}", {"allowed": f"{written}, as {why}; or leave it out"})
        return value

    return AfterValidator(check)


def _parts(content: Any) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if content is not None and not isinstance(content, list):
        raise PydanticCustomError("content", "a string, or a list of parts with text")
    return content


class Strict(BaseModel):
    """No other fields, no other types."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _one_stranger(cls, data: Any) -> Any:
        """One field that there is not is enough to be refused for; each would cost an error of its own."""
        fields = cls.model_fields
        if not isinstance(data, dict) or len(data) <= len(fields):
            return data
        known = {name: value for name, value in data.items() if name in fields}
        stranger = next(name for name in data if name not in fields)
        return known | {stranger: data[stranger]}


class Part(Strict):
    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: str
    arguments: str
    """JSON."""


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Annotated[list[Part], Field(fail_fast=True)] | None, BeforeValidator(_parts)] = None
    """None: of an assistant that only called tools."""
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[Any, _neutral(None, [])] = None


class Function(Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: Annotated[Any, _neutral(False)] = False
    continuous_usage_stats: Annotated[Any, _neutral(False)] = False


class Body(Strict):
    """What chats and completions have in common, but for the settings of `smc.api.sampling_params`, which have the same
    names. `null` is taken out before: it means that a field is not given."""

    model: str | None = None
    n: Annotated[int, Field(ge=1)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    request_id: Annotated[str, Field(max_length=256, pattern="^[!-~]*$")] | None = None
    """Ours: unique among running requests of the same token; a header of the answer."""
    cache_salt: str = ""
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Ours: seconds from arrival, after which the call is dropped."""
    negative_prompt: Any = None
    """Ours: a string, a list of token ids, or a list of messages; with `guidance_scale`."""

    # Said about the caller, and no business of decoding.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    best_of: Annotated[Any, _neutral(1)] = 1
    frequency_penalty: Annotated[Any, _neutral(0)] = 0
    presence_penalty: Annotated[Any, _neutral(0)] = 0
    repetition_penalty: Annotated[Any, _neutral(1)] = 1
    service_tier: Annotated[Any, _neutral("auto", "default")] = None
    store: Annotated[Any, _neutral(False)] = False
    response_format: Annotated[Any, _neutral({"type": "text"})] = None
    skip_special_tokens: Annotated[Any, _neutral(True)] = True
    spaces_between_special_tokens: Annotated[Any, _neutral(True)] = True
    include_stop_str_in_output: Annotated[Any, _neutral(False)] = False


class ChatBody(Body):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    max_completion_tokens: Any = None
    tool_choice: Annotated[
        Any, _neutral("auto", "none", why="the template offers the tools, and what the model writes is text")
    ] = None
    parallel_tool_calls: Annotated[Any, _neutral(True)] = True
    modalities: Annotated[Any, _neutral(["text"])] = None
    functions: Annotated[Any, _neutral([])] = None
    function_call: Annotated[Any, _neutral("auto", "none")] = None
    reasoning_effort: Annotated[Any, _neutral("none")] = None
    verbosity: Annotated[Any, _neutral("medium")] = None
    add_generation_prompt: Annotated[Any, _neutral(True)] = True
    continue_final_message: Annotated[Any, _neutral(False)] = False


class CompletionBody(Body):
    prompt: Any
    """One string or list of token ids, or a list of such."""
    echo: bool = False
    suffix: Annotated[Any, _neutral("")] = None
    add_special_tokens: Annotated[Any, _neutral(True)] = True
