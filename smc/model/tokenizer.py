"""Converts text to token ids and back, with the tokenizer of a Hugging Face directory. Knows nothing about models or
requests.

Every id stands for a fixed string of bytes. Decoding is concatenation, so a stream of tokens can be cut anywhere.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from smc.api.limits import PromptTooLong
from smc.model.files import read_json

COPIED_TOKENIZER_FILES = (
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
"""Files beside `tokenizer.json` and `tokenizer_config.json` that belong to a tokenizer, if they exist."""
_SUPPORTED_DECODERS = (
    "ByteLevel (Llama 3, Qwen), or Replace '▁' by ' ' with ByteFallback, Fuse and Strip (sentencepiece)"
)
_MAX_NFC_RATIO = 4
"""Maximum number of characters that Unicode normal form C combines into one."""
_PRIVATE_USE, _BLANKS, _MARK_SIZE = range(0xE000, 0xF900), "\u2000\u2001\u2002\u2003\u2004\u2005", 16
"""Parts of the mark for the end of a message: 16 private-use characters, then 16 blanks."""
PROBE = ({"role": "system", "content": "x"}, {"role": "user", "content": "x"})
"""The conversation that shows whether a chat template writes tools."""
PROBE_TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "probe",
            "description": "x",
            "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}},
        },
    },
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A vocabulary with its end-of-text ids and chat template. Created by `Tokenizer.load`."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        eos_ids: tuple[int, ...],
        special: dict[str, str],
        chat_template: str | None,
    ) -> None:
        """`special` maps `bos_token` and `eos_token` to their text, for chat templates."""
        self._tokenizer = tokenizer
        self._bytes = _bytes_of_every_id(tokenizer)
        self._max_bytes = _max_bytes_per_token(tokenizer, self._bytes)
        self._special = special
        self._chat_template = chat_template
        self.eos_ids = eos_ids
        """End-of-text ids, ascending; empty if the model has none."""
        if beyond := [eos for eos in eos_ids if not 0 <= eos < self.size]:
            raise ValueError(f"end-of-text ids {beyond} are out of range; allowed: 0 to {self.size - 1}")

    @staticmethod
    def load(directory: str | Path) -> Tokenizer:
        """Read the tokenizer of a model directory. Raises ValueError that names the file."""
        directory = Path(directory)
        tokenizer = _read_tokenizer(directory / "tokenizer.json")
        settings = _read_optional(directory / "tokenizer_config.json")
        special = {name: _content(settings[name]) for name in ("bos_token", "eos_token") if settings.get(name)}
        eos_ids = _read_eos(directory, tokenizer, special.get("eos_token"))
        try:
            return Tokenizer(tokenizer, eos_ids, special, _read_chat_template(directory, settings))
        except ValueError as error:
            raise ValueError(f"{directory}: {error}") from error

    @property
    def size(self) -> int:
        """Number of ids, including added tokens. Every valid id is below it."""
        return len(self._bytes)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids of special tokens, which stand for no text, ascending."""
        return tuple(sorted(i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special))

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """Ids of added tokens, which are found in a text before it is split; special tokens are among them."""
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @property
    def start_id(self) -> int | None:
        """Id of the begin-of-text token, or else the first end-of-text id; None if the model has neither."""
        start = self._tokenizer.token_to_id(self._special["bos_token"]) if "bos_token" in self._special else None
        return next(iter(self.eos_ids), None) if start is None else start

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def chat_template(self) -> str | None:
        return self._chat_template

    def id_of(self, token: str) -> int | None:
        """Id of the token with this spelling in the vocabulary; None if there is none."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str, add_special: bool = True, limit: int | None = None) -> list[int]:
        """Return the token ids of `text`. `add_special` adds the tokens that the model expects around a text, such as
        `bos`.

        Raises ValueError if `text` is not valid Unicode or has more than `limit` tokens; a text that is far too long is
        rejected before it is encoded. Releases the interpreter lock while encoding."""
        least = len(text) // self._max_bytes if self._max_bytes else 0
        if limit is not None and least > limit:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters, at least {least} tokens; allowed: at most {limit} tokens"
            )
        try:
            # Unlike `encode`, this releases the interpreter lock.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)
        except TypeError as error:  # a lone surrogate has no UTF-8 form
            raise ValueError(f"cannot encode {text!r}: {error}; text that is valid Unicode is needed") from error
        if limit is not None and len(encoding) > limit:
            raise PromptTooLong(f"the prompt has {len(encoding)} tokens; allowed: at most {limit}")
        return encoding.ids

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for a special token. Raises ValueError if the id is out of range."""
        if not 0 <= token_id < len(self._bytes):
            raise ValueError(f"token id {token_id} is out of range; allowed: 0 to {len(self._bytes) - 1}")
        return self._bytes[token_id]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of a complete sequence. Bytes that are not valid UTF-8 become U+FFFD."""
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", errors="replace")

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        limit: int | None = None,
        tools: Sequence[dict[str, Any]] = (),
        settings: Mapping[str, Any] = MappingProxyType({}),
        begins_message: bool = True,
        continues_last: bool = False,
    ) -> list[int]:
        """Return the token ids of a conversation, ending where the assistant's next message starts. `settings`: further
        template variables, by name. Without `begins_message` the ids end after the last message; with `continues_last`
        they end inside the last message, after its text.

        Raises ValueError if the template cannot be rendered, if there are more than `limit` tokens, or for a setting
        with the name of a built-in variable."""
        content, mark = "", ""
        if continues_last:
            content, (last, mark) = messages[-1].get("content") or "", _marked(messages[-1])
            messages = (*messages[:-1], last)
        text = self._rendered(messages, tools, settings, begins_message and not continues_last)
        if continues_last:
            text = _up_to_the_mark(mark, content, text)
        return self.encode(text, add_special=False, limit=limit)

    def reads_tools(self, has_system: bool, settings: Mapping[str, Any] = MappingProxyType({})) -> bool:
        """Return whether the chat template writes tools into conversations. It renders a short one, whatever the length
        of the caller's. `has_system`: whether they begin with a system message; `settings`: see `chat`. True if the
        template cannot be rendered: `chat` raises an error that says more."""
        messages = PROBE if has_system else PROBE[1:]
        try:
            without, offered = (self._rendered(messages, tools, settings, True) for tools in ((), PROBE_TOOLS))
        except ValueError:
            return True
        return without != offered

    def _rendered(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        settings: Mapping[str, Any],
        begins_message: bool,
    ) -> str:
        """Return the text of a conversation. Raises ValueError."""
        if self._chat_template is None:
            raise ValueError(
                "the model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)"
            )
        # `tools` and `documents` are defined as None by default, as in transformers.
        own = {"messages": messages, "tools": list(tools) or None, "add_generation_prompt": begins_message}
        fixed: dict[str, Any] = {**own, **self._special}
        if taken := sorted(fixed.keys() & settings.keys()):
            raise ValueError(f"chat_template_kwargs holds {taken[0]}, which the template is given anyway; leave it out")
        try:
            return self._compiled_template.render({"documents": None, **settings, **fixed})
        except (
            Exception
        ) as error:  # the template is the model's code and the messages are the caller's, so any exception is possible
            raise ValueError(f"the chat template cannot render these messages: {error}") from error

    def token(self, token_id: int) -> str | None:
        """Spelling of a token in the vocabulary; None if no token has this id."""
        return self._tokenizer.id_to_token(token_id)

    def fingerprint(self) -> str:
        """Hash of the id -> token mapping, including added tokens. Equal fingerprints mean equal vocabularies."""
        pairs = sorted(
            (token_id, token) for token, token_id in self._tokenizer.get_vocab(with_added_tokens=True).items()
        )
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()

    @cached_property
    def _compiled_template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        assert self._chat_template is not None
        return environment.from_string(self._chat_template)


def _marked(message: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return `message` with a mark after its content, and the mark. Its letters are drawn at random, so they do not
    occur in a text. Its blanks are missing from the output of a template that strips contents."""
    letters = "".join(chr(_PRIVATE_USE[0] + secrets.randbelow(len(_PRIVATE_USE))) for _ in range(_MARK_SIZE))
    mark = letters + "".join(secrets.choice(_BLANKS) for _ in range(_MARK_SIZE))
    return message | {"content": (message.get("content") or "") + mark}, mark


def _up_to_the_mark(mark: str, content: str, text: str) -> str:
    """Return `text` up to the mark, which follows the `content` of the last message. Raises ValueError if the template
    does not write the content unchanged; it may strip it."""
    before, found, after = text.rpartition(mark[:_MARK_SIZE])
    if not after.startswith(mark[_MARK_SIZE:]):
        before = before.rstrip()
    if not found or not content.strip() or not before.rstrip().endswith(content.strip()):
        raise ValueError(
            "the chat template does not write the last message's content as it is, so that it cannot be continued; "
            "end with a message of the user"
        )
    return before


def _max_bytes_per_token(tokenizer: tokenizers.Tokenizer, bytes_of: Sequence[bytes]) -> int | None:
    """Return the maximum number of UTF-8 bytes of a text that one token can stand for. It bounds the token count of a
    text without encoding it. None if there is no bound, because the tokenizer drops text or merges unknown characters.
    `bytes_of`: the bytes of each id."""
    parts = json.loads(tokenizer.to_str())
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added) or not _keeps_all(parts, tokenizer):
        return None
    shrinks = _MAX_NFC_RATIO if "NFC" in [step["type"] for step in _steps(parts["normalizer"], "normalizers")] else 1
    return shrinks * max([1, *map(len, bytes_of), *(len(token.content.encode()) for token in added)])


def _keeps_all(parts: dict[str, Any], tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether every byte of a text ends up in a token. False for steps that this module does not know."""
    normalizers, splitters = _steps(parts["normalizer"], "normalizers"), _steps(parts["pre_tokenizer"], "pretokenizers")
    if not {step["type"] for step in normalizers} <= {"NFC", "Prepend", "Replace"} or parts["model"]["type"] != "BPE":
        return False
    if any(
        step["type"] == "Replace" and (step["pattern"], step["content"]) != ({"String": " "}, "\u2581")
        for step in normalizers
    ):
        return False
    if any(
        step["type"] not in ("ByteLevel", "Metaspace", "Split", "Digits") or step.get("behavior") == "Removed"
        for step in splitters
    ):
        return False
    # Unknown characters are encoded byte by byte. If a byte has no token, text is dropped.
    if any(step["type"] == "ByteLevel" for step in splitters):
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    else:
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)] if parts["model"]["byte_fallback"] else [""]
    return all(tokenizer.token_to_id(token) is not None for token in alphabet)


def _steps(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return part[name] if part["type"] == "Sequence" else [part]


def _bytes_of_every_id(tokenizer: tokenizers.Tokenizer) -> list[bytes]:
    """Return the bytes of every id. Unused ids and special tokens have no bytes."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    to_bytes = _token_to_bytes(tokenizer)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    added = tokenizer.get_added_tokens_decoder()
    for token, token_id in vocabulary.items():
        if token_id not in added:
            table[token_id] = to_bytes(token)
        elif not added[token_id].special:
            table[token_id] = added[token_id].content.encode()  # matched verbatim in text, so not byte-mapped
    return table


def _token_to_bytes(tokenizer: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """Return the function from token strings to bytes that implements the decoder of `tokenizer.json`. Raises
    ValueError if the decoder is not supported."""
    decoder = json.loads(tokenizer.to_str())["decoder"] or {"type": "none"}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level
    spaces = [step for step in steps if step["type"] == "Replace"]
    # Strip and Fuse act on a whole text. Strip would remove the first token's leading space, which is kept here,
    # because the decoded text continues a prompt.
    if len(spaces) != 1 or not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        raise ValueError(f"tokenizer decoder {' + '.join(kinds)} is not supported; supported: {_SUPPORTED_DECODERS}")
    if (spaces[0]["pattern"], spaces[0]["content"]) != ({"String": "▁"}, " "):
        raise ValueError(f"tokenizer decoder {spaces[0]} is not supported; supported: {_SUPPORTED_DECODERS}")
    return _sentencepiece_with_bytes if "ByteFallback" in kinds else _sentencepiece


def _gpt2_byte_map() -> dict[str, int]:
    """Return the byte of each character of GPT-2's alphabet. It writes printable bytes as the character of that code,
    and other bytes as characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _gpt2_byte_map()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()  # a token with unmapped characters stands for itself, as in the tokenizers library


def _sentencepiece(token: str) -> bytes:
    return token.replace("▁", " ").encode()


def _sentencepiece_with_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else _sentencepiece(token)


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ValueError(
            f"{path} is missing; a tokenizer of the `tokenizers` library is needed (tokenizer.model is not supported)"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise ValueError(f"{path} is not a readable tokenizer: {error}") from error
    # Published files may enable the truncation and padding of the training run.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _read_eos(directory: Path, tokenizer: tokenizers.Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    """Read the end-of-text ids. generation_config.json takes precedence, because it also names the end-of-turn ids of
    instruct models."""
    for name in ("generation_config.json", "config.json"):
        found = _read_optional(directory / name).get("eos_token_id")
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(type(token_id) is int for token_id in ids):
            raise ValueError(f"{directory / name}: eos_token_id={found!r}; an integer or a list of integers is needed")
        return tuple(sorted(set(ids)))
    if eos_token is None:
        return ()
    token_id = tokenizer.token_to_id(eos_token)
    if token_id is None:
        raise ValueError(f"{directory}: eos_token {eos_token!r} of tokenizer_config.json is not in the vocabulary")
    return (token_id,)


def _read_chat_template(directory: Path, settings: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        return next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template


def _content(token: str | dict[str, Any]) -> str:
    return token["content"] if isinstance(token, dict) else token


def _to_json(value: Any, indent: int | None = None) -> str:
    """Write JSON without the escapes of jinja2's own filter: <, > and non-ASCII text are kept."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
