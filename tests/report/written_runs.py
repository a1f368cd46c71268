"""Run folders made by hand, with every result file that a report can show."""

import json
import math
from pathlib import Path

HOSTILE = "<script>alert('x')</script><img src=http://evil.example/a.png>&amp;"
MADE = {
    "time": "2026-01-02T03:04:05Z",
    "commit": "abcdef123456",
    "hardware": "CPU, 2 cores",
    "seed": 7,
    "versions": {"python": "3.11.0", "torch": "2.13.0"},
}


def perplexity(loss):
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": loss / 2.3,
        "window": 64,
        "tokens": 12345,
        "unit": "token",
        "text": ["held/out.txt"],
        "protocol": "Windows of 64 tokens; mean taken over tokens.",
        "origin": "measured",
    }


SPLIT = {
    "num_experts": 6,
    "expert_size": 16,
    "active_experts": 2,
    "shared_size": 0,
    "first_dense_layers": 0,
}
COUNTS = {
    "dense": 1_000_000,
    "stored": 1_010_000,
    "active": 432_100,
    "active_with_routers": 442_100,
    "active_without_embeddings": 300_123,
}
RESULTS = {
    "dense": perplexity(2.125),
    "moe": perplexity(2.4375),
    "origin": "measured",
    "granularity": SPLIT,
    "steps": 40,
    "parameters": COUNTS,
    "verification": {"tokens": 128, "dtype": "bfloat16", "logits_error": 0.0061234},
    "provenance": MADE,
}
EXPORT = {
    "format": "glm4_moe",
    "source": "some/dense",
    "dtype": "bfloat16",
    "servers": ["Transformers", "vLLM"],
    "num_layers": 2,
    "model_width": 64,
    "active_experts": 2,
    "total_bytes": 5_000_000,
}


def metrics(steps, *, aligned):
    lines = []
    for step in range(1, steps + 1):
        line = {"step": step, "loss": 5.0 - step / steps, "ce": 3.0, "kl": 1.0 / step}
        if aligned:
            line |= {"tau": max(0.1, 1 - step / 20), "moved_fraction": 0.2 / step}
            line |= {"soft_hard_gap": 0.5 / step}
        lines.append(line | {"grad_norm": 1.5, "seconds": 0.25})
    lines[1]["kl"] = None  # as a step with a number that is not finite is written
    return lines


def task(accuracy, *, notes=(), name="piqa"):
    values = {"acc": (accuracy, 0.0211), "acc_norm": (accuracy + 0.0625, 0.0212)}
    scores = [
        {"task": name, "metric": metric, "is_main": metric == "acc", "sets": [], "shots": 5}
        | {"value": value, "stderr": error, "questions": 200, "all_questions": 1838, "chance": 0.5}
        for metric, (value, error) in values.items()
    ]
    return {
        "origin": "measured",
        "scores": scores,
        "limit": None,
        "notes": list(notes),
        "provenance": MADE,
    }


def closeness(value):
    return {"cosine": 1 - value, "mse": value / 3, "relative_mse": value}


def side(name):
    repetition = dict.fromkeys(
        ("loop_share", "looping", "rep_2", "rep_3", "rep_4", "distinct_1", "distinct_2"), 0.1234
    )
    written = {"repetition": repetition, "texts": [f"{name} goes on {HOSTILE}", "and on"]}
    return {
        "name": name,
        "prompts": [f"Once {HOSTILE}", "Twice"],
        "greedy": written,
        "sampled": written,
    }


def bench_point(name, ratio):
    speed = {"tokens_per_s": 100.0, "peak_bytes": 50 * 2**20}
    return {
        "point": {"name": name, "tokens": 128, "batch": 1, "steps": 16},
        "dense": speed,
        "moe": speed | {"tokens_per_s": 100.0 * ratio},
        "speed_ratio": ratio,
        "speed_ratio_quartiles": [ratio - 0.05, ratio + 0.05],
        "ideal_ratio": 2.5,
    }


def curve_point(k):
    return {
        "active_experts": k,
        "active_fraction": k / 6,
        "active_parameters": 200_000 + 130_000 * k,
        "perplexity": 8.0 + 6 - k,
        "loss_above_all_experts": 0.1 * (6 - k),
    }


MEASURED = {
    "curve": {
        "dense_parameters": 1_000_000,
        "num_experts": 6,
        "active_experts": 2,
        "all_experts": {"model": "dense", "perplexity": 8.0},
        "points": [curve_point(k) for k in (1, 2, 4, 6)],
        **{key: RESULTS["dense"][key] for key in ("unit", "text", "protocol")},
    },
    "fidelity": {
        "kl": 0.3333,
        "top1_agreement": 0.777,
        "tokens": 4096,
        "before_head": closeness(0.11),
        "after_head": closeness(0.22),
        "ffn": [{"layer": layer, **closeness(0.1 + layer)} for layer in range(2)],
        "text": ["held/out.txt"],
        "window": 64,
    },
    "generation": {
        "model": side("moe"),
        "against": side("dense"),
        "settings": {"temperature": 0.8, "top_p": 0.9},
    },
    "word_perplexity": {
        "model": {"name": "moe", "windows": [{"window": 64, "word_perplexity": 42.4242}]}
    },
    "bench": {
        "runtime": "transformers",
        "protocol": "In turns.",
        "settings": {"clock": "wall"},
        "points": [bench_point("decode", 1.37), bench_point("prefill", 1.73)],
    },
}
LOAD = {
    "coefficient_of_variation": 0.31,
    "max_over_mean": 1.77,
    "min_over_mean": 0.21,
    "dead_experts": [3],
    "always_on_experts": [],
    "entropy_normalised": 0.95,
}
APART = {"silhouette": 0.0871, "neighbour_agreement": 0.81, "neighbour_chance": 0.17}
ANALYSES = {
    "expert_utilisation": {
        "layers": [0, 1],
        "share_LE": [[0.5, 0.5, 0.4, 0.0, 0.3, 0.3], [0.4, 0.4, 0.3, 0.3, 0.3, 0.3]],
        "statistics": [{"layer": layer, **LOAD} for layer in range(2)],
        "warnings": [f"layer 0: 1 of 6 experts are dead {HOSTILE}"],
    },
    "routing_overlap": {"layers": [0, 1], "similarity_LL": [[1.0, 0.234], [0.234, 1.0]]},
    "expert_outputs_tsne": {
        "layer": 1,
        "points": [[float(i % 7), float(i % 11)] for i in range(60)],
        "expert": [i % 6 for i in range(60)],
        "experts_shown": 6,
        "num_experts": 6,
        "perplexity": 19.0,
        **APART,
        "random_split": APART,
    },
    "alignment_history": {
        "steps": [1, 2, 3],
        "kl": [1.0, 0.5, 0.25],
        "ce": [3.0, 3.0, 3.0],
        "settling": {"moved_first_tenth": 0.2, "moved_last_tenth": 0.004},
        "kept_from_start": [0.65, 0.67],
    },
    "overhead_profile": {
        "shares": {"dense forward": 0.2, "backward": 0.55, "assignment solve": 0.25},
        "step_s": 0.4321,
        "tokens_a_step": 256,
        "steps": 3,
        "clock": "wall",
        "overhead": 0.333,
        "overhead_parts": ["assignment solve"],
    },
}


def put(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def put_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(run: Path, *, measured=True, finetuned=False):
    """A finished run; `measured`: with everything that can be measured of it later."""
    config = {"finetune": {"train": "lora"}, "run": "converted"} if finetuned else {}
    config = config or {"model": "some/dense", "method": "dot_moe", "note": HOSTILE}
    results = RESULTS | {"config": config}
    if finetuned:
        results |= {"converted": RESULTS["moe"], "moe": perplexity(2.25), "tokens": 999}
        put_lines(run / "4_finetune" / "metrics.jsonl", metrics(30, aligned=False))
    else:
        put_lines(run / "2_align" / "metrics.jsonl", metrics(40, aligned=True))
    put(run / "config.json", config)
    put(run / "6_evaluate" / "results.json", results)
    put(run / "5_export" / "dotmoe.json", EXPORT)
    if not measured:
        return run
    for name, values in MEASURED.items():
        put(
            run / "6_evaluate" / f"{name}.json", values | {"origin": "measured", "provenance": MADE}
        )
    for name, values in ANALYSES.items():
        result = {"origin": "measured", "title": name, "tokens": 2048, "values": values}
        put(run / "6_evaluate" / "analysis" / f"{name}.json", result | {"provenance": MADE})
    for folder, lost in (("tasks", 0.125), ("against", 0.0)):
        put(run / "6_evaluate" / folder / "piqa.json", task(0.75 - lost, notes=["a stand-in"]))
        put(run / "6_evaluate" / folder / "mine.json", task(0.3 - lost / 100, name="mine"))
    return run


def write_quickstart(folder: Path):
    """What `dotmoe quickstart` leaves behind, as far as a report reads it."""
    write_run(folder / "dot_moe", measured=False)
    samples = {"prompt": "def", "dense": f"dense {HOSTILE}", "moe": "moe text"}
    summary = {"random_split": perplexity(3.0625), "dot_moe": RESULTS["moe"], "samples": samples}
    put(folder / "quickstart.json", summary)
    return folder
