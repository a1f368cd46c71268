"""One conversation with several models, word for word: the same questions, each with its own past.

    python experiments/conversation.py DENSE CONVERTED --out conversation.json

Each model answers the first question, then the second with its own first answer before it, and so
on. Answers are the most likely tokens, without a penalty, and cut at `new_tokens`. Nothing is
chosen or edited: the questions stand in this file, and were written before any model was asked.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from dotmoe.cli.arguments import settings as settings_of
from dotmoe.common.errors import UserError
from dotmoe.common.files import Values, require_writable, write_json
from dotmoe.common.options import ARGUMENT, at_least
from dotmoe.common.progress import Progress, Update
from dotmoe.measure.evaluate.generation import generated
from dotmoe.measure.evaluate.models import StockModel, loaded, model_folder
from dotmoe.models.chat import asked
from dotmoe.models.config import LoadConfig
from dotmoe.models.identity import FINGERPRINT, fingerprint
from dotmoe.run.provenance import provenance

QUESTIONS = (
    "Hi! I run a small bakery and want to count what we sell. I know a little Python. "
    "How would you store one day's sales?",
    "Good. Write a function total(sales) that returns the money of the day, where a sale is a "
    "dict with a price and a count.",
    "On Monday we sold 12 rolls at 0.80 and 3 cakes at 18.50. What does your function return? "
    "Show the sums.",
    "Now make it give 10 % off every sale of 10 pieces or more, and show the new function.",
    "Write a short, friendly note to my staff that tells them about this discount.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Two models, and where the conversation goes."""

    dense: Annotated[str, ARGUMENT]
    """Dense model: folder, hub name or GGUF file."""
    converted: Annotated[str, ARGUMENT]
    """The converted one: its run or its export."""
    out: Path
    """JSON file to write."""
    new_tokens: Annotated[int, at_least(1)] = 320
    """Tokens of an answer at most."""
    load: LoadConfig = field(default_factory=LoadConfig)


def conversation(stock: StockModel, new_tokens: int, on_progress: Update) -> list[Values]:
    """The turns of a model: each question, its answer, and whether the answer ended by itself."""
    messages = list[dict[str, Any]]()
    turns = list[Values]()
    for number, question in enumerate(QUESTIONS, start=1):
        messages.append({"role": "user", "content": question})
        prompt = asked(stock.tokenizer, messages)
        (ids,) = generated(stock.model, stock.tokenizer, [prompt], new_tokens)
        answer = stock.tokenizer.decode(ids, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        turns.append({"question": question, "answer": answer, "ended": len(ids) < new_tokens})
        on_progress(number, len(QUESTIONS))
    return turns


def main() -> None:
    settings = settings_of(Settings, __doc__)
    record: Values = {"origin": "measured", "new_tokens": settings.new_tokens}
    try:
        require_writable(settings.out)
        folders = [model_folder(name) for name in (settings.dense, settings.converted)]
        for side, folder in zip(("dense", "converted"), folders, strict=True):
            with Progress().bar(side) as update:
                stock = loaded(folder, settings.load)
                turns = conversation(stock, settings.new_tokens, update)
            record[side] = {FINGERPRINT: fingerprint(folder), "dtype": stock.dtype, "turns": turns}
    except UserError as error:
        sys.exit(f"conversation.py: error: {error}")
    write_json(settings.out, record | {"provenance": provenance(0)})


if __name__ == "__main__":
    main()
