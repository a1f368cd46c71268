"""Content of the report as data: sections of sentences and tables."""

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dotmoe.common.files import Values
from dotmoe.common.tables import Table, figure, in_bytes, millions, percent, table_of
from dotmoe.measure.bench import table as bench_table
from dotmoe.measure.evaluate import MEASUREMENTS
from dotmoe.measure.evaluate.answers_at_k import curve_table_of_answers
from dotmoe.measure.evaluate.difference import times_perplexity
from dotmoe.measure.evaluate.models import sides_of
from dotmoe.measure.evaluate.own_answers import ends_by_penalty
from dotmoe.measure.evaluate.perplexity import curve_table, perplexity_table, text_names
from dotmoe.measure.evaluate.task_tables import shown_tasks
from dotmoe.measure.inspection.tables import counts_table, in_words
from dotmoe.measure.report.results import RunResults, active_parameters
from dotmoe.method.granularity import targets_of


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a section that is neither a paragraph nor a table."""

    kind: str
    """`note`, `warning`, `command`, `sample` or `folded`."""
    text: str
    """Text of the block: a sample's prompt, a folded text's title."""
    content: Any = None
    """The sample's continuations by model, or the folded text or table."""


Blocks = list[str | Table | Block]
Section = Callable[[RunResults, Values], Blocks]


def _measurement(name: str) -> Section:
    """Section that shows a measurement as `dotmoe evaluate` does."""
    _, show = MEASUREMENTS[name]
    return lambda run, result: [*show(run.named(result))]


def _tasks(run: RunResults, _: Values) -> Blocks:
    return [*shown_tasks(run.tasks)] if "model" in run.tasks else []


def _answers_at_other_k(run: RunResults, _: Values) -> Blocks:
    curve = run.own_answers_curve
    return [curve_table_of_answers(curve)] if curve else []


def _curve(run: RunResults, curve: Values) -> Blocks:
    return [
        "k is the number of experts that run for a token. Another one needs no training:",
        Block("command", f"dotmoe export {shlex.quote(str(run.folder))} OUT --active-experts K"),
        curve_table(curve),
    ]


_MOST_SAMPLES = 3
"""Prompts of which the report shows the continuations."""


def _generation(run: RunResults, result: Values) -> Blocks:
    sides = sides_of(run.named(result))
    temperature = result.get("temperature")
    how = f"sampled at temperature {temperature:g}" if temperature else "the most likely one"
    penalty = result.get("repetition_penalty", 1.0)
    if penalty != 1.0:
        how += f", with repetition_penalty {penalty:g}"
    blocks: Blocks = [f"Each token of the continuations is {how}."]
    prompts = result["model"]["prompts"]
    if len(prompts) > _MOST_SAMPLES:
        blocks.append(
            f"The first {_MOST_SAMPLES} of {len(prompts)} prompts; generation.json has all."
        )
    for index, prompt in enumerate(prompts[:_MOST_SAMPLES]):
        texts = {side["name"]: side["texts"][index] for side in sides}
        blocks.append(Block("sample", prompt, texts))
    return blocks


def _size(run: RunResults, results: Values) -> Blocks:
    counts = results["parameters"]
    splits = (in_words(split, run.export.num_layers) for split in run.splits)
    return [
        *(f"{split[0].upper()}{split[1:]}." for split in splits),
        counts_table({"dense_total": counts["dense"], **counts}, "Parameters, counted"),
        f"The files hold {in_bytes(run.export.total_bytes)} in {run.export.dtype}.",
        f"Weights: {_weights(run)}",
    ]


def _serve(run: RunResults, _: Values) -> Blocks:
    export = run.export
    notes = notes_for_serving(run)
    blocks: Blocks = [f"Format {export.format} runs in {', '.join(export.servers)}.", *notes]
    if loops := ends_by_penalty(run.own_answers.get(run.name, {})):
        blocks.append(loops)
    if left_out := len(export.notes) - len(notes):
        blocks.append(
            Block(
                "note",
                f"{left_out} more of Blackwell GPUs, which the run did not have, are in "
                f"{run.folder}/5_export/README.md.",
            )
        )
    return blocks


def notes_for_serving(run: RunResults) -> list[str]:
    """Notes of the export, those of Blackwell GPUs only if the run was on one."""
    has_blackwell = re.search(_BLACKWELL, str(run.results["provenance"].get("hardware", "")))
    return [note for note in run.export.notes if has_blackwell or "Blackwell" not in note]


_BLACKWELL = r"\bG?B[123]\d\d\b|Blackwell|RTX 50\d\d"
"""Names of GPUs of NVIDIA's Blackwell generation."""


def _analysis(_: RunResults, analysis: Values) -> Blocks:
    blocks: Blocks = []
    for line in analysis["says"]:
        sentence = f"{line[:1].upper()}{line[1:]}."
        blocks.append(Block("warning", sentence) if line.startswith("warning") else sentence)
    if analysis["values"].get("warnings") == []:
        blocks.append("No expert is dead or always on, and no layer's load is uneven.")
    return [*blocks, Block("note", f"{analysis['title']}, {analysis['tokens']:,} tokens.")]


def _training(name: str, run: RunResults) -> Blocks:
    steps = run.steps[name]
    if not steps:
        return []
    seconds = sum(step.get("seconds") or 0.0 for step in steps)
    first, last = (figure(step.get("loss")) for step in (steps[0], steps[-1]))
    return [
        f"{len(steps):,} steps, {seconds:,.0f} s in total; the loss goes from {first} to {last}."
    ]


def _perplexity(run: RunResults, _: Values) -> Blocks:
    table = perplexity_table(run.models)
    if not run.is_edited:
        return [table]
    sentence = f"Files of {run.folder}/5_export were edited after this was measured: it is of the "
    sentence += "export as it was before. dotmoe evaluate measures the edited one."
    return [Block("warning", sentence), table]


def _checks(run: RunResults, results: Values) -> Blocks:
    checks = [[name.replace("_", " "), figure(v)] for name, v in results["verification"].items()]
    table = Table(
        title="Export against masked dense model", columns=("check", "value"), rows=checks
    )
    checked = "before the checkpoint got its final name, stock Transformers loaded it, and its "
    checked += "output was compared with that of the model that was measured."
    answer = "It was, until its files were edited" if run.is_edited else "Yes"
    return [f"{answer}: {checked}", Block("folded", "Figures of the check", table)]


def _configuration(run: RunResults, _: Values) -> Blocks:
    command = "finetune" if run.is_finetuned else "convert"
    config = run.folder / "config.json"
    again = ["dotmoe", command, run.source, "AGAIN", "--config", str(config)]
    missing = [f"{note[0].upper()}{note[1:]}." for note in run.results.get("text_notes", ())]
    return [
        *(Block("warning", sentence) for sentence in missing),
        "This command repeats the run (its config holds every option, including defaults):",
        Block("command", shlex.join(again)),
        Block("folded", "config.json", json.dumps(run.config, indent=2)),
        Block("folded", "Versions of the run", json.dumps(run.results["provenance"], indent=2)),
    ]


def _wanted(run: RunResults) -> dict[str, tuple[str, list[str]]]:
    """What a run can be measured for, in words, and the command for it, by the file it writes."""
    folder, dense = str(run.folder), run.dense_model
    out = ["--out", f"{folder}/6_evaluate"]
    text = ["--text", "HELD_OUT.txt", *out]
    prompt = ["--generate", "64", "--prompts", "PROMPT"]
    evaluate = ["dotmoe", "evaluate", folder]
    beside = [*evaluate, "--against", dense]
    bench = ["dotmoe", "bench", dense, folder, "--out", f"{folder}/6_evaluate/bench.json"]
    wanted = {
        "against": ("benchmark tasks, this model and the dense one", [*beside, "--tasks", "paper"]),
        "curve": ("perplexity at other k", [*evaluate, "--curve", *text]),
        "fidelity": ("closeness to the dense model", [*beside, "--fidelity", *text]),
        "generation": ("what both write after a prompt", [*beside, *prompt, *out]),
        "analysis": ("load of the experts", ["dotmoe", "analyse", folder]),
        "bench": ("speed, MoE and dense", bench),
    }
    if not run.is_finetuned and targets_of(run.splits) == "ffn":  # heads are not trained further
        again = ["dotmoe", "finetune", folder, f"{folder}-finetuned"]
        wanted["finetune"] = ("finetuning, which recovers part of what was lost", again)
    if not run.export.active_experts_editable:
        del wanted["curve"]
    if len(run.splits) > 1:  # two different k
        del wanted["bench"]
    return wanted


def _missing(run: RunResults, _: Values) -> Blocks:
    """Measurements that are missing, each with the command that makes it, and those left out."""
    there = {name.partition("/")[0] for name in run.files}
    if "tasks" not in there:
        there.discard("against")
    blocks: Blocks = []
    if run.of_others:
        names = ", ".join(f"{name}.json" for name in run.of_others)
        sentence = "Left out, because they are of other models than this export and its dense "
        sentence += (
            f"model, or do not say which: {names} in 6_evaluate. Delete them, and measure again."
        )
        blocks.append(Block("warning", sentence))
    for name, (what, words) in _wanted(run).items():
        if name not in there:
            blocks += [f"{what}:", Block("command", shlex.join(words))]
    if not blocks:
        return []
    note = "Each command adds its result to the run; dotmoe report then updates this page. Replace "
    note += "HELD_OUT.txt with a text of your own that the model was not trained on."
    return [*blocks, Block("note", note)]


SECTIONS: list[tuple[str, str, Section]] = [
    ("Perplexity", "results", _perplexity),
    ("Perplexity on other text", "perplexity", _measurement("perplexity")),
    ("Benchmark tasks", "", _tasks),
    ("Answers at other numbers of active experts", "results", _answers_at_other_k),
    ("Other numbers of active experts", "curve", _curve),
    ("Closeness to the dense model", "fidelity", _measurement("fidelity")),
    ("What the models write", "generation", _generation),
    ("Size and weights", "results", _size),
    ("Serve", "", _serve),
    ("Speed", "bench", lambda _, bench: [bench_table(bench)]),
    ("Load of the experts", "analysis/expert_utilisation", _analysis),
    ("Alignment", "", lambda run, _: _training("align", run)),
    ("Finetuning", "", lambda run, _: _training("finetune", run)),
    ("Is the checkpoint what was measured?", "results", _checks),
    ("How it was made", "", _configuration),
    ("Not measured yet", "results", _missing),
]
"""Title, the one file of `6_evaluate` that the section needs (or empty), and its function."""


def sections(run: RunResults) -> dict[str, Blocks]:
    """The sections that the results of a run allow, by title."""
    blocks: dict[str, Blocks] = {}
    for title, file, make in SECTIONS:
        if not file or file in run.files:
            with run.reading(f"6_evaluate/{file}.json" if file else "6_evaluate"):
                blocks[title] = make(run, run.files.get(file, {}))
    return {title: section for title, section in blocks.items() if section}


def in_short(moe: Values, dense: Values, counts: Values) -> str:
    """One sentence on what was lost and gained, in plain words."""
    times = times_perplexity(moe, dense)
    lost = "Perplexity was not measured as the dense model's was"
    if times is not None:
        lost = f"Perplexity is {times:.2f} times the dense model's (on {text_names(dense)})"
    return (
        f"{lost}, and {millions(counts['active'])} of {millions(counts['dense'])} "
        f"parameters ({percent(counts['active'] / counts['dense'])}) work on a token."
    )


def overview(models: Mapping[str, Values], counts: Values) -> Table:
    """Perplexity of each model, also relative to the first, the dense one, and its work."""
    dense = next(iter(models.values()))

    def parameters(row: tuple[str, Values]) -> str:
        return millions(counts["dense"] if row[1] is dense else active_parameters(row[1], counts))

    columns: dict[str, Callable[[tuple[str, Values]], str]] = {
        "model": lambda row: row[0],
        "perplexity": lambda row: f"{row[1]['perplexity']:.2f}",
        "times dense": lambda row: figure(times_perplexity(row[1], dense), ".3f"),
        "parameters for a token": parameters,
    }
    return table_of(models.items(), columns)


def _weights(run: RunResults) -> str:
    target = targets_of(run.splits)
    if run.is_repaired:
        origin = "repair refitted the output projections of the experts"
        if target != "attention" and run.config["repairing"].get("repair_epochs"):
            origin = "repair trained the FFNs"
            if target == "both":
                origin += " and refitted the attention's output projections"
        origin += "; everything else is the dense model's"
    elif run.is_finetuned:
        trained = {"experts": "the experts", "lora": "low-rank adapters and routers"}
        train = run.config["finetune"]["train"]
        origin = f"finetuning changed {trained.get(train, 'all weights')}"
    else:
        parts = {"ffn": "FFNs", "both": "FFNs and attention"}.get(target, target)
        origin = f"the experts are slices of the dense {parts}"
    return f"{origin}. Format {run.export.format}: {run.export.exactness}."
