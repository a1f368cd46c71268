"""Sections on how the model behaves beside the dense one: hidden states, logits, samples."""

from typing import Any

from dotmoe.report.elements import Markup, element, figure, joined, paragraph, table
from dotmoe.report.result_files import Values
from dotmoe.report.sections.parts import Context, Missing, Part, Section
from dotmoe.report.words import percent

_MOST_SAMPLES = 3
"""Prompts whose continuations are shown."""

_GREEDY = "Greedy: the most likely token each time."

_REPETITION = {
    "loop_share": "tokens in a loop, %",
    "looping": "end in a loop, %",
    "rep_2": "rep-2, %",
    "rep_3": "rep-3, %",
    "rep_4": "rep-4, %",
    "distinct_1": "distinct-1, %",
    "distinct_2": "distinct-2, %",
}


def fidelity(context: Context) -> list[Part]:
    """Closeness to the dense model before and after the head, and FFN by FFN."""
    result = context.found.measured.get("fidelity")
    if result is None:
        return [
            Missing(
                what="closeness to the dense model (hidden states, logits, FFN outputs)",
                command=context.evaluation("--fidelity", "--text", *context.texts),
            )
        ]
    rows = [("before the LM head", result["before_head"]), ("logits", result["after_head"])]
    rows += [(f"FFN output, layer {each['layer']}", each) for each in result["ffn"]]
    body = [
        paragraph(
            f"KL to the dense model's predictions: {result['kl']:.4f} nats a token. The most "
            f"likely next token is the same for {percent(result['top1_agreement'])} of "
            f"{result['tokens']:,} tokens."
        ),
        context.plot("fidelity", "Error of each split FFN's output, fed with the dense input."),
        table(
            ("place", "cosine", "MSE", "MSE / mean square"),
            [
                (
                    name,
                    f"{each['cosine']:.4f}",
                    figure(each["mse"]),
                    f"{each['relative_mse']:.4f}",
                )
                for name, each in rows
            ],
            caption="Means over tokens; the last column divides by the dense model's mean square",
        ),
        paragraph(
            f"Text: {', '.join(result['text'])}, in windows of {result['window']}.", class_="note"
        ),
    ]
    return [Section(title="Closeness to the dense model", body=joined(body))]


def generation(context: Context) -> list[Part]:
    """What the models write, side by side, and how much of it repeats."""
    found = context.found
    result = found.measured.get("generation")
    parts: list[Part] = []
    body: list[Markup] = []
    if found.quickstart is not None:
        samples = found.quickstart["samples"]
        texts = {"dense": samples["dense"], found.name: samples["moe"]}
        body += [paragraph(_GREEDY), _sample(samples["prompt"], texts)]
    if result is not None:
        body += [*_samples(result, found.name), _repetition(result, found.name)]
    if body:
        parts.append(Section(title="What the models write", body=joined(body)))
    if result is None or "against" not in result:
        words = ("--against", context.dense, "--generate", "64", "--text", *context.texts)
        parts.append(
            Missing(
                what="continuations of prompts side by side, and how much of them repeats",
                command=context.evaluation(*words),
            )
        )
    return parts


def _samples(result: Values, name: str) -> list[Markup]:
    """Greedy ones in the open; sampled ones folded, since they are many."""
    settings = result["settings"]
    drawn = f"Sampled: temperature {settings['temperature']:g}, top-p {settings['top_p']:g}"
    sampled = element("details", element("summary", drawn), *_continued(result, "sampled", name))
    return [paragraph(_GREEDY), *_continued(result, "greedy", name), sampled]


def _continued(result: Values, way: str, name: str) -> list[Markup]:
    names = {"against": f"dense ({_name(result, 'against')})", "model": name}
    there = {names[label]: result[label][way]["texts"] for label in names if label in result}
    return [
        _sample(prompt, {side: texts[index] for side, texts in there.items()})
        for index, prompt in enumerate(result["model"]["prompts"][:_MOST_SAMPLES])
    ]


def _sample(prompt: str, texts: dict[str, str]) -> Markup:
    """A prompt, and what each model makes of it."""
    columns = [
        element("div", element("h4", name), element("pre", text), class_="sample")
        for name, text in texts.items()
    ]
    return element(
        "div",
        element("pre", prompt, class_="prompt"),
        element("div", *columns, class_="beside"),
        class_="samples",
    )


def _repetition(result: Values, name: str) -> Markup:
    names = {"against": f"dense ({_name(result, 'against')})", "model": name}
    rows = []
    for way in ("greedy", "sampled"):
        for label in (label for label in names if label in result):
            found = result[label][way]["repetition"]
            cells = [f"{100 * found[key]:.1f}" for key in _REPETITION]
            rows.append((f"{names[label]}, {way}", *cells))
    count = len(result["model"]["prompts"])
    return table(
        ("model", *_REPETITION.values()), rows, caption=f"Repetition, over {count} prompts"
    )


def _name(result: Values, label: str) -> Any:
    return result.get(label, {}).get("name", "")
