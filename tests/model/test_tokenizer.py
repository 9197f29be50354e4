"""The tokenizer: decoding by bytes equals that of the `tokenizers` library, a stream equals decoding the whole text,
and settings are read from all files that may hold them."""

from __future__ import annotations

import random

import pytest
import tokenizers
from tokenizers import decoders, models

from smc.model.tokenizer import Tokenizer
from tests.model.tiny import CORPUS, save_byte_level, save_sentencepiece, save_tokenizer, write_json

CHAT = """{% if messages[0]['role'] != 'user' %}
    {{ raise_exception('the user speaks first') }}
{% endif %}
{{ bos_token }}{% for message in messages %}
<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
<assistant>
{% endif %}
"""


@pytest.fixture(params=["byte level", "sentencepiece"])
def directory(request, tmp_path):
    return save_byte_level(tmp_path) if request.param == "byte level" else save_sentencepiece(tmp_path)


def random_text(rng: random.Random) -> str:
    """Random text of words that the tokenizers know and characters of every UTF-8 length."""
    ranges = [(0x20, 0x7E), (0xA1, 0x24F), (0x3040, 0x30FF), (0x1F600, 0x1F64F)]
    parts = [
        rng.choice(CORPUS) if rng.random() < 0.2 else chr(rng.randint(*rng.choice(ranges)))
        for _ in range(rng.randint(0, 30))
    ]
    return "".join(parts)


def test_decode_equals_the_library(directory):
    ours, library = Tokenizer.load(directory), tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    rng = random.Random(0)
    for _ in range(300):
        text = random_text(rng)
        ids = ours.encode(text)
        assert ids == library.encode(text).ids
        assert ours.decode(ids) == library.decode(ids) == text


def test_bytes_of_added_tokens(tmp_path):
    tokenizer = Tokenizer.load(save_byte_level(tmp_path, words=("naïve",)))
    for text in ("<tool call>", "naïve"):
        (token_id,) = tokenizer.encode(text)
        assert tokenizer.bytes_of(token_id) == text.encode()
    (eos,) = tokenizer.encode("<|eos|>")
    assert tokenizer.bytes_of(eos) == b""
    assert tokenizer.decode([eos, *tokenizer.encode("fox"), eos]) == "fox"


def test_stripped_decoders_keep_the_leading_space(tmp_path):
    tokenizer = Tokenizer.load(save_sentencepiece(tmp_path, strip=True))
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_id_out_of_range(directory, token_id):
    tokenizer = Tokenizer.load(directory)
    tokenizer.bytes_of(tokenizer.size - 1)
    with pytest.raises(ValueError, match=f"token id {token_id} is out of range; allowed: 0 to {tokenizer.size - 1}"):
        tokenizer.decode([token_id])


def test_text_that_is_not_unicode(directory):
    with pytest.raises(ValueError, match="valid Unicode"):
        Tokenizer.load(directory).encode("\ud800")


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path):
    save_byte_level(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.enable_truncation(3)
    library.enable_padding(length=50)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode(CORPUS[0])) == CORPUS[0]


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Metaspace(),
        decoders.Replace("_", " "),
        decoders.Sequence([decoders.Fuse()]),
    ],
    ids=["none", "wordpiece", "metaspace", "other replace", "no replace"],
)
def test_other_decoders_are_refused(decoder, tmp_path):
    tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    if decoder is not None:
        tokenizer.decoder = decoder
    save_tokenizer(tokenizer, tmp_path)
    with pytest.raises(ValueError, match=r"is not supported; supported: ByteLevel .*sentencepiece"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "is missing"), ("{", "is not a readable tokenizer"), ("{}", "is not a readable")]
)
def test_unreadable_tokenizer(content, message, tmp_path):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=rf"tokenizer\.json {message}"):
        Tokenizer.load(tmp_path)


def test_eos_is_taken_from_the_file_that_knows_best(tmp_path):
    save_byte_level(tmp_path)
    own = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("<|eos|>")
    assert Tokenizer.load(tmp_path).eos_ids == (own,)
    write_json(tmp_path / "config.json", {"eos_token_id": 7})
    assert Tokenizer.load(tmp_path).eos_ids == (7,)
    write_json(tmp_path / "generation_config.json", {"temperature": 0.6})
    assert Tokenizer.load(tmp_path).eos_ids == (7,)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [9, 8, 9]})
    assert Tokenizer.load(tmp_path).eos_ids == (8, 9)


def test_no_eos(tmp_path):
    assert Tokenizer.load(save_byte_level(tmp_path, eos_token=None)).eos_ids == ()


@pytest.mark.parametrize(
    ("eos", "message"),
    [(10**6, r"end-of-text ids \[1000000\] are out of range"), ("</s>", "eos_token_id='</s>'; an integer or a list")],
)
def test_bad_eos_id(eos, message, tmp_path):
    write_json(save_byte_level(tmp_path) / "config.json", {"eos_token_id": eos})
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(tmp_path)


def test_bad_eos_token(tmp_path):
    with pytest.raises(ValueError, match=r"eos_token '<nope>' of tokenizer_config\.json is not in the vocabulary"):
        Tokenizer.load(save_byte_level(tmp_path, eos_token="<nope>"))


def test_chat(tmp_path):
    tokenizer = Tokenizer.load(save_byte_level(tmp_path, chat_template=CHAT))
    assert tokenizer.has_chat_template
    ids = tokenizer.chat([{"role": "user", "content": "hello <fox> ü"}])
    assert ids == tokenizer.encode("<|bos|><user>hello <fox> ü<|eos|>\n<assistant>\n", add_special=False)


@pytest.mark.xdist_group("transformers")
def test_chat_renders_as_transformers_does(tmp_path):
    transformers = pytest.importorskip("transformers")
    template = (
        CHAT + "{% if tools is defined and tools is none %}no tools {% endif %}{{ messages | tojson }}"
        "{{ strftime_now('%Y') }}"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
    )
    save_byte_level(tmp_path, chat_template=template)
    messages = [
        {"role": "user", "content": "is 1 < 2 & 'ü'?"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "ok"},
    ]
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert Tokenizer.load(tmp_path).chat(messages) == expected


def test_chat_template_file_and_named_templates(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "dog"}]
    save_byte_level(tmp_path, chat_template=named)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.chat([])) == "dog"
    (tmp_path / "chat_template.jinja").write_text("fox")
    assert tokenizer.decode(Tokenizer.load(tmp_path).chat([])) == "fox"


def test_no_chat_template(tmp_path):
    tokenizer = Tokenizer.load(save_byte_level(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="the model has no chat template"):
        tokenizer.chat([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CHAT, "the user speaks first"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 'a' + none }}", "can only concatenate str"),
    ],
    ids=["raise_exception", "syntax", "escape", "mutation", "type"],
)
def test_template_errors(template, message, tmp_path):
    tokenizer = Tokenizer.load(save_byte_level(tmp_path, chat_template=template))
    with pytest.raises(ValueError, match=f"the chat template cannot render these messages: .*{message}"):
        tokenizer.chat([{"role": "assistant", "content": "hello"}])


def test_fingerprint_sees_the_mapping_only(tmp_path):
    plain = Tokenizer.load(save_byte_level(tmp_path / "a")).fingerprint()
    assert plain == Tokenizer.load(save_byte_level(tmp_path / "b", chat_template=CHAT)).fingerprint()
    assert plain != Tokenizer.load(save_byte_level(tmp_path / "c", words=("extra",))).fingerprint()
    assert plain != Tokenizer.load(save_sentencepiece(tmp_path / "d")).fingerprint()
