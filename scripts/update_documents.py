"""Write the generated parts of the documents from the JSON under results/; never typed by hand.

    python scripts/update_documents.py            # rewrite
    python scripts/update_documents.py --check    # exit 1 if a document is not current

A part lies between `<!-- generated: NAME -->` and `<!-- end -->`; `PARTS` says what makes it. The
README files under experiments/ are made as a whole, by experiments/rendering.py.
"""

import importlib
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import LlamaConfig, Qwen2Config

from dotmoe.granularity import ExpertsConfig
from dotmoe.inspection import Machines, RunSize, inspect_model
from dotmoe.inspection.device_time import DeviceRates
from dotmoe.inspection.plan_tables import way
from dotmoe.inspection.sizes import total
from dotmoe.models.family import family_of
from dotmoe.report import quickstart_summary

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "serving.md", ROOT / "docs" / "planning.md")
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def result(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))
    return value


def quickstart() -> str:
    """What the quickstart printed, rendered again from what it wrote."""
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


def embedded() -> str:
    """The embedded model's own record."""
    record = json.loads((ROOT / "src/dotmoe/embedded/training.json").read_text(encoding="utf-8"))
    return (
        f"{record['parameters']:,} parameters, trained on {record['tokens_seen']:,} tokens of "
        f"{record['training_text']}. Held-out loss {record['heldout_loss_nats_per_token']} nats a "
        f"token (perplexity {record['heldout_perplexity']}, {record['heldout_tokens']:,} tokens, "
        f"windows of {record['window_tokens']})."
    )


def stories() -> str:
    """A foreign checkpoint, converted with the defaults and with the recipe for small models."""
    rows = ["| run | k of E | dense | MoE | steps |", "|---|---|---|---|---|"]
    for name in ("stories260K_default", "stories260K_small"):
        record = result(f"{name}.json")
        split = record["granularity"]
        rows.append(
            f"| {name.split('_')[1]} | {split['active_experts']} of {split['num_experts']} | "
            f"{record['dense']['perplexity']:.3f} | {record['moe']['perplexity']:.3f} | "
            f"{record['steps']} |"
        )
    return "\n".join(rows)


def active_experts() -> str:
    """Quality of the quickstart's export against k."""
    record = result("quickstart_active_experts.json")
    rows = ["| k | active parameters | perplexity | nats above dense |", "|---|---|---|---|"]
    for point in record["points"]:
        name = str(point["active_experts"])
        name += " (as exported)" * (point["active_experts"] == record["active_experts"])
        rows.append(
            f"| {name} | {point['active_parameters'] / 1e6:.2f}M | {point['perplexity']:.2f} | "
            f"{point['loss_above_all_experts']:.3f} |"
        )
    return "\n".join([*rows, "", source(record, "quickstart_active_experts.json")])


def gguf() -> str:
    """Perplexity in llama.cpp by number format, dense and MoE."""
    record = result("gguf_parity.json")
    rows = [
        "| model | run by | type | dense | MoE | MiB, dense / MoE |",
        "|---|---|---|---|---|---|",
    ]
    for name, model in record.items():
        types = {key: value for key, value in model["perplexity"].items() if "dense" in str(value)}
        for kind, found in types.items():
            sizes = [found[side].get("bytes") for side in ("dense", "moe")]
            cells = [f"{found[side]['perplexity']:.3f}" for side in ("dense", "moe")]
            size = "" if None in sizes else " / ".join(f"{n / 2**20:.2f}" for n in sizes)
            runtime = "Transformers" if kind == "transformers" else "llama.cpp"
            shown = "float32" if kind == "transformers" else kind
            rows.append(f"| {name} | {runtime} | {shown} | {cells[0]} | {cells[1]} | {size} |")
    first = next(iter(record.values()))
    return "\n".join([*rows, "", source(first, "gguf_parity.json")])


def speed() -> str:
    """Decode and prefill of the d 1024 model, MoE over dense."""
    record = result("serving_speed.json")
    rows = [
        "| runtime and type, context | measure | dense, tokens/s | MoE, tokens/s | ratio | ideal | "
        "share of ideal |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, case in record["cases"].items():
        for point in case["points"]:
            what = point["point"]
            shown = "prefill" if what["name"] == "prefill" else f"decode x {what['batch']}"
            rows.append(
                f"| {name} | {shown} | {point['dense']['tokens_per_s']:,.1f} | "
                f"{point['moe']['tokens_per_s']:,.1f} | {point['speed_ratio']:.2f} | "
                f"{point['ideal_ratio']:.2f} | {point['share_of_ideal']:.0%} |"
            )
    return "\n".join([*rows, "", source(case, "serving_speed.json")])


def streaming() -> str:
    """Peak memory and time of exports whose weights stay on disk."""
    record = result("streaming_memory.json")
    rows = [
        "| layers | checkpoint, GB | peak, GB | of which libraries | bound, GB | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for model in record["models"]:
        sizes = ("checkpoint_bytes", "peak_bytes", "libraries_bytes", "bound_bytes")
        cells = [f"{model[name] / 1e9:.2f}" for name in sizes]
        rows.append(f"| {model['layers']} | {' | '.join(cells)} | {model['wall_s']:.0f} |")
    return "\n".join([*rows, "", source(record, "streaming_memory.json")])


def source(record: dict[str, Any], name: str) -> str:
    """Where a table comes from."""
    made = record["provenance"]
    return (
        f"Measured at commit `{made['commit']}` on {made['hardware']}, {made['threads']} threads, "
        f"torch {made['versions']['torch']}; results/{name}."
    )


def planner() -> str:
    """Plans for the paper's models on its machine; estimates, no measurement."""
    rows = [
        "| model | task | weights | sequences at once | memory of a GPU | tokens/s | hours |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, config in planned_models().items():
        for task in ("align", "finetune"):
            found = inspect_model(
                config,
                family_of(config),
                ExpertsConfig(expert_size=128),
                RunSize(device="cpu"),
                stored=torch.bfloat16,
                rates=DeviceRates(device="", dtype="float32", flops_per_s=1.0, bytes_per_s=1.0),
                machines=Machines(task=task, gpu="h100", gpus=8),
            )
            (plan,) = found.plans
            choice = plan.choice
            assert choice is not None
            memory = total(choice.memory) / 2**30
            rows.append(
                f"| {name} | {task} | {way(choice)} | {choice.micro_batch_size} | "
                f"{memory:.1f} GiB | {choice.tokens_per_s:,.0f} | {plan.hours:.1f} |"
            )
    return "\n".join(rows)


def planned_models() -> dict[str, Any]:
    """Configs of the paper's models; their sizes are public."""
    llama = {"tie_word_embeddings": False, "num_hidden_layers": 32, "hidden_size": 4_096}
    heads = {"num_attention_heads": 32}
    return {
        "LLaMA-2-7B": LlamaConfig(
            **llama,
            **heads,
            vocab_size=32_000,
            intermediate_size=11_008,
            num_key_value_heads=32,
            max_position_embeddings=4_096,
        ),
        "LLaMA-3-8B": LlamaConfig(
            **llama,
            **heads,
            vocab_size=128_256,
            intermediate_size=14_336,
            num_key_value_heads=8,
            max_position_embeddings=8_192,
        ),
        "Qwen2.5-7B": Qwen2Config(
            tie_word_embeddings=False,
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
    """Predicted beside measured steps."""
    record = result("planner_check.json")
    rows = ["| shape | checkpointing | measured, s | predicted / measured |", "|---|---|---|---|"]
    for row in record["rows"]:
        name = row["name"] + " (unseen)" * row["unseen"]
        rows.append(
            f"| {name} | {'yes' if row['checkpointing'] else 'no'} | "
            f"{row['seconds']['step']:.3f} | {row['ratio']:.2f} |"
        )
    return "\n".join([*rows, "", source(record, "planner_check.json")])


def experiments() -> str:
    """A row an experiment of the paper."""
    return str(rendering().overview("experiments/"))


def rendering() -> Any:
    """experiments/rendering.py, whose folder is no package."""
    folder = str(ROOT / "experiments")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("rendering")


PARTS: dict[str, Callable[[], str]] = {
    "experiments": experiments,
    "planner": planner,
    "planner_check": planner_check,
    "quickstart": quickstart,
    "embedded": embedded,
    "stories": stories,
    "active_experts": active_experts,
    "gguf": gguf,
    "speed": speed,
    "streaming": streaming,
}


def rendered(text: str) -> str:
    """A document's text with every generated part made anew."""
    return PART.sub(lambda match: f"{match[1]}{PARTS[match[2]]()}\n{match[3]}", text)


def main() -> int:
    texts = {document: rendered(document.read_text(encoding="utf-8")) for document in DOCUMENTS}
    for document, after in (texts | rendering().readmes()).items():
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
