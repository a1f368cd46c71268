"""Write the generated parts of README.md from the JSON under results/; never typed by hand.

    python scripts/update_readme.py            # rewrite
    python scripts/update_readme.py --check    # exit 1 if README.md is not current

A part lies between `<!-- generated: NAME -->` and `<!-- end -->`; `PARTS` says what makes it.
"""

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from dotmoe.report import quickstart_summary

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
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


PARTS: dict[str, Callable[[], str]] = {
    "quickstart": quickstart,
    "embedded": embedded,
    "stories": stories,
}


def rendered(text: str) -> str:
    """README text with every generated part made anew."""
    return PART.sub(lambda match: f"{match[1]}{PARTS[match[2]]()}\n{match[3]}", text)


def main() -> int:
    before = README.read_text(encoding="utf-8")
    after = rendered(before)
    if "--check" in sys.argv[1:]:
        if after != before:
            print("README.md is not current. Run: python scripts/update_readme.py")
            return 1
        return 0
    README.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
