"""Settings of a chat for its template: where the prompt ends, and how much effort the model spends on reasoning."""

from __future__ import annotations

import openai
import pytest

from services.openai.bodies import BadRequest
from services.openai.requests import Served, understood
from smc.model.tokenizer import Tokenizer
from tests.openai.asking import QUESTIONS, user

HALF = {"role": "assistant", "content": "He has 3"}


def read(tokenizer: Tokenizer, **fields: object):
    body = {"messages": user("x"), **fields}
    return understood(body, True, Served(("demo",), tokenizer)).with_tool_format(tokenizer)


def ids(tokenizer: Tokenizer, **fields: object) -> list[int]:
    (prompt,) = read(tokenizer, **fields).prompts
    return list(prompt.encode(tokenizer, 500))


def test_a_prompt_may_end_elsewhere(pair):
    """`add_generation_prompt` and `continue_final_message` set where the prompt ends. Trailing spaces of a continued
    message stay unless the template strips them."""
    tokenizer = pair.tokenizer
    begun = ids(tokenizer)
    ended = ids(tokenizer, add_generation_prompt=False)
    assert begun[: len(ended)] == ended and len(begun) > len(ended)
    inside = ids(tokenizer, messages=[*user("x"), HALF], continue_final_message=True)
    assert tokenizer.decode(inside) == tokenizer.decode(begun) + HALF["content"]
    padded = {"role": "assistant", "content": "He has "}
    inside = ids(tokenizer, messages=[*user("x"), padded], continue_final_message=True)
    assert tokenizer.decode(inside) == tokenizer.decode(begun) + "He has "
    strips = (tokenizer.chat_template or "").replace("message['content']", "message['content'] | trim")
    assert strips != tokenizer.chat_template
    stripping = Tokenizer(tokenizer._tokenizer, tokenizer.eos_ids, tokenizer._special, strips)
    assert tokenizer.decode(ids(stripping, messages=[*user("x"), padded], continue_final_message=True)).endswith("has")


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    return Tokenizer(tokenizer._tokenizer, tokenizer.eos_ids, tokenizer._special, template)


@pytest.mark.parametrize(
    "template", [CHATML, CHATML.replace("m.content", "m.content | trim")], ids=["kept", "stripped"]
)
@pytest.mark.parametrize("content", ["s", "<", "e", "end", "|", "im_start", "assistant", "The answer is", "{", " a \n"])
def test_continued_message_position(pair, template, content):
    """The prompt ends where the continued message ends, whatever its words, even if the template writes the same text
    elsewhere."""
    tokenizer = with_template(pair.tokenizer, template)
    begun = tokenizer.decode(ids(tokenizer, messages=user(content)))
    inside = ids(
        tokenizer, messages=[*user(content), {"role": "assistant", "content": content}], continue_final_message=True
    )
    assert tokenizer.decode(inside) == begun + (content.strip() if "trim" in template else content)


@pytest.mark.parametrize(
    "written", ["m.content | upper", "m.content[:3]", "m.content[3:]", "m.content | tojson | upper", "'yes'"]
)
def test_a_message_that_the_template_changes_is_not_continued(pair, written):
    """A message can be continued only if the template renders its content unchanged."""
    tokenizer = with_template(pair.tokenizer, CHATML.replace("m.content", written))
    with pytest.raises(ValueError, match="does not write the last message's content as it is"):
        ids(tokenizer, messages=[*user("x"), HALF], continue_final_message=True)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"continue_final_message": True}, "of role 'user'; allowed: 'assistant'"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "are both true; allowed: one of them"),
        ({"reasoning_effort": "high"}, "reasoning_effort='high', but the model's chat template does not read it"),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, "does not read it; allowed: 'none'"),
    ],
)
def test_what_has_no_effect_is_refused(pair, fields, says):
    with pytest.raises(BadRequest, match=says):
        read(pair.tokenizer, **fields)


def test_an_empty_message_is_not_continued(pair):
    with pytest.raises(ValueError, match="does not write the last message's content as it is"):
        ids(pair.tokenizer, messages=[*user("x"), {"role": "assistant", "content": " "}], continue_final_message=True)


def test_the_effort_goes_to_a_template_that_has_it(pair):
    own = pair.tokenizer
    template = "{{ reasoning_effort }}" + (own.chat_template or "")
    tokenizer = Tokenizer(own._tokenizer, own.eos_ids, own._special, template)
    assert tokenizer.decode(ids(tokenizer, reasoning_effort="high")) == "high" + own.decode(ids(own))
    assert ids(own, reasoning_effort="none") == ids(own)


def test_a_continued_answer_is_what_follows(service, client: openai.OpenAI):
    greedy = {"model": "demo", "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(messages=user(QUESTIONS[3]), **greedy).choices[0].message.content
    head = whole[: whole.index(" ", len(whole) // 2)]
    given = [*user(QUESTIONS[3]), {"role": "assistant", "content": head}]
    asks = {"extra_body": {"continue_final_message": True, "add_generation_prompt": False}}
    rest = client.chat.completions.create(messages=given, **greedy, **asks).choices[0].message.content
    assert (head + rest).startswith(whole)
