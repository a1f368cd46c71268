"""The tokenizer of a checkpoint: loaded so that ids are those of its files, and copied as it is.

Transformers 5 rebuilds some tokenizers by their class instead of reading `tokenizer.json`: leading
spaces (Llama 2, Yi) or digits (SmolLM2) then get other ids than those that the model was trained
on. So ids are compared with the file's, and the file is right.
"""

import json
import logging
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers import __version__ as transformers_version

from dotmoe.common.errors import UserError, one_line
from dotmoe.common.files import Values, read_json
from dotmoe.models.checkpoint import require_tokenizer
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.stock import read_stock

WHOLE = "tokenizer.json"
"""File of a whole tokenizer, as the tokenizers library reads it."""
BESIDE_WEIGHTS = (
    "tokenizer*",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.*",
    "additional_chat_templates/*",
    "generation_config.json",
)
"""Patterns of the files of a tokenizer, and of the generation config."""
PROBES = (
    "Once upon a time, there was a little girl named Lily.",
    "def f(x):\n\treturn x ** 2  # 1234567890, 3.14\n\n\nprint(f(12))  ",
    "  two  spaces,   three;\n \n trailing \t tab",
    "Grüße, café, naïve — “quotes” … 日本語 中文 한국어 Привет мир 🙂🚀 ½ ² ٣",
    "I'm, you're, he'LL, don't; WE'VE 'tis 100,000.00 x=1e-5 {}[]()<>@#$%^&*",
)
"""Texts on which tokenizers are compared: letters of many scripts, digits, spaces, line breaks."""
_CHARACTERS = (
    " ",
    "\n",
    "\r",
    "\t",
    " \u00a0\u3000\u200b",
    "'",
    "'",
    "sStTdDmM",
    "lLvVrReE",
    "azAZ",
    "\u00e9\u00c9\u00df\u0436\u0416\u01c5\u02b0",
    "\u65e5\u3042\u30a2\ud55c\u0e01\u0905\u05d0",
    "\u0301\u094d\u0e34",
    "0123456789",
    "0123456789\u0663\u00b2\u2167\u00bd",
    "!.,/-_()?:;@#%&*[]{}",
    "$+~`<=>|^",
    "\u2026\u3002\uff0c\u0964\u2014\u201c",
    "\U0001f642\u20ac\u00b0",
)
"""Groups of characters that different rules treat differently."""
_NO_FILE = (
    f"There is no {WHOLE}: Transformers makes it of the other files, which may need "
    "pip install sentencepiece protobuf tiktoken."
)

logger = logging.getLogger(__name__)


def load_tokenizer(folder: Path, rows: int | None = None) -> Any:
    """Load the tokenizer of a folder as a `PreTrainedTokenizerBase`.

    It is `AutoTokenizer`'s if that gives the ids of `tokenizer.json` on `PROBES`, random text and
    the file's added tokens, else one that is read from the file directly, with a logged note. Ids
    are compared without the special tokens around a text. Those depend on the use: `pack` puts a
    BOS before each document if the tokenizer names one, whatever else; prompts and benchmark tasks
    get what the post-processor of `tokenizer.json` adds, which Transformers prefers to
    `add_bos_token`.

    Special tokens with ids from `rows` (the embedding's number) on, such as a pad token that was
    added for training, are left out with a logged note: their names in a text are plain text.

    Raises:
        UserError: There is no tokenizer, it cannot be read or does not give the file's ids, or a
            token that is not special has no row in the embedding.
    """
    for name in require_tokenizer(folder):
        if name.endswith(".json"):
            read_json(folder / name)
    file = folder / WHOLE
    try:
        stock = _stock(folder)
        whole = Tokenizer.from_file(str(file)) if file.is_file() else None
    except Exception as error:  # of any type: tokenizers raises `Exception` itself
        remedy = "Copy it again." if file.is_file() else _NO_FILE
        raise UserError(
            f"the tokenizer in {folder} cannot be loaded ({one_line(error)}). {remedy}"
        ) from error
    beyond = [] if rows is None else _beyond(stock, rows, folder)
    text = _text_read_otherwise(stock, whole) if whole else None
    if text is None and not beyond:
        return stock
    if beyond:
        logger.warning(
            "%s: special tokens such as %r have ids beyond the %d rows of the embedding; they are "
            "left out, and text with their names is plain text.",
            folder,
            beyond[0],
            rows,
        )
    if text is not None:
        logger.warning("%s: %s", folder, _difference_in_words(stock, text))
    parts = read_json(file) if whole else json.loads(stock.backend_tokenizer.to_str())
    tokenizer = from_parts(parts, stock, rows)
    if whole and not beyond and _text_read_otherwise(tokenizer, whole) is not None:
        raise UserError(
            f"Transformers {transformers_version} does not give the ids of {file}. Install another "
            "version, or copy the tokenizer again."
        )
    return tokenizer


def from_parts(parts: Values, like: Any, rows: int | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer from the contents of a `tokenizer.json`, without added tokens from `rows` on.

    Chat template, lengths and the names of special tokens, where they exist, are those of `like`,
    and so are added tokens that the file lacks (`added_tokens.json`).
    """
    backend = getattr(like, "backend_tokenizer", None)
    stock = json.loads(backend.to_str())["added_tokens"] if backend else []
    by_name = {token["content"]: token for token in (*stock, *parts["added_tokens"])}
    added = [token for token in by_name.values() if rows is None or token["id"] < rows]
    added.sort(key=lambda token: token["id"])
    whole = Tokenizer.from_str(json.dumps(parts | {"added_tokens": added}))
    vocabulary = whole.get_vocab()
    known = [token for token in like.all_special_tokens if token in vocabulary]
    special = {name: token for name, token in like.special_tokens_map.items() if token in known}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=whole,
        chat_template=like.chat_template,
        clean_up_tokenization_spaces=like.clean_up_tokenization_spaces,
        model_max_length=like.model_max_length,
        extra_special_tokens=[token for token in known if token not in special.values()],
        **special,
    )
    tokenizer.name_or_path = like.name_or_path
    return tokenizer


@cache
def random_text() -> str:
    """Random text with characters of all groups; its first letter reveals a space put before it."""
    draw = random.Random(0)
    return "a" + "".join(draw.choice(draw.choice(_CHARACTERS)) for _ in range(30_000))


def copy_beside_weights(dense: DenseModel, out: Path) -> None:
    """Copy a model's tokenizer and generation config byte for byte; `out` must exist.

    A folder without `tokenizer.json` gets what Transformers makes of the other files beside them.
    """
    if not (dense.folder / WHOLE).is_file():
        dense.tokenizer.save_pretrained(out)
        logger.warning(
            "%s has no %s; %s gets the one that Transformers makes of the other files.",
            dense.folder,
            WHOLE,
            out,
        )
    for path in (path for pattern in BESIDE_WEIGHTS for path in dense.folder.glob(pattern)):
        if path.is_file():
            copy = out / path.relative_to(dense.folder)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


def tokenizer_notes(folder: Path) -> list[str]:
    """A sentence if `AutoTokenizer` does not give the ids of a folder's `tokenizer.json`."""
    if not (folder / WHOLE).is_file():
        return []
    stock = _stock(folder)
    text = _text_read_otherwise(stock, Tokenizer.from_file(str(folder / WHOLE)))
    return [] if text is None else [_difference_in_words(stock, text)]


def _difference_in_words(stock: Any, text: str) -> str:
    """What is wrong with the tokenizer that gives other ids for `text`, and which one is right."""
    return (
        f"{type(stock).__name__} of Transformers {transformers_version} does not give the ids of "
        f"{WHOLE} (for example for {text[:24]!r}); PreTrainedTokenizerFast does."
    )


def _stock(folder: Path) -> Any:
    """The tokenizer that `AutoTokenizer` makes or, if that fails, the generic one."""
    try:
        return read_stock(AutoTokenizer, folder)
    except Exception:  # of any type; the generic one needs no code or package of its own
        if not (folder / WHOLE).is_file():
            raise
        return read_stock(PreTrainedTokenizerFast, folder)


def _beyond(tokenizer: Any, rows: int, folder: Path) -> list[str]:
    """Special tokens without a row in the embedding; any other such token is refused."""
    ids = {number: token for token, number in tokenizer.get_vocab().items() if number >= rows}
    added = tokenizer.added_tokens_decoder
    if any(number not in added or not added[number].special for number in ids):
        raise UserError(
            f"the tokenizer in {folder} has ids up to {max(ids)}, but the embedding has {rows} "
            "rows. Copy the tokenizer that belongs to this checkpoint."
        )
    return [ids[number] for number in sorted(ids)]


def _ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text, without special tokens around it, without truncation or padding."""
    if isinstance(tokenizer, Tokenizer):
        return list(tokenizer.encode(text, add_special_tokens=False).ids)
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _text_read_otherwise(tokenizer: Any, whole: Tokenizer) -> str | None:
    """The first text for which a tokenizer does not give the ids of its file; None if it does."""
    whole.no_padding()
    whole.no_truncation()
    added = " b".join(["a", *map(str, whole.get_added_tokens_decoder().values()), ""])
    texts = (*PROBES, " one space", "", random_text()[:3000], added)
    return next((t for t in texts if _ids(tokenizer, t) != _ids(whole, t)), None)
