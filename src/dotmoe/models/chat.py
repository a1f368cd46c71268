"""What a chat template says: how a question is asked, how a user's turn begins, where turns end."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dotmoe.common.errors import UserError, one_line
from dotmoe.common.files import read_json

Message = dict[str, Any]
"""One turn of a chat: `role` and `content` are text; others, such as `tool_calls`, as given."""

_MARK = "\u2042mark\u2042"
"""Content that no template contains."""


def has_chats(tokenizer: Any) -> bool:
    """Whether a tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def states_chats(folder: Path) -> bool:
    """Whether the files of a checkpoint have a chat template; its tokenizer is not loaded."""
    if any(folder.glob("chat_template.*")) or any(folder.glob("additional_chat_templates/*")):
        return True
    path = folder / "tokenizer_config.json"
    return path.is_file() and bool(read_json(path).get("chat_template"))


def asked(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a chat that ends with the user's turn, and of what comes before the answer.

    Raises `UserError` if there is no template, or it refuses the messages or writes nothing.
    """
    ids = ids_of(tokenizer, _rendered(tokenizer, messages, before_answer=True))
    if not ids:
        raise UserError(
            "the model's chat template writes nothing for a question. Mend chat_template.jinja, or "
            "give text and --heldout-answers 0."
        )
    return ids


def why_not_asked(tokenizer: Any) -> str | None:
    """Why a model cannot be asked a plain question; None if it can."""
    try:
        asked(tokenizer, [{"role": "user", "content": "?"}])
    except UserError as error:
        return str(error)
    return None


def user_opening(tokenizer: Any) -> list[int]:
    """Token ids of a chat up to where the user's first words stand; `UserError` as for `asked`."""
    text = _rendered(tokenizer, [{"role": "user", "content": _MARK}], before_answer=False)
    return ids_of(tokenizer, text.partition(_MARK)[0])


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Ids that end a turn: by the tokenizer, the generation settings, and the chat template."""
    ends = {tokenizer.eos_token_id}
    settings = getattr(model, "generation_config", None)
    named = getattr(settings, "eos_token_id", None)
    ends.update(named if isinstance(named, list) else [named])
    if has_chats(tokenizer):
        with suppress(UserError):  # the template may refuse a plain question
            ends.add(_turn_end(tokenizer))
    return {end for end in ends if end is not None}


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Token ids of text in which control tokens are meant, as in a rendered chat."""
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def _turn_end(tokenizer: Any) -> int | None:
    """The first control token after an answer, if the template writes one."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    text = _rendered(tokenizer, chat, before_answer=False)
    control = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    after = ids_of(tokenizer, text.partition(_MARK)[2])
    return next((token for token in after if token in control), None)


def _rendered(tokenizer: Any, messages: Sequence[Message], *, before_answer: bool) -> str:
    if not has_chats(tokenizer):
        raise UserError(
            "the model has no chat template. Ask a model that answers, or give plain text."
        )
    return by_template(
        tokenizer,
        messages,
        refusal="the messages do not suit",
        remedy="Change or remove them, or mend chat_template.jinja.",
        before_answer=before_answer,
    )


def by_template(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    refusal: str,
    remedy: str,
    before_answer: bool = False,
) -> str:
    """What a chat template writes; with `before_answer` also what opens the model's answer.

    Raises `UserError` if the template refuses the messages: `refusal` begins it, `remedy` ends it.
    """
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=before_answer, tokenize=False
        )
    except Exception as error:  # templates raise what they like
        raise UserError(
            f"{refusal} the model's chat template ({one_line(error)[:160]}). {remedy}"
        ) from error
    return text
