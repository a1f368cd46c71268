"""Every table of results: one function each, for the terminal, the page and the documents."""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dotmoe.tables import Table, figure, in_bytes, percent, table_of

Values = Mapping[str, Any]

LABELS = ("against", "model")
"""The two sides of a measurement; the other model first, as in the paper's tables."""


def perplexity_table(models: Mapping[str, Values]) -> Table:
    """Perplexity of models on the same text.

    Args:
        models: Results by the name of the model; the first is what the others are compared with.
    """
    reference, first = next(iter(models.items()))
    unit = first["unit"]
    columns: dict[str, Callable[[Any], str]] = {
        "model": lambda row: row[0],
        "perplexity": lambda row: f"{row[1]['perplexity']:.3f}",
        f"nats a {unit}": lambda row: f"{row[1]['loss']:.4f}",
        f"above {Path(reference).name}": lambda row: f"{row[1]['loss'] - first['loss']:+.4f}",
        "bits a byte": lambda row: figure(row[1].get("bits_per_byte")),
    }
    if len(models) == 1:  # nothing to compare with
        del columns[f"above {Path(reference).name}"]
    return table_of(
        models.items(),
        columns,
        title=f"Perplexity per {unit}, windows of {first['window']:,}, {first['tokens']:,} tokens",
        note=_protocol(first),
    )


def word_table(result: Values) -> Table:
    """Perplexity a word of one model or two, at each window."""
    sides = [result[label] for label in LABELS if label in result]
    rows = [(str(side["name"]), row) for side in sides for row in side["windows"]]
    return table_of(
        rows,
        {
            "model": lambda row: row[0],
            "window, tokens": lambda row: f"{row[1]['window']:,}",
            "perplexity a word": lambda row: f"{row[1]['word_perplexity']:.3f}",
            "words": lambda row: f"{row[1]['words']:,}",
            "tokens": lambda row: f"{row[1]['tokens']:,}",
        },
        title="Perplexity a word, by rolling log-likelihood",
        note=_protocol(result),
    )


def curve_table(curve: Values) -> Table:
    """Perplexity of an export at several k."""
    marks = {curve["active_experts"]: " (now)"}
    marks[curve["num_experts"]] = f" ({curve['all_experts']['model']})"
    return table_of(
        curve["points"],
        {
            "k": lambda point: f"{point['active_experts']}{marks.get(point['active_experts'], '')}",
            "of the FFN": lambda point: percent(point["active_fraction"]),
            "active parameters": lambda point: f"{point['active_parameters']:,}",
            "of all": lambda point: percent(point["active_parameters"] / curve["dense_parameters"]),
            "perplexity": lambda point: f"{point['perplexity']:.3f}",
            f"nats above k = {curve['num_experts']}": lambda point: (
                f"{point['loss_above_all_experts']:+.4f}"
            ),
        },
        title=f"Perplexity per {curve['unit']} at several k",
        note=_protocol(curve),
    )


def scores_table(
    scores: Iterable[Values], others: Iterable[Values], names: tuple[str, str]
) -> Table:
    """Benchmark tasks of a model, beside another one where that was measured.

    Args:
        scores: Rows of the model, from the `scores` of its task files.
        others: The same of the other model; may be empty.
        names: Of the other model, and of the model.
    """
    by_key = {(each["task"], each["metric"]): each for each in others}
    pairs = [(score, by_key.get((score["task"], score["metric"]))) for score in scores]

    def change(pair: tuple[Values, Values | None]) -> str | None:
        score, other = pair
        if other is None:
            return None
        factor = 100 if is_share(score) else 1
        return f"{factor * (score['value'] - other['value']):+.3g}" + " *" * differ(score, other)

    of_other = {names[0]: lambda pair: _with_error(pair[1])} if by_key else {}
    return table_of(
        pairs,
        {
            "task": lambda pair: pair[0]["task"],
            "metric": lambda pair: pair[0]["metric"],
            "shots": lambda pair: str(pair[0]["shots"]),
            "questions": lambda pair: f"{pair[0]['questions']:,}",
            "guessing": lambda pair: figure(pair[0]["chance"] and 100 * pair[0]["chance"], ".0f"),
            **of_other,
            names[1]: lambda pair: _with_error(pair[0]),
            **({"difference": change} if by_key else {}),
        },
        title="Benchmark tasks, per cent ± one standard error",
        note="guessing: evenly, or always the most frequent answer. *: the difference exceeds two "
        "standard errors.",
        words=2,
    )


def is_share(score: Values) -> bool:
    """Whether a score is a share of right answers, 0 to 1."""
    return score["metric"] in ("acc", "acc_norm", "exact_match")


def differ(score: Values, other: Values) -> bool:
    """Whether two scores differ by more than two standard errors of the difference.

    The errors count as independent. Both models answer the same questions, so the true error of
    the difference is smaller, and a difference may be overlooked.
    """
    error = math.hypot(score["stderr"] or math.inf, other["stderr"] or math.inf)
    return bool(abs(score["value"] - other["value"]) > 2 * error)


def is_near_chance(score: Values) -> bool:
    """Whether a score cannot be told from guessing, or is below it."""
    if score["chance"] is None or score["stderr"] is None:
        return False
    return bool(score["value"] - score["chance"] < 2 * score["stderr"])


def fidelity_table(result: Values) -> Table:
    """Closeness to the dense model before and after the head, and of each FFN."""
    places = {"before the LM head": result["before_head"], "logits": result["after_head"]}
    places |= {f"FFN output, layer {each['layer']}": each for each in result["ffn"]}
    return table_of(
        places.items(),
        {
            "place": lambda row: row[0],
            "cosine": lambda row: f"{row[1]['cosine']:.4f}",
            "MSE": lambda row: figure(row[1]["mse"]),
            "MSE / mean square": lambda row: f"{row[1]['relative_mse']:.4f}",
        },
        title=f"{result['name']} beside {result['against']}, {result['tokens']:,} tokens",
        note=f"KL {result['kl']:.4f} nats a token, same most likely token for "
        f"{percent(result['top1_agreement'])}. Text: {text_names(result)}.",
    )


def repetition_table(result: Values) -> Table:
    """How much of what each model writes repeats."""
    keys = {"in a loop": "loop_share", "end in a loop": "looping"}
    keys |= {f"rep-{n}": f"rep_{n}" for n in (2, 3, 4)}
    keys |= {f"distinct-{n}": f"distinct_{n}" for n in (1, 2)}
    sides = [result[label] for label in LABELS if label in result]
    return Table(
        title=f"Repetition in continuations of {len(result['model']['prompts'])} prompts, per cent",
        columns=("model", *keys),
        rows=[
            [
                f"{side['name']}, {way}",
                *(f"{100 * side[way]['repetition'][key]:.1f}" for key in keys.values()),
            ]
            for way in ("greedy", "sampled")
            for side in sides
        ],
    )


def counts_table(counts: Values) -> Table:
    """Parameters, counted; each weight once, however often it lies in the files."""
    names = {
        "dense": "dense model",
        "stored": "dense model and routers",
        "active": "active: work on one token",
        "active_with_routers": "active, routers included",
        "active_without_embeddings": "active, without embeddings and head",
    }
    return table_of(
        names,
        {
            "parameters": lambda key: names[key],
            "number": lambda key: f"{counts[key]:,}",
            "of dense": lambda key: percent(counts[key] / counts["dense"]),
        },
        title="Parameters, counted; each weight once",
    )


def ffn_operations(results: Values, export: Values) -> dict[str, int]:
    """Floating-point operations of all FFNs for one token; a product and its sum are two.

    Three matrices of width D by neurons each; a router is D by E.
    """
    split, layers, width = results["granularity"], export["num_layers"], export["model_width"]
    ffn = split["num_experts"] * split["expert_size"] + split["shared_size"]
    moe_layers = layers - split["first_dense_layers"]
    run = split["active_experts"] * split["expert_size"] + split["shared_size"]
    experts = 6 * width * (split["first_dense_layers"] * ffn + moe_layers * run)
    routers = 2 * width * split["num_experts"] * moe_layers
    dense = 6 * width * ffn * layers
    return {"dense": dense, "experts": experts, "routers": routers, "moe": experts + routers}


def bench_name(point: Values) -> str:
    """What a point of the benchmark measures."""
    work = point["point"]
    if work["name"] == "prefill":
        return f"prefill of {work['tokens']} tokens"
    return f"decode at batch {work['batch']}"


def speed_table(bench: Values) -> Table:
    """Speed and memory, MoE beside dense."""
    per = "tokens/s" if bench["settings"].get("clock", "wall") == "wall" else "tokens/CPU s"
    return table_of(
        bench["points"],
        {
            "work": bench_name,
            f"dense, {per}": lambda point: f"{point['dense']['tokens_per_s']:,.1f}",
            f"MoE, {per}": lambda point: f"{point['moe']['tokens_per_s']:,.1f}",
            "ratio": lambda point: f"{point['speed_ratio']:.2f}",
            "rounds": lambda point: "{:.2f} to {:.2f}".format(*point["speed_ratio_quartiles"]),
            "ideal ratio": lambda point: f"{point['ideal_ratio']:.2f}",
            "dense, peak": lambda point: in_bytes(point["dense"]["peak_bytes"]),
            "MoE, peak": lambda point: in_bytes(point["moe"]["peak_bytes"]),
        },
        title=f"Measured by {bench['runtime']}",
        note=f"rounds: middle half of the rounds' ratios, of median times. {bench['protocol']}",
    )


def load_table(utilisation: Values) -> Table:
    """How evenly tokens are spread over the experts of each layer."""
    return table_of(
        utilisation["values"]["statistics"],
        {
            "layer": lambda row: str(row["layer"]),
            "coefficient of variation": lambda row: figure(row["coefficient_of_variation"]),
            "busiest / mean": lambda row: figure(row["max_over_mean"]),
            "idlest / mean": lambda row: figure(row["min_over_mean"]),
            "dead experts": lambda row: str(len(row["dead_experts"])),
            "always on": lambda row: str(len(row["always_on_experts"])),
            "entropy / its maximum": lambda row: figure(row["entropy_normalised"]),
        },
        title=f"Load of the experts, {utilisation['tokens']:,} tokens",
        words=0,
    )


def steps_table(steps: list[dict[str, Any]], shown: int = 9) -> Table:
    """Some steps of a training, the first and the last among them."""
    names = {
        "step": "step",
        "loss": "loss",
        "ce": "CE, nats",
        "kl": "KL, nats",
        "balance": "balance loss",
        "tau": "tau",
        "moved_fraction": "moved, share",
        "soft_hard_gap": "soft-hard gap",
        "marginal_error": "marginal error",
        "grad_norm": "gradient norm",
    }
    columns = {name: key for key, name in names.items() if key in steps[0]}
    rows = sorted({round(index * (len(steps) - 1) / (shown - 1)) for index in range(shown)})
    return Table(
        title="Single steps",
        columns=tuple(columns),
        rows=[[figure(steps[row].get(key)) for key in columns.values()] for row in rows],
        words=0,
    )


def checks_table(verification: Values) -> Table:
    """The exported checkpoint against the masked dense model."""
    return table_of(
        verification.items(),
        {"check": lambda row: row[0].replace("_", " "), "value": lambda row: figure(row[1])},
        title="Export against masked dense model",
    )


def origins_table(files: Mapping[str, Values]) -> Table:
    """Where each figure comes from: file, origin, time, commit, machine, seed."""
    rows = [(name, values, values.get("provenance", {})) for name, values in files.items()]
    return table_of(
        rows,
        {
            "file": lambda row: f"6_evaluate/{row[0]}.json",
            "origin": lambda row: row[1].get("origin"),
            "time (UTC)": lambda row: row[2].get("time"),
            "commit": lambda row: row[2].get("commit"),
            "hardware": lambda row: row[2].get("hardware"),
            "seed": lambda row: figure(row[2].get("seed")),
        },
        title="Result files",
        words=6,
    )


def text_names(result: Values) -> str:
    """Names of the texts that were measured on, without their folders."""
    return ", ".join(Path(str(text)).name for text in result.get("text", ()))


def _with_error(score: Values | None) -> str | None:
    if score is None:
        return None
    factor, form = (100, ".1f") if is_share(score) else (1, ".3f")
    error = "" if score["stderr"] is None else f" ± {factor * score['stderr']:{form}}"
    return f"{factor * score['value']:{form}}{error}"


def _protocol(result: Values) -> str:
    return f"Text: {', '.join(map(str, result.get('text', ())))}. {result.get('protocol', '')}"
