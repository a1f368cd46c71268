"""What was lost and what was gained, in plain words and in four figures."""

from pathlib import Path

from dotmoe.report.elements import Markup, element, joined, paragraph, strong
from dotmoe.report.plots import bench_name
from dotmoe.report.result_files import ResultFiles
from dotmoe.report.sections.parts import Context
from dotmoe.report.sections.size import Arithmetic
from dotmoe.report.task_scores import main_scores, mean_of, scores_of
from dotmoe.report.words import millions, percent


def verdict(context: Context) -> Markup:
    """A paragraph that can be read alone, and the main figures."""
    found = context.found
    return joined(
        [
            paragraph(strong("Lost: "), _lost(found), *_benchmarks(found), class_="verdict"),
            paragraph(strong("Gained: "), _gained(found), _speed(found), class_="verdict"),
            paragraph(_weights(found), *_caution(found), class_="verdict"),
            _tiles(found),
        ]
    )


def sources_of(result: dict[str, object]) -> str:
    """Names of the texts that were measured on, without their folders."""
    texts = result.get("text")
    return ", ".join(Path(str(text)).name for text in texts) if isinstance(texts, list) else ""


def _lost(found: ResultFiles) -> str:
    dense, moe = found.results["dense"], found.results["moe"]
    loss = moe["loss"] - dense["loss"]
    share = moe["perplexity"] / dense["perplexity"] - 1
    said = (
        f"on {sources_of(dense)} ({dense['tokens']:,} tokens scored, in windows of "
        f"{dense['window']}) the perplexity per {dense['unit']} goes from "
        f"{dense['perplexity']:.2f} to {moe['perplexity']:.2f}: {loss:+.3f} nats a "
        f"{dense['unit']}, perplexity {100 * share:+.1f} %."
    )
    if "converted" in found.results:
        before = found.results["converted"]
        said += (
            f" Before recovery training it was {before['perplexity']:.2f} "
            f"({before['loss'] - dense['loss']:+.3f} nats)."
        )
    if found.quickstart is not None:
        random = found.quickstart["random_split"]
        said += (
            f" A random split, experts as large and its router trained as long, comes to "
            f"{random['perplexity']:.2f} ({random['loss'] - dense['loss']:+.3f} nats)."
        )
    return said


def _benchmarks(found: ResultFiles) -> list[str]:
    scores = main_scores(scores_of(found))
    model, dense = mean_of(scores, "model"), mean_of(scores, "against")
    if model is None:
        return [" Benchmark tasks were not run."]
    after = f"{100 * model[0]:.1f} ± {100 * model[1]:.1f} %"
    if dense is None:
        return [f" Mean accuracy over {len(scores)} benchmark tasks: {after}; dense: not run."]
    apart = sum(score.differs() for score in scores) or "none"
    blind = [score for score in scores if score.is_near_chance("against")]
    said = (
        f" Over {len(scores)} benchmark tasks{_limit(found)} the mean accuracy goes from "
        f"{100 * dense[0]:.1f} ± {100 * dense[1]:.1f} % to {after} (± one standard error); "
        f"{apart} of them differ by more than two standard errors."
    )
    if blind:
        said += (
            f" In {len(blind)} of them the dense model itself cannot be told from guessing, so "
            "that nothing could be lost there."
        )
    return [said]


def _limit(found: ResultFiles) -> str:
    limits = [result.get("limit") for result in found.tasks["model"].values()]
    asked = max(limit or 0 for limit in limits)
    return f" (only the first {asked} questions of each)" if asked else ""


def _gained(found: ResultFiles) -> str:
    counts, split = found.results["parameters"], found.results["granularity"]
    saved = 1 - counts["active"] / counts["dense"]
    said = (
        f"each token runs {split['active_experts']} of {split['num_experts']} experts a layer, so "
        f"that {millions(counts['active'])} of {millions(counts['dense'])} parameters work on it "
        f"({percent(saved)} fewer)"
    )
    work = Arithmetic.of(found)
    if work is None:
        return said + "."
    return (
        said + f", and its FFNs take {percent(1 - work.moe / work.dense)} fewer floating-point "
        f"operations, routers counted ({millions(work.moe)} instead of {millions(work.dense)})."
    )


def _speed(found: ResultFiles) -> str:
    bench = found.measured.get("bench")
    if bench is None:
        return " Speed was not measured."
    ratios = [point["speed_ratio"] for point in bench["points"]]
    said = [
        f"{ratio:.2f} in {bench_name(p)}" for ratio, p in zip(ratios, bench["points"], strict=True)
    ]
    quartiles = [point["speed_ratio_quartiles"] for point in bench["points"]]
    conclusion = {(True, True): " It is faster there.", (False, False): " It is slower there."}
    after = conclusion.get((max(ratios) > 1, min(ratios) > 1), "")
    if any(not low <= ratio <= high for (low, high), ratio in zip(quartiles, ratios, strict=True)):
        after = " The machine was not quiet: its rounds spread beyond these figures."
    return (
        f" Measured speed over that of the dense model, by {bench['runtime']} on "
        f"{bench['provenance']['hardware']}: {', '.join(said)}.{after}"
    )


def _weights(found: ResultFiles) -> str:
    if found.kind == "finetune":
        train = found.results["config"]["finetune"]["train"]
        what = {"routers": "the routers alone", "lora": "low-rank adapters and routers"}
        return f"Recovery training changed {what.get(train, 'all weights')}."
    counts = found.results["parameters"]
    added = counts["stored"] - counts["dense"]
    return (
        "No dense weight was changed: the experts are slices of the dense FFNs. The routers add "
        f"{added:,} parameters ({percent(added / counts['dense'])}) to what is stored."
    )


def _caution(found: ResultFiles) -> list[str]:
    """A later `dotmoe edit` changes what the figures are of."""
    measured = found.results["granularity"]["active_experts"]
    if found.export is None or found.export["active_experts"] == measured:
        return []
    return [
        " ",
        strong(
            f"The export now runs k = {found.export['active_experts']}; the figures of this page "
            f"were measured at k = {measured}."
        ),
    ]


def _tiles(found: ResultFiles) -> Markup:
    dense, moe = found.results["dense"], found.results["moe"]
    counts, work = found.results["parameters"], Arithmetic.of(found)
    tiles = [
        (f"{dense['perplexity']:.2f} → {moe['perplexity']:.2f}", f"perplexity per {dense['unit']}"),
        (percent(counts["active"] / counts["dense"]), "of the parameters work on a token"),
    ]
    if work is not None:
        tiles.append((percent(work.moe / work.dense), "of the FFN operations per token"))
    scores = main_scores(scores_of(found))
    model, before = mean_of(scores, "model"), mean_of(scores, "against")
    if model is not None and before is not None:
        change = f"{100 * before[0]:.1f} → {100 * model[0]:.1f} %"
        tiles.append((change, f"mean accuracy, {len(scores)} tasks"))
    drawn = [
        element("div", element("b", value), element("span", text), class_="tile")
        for value, text in tiles
    ]
    return element("div", *drawn, class_="tiles")
