"""Write the generated parts of the documents from the JSON files under results/.

    python scripts/update_documents.py            # rewrite
    python scripts/update_documents.py --check    # exit 1 if a document is not current

A part lies between `<!-- generated: NAME -->` and `<!-- end -->`; `PARTS` has the function that
makes it. experiments/readmes.py generates the README files under experiments/ as a whole.
"""

import importlib
import io
import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from transformers import LlamaConfig, Qwen2Config

from dotmoe.compare import over_seeds, spread, table
from dotmoe.evaluate.perplexity import curve_table
from dotmoe.granularity import ExpertsConfig
from dotmoe.inspection import InspectConfig, inspect_model
from dotmoe.inspection.planner import Accelerator
from dotmoe.report.page import quickstart_summary
from dotmoe.tables import Table, in_bytes, in_time, percent, table_of, to_markdown

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{n}.md" for n in ("baselines", "serving", "planning", "finetune")),
)
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = Any


def result(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))
    return value


def part(table: Table, record: Mapping[str, Any] | None = None, name: str = "") -> str:
    """A table in Markdown, with its provenance."""
    if record is None:
        return to_markdown(table)
    made = record["provenance"]
    commit = f"commit `{made['commit']}`" if made["commit"] else "a commit that was not recorded"
    return (
        f"{to_markdown(table)}\n\nMeasured at {commit} on {made['hardware']}, "
        f"{made['threads']} threads, torch {made['versions']['torch']}; results/{name}."
    )


def quickstart() -> str:
    """Output of the quickstart, rendered again from its result file."""
    record = result("quickstart.json")
    console = Console(file=io.StringIO(), width=96)
    console.print(quickstart_summary(record), soft_wrap=True)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    made = record["provenance"]
    return "\n".join(
        [
            "```text",
            *(line.rstrip() for line in lines),
            "```",
            "",
            f"Measured at commit `{made['commit']}` on {made['hardware']}, torch "
            f"{made['versions']['torch']}, {record['seconds']:.0f} s in all.",
        ]
    )


SPLITS = {
    "random_split": "random",
    "by_energy": "by energy, own router: nearly static",
    "llama_moe_v2": "LLaMA-MoE v2",
    "co_activation": "co-activation (MoEfication)",
    "cmoe": "CMoE",
    "dot_moe": "DOT-MoE's start",
}


def splits() -> str:
    """Losses of ways to split with the same router start: frozen, repaired and finetuned."""
    record = result("splits.json")
    dense, *rows = over_seeds(record["rows"])
    # With its own router the most energetic neurons run for nearly every token.
    routers = {"by_energy": "own"}
    rows = [row for row in rows if row["router"] == routers.get(row["value"], "ridge")]
    found = {(row["value"], row["weights"]): row for row in rows}
    levels = dict.fromkeys(row["weights"] for row in rows)
    last = [*levels][-1]
    measured = (name for name in SPLITS if (name, last) in found)
    names = sorted(measured, key=lambda name: -found[name, last]["loss_above_dense"])
    columns: dict[str, Callable[[Row], str | None]] = {"split": lambda name: SPLITS[name]}
    for level in levels:
        columns[level] = partial(lambda level, name: nats(found[name, level]), level)
    repaired = next(row for row in rows if row["weights"] == "finetuned")
    table = table_of(
        names,
        columns,
        note=f"Quarter of the FFN active, {len(rows[0]['losses'])} seeds (least to greatest), "
        f"{rows[0]['tokens']:,} held-out tokens in windows of {dense['window']}; dense perplexity "
        f"{dense['perplexity']:.2f}. Finetuned on {repaired['finetune_tokens']:,} tokens.",
    )
    return part(table, record, "splits.json")


def nats(row: Row) -> str:
    """Nats above dense: mean over seeds, and their range."""
    return f"{row['loss_above_dense']:.3f} ({spread(row)})"


def real_model() -> str:
    """SmolLM2, dense and converted; missing values are left out, and without a file all of it.

    The file has `rows`, each with `model`, `training` and any of the keys of the columns below;
    `perplexity` is by text, and `tasks` has a `value` and a `stderr` by task.
    """
    if not (ROOT / "results" / "smollm2.json").exists():
        return ""
    record = result("smollm2.json")
    rows = record["rows"]
    columns: dict[str, Callable[[Row], str | None]] = {
        "model": lambda row: row["model"],
        "training": lambda row: row.get("training"),
        "of the FFN": lambda row: cell(row, "active_fraction", percent),
    }
    for text in dict.fromkeys(text for row in rows for text in row.get("perplexity", {})):
        columns[f"perplexity, {text}"] = partial(
            lambda text, row: cell(row.get("perplexity", {}), text, "{:.2f}".format), text
        )
    columns |= {
        "six tasks, %": lambda row: mean_score(row["tasks"]) if row.get("tasks") else None,
        "decode, tokens/s": lambda row: cell(row, "decode_tokens_per_s", "{:.1f}".format),
        "tokens of training": lambda row: cell(row, "training_tokens", "{:,}".format),
        "time": lambda row: cell(row, "seconds", lambda seconds: in_time(seconds / 3_600)),
    }
    columns = {name: show for name, show in columns.items() if any(map(show, rows))}
    table = table_of(rows, columns, title="A real model: SmolLM2-135M-Instruct.", words=2)
    return part(table, record, "smollm2.json")


def method_rows(name: str, model: str, text: str, other: str) -> str:
    """All methods at the parameters that 2:4 leaves, least loss first; "" without a file."""
    if not (ROOT / "results" / name).exists():
        return ""
    record = result(name)
    dense, *rows = over_seeds(record["rows"])
    rows.sort(key=lambda row: row["loss_above_dense"])
    columns: dict[str, Callable[[Row], str | None]] = {
        "method": lambda row: row["value"],
        "router": lambda row: row.get("router"),
        "weights": lambda row: row.get("weights"),
        text: lambda row: f"{row['loss_above_dense']:.3f}",
        "seeds": spread,
        other: lambda row: f"{row['other_loss'] - dense['other_loss']:.3f}",
        "parameters": lambda row: percent(row["parameters"] / dense["parameters"]),
        "six tasks, %": lambda row: cell(row, "tasks", mean_score),
        "tokens": lambda row: cell(row, "text_tokens", "{:,}".format),
        "seconds": lambda row: cell(row, "seconds", "{:.0f}".format),
    }
    columns = {column: show for column, show in columns.items() if any(map(show, rows))}
    perplexities = f"{dense['perplexity']:.2f} and {math.exp(dense['other_loss']):.2f}"
    tasks = f", six tasks {mean_score(dense['tasks'])} %" if "tasks" in dense else ""
    note = (
        f"Dense: perplexity {perplexities}{tasks}. {dense['tokens']:,} tokens of each text in "
        f"windows of {dense['window']}."
    )
    if len(commits := record.get("made_at", ())) > 1:
        note += f" Rows were made at commits {', '.join(f'`{commit}`' for commit in commits)}."
    if left_out := record.get("left_out"):
        note += f" Left out, since the export failed its check: {', '.join(left_out)}."
    title = f"{model}, nats a token above the dense model."
    table = table_of(rows, columns, words=3, title=title, note=note)
    return part(table, record, name)


def smollm2_rows() -> str:
    """Rows of all methods on SmolLM2, with the six tasks."""
    return method_rows("smollm2_rows.json", "SmolLM2-135M-Instruct", "WikiText-2", "books")


def embedded_rows() -> str:
    """Rows of all methods on the embedded model, conversions with several seeds."""
    return method_rows("embedded_rows.json", "The embedded model", "held-out code", "WikiText-2")


def mean_score(tasks: Mapping[str, Row]) -> str:
    """Mean accuracy over tasks, and its standard error."""
    values, errors = zip(*((each["value"], each["stderr"]) for each in tasks.values()), strict=True)
    return score({"value": fmean(values), "stderr": math.hypot(*errors) / len(errors)})


def score(of_task: Row) -> str:
    """Accuracy in percent, and its standard error."""
    return f"{100 * of_task['value']:.1f} ± {100 * of_task['stderr']:.1f}"


def cell(row: Row, key: str, form: Callable[[Any], str]) -> str | None:
    """A value as text, or None if it was not measured."""
    return None if row.get(key) is None else form(row[key])


def embedded() -> str:
    """Size, training and loss of the embedded model, from its record."""
    record = json.loads((ROOT / "src/dotmoe/embedded/training.json").read_text(encoding="utf-8"))
    return (
        f"{record['parameters']:,} parameters, trained on {record['tokens_seen']:,} tokens of "
        f"{record['training_text']}. Held-out loss {record['heldout_loss_nats_per_token']} nats a "
        f"token (perplexity {record['heldout_perplexity']}, {record['heldout_tokens']:,} tokens, "
        f"windows of {record['window_tokens']})."
    )


def stories() -> str:
    """A foreign checkpoint, converted with the defaults and with the recipe for small models."""

    def active(row: Row) -> str:
        split = row[1]["granularity"]
        return f"{split['active_experts']} of {split['num_experts']}"

    columns: dict[str, Callable[[Row], str | None]] = {
        "recipe": lambda row: row[0],
        "k of E": active,
        "steps": lambda row: str(row[1]["steps"]),
        "dense": lambda row: f"{row[1]['dense']['perplexity']:.3f}",
        "as split": lambda row: f"{row[1].get('frozen', row[1]['moe'])['perplexity']:.3f}",
        "repaired": lambda row: (
            f"{row[1]['moe']['perplexity']:.3f}" if "frozen" in row[1] else None
        ),
    }
    rows = [(name, result(f"stories260K_{name}.json")) for name in ("default", "small")]
    return part(table_of(rows, columns))


def active_experts() -> str:
    """Quality of the quickstart's export at several k."""
    record = result("quickstart_active_experts.json")
    return part(curve_table(record), record, "quickstart_active_experts.json")


def parts(file: str = "smollm2_parts.json") -> str:
    """What each part of the method is worth on a real model."""
    record = result(file)
    first = record["rows"][0]["kl"]
    columns: dict[str, Callable[[Row], str]] = {
        "row": lambda row: row["name"],
        "experts": lambda row: "{active_experts} of {num_experts}".format(**row),
        "always on": lambda row: f"{row['shared_size']} neurons" if row["shared_size"] else "-",
        "tokens": lambda row: f"{row['text_tokens']:,}",
        "nats above dense": lambda row: f"{row['nats_above_dense']:.3f}",
    }
    for text in sorted(first, reverse=True):
        columns[f"KL, {text}"] = partial(lambda text, row: f"{row['kl'][text]:.3f}", text)
        columns[f"of the first, {text}"] = partial(
            lambda text, row: f"{row['kl'][text] / first[text]:.2f}", text
        )
    return part(table_of(record["rows"], columns, words=3), record, file)


def trained_repair() -> str:
    """What training after the refit is worth on a real model."""
    return parts("smollm2_trained.json")


def decomposition() -> str:
    """What each part of the method costs on a real model, and what recovers it."""
    record = result("smollm2_decomposition.json")
    rows = record["rows"]
    columns: dict[str, Callable[[str], str]] = {"what runs": str}
    for text in rows["repaired"]:
        columns[f"KL, {text}"] = partial(lambda t, name: f"{rows[name][t]['kl']:.3f}", text)
        columns[f"nats above dense, {text}"] = partial(
            lambda t, name: f"{rows[name][t]['nats_above_dense']:.3f}", text
        )
    return part(table_of(rows, columns), record, "smollm2_decomposition.json")


def vllm() -> str:
    """Exports in real vLLM, compared with Transformers."""
    record = result("vllm_parity.json")
    columns: dict[str, Callable[[Row], str]] = {
        "export": lambda row: row["export"],
        "dtype": lambda row: row["dtype"],
        "mean difference, nats": lambda row: f"{row['mean']:.2g}",
        "to float32": lambda row: f"{row['mean_to_float32']:.2g}",
        "Transformers to float32": lambda row: f"{row['stock_mean_to_float32']:.2g}",
        "top-1 equal": lambda row: f"{row['top1_equal']:.2%}",
        "perplexity": lambda row: f"{row['perplexity']:.2f}",
        "in Transformers": lambda row: f"{row['stock_perplexity']:.2f}",
    }
    return part(table_of(record["rows"], columns, words=2), record, "vllm_parity.json")


def gguf() -> str:
    """Perplexity in llama.cpp by number format, dense and MoE."""
    record = result("gguf_parity.json")
    rows = [
        (name, kind, found)
        for name, model in record.items()
        for kind, found in model["perplexity"].items()
        if "dense" in str(found)
    ]

    def size(row: Row) -> str:
        sizes = [row[2][side].get("bytes") for side in ("dense", "moe")]
        return "" if None in sizes else " / ".join(f"{n / 2**20:.2f}" for n in sizes)

    stock = "transformers"
    columns: dict[str, Callable[[Row], str]] = {
        "model": lambda row: row[0],
        "run by": lambda row: "Transformers" if row[1] == stock else "llama.cpp",
        "type": lambda row: "float32" if row[1] == stock else row[1],
        "dense": lambda row: f"{row[2]['dense']['perplexity']:.3f}",
        "MoE": lambda row: f"{row[2]['moe']['perplexity']:.3f}",
        "MiB, dense / MoE": size,
    }
    return part(table_of(rows, columns, words=3), next(iter(record.values())), "gguf_parity.json")


def repaired() -> str:
    """What a repair is worth on the embedded model, without alignment."""
    record = result("repair_embedded.json")
    return part(table(record), record, "repair_embedded.json")


def smollm2() -> str:
    """GGUF files of a real model by number format, dense and MoE, against Transformers."""
    record = result("smollm2_gguf.json")

    def split(row: Row) -> str:
        made = f"{row['active']} of {row['experts']} experts, {row['weights']}"
        return "dense" if row["model"] == "gguf_dense" else made

    def speed(row: Row) -> str:
        found = row.get("decode")
        both = found and [found[side]["tokens_per_s"] for side in ("dense", "moe")]
        return f"{both[1]:.0f} / {both[0]:.0f}" if both else ""

    columns: dict[str, Callable[[Row], str]] = {
        "model": split,
        "type": lambda row: row["type"],
        "MiB": lambda row: f"{row['bytes'] / 2**20:.0f}",
        "perplexity": lambda row: f"{row['perplexity']:.2f}",
        "in Transformers, float32": lambda row: f"{row['in_transformers']:.2f}",
        "top-1 equal": lambda row: f"{row['top1_agreement']:.0%}",
        "lines cut alike": lambda row: "{} of {}".format(*row["equal_lines"]),
        "decode, tokens/s, MoE / dense": speed,
    }
    return part(table_of(record["rows"], columns, words=2), record, "smollm2_gguf.json")


def speed() -> str:
    """Decode and prefill speed of the model of width 1,024, MoE over dense."""
    cases = result("serving_speed.json")["cases"]
    rows = [(name, point) for name, case in cases.items() for point in case["points"]]

    def work(row: Row) -> str:
        what = row[1]["point"]
        return "prefill" if what["name"] == "prefill" else f"decode x {what['batch']}"

    columns: dict[str, Callable[[Row], str]] = {
        "runtime and type, context": lambda row: row[0],
        "measure": work,
        "dense, tokens/s": lambda row: f"{row[1]['dense']['tokens_per_s']:,.1f}",
        "MoE, tokens/s": lambda row: f"{row[1]['moe']['tokens_per_s']:,.1f}",
        "ratio": lambda row: f"{row[1]['speed_ratio']:.2f}",
        "ideal": lambda row: f"{row[1]['ideal_ratio']:.2f}",
        "share of ideal": lambda row: f"{row[1]['share_of_ideal']:.0%}",
    }
    last = list(cases.values())[-1]
    return part(table_of(rows, columns, words=2), last, "serving_speed.json")


def streaming() -> str:
    """Peak memory and time of exports whose weights stay on disk."""
    record = result("streaming_memory.json")
    columns: dict[str, Callable[[Row], str]] = {
        "layers": lambda row: str(row["layers"]),
        "checkpoint, GB": lambda row: f"{row['checkpoint_bytes'] / 1e9:.2f}",
        "peak, GB": lambda row: f"{row['peak_bytes'] / 1e9:.2f}",
        "of which libraries": lambda row: f"{row['libraries_bytes'] / 1e9:.2f}",
        "bound, GB": lambda row: f"{row['bound_bytes'] / 1e9:.2f}",
        "seconds": lambda row: f"{row['wall_s']:.0f}",
    }
    table = table_of(record["models"], columns, words=0)
    return part(table, record, "streaming_memory.json")


def planner() -> str:
    """Plans for the paper's models on its machine; estimated, not measured."""
    no_machine = Accelerator(name="", dtype="float32", flops_per_s=1, bytes_per_s=1, on_cpu=True)
    rows = []
    for name, config in planned_models().items():
        for task in ("align", "finetune"):
            asked = InspectConfig(
                model=name,
                experts=ExpertsConfig(expert_size=128),
                device="cpu",
                task=task,
                gpu="h100",
                gpus=8,
            )
            (plan,) = inspect_model(config, asked, stored=torch.bfloat16, here=no_machine)["plans"]
            rows.append((name, task, plan, plan["recommended"]))
    columns: dict[str, Callable[[Row], str]] = {
        "model": lambda row: row[0],
        "task": lambda row: row[1],
        "weights": lambda row: row[3]["way"],
        "sequences at once": lambda row: str(row[3]["micro_batch_size"]),
        "memory of a GPU": lambda row: in_bytes(row[3]["memory_total"]),
        "tokens/s": lambda row: f"{row[3]['tokens_per_s']:,.0f}",
        "hours": lambda row: f"{row[2]['hours']:.1f}",
    }
    return part(table_of(rows, columns, words=3))


def planned_models() -> dict[str, Any]:
    """Configs of the paper's models, whose sizes are public."""
    common = {"tie_word_embeddings": False}
    llama = common | {
        "num_hidden_layers": 32,
        "hidden_size": 4_096,
        "num_attention_heads": 32,
    }
    return {
        "LLaMA-2-7B": LlamaConfig(
            **llama,
            vocab_size=32_000,
            intermediate_size=11_008,
            num_key_value_heads=32,
            max_position_embeddings=4_096,
        ),
        "LLaMA-3-8B": LlamaConfig(
            **llama,
            vocab_size=128_256,
            intermediate_size=14_336,
            num_key_value_heads=8,
            max_position_embeddings=8_192,
        ),
        "Qwen2.5-7B": Qwen2Config(
            **common,
            num_hidden_layers=28,
            hidden_size=3_584,
            num_attention_heads=28,
            num_key_value_heads=4,
            vocab_size=152_064,
            intermediate_size=18_944,
            max_position_embeddings=32_768,
        ),
    }


def planner_check() -> str:
    """Predicted and measured times of alignment steps."""
    record = result("planner_check.json")
    columns: dict[str, Callable[[Row], str]] = {
        "shape": lambda row: row["name"] + " (unseen)" * row["unseen"],
        "checkpointing": lambda row: "yes" if row["checkpointing"] else "no",
        "measured, s": lambda row: f"{row['seconds']['step']:.3f}",
        "predicted / measured": lambda row: f"{row['ratio']:.2f}",
    }
    return part(table_of(record["rows"], columns, words=2), record, "planner_check.json")


def module(folder: str, name: str) -> Any:
    """Import a module from a folder that is not a package."""
    if str(ROOT / folder) not in sys.path:
        sys.path.append(str(ROOT / folder))
    return importlib.import_module(name)


PARTS: dict[str, Callable[[], str]] = {
    make.__name__: make
    for make in (
        splits,
        real_model,
        smollm2_rows,
        embedded_rows,
        planner,
        planner_check,
        quickstart,
        embedded,
        stories,
        active_experts,
        gguf,
        smollm2,
        repaired,
        parts,
        trained_repair,
        decomposition,
        vllm,
        speed,
        streaming,
    )
}


def rendered(text: str) -> str:
    """Text of a document with every generated part updated."""
    return PART.sub(lambda match: f"{match[1]}{PARTS[match[2]]()}\n{match[3]}", text)


def main() -> int:
    texts = {document: rendered(document.read_text(encoding="utf-8")) for document in DOCUMENTS}
    for document, after in (texts | module("experiments", "readmes").readmes()).items():
        before = document.read_text(encoding="utf-8") if document.exists() else ""
        if "--check" in sys.argv[1:] and after != before:
            print(
                f"{document.relative_to(ROOT)} is not current. "
                "Run: python scripts/update_documents.py"
            )
            return 1
        document.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
