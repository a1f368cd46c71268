"""The sections of the report, as data: what is said, which table, which plot."""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dotmoe.report import tables
from dotmoe.report.read import RunResults, Values
from dotmoe.report.tables import ffn_operations, is_near_chance
from dotmoe.tables import Table, in_bytes, percent

TEXT = "HELD_OUT.txt"
"""Stands in a command for a text that the reader must name."""

_SAMPLES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a section that is neither a paragraph nor a table."""

    kind: str
    """`note`, `warning`, `command`, `plot`, `sample` or `folded`."""
    text: str
    """What is said; of a plot its caption, of a sample its prompt, of a folded text its title."""
    content: Any = None
    """The name of a plot, continuations by model, or the folded text."""


Blocks = list[str | Table | Block]


def _perplexity(found: RunResults, _: Values) -> Blocks:
    return [tables.perplexity_table(found.models)]


def _other_texts(found: RunResults, result: Values) -> Blocks:
    return [tables.perplexity_table(found.sides(result) or {found.name: result})]


def _tasks(found: RunResults, _: Values) -> Blocks:
    scores, others = found.scores("tasks"), found.scores("against")
    if not scores:
        return []
    near = [each["task"] for each in found.main_scores()[0] if is_near_chance(each)]
    notes: dict[str, list[str]] = {}
    for task in found.tasks("against") + found.tasks("tasks"):
        for note in task["notes"]:
            notes.setdefault(note, []).append(task["task"])
    said = [f"{', '.join(dict.fromkeys(names))}: {note}." for note, names in notes.items()]
    if near:
        said.append(
            f"{found.against} is within two standard errors of guessing, or below, in "
            f"{', '.join(near)}: a score there says nothing about the split."
        )
    return [
        Block("plot", "Accuracy on each task, with one standard error.", "tasks"),
        tables.scores_table(scores, others, (found.against, found.name)),
        *(Block("note", note) for note in said),
    ]


def _curve(found: RunResults, curve: Values) -> Blocks:
    return [
        "k is how many experts run for a token. It can be changed in the finished checkpoint "
        "without any training:",
        Block("command", shlex.join(["dotmoe", "edit", str(found.run), "--active-experts", "K"])),
        Block("plot", "Perplexity against the parameters that work on a token.", "active_experts"),
        tables.curve_table(curve),
    ]


def _fidelity(found: RunResults, result: Values) -> Blocks:
    said = "Error of each split FFN's output, fed with the dense input."
    return [Block("plot", said, "fidelity"), tables.fidelity_table(result)]


def _generation(found: RunResults, result: Values) -> Blocks:
    blocks: Blocks = []
    if found.quickstart:
        own = found.quickstart["samples"]
        texts = {"dense": own["dense"], found.name: own["moe"]}
        blocks.append(Block("sample", own["prompt"], texts))
    if result:
        settings = result["settings"]
        drawn = f"temperature {settings['temperature']:g}, top-p {settings['top_p']:g}"
        for way, how in (("greedy", "the most likely token each time"), ("sampled", drawn)):
            blocks.append(f"{way.capitalize()}: {how}.")
            for index, prompt in enumerate(result["model"]["prompts"][:_SAMPLES_SHOWN]):
                sides = found.sides(result).items()
                texts = {name: side[way]["texts"][index] for name, side in sides}
                blocks.append(Block("sample", prompt, texts))
        blocks.append(tables.repetition_table(result))
    return blocks


def _size(found: RunResults, results: Values) -> Blocks:
    split, export = results["granularity"], found.export
    blocks: Blocks = [
        f"{split['num_experts']} experts of {split['expert_size']} neurons a layer, "
        f"{split['active_experts']} run per token; shared neurons: {split['shared_size']}; "
        f"leading layers left dense: {split['first_dense_layers']}.",
        tables.counts_table(results["parameters"]),
    ]
    if export:
        work = ffn_operations(results, export)
        blocks += [
            f"The files hold {in_bytes(export['total_bytes'])} in {export['dtype']}, with what the "
            f"architecture {export['format']} adds: a head written out, experts that never run.",
            f"FFN arithmetic per token (a product and its sum are two): dense {work['dense']:,} "
            f"FLOP; experts that run {work['experts']:,}, routers {work['routers']:,}, together "
            f"{percent(work['moe'] / work['dense'])} of dense.",
        ]
    return blocks


def _speed(_: RunResults, bench: Values) -> Blocks:
    plot = Block("plot", "Speed of the MoE over that of the dense model.", "speed")
    return [plot, tables.speed_table(bench)]


def _analysis(name: str) -> Callable[[RunResults, Values], Blocks]:
    def blocks(_: RunResults, analysis: Values) -> Blocks:
        of_text = f", {analysis['tokens']:,} tokens" if analysis["tokens"] else ""
        plot = Block("plot", f"{analysis['title']}{of_text}.", name)
        return [*_sentences(analysis), plot]

    return blocks


def _load(found: RunResults, analysis: Values) -> Blocks:
    warnings: Blocks = [
        Block("warning", str(warning)) for warning in analysis["values"]["warnings"]
    ]
    none = "No expert is dead or always on, and no layer's load is uneven by the rules of analyse."
    spread, *_, plot = _analysis("expert_utilisation")(found, analysis)
    return [*(warnings or [none]), spread, plot, tables.load_table(analysis)]


def _sentences(analysis: Values) -> list[str]:
    return [f"{said[:1].upper()}{said[1:]}." for said in analysis["says"]]


def _alignment(found: RunResults, _: Values) -> Blocks:
    steps, history = found.alignment_steps(), found.files.get("analysis/alignment_history")
    if not steps:
        none = "None: the start was extracted as it is."
        return [none] if found.command == "convert" else []
    return [*_training(steps, "alignment"), *(_sentences(history) if history else [])]


def _finetuning(found: RunResults, _: Values) -> Blocks:
    return _training(found.finetuned, "finetune") if found.finetuned else []


def _training(steps: list[Values], plot: str) -> Blocks:
    seconds = sum(step.get("seconds") or 0.0 for step in steps)
    caption = (
        "Faint: each step, or the mean of a few where there are many; strong: mean of the last "
        "twentieth of the steps. Each step has other text, so the losses scatter."
    )
    said = f"{len(steps):,} steps, {seconds:,.0f} s in all."
    return [said, Block("plot", caption, plot), tables.steps_table(steps)]


def _checks(found: RunResults, results: Values) -> Blocks:
    export = found.export
    blocks: Blocks = [
        "Before it got its name the checkpoint was loaded with stock Transformers and compared "
        "with the dense model with masked FFNs, which is what was trained and measured.",
        tables.checks_table(results["verification"]),
    ]
    if export:
        runs = f"Runs in: {', '.join(export['servers'])}."
        blocks.append(f"Format {export['format']}, {export['dtype']}. {runs}")
    return blocks


def _configuration(found: RunResults, _: Values) -> Blocks:
    config = str(found.run / "config.json")
    again = ["dotmoe", found.command, found.source, "AGAIN", "--config", config]
    return [
        "This repeats it (the config holds every option, defaults too):",
        Block("command", shlex.join(again)),
        Block("folded", "config.json", json.dumps(found.config, indent=2)),
    ]


def _origins(found: RunResults, results: Values) -> Blocks:
    return [
        "Every figure here is read from one of these files and computed nowhere else. measured: "
        "by running the model here; quoted: from a paper or data sheet; estimated: from sizes.",
        tables.origins_table(found.files),
        Block("folded", "Versions of the run", json.dumps(results["provenance"], indent=2)),
    ]


def _missing(found: RunResults, results: Values) -> Blocks:
    """What was not measured, with the command that measures it."""
    run, files, dense = str(found.run), found.files, found.dense_model
    known = [str(text) for text in results["dense"].get("text", ())]
    is_named = known and all(Path(text).exists() or " " not in text for text in known)
    text = ["--text", *(known if is_named else [TEXT])]
    kept = ["--out", f"{run}/6_evaluate"]
    evaluate = ["dotmoe", "evaluate", run]
    has_curve = "curve" in files or not found.export.get("active_experts_editable", True)
    wanted = {
        "benchmark tasks, dense model beside this one": not found.tasks("against")
        and [*evaluate, "--against", dense, "--tasks", "paper"],
        "perplexity at other k": not has_curve and [*evaluate, "--curve", *text, *kept],
        "closeness to the dense model (hidden states, logits, FFN outputs)": "fidelity" not in files
        and [*evaluate, "--against", dense, "--fidelity", *text, *kept],
        "continuations of prompts side by side, and how much of them repeats": "generation"
        not in files
        and [*evaluate, "--against", dense, "--generate", "64", *text, *kept],
        "speed and memory, MoE beside dense": "bench" not in files
        and ["dotmoe", "bench", dense, run, "--json"],
        "finetuning, which makes up for a part of the loss": found.command == "convert"
        and ["dotmoe", "finetune", run, f"{run}-finetuned"],
    }
    analyses = {
        "expert_utilisation": "how often each expert runs, and experts that never do",
        "routing_overlap": "which layers route alike",
        "expert_outputs_tsne": "a map of what the experts write",
        "alignment_history": "how the assignment settled",
        "overhead_profile": "where the time of an alignment step goes",
    }
    if found.command == "convert" and not found.aligned:
        del analyses["alignment_history"], analyses["overhead_profile"]
    lacking = [name for name in analyses if f"analysis/{name}" not in files]
    only = [] if len(lacking) == len(analyses) else ["--only", *lacking]
    said = "; ".join(analyses[name] for name in lacking)
    wanted[said] = bool(lacking) and ["dotmoe", "analyse", run, *only]
    blocks: Blocks = []
    for what, words in wanted.items():
        if words:
            keep = f" > {shlex.quote(f'{run}/6_evaluate/bench.json')}" * ("bench" in words)
            blocks += [f"{what}:", Block("command", shlex.join(words) + keep)]
    after = "Each command adds to the run; then dotmoe report makes this page anew."
    if TEXT in text:
        after += f" {TEXT} stands for a text of your own that the model was not trained on."
    return [*blocks, Block("note", after)] if blocks else []


SECTIONS: list[tuple[str, str, Callable[[RunResults, Values], Blocks]]] = [
    ("Perplexity", "results", _perplexity),
    ("Perplexity on other text", "perplexity", _other_texts),
    ("Benchmark tasks", "", _tasks),
    ("Other numbers of active experts", "curve", _curve),
    ("Perplexity a word", "word_perplexity", lambda _, result: [tables.word_table(result)]),
    ("Closeness to the dense model", "fidelity", _fidelity),
    ("What the models write", "", lambda f, _: _generation(f, f.files.get("generation", {}))),
    ("Size and arithmetic", "results", _size),
    ("Speed", "bench", _speed),
    ("Load of the experts", "analysis/expert_utilisation", _load),
    ("Which layers route alike", "analysis/routing_overlap", _analysis("routing_overlap")),
    ("What the experts write", "analysis/expert_outputs_tsne", _analysis("expert_outputs_tsne")),
    ("Alignment", "", _alignment),
    ("Finetuning", "", _finetuning),
    ("Where a step's time goes", "analysis/overhead_profile", _analysis("overhead_profile")),
    ("Is the checkpoint what was measured?", "results", _checks),
    ("How it was made", "", _configuration),
    ("Where the figures come from", "results", _origins),
    ("Not measured yet", "results", _missing),
]
"""Title, the file of `6_evaluate` that a section is of (empty: several), and what makes it."""


def sections(found: RunResults) -> dict[str, Blocks]:
    """The sections that the results of a run allow, by title.

    Raises:
        UserError: A result file lacks what the report shows of it.
    """
    made: dict[str, Blocks] = {}
    for title, file, make in SECTIONS:
        if not file or file in found.files:
            with found.reading(f"6_evaluate/{file}.json" if file else "6_evaluate"):
                made[title] = make(found, found.files.get(file, {}))
    return {title: blocks for title, blocks in made.items() if blocks}
