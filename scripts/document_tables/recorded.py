"""What was recorded word by word: the tutorial, and a conversation."""

from document_tables.cells import made, tabled
from document_tables.records import load
from document_tables.registry import part
from dotmoe.common.tables import in_time


@part
def tutorial(step: str) -> str:
    """What a step of the tutorial printed."""
    return f"```text\n{load('results/tutorial.json').steps[step].output}\n```"


def as_quotation(text: str) -> str:
    """A text of several lines as a quotation."""
    return "\n".join(f"> {line}".rstrip() for line in text.strip().splitlines())


@part
def conversation(file: str) -> str:
    """Every word of a conversation, question by question."""
    record = load(file)
    parts = []
    for number, turn in enumerate(record.dense.turns):
        parts += [f"## {number + 1}. The user", turn.question]
        for side, name in (("dense", "The dense model"), ("converted", "The converted model")):
            said = record[side].turns[number]
            end = "" if said.ended else f" (cut at {record.new_tokens} tokens)"
            parts += [f"**{name}**{end}", as_quotation(said.answer)]
    return "\n\n".join([*parts, f"{made(record)}; {file}."])


@part
def tutorial_times() -> str:
    """CPU time of each step of the tutorial."""
    record = load("results/tutorial.json")
    columns = {
        "step": lambda step: step.title,
        "CPU time": lambda step: in_time(step.cpu_s / 3600) if step.cpu_s else None,
    }
    return f"{tabled(record.steps.values(), columns)}\n\n{made(record)}; results/tutorial.json."
