"""What was lost and what was gained, in plain words and in four figures."""

import math

from dotmoe.report.read import RunResults, Values
from dotmoe.report.tables import bench_name, differ, ffn_operations, is_near_chance, text_names
from dotmoe.tables import millions, percent


def verdict(found: RunResults) -> list[str]:
    """Sentences that can be read alone: lost, gained, what is in the weights."""
    results, export = found.results, found.export
    sentences = [
        f"Lost: {_lost(found)} {_tasks(found)}",
        f"Gained: {gained(results, export)} {_speed(found.files.get('bench'))}",
        f"Weights: {_weights(found)}",
    ]
    measured = results["granularity"]["active_experts"]
    if export and export["active_experts"] != measured:  # by a later `dotmoe edit`
        sentences.append(
            f"The export now runs k = {export['active_experts']}; the figures of this page were "
            f"measured at k = {measured}."
        )
    return sentences


def tiles(found: RunResults) -> dict[str, str]:
    """The main figures, by what they are."""
    dense, moe = found.results["dense"], found.results["moe"]
    counts = found.results["parameters"]
    shown = {
        f"perplexity per {dense['unit']}": f"{dense['perplexity']:.2f} → {moe['perplexity']:.2f}",
        "of the parameters work on a token": percent(counts["active"] / counts["dense"]),
    }
    if found.export:
        work = ffn_operations(found.results, found.export)
        shown["of the FFN operations per token"] = percent(work["moe"] / work["dense"])
    others, own = found.main_scores()
    if own and len(own) == len(others):
        before, after = _mean(others)[0], _mean(own)[0]
        shown[f"mean accuracy, {len(own)} tasks"] = f"{before:.1f} → {after:.1f} %"
    return shown


def gained(results: Values, export: Values) -> str:
    """What works on a token, in a sentence.

    Args:
        results: With `parameters` and `granularity`.
        export: The record of the export; empty where there is none.
    """
    counts, split = results["parameters"], results["granularity"]
    said = (
        f"each token runs {split['active_experts']} of {split['num_experts']} experts a layer, so "
        f"{millions(counts['active'])} of {millions(counts['dense'])} parameters work on it "
        f"({percent(1 - counts['active'] / counts['dense'])} fewer)"
    )
    if not export:
        return f"{said}."
    work = ffn_operations(results, export)
    return (
        f"{said}, and its FFNs take {percent(1 - work['moe'] / work['dense'])} fewer "
        f"floating-point operations, routers counted ({millions(work['moe'])} instead of "
        f"{millions(work['dense'])})."
    )


def _lost(found: RunResults) -> str:
    dense, moe = found.results["dense"], found.results["moe"]
    share = moe["perplexity"] / dense["perplexity"] - 1
    said = (
        f"on {text_names(dense)} ({dense['tokens']:,} tokens scored, in windows of "
        f"{dense['window']}) the perplexity per {dense['unit']} goes from "
        f"{dense['perplexity']:.2f} to {moe['perplexity']:.2f}: {moe['loss'] - dense['loss']:+.3f} "
        f"nats a {dense['unit']}, perplexity {100 * share:+.1f} %."
    )
    others = {
        "Before finetuning it was": found.results.get("converted"),
        "A random split, its router trained as long, has": found.quickstart.get("random_split"),
    }
    for name, result in others.items():
        if result:
            above = result["loss"] - dense["loss"]
            said += f" {name} {result['perplexity']:.2f} ({above:+.3f} nats)."
    return said


def _tasks(found: RunResults) -> str:
    others, own = found.main_scores()
    if not own:
        return "Benchmark tasks were not run."
    over = f"{len(own)} benchmark tasks ({', '.join(score['task'] for score in own)})"
    after = "{:.1f} ± {:.1f} %".format(*_mean(own))
    if len(others) < len(own):
        said = f"Mean accuracy over {over}: {after}."
    else:
        before = "{:.1f} ± {:.1f} %".format(*_mean(others))
        said = (
            f"Over {over} the mean accuracy goes from {before} ({found.against}) to {after} (± one "
            f"standard error); {sum(map(differ, own, others)) or 'none'} of them differ by more "
            "than two standard errors."
        )
    if blind := sum(map(is_near_chance, others)):
        said += f" In {blind} of them {found.against} cannot be told from guessing."
    limits = {task["task"]: task["limit"] for task in found.tasks("tasks") if task["limit"]}
    if limits:
        asked = ", ".join(f"{limit} of {task}" for task, limit in limits.items())
        said += f" Only the first questions were asked: {asked}."
    return said


def _mean(scores: list[Values]) -> tuple[float, float]:
    """Unweighted mean of scores in per cent, and its standard error."""
    error = math.hypot(*(score["stderr"] or 0.0 for score in scores))
    mean = sum(score["value"] for score in scores) / len(scores)
    return 100 * mean, 100 * error / len(scores)


def _speed(bench: Values | None) -> str:
    if bench is None:
        return "Speed was not measured."
    points = bench["points"]
    said = ", ".join(f"{point['speed_ratio']:.2f} in {bench_name(point)}" for point in points)
    low, high = zip(*(point["speed_ratio_quartiles"] for point in points), strict=True)
    after = " It is faster there." * (min(low) > 1) + " It is slower there." * (max(high) < 1)
    return (
        f"Measured speed over that of the dense model, by {bench['runtime']} on "
        f"{bench['provenance']['hardware']}: {said}.{after}"
    )


def _weights(found: RunResults) -> str:
    counts, export = found.results["parameters"], found.export
    said = "the experts are slices of the dense FFNs"
    if found.command == "finetune":
        train = found.config["finetune"]["train"]
        what = {"routers": "the routers alone", "lora": "low-rank adapters and routers"}
        said = f"finetuning changed {what.get(train, 'all weights')}"
    if export:
        said += f". Format {export['format']}: {export['exactness']}"
    added = counts["stored"] - counts["dense"]
    share = percent(added / counts["dense"])
    return f"{said}. The routers add {added:,} parameters ({share}) to those of the dense model."
