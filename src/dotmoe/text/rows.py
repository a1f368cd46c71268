"""What a row of a data set is, text or a chat, and a chat as the model reads it."""

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from dotmoe.common.errors import UserError, one_line
from dotmoe.common.progress import warn_once
from dotmoe.models.chat import Message, by_template, has_chats

logger = logging.getLogger(__name__)

TEXT_FIELDS = ("text", "content", "page", "passage", "document")
"""Fields that hold a text, in the order in which they are tried."""
CHAT_FIELDS = ("messages", "conversations")
"""Fields that hold a list of messages; they are tried after those of text."""
INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"
"""Fields of an Alpaca row, a chat of two turns; they are tried last."""
_OTHERS_OF_ALPACA = ("system", "history")
"""Fields that LLaMA-Factory adds to an Alpaca row."""
BESIDE_MESSAGES = ("system", "tools", "completion", "response", "chosen")
"""Fields that some data sets keep beside the messages or the prompt of a chat."""
OF_A_MESSAGE = ("role", "tool_calls", "from", "value")
"""Fields of a row that is one message of a chat, beside its content."""
PROMPT = "prompt"
"""Field of a row that asks: what a user says, as text or as messages. It is tried last."""
FIELDS = (*TEXT_FIELDS, *CHAT_FIELDS, INSTRUCTION, INPUT, OUTPUT, *_OTHERS_OF_ALPACA, PROMPT)
"""Every field that is read without being named."""
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
}
_CARRIAGE_RETURN = re.compile(r"\r\n?")
_NAME_ANOTHER = "Name another field: SOURCE#FIELD."


class Document(NamedTuple):
    """A text, a part of a long text, or a chat that the dense model answers."""

    text: str
    """Empty for a row that says nothing, and for a chat to answer, which is no text itself."""
    messages: tuple[Message, ...] = ()
    """A chat to answer, which ends with the user's turn."""
    is_rendered: bool = False
    """Whether names of control tokens stand for these tokens, as in a chat."""
    is_continued: bool = False
    """Whether it goes on from the document before it."""

    @property
    def says_nothing(self) -> bool:
        """Whether it has neither text nor a question."""
        return not self.text and not self.messages


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation whose messages were checked: each has a role, and text or tool calls."""

    messages: tuple[Message, ...]

    @property
    def is_blank(self) -> bool:
        """Whether nobody says anything."""
        return all(_is_blank(m["content"]) and not m.get("tool_calls") for m in self.messages)

    @property
    def asks(self) -> bool:
        """Whether it ends with the user's turn."""
        return bool(self.messages) and self.messages[-1]["role"] == "user"


def content_of(row: Any, place: str, field: str | None = None) -> str | Chat | None:
    """What a row says: its text, its chat, or None where it says nothing.

    `field` names the field that counts. Without it the first of `full_fields` does; a row that is a
    list of messages is a chat. `place` names the row in errors: a `UserError` if it has no such
    field, or the value is neither text nor a chat.
    """
    if isinstance(row, list):
        return _chat(row, place)
    if not isinstance(row, Mapping):
        raise UserError(
            f"{place} is not a JSON object, nor a list of messages. Write one object per line."
        )
    if field is not None:
        if field not in row:
            raise _no_field(row, place, repr(field))
        return _value(row[field], f"{field!r} in {place}")
    _require_fields(row, place)
    first = next(iter(full_fields(row)), None)
    if first is None:
        return _question(row, place)
    if first == INSTRUCTION:
        return _alpaca(row, place)
    if first in CHAT_FIELDS and isinstance(row[first], str):
        raise UserError(
            f"{first!r} in {place} is text, not a list of messages. To read it as text, name it: "
            f"SOURCE#{first}."
        )
    return _value(row[first], f"{first!r} in {place}")


def _require_fields(row: Mapping[str, Any], place: str) -> None:
    """Refuse a row without a field that is read unnamed, or that is a part of a chat."""
    usual = [*TEXT_FIELDS, *CHAT_FIELDS]
    is_alpaca = INSTRUCTION in row and OUTPUT in row
    is_part = is_message(row) and full_fields(row) in ([], ["content"])
    if is_part:
        raise UserError(
            f"{place} is one message of a chat. Write a row for each chat, with the list of its "
            "messages, or name the field to read as text: SOURCE#content."
        )
    if not is_alpaca and PROMPT not in row and not any(name in row for name in usual):
        wanted = f"of {', '.join(usual)}, {PROMPT}, nor {INSTRUCTION} and {OUTPUT}"
        raise _no_field(row, place, wanted)


def full_fields(row: Mapping[str, Any]) -> list[str]:
    """Fields of a row that say something, in the order in which they count.

    `instruction` stands for an Alpaca row, which needs an output too.
    """
    full = [name for name in (*TEXT_FIELDS, *CHAT_FIELDS) if not _is_blank(row.get(name))]
    if not any(_is_blank(row.get(name)) for name in (INSTRUCTION, OUTPUT)):
        full.append(INSTRUCTION)
    return full


def is_message(value: Any) -> bool:
    """Whether a value is one message of a chat, of OpenAI's form or ShareGPT's."""
    if not isinstance(value, Mapping):
        return False
    says = "content" in value or "tool_calls" in value
    return ("role" in value and says) or ("from" in value and "value" in value)


def _no_field(row: Mapping[str, Any], place: str, wanted: str) -> UserError:
    has = ", ".join(map(str, row)) or "none"
    return UserError(f"{place} has no field {wanted}; it has {has}. Name one: SOURCE#FIELD.")


def _is_blank(value: Any) -> bool:
    """Whether a value says nothing: null, blank text, an empty list."""
    if isinstance(value, str):
        return not value or value.isspace()
    if isinstance(value, float):
        return math.isnan(value)  # as some tables write null
    return value is None or value in ([], {})


def _value(value: Any, place: str) -> str | Chat | None:
    if _is_blank(value):
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        return _chat(value, place)
    raise UserError(f"{place} is {type(value).__name__}, not text. {_NAME_ANOTHER}")


def _chat(messages: list[Any], place: str) -> Chat | None:
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            raise UserError(
                f"{place} is not a JSON object, nor a list of messages: item {number} is "
                f"{type(message).__name__}. Write one object per line."
            )
    chat = Chat(
        tuple(
            _message(message, f"message {number} of {place}")
            for number, message in enumerate(messages, start=1)
        )
    )
    return None if chat.is_blank else chat


def _message(given: Mapping[str, Any], place: str) -> Message:
    """A message of OpenAI's form; tables write null for what a message does not have."""
    message = {key: value for key, value in given.items() if value is not None}
    if "role" not in message and "from" in message:
        message = _of_sharegpt(message, place)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise UserError(f"{place} has no role; it has {_names(message)}. Give it one.")
    if content is None and not message.get("tool_calls"):
        raise UserError(
            f"{place} has no content; it has {_names(message)}. Name its text `content`, or remove "
            "the row."
        )
    return {**message, "role": role, "content": _content(content, place)}


def _of_sharegpt(message: Message, place: str) -> Message:
    sender = message["from"]
    role = _SHAREGPT_ROLES.get(sender) if isinstance(sender, str) else None
    if role is None:
        raise UserError(
            f"{place} is from {sender!r}, but {', '.join(_SHAREGPT_ROLES)} are known. Write it "
            "with `role` and `content`."
        )
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {**others, "role": role, "content": message.get("value")}


def _content(content: Any, place: str) -> str:
    """The text of a message; the parts of a list are joined as they are."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(
            f"{place} has a content that is {type(content).__name__}, not text. Write it as text."
        )
    texts = list[str]()
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UserError(
                f"{place} has a part of type {kind}, and only text is read. Remove the part or "
                "the row, or write {'type': 'text', 'text': ...}."
            )
        texts.append(part["text"])
    return "".join(texts)


def _question(row: Mapping[str, Any], place: str) -> Chat | None:
    """The chat of a row that asks, None for a row that says nothing."""
    asked = _value(row.get(PROMPT), f"{PROMPT!r} in {place}")
    if isinstance(asked, str):
        return Chat(({"role": "user", "content": asked},))
    return asked


def _alpaca(row: Mapping[str, Any], place: str) -> Chat:
    """An instruction and its output as a chat, the input below the instruction."""
    for name in (INSTRUCTION, INPUT, OUTPUT, *_OTHERS_OF_ALPACA):
        if not _is_blank(row.get(name)) and not isinstance(row[name], str):
            kind = type(row[name]).__name__
            raise UserError(f"{name!r} in {place} is {kind}, not text. {_NAME_ANOTHER}")
    asked = [row[name] for name in (INSTRUCTION, INPUT) if not _is_blank(row.get(name))]
    messages = [
        {"role": "user", "content": "\n\n".join(asked)},
        {"role": "assistant", "content": row[OUTPUT]},
    ]
    if not _is_blank(row.get("system")):
        messages.insert(0, {"role": "system", "content": row["system"]})
    return Chat(tuple(messages))


def _names(values: Mapping[str, Any]) -> str:
    return ", ".join(map(str, values)) or "nothing"


class RowReader(NamedTuple):
    """Turns the rows of one source into documents."""

    source: str
    field: str | None
    """The field that the user named, if any."""
    tokenizer: Any
    """Renders chats; None: they are refused."""
    answered: bool = False
    """Whether the dense model answers rows that ask: then they give their messages, else text."""

    def document(self, row: Any, place: str) -> Document:
        """The document of a row, with line ends of text mode; empty for a row that says nothing.

        Raises `UserError` as `content_of` and `rendered` do, or for what is no Unicode text.
        """
        self._say_other_fields(row)
        content = content_of(row, place, self.field)
        if content is None:
            return Document("")
        if isinstance(content, str):
            return Document(_checked_text(content, place))
        if isinstance(row, Mapping):
            _say_unread(self.source, row)
        if content.asks and self.answered:
            return Document("", messages=tuple(_checked(each, place) for each in content.messages))
        text = rendered(content, self.tokenizer, place, self.source)
        return Document(_checked_text(text, place), is_rendered=True)

    def _say_other_fields(self, row: Any) -> None:
        """Warn of a row that says something in several fields, of which one is read."""
        full = full_fields(row) if self.field is None and isinstance(row, Mapping) else []
        if full and full[0] not in CHAT_FIELDS and not _is_blank(row.get(PROMPT)):
            full.append(PROMPT)
        if len(full) > 1:
            first, *others = full
            warn_once(
                logger,
                f"{self.source}: rows say something in {first} and in {', '.join(others)}; "
                f"{first} is read. Name another: SOURCE#FIELD",
            )


def _checked(message: Message, place: str) -> Message:
    """A message of Unicode text with line ends of text mode."""
    for text in _texts_in(message):
        require_text(text, place)
    return {**message, "content": _checked_text(message["content"], place)}


def _texts_in(value: Any) -> Iterator[str]:
    """All texts in nested values, such as those of a call of a tool."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for pair in value.items() for each in pair for text in _texts_in(each))
    elif isinstance(value, list | tuple):
        yield from (text for each in value for text in _texts_in(each))


def _checked_text(text: str, place: str) -> str:
    """The text with line ends of text mode; `UserError` if it is no Unicode text."""
    require_text(text, place)
    return _CARRIAGE_RETURN.sub("\n", text) if "\r" in text else text


def _say_unread(source: str, row: Mapping[str, Any]) -> None:
    """Warn of what stands beside the messages of a chat, but belongs to what the model reads."""
    is_alpaca = next(iter(full_fields(row)), None) == INSTRUCTION  # its system message is read
    for name in BESIDE_MESSAGES:
        if not is_alpaca and not _is_blank(row.get(name)):
            warn_once(
                logger,
                f"{source}: rows have {name} beside their messages, which is not read. Write it "
                "into the messages",
            )


def require_text(text: str, place: str) -> None:
    """Refuse text that has half of a surrogate pair, which JSON can write, or a NUL."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{place} is not Unicode text ({one_line(error)}). Repair or remove it."
        ) from error
    if "\0" in text:
        raise UserError(f"{place} holds the character NUL, so it is no text. Repair or remove it.")


def rendered(chat: Chat, tokenizer: Any, place: str, source: str) -> str:
    """A chat as the model reads it, without the BOS that packing adds.

    Raises `UserError` if there is no chat template, or the chat does not suit it.
    """
    if not has_chats(tokenizer):
        why = "the model has no chat template" if tokenizer else "text is needed here"
        raise UserError(
            f"{place} is a chat, but {why}. Write it as text, or name a field: SOURCE#FIELD."
        )
    text = _applied(tokenizer, chat.messages, place)
    if any(message.get("tool_calls") for message in chat.messages):
        _require_calls(chat, text, tokenizer, place)
    for message in chat.messages:
        if message["content"].strip() not in text:
            warn_once(
                logger,
                f"{source}: the model's chat template leaves out or changes what messages of role "
                f"{message['role']} say",
            )
    return text.removeprefix(tokenizer.bos_token or "")


def _applied(tokenizer: Any, messages: Sequence[Message], place: str) -> str:
    """What a chat template writes; `UserError` if the messages do not suit it."""
    return by_template(
        tokenizer, messages, refusal=f"{place} does not suit", remedy="Change or remove it."
    )


def _require_calls(chat: Chat, text: str, tokenizer: Any, place: str) -> None:
    """Refuse tool calls that a template does not write: `text` is the same without them."""
    without = [
        {key: value for key, value in message.items() if key != "tool_calls"}
        for message in chat.messages
    ]
    same = None
    with suppress(UserError):  # a template that refuses their absence reads them
        same = _applied(tokenizer, without, place)
    if same == text:
        raise UserError(
            f"{place} has tool calls, which the model's chat template does not write. Remove "
            "the row, or write it as text."
        )
