"""Tasks through `dotmoe evaluate --tasks`, beside the harness itself on the same rows."""

import itertools
import json
import logging
import math
import os
import random
import re
import shutil
from pathlib import Path
from statistics import fmean

import datasets
import numpy as np
import pytest
import torch
from scipy.stats import sem
from tqdm import tqdm

from dotmoe.common.errors import UserError
from dotmoe.common.files import alone_in, read_json
from dotmoe.measure.config import EvaluateConfig
from dotmoe.measure.evaluate import harness, programs
from dotmoe.measure.evaluate.difference import share_kept
from dotmoe.measure.evaluate.harness import chance_of, harness_model, run_tasks
from dotmoe.measure.evaluate.task_tables import differ, shown_change, with_error
from dotmoe.measure.evaluate.tasks import (
    PAPER,
    SETS,
    TASKS,
    is_share,
    local_files,
    mark_main,
    mean_of,
    summary_of_model,
)
from dotmoe.models.config import LoadConfig
from dotmoe.models.identity import fingerprint
from runs import refusal

HUB = {"boolq": "aps/super_glue", "piqa": "baber/piqa", "hellaswag": "Rowan/hellaswag"}
"""Data set of each task, as the harness's own definitions name it."""
ENDINGS = ["flies away slowly.", "sits.", "counts to {}.", "is a large crow."]
SPLITS = {"train": range(50, 57), "validation": range(6)}


def rows(task, numbers):
    """Rows in the field names of the harness; lengths differ, so that acc_norm is not acc."""
    make = {
        "boolq": lambda i: {"passage": f"Crow {i} flew. " * 3, "question": f"did crow {i} fly"},
        "piqa": lambda i: {"goal": f"count {i}", "sol1": f"say {i} " * 4, "sol2": "no"},
        "hellaswag": lambda i: {
            "activity_label": "Counting",
            "ctx_a": f"Crow {i} sits.",
            "ctx_b": "It",
            "endings": [ending.format(i) for ending in ENDINGS],
        },
    }[task]
    label = (lambda i: str(i % 4)) if task == "hellaswag" else (lambda i: i % 2)
    return [make(i) | {"label": label(i)} for i in numbers]


@pytest.fixture
def task_data(tmp_path, monkeypatch):
    """Folder with a few rows of three tasks."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for task in HUB:
        for split, numbers in SPLITS.items():
            put(tmp_path / "data", f"{task}/{split}.jsonl", rows=rows(task, numbers))
    return tmp_path / "data"


def put(folder, *names, rows=({},)):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def by_the_harness(folder, tasks, shots, monkeypatch, **options):
    """The harness with its own definitions untouched; only its downloads are answered by hand."""
    import datasets
    import lm_eval.tasks
    from lm_eval import simple_evaluate

    stock = Path(lm_eval.tasks.__file__).parent
    manager = lm_eval.tasks.TaskManager(
        include_path=[stock / each for each in ("super_glue/boolq", "piqa", "hellaswag")],
        include_defaults=False,
    )

    def hub(path, name=None, **options):
        task = next(task for task, hub_name in HUB.items() if hub_name == path)
        made = {n: datasets.Dataset.from_list(rows(task, each)) for n, each in SPLITS.items()}
        return datasets.DatasetDict(made)

    with monkeypatch.context() as patch:
        patch.setattr(datasets, "load_dataset", hub)
        return simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), "dtype": "float32"},
            tasks=list(tasks),
            num_fewshot=shots,
            batch_size=4,
            device="cpu",
            task_manager=manager,
            **options,
        )["results"]


def test_every_number_is_the_one_of_the_harness(
    tiny_dense, task_data, tmp_path, command, monkeypatch
):
    model, out = tiny_dense("qwen2"), tmp_path / "out"
    options = {"task_data": task_data, "shots": 3, "batch_size": 4, "device": "cpu", "out": out}
    said = command("evaluate", model, tasks=list(HUB), against=model, json=[], **options)
    found = json.loads(said.out)
    for task, plain in by_the_harness(model, HUB, 3, monkeypatch).items():
        result = json.loads((out / "tasks" / f"{task}.json").read_text())
        assert found["model"]["tasks"][task] == result
        assert found["against"]["tasks"][task]["scores"] == result["scores"]
        values = {k: v for k, v in plain.items() if k.endswith(",none") and "stderr" not in k}
        errors = {k: v for k, v in plain.items() if k.endswith("_stderr,none")}
        scores = {score["metric"]: score for score in result["scores"]}
        assert {f"{name},none": score["value"] for name, score in scores.items()} == values
        assert {f"{name}_stderr,none": score["stderr"] for name, score in scores.items()} == errors
        for score in scores.values():
            assert (score["task"], score["shots"], score["questions"]) == (task, 3, 6)
            assert score["chance"] == (0.25 if task == "hellaswag" else 0.5)
        main = [score["metric"] for score in scores.values() if score["is_main"]]
        assert main == ["acc_norm" if task == "hellaswag" else "acc"]
        assert set(result["identity"]["data"]) == {"train", "validation"}
    assert list(found["model"]["averages"]) == ["tasks"]


@pytest.mark.parametrize("window", [7, 256])
def test_perplexity_a_word_is_rolling_in_windows_of_the_length(
    window, tiny_dense, tmp_path, command, monkeypatch
):
    from lm_eval.api.instance import Instance
    from lm_eval.models import huggingface

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    pages = [f"Crow {i} ate seven figs and went on. " * (3 * i + 1) for i in range(4)]
    put(tmp_path / "data", "wikitext/test.jsonl", rows=[{"page": page} for page in pages])
    model = tiny_dense("qwen2")
    options = {"task_data": tmp_path / "data", "max_length": window, "device": "cpu"}
    command("evaluate", model, tasks=["wikitext"], out=tmp_path / "out", **options)
    result = json.loads((tmp_path / "out" / "tasks" / "wikitext.json").read_text())
    runner = huggingface.HFLM(
        pretrained=str(model), dtype="float32", max_length=window, device="cpu"
    )
    kind = {"request_type": "loglikelihood_rolling", "doc": {}, "idx": 0}
    requests = [Instance(arguments=(page,), **kind) for page in pages]
    nats = -sum(runner.loglikelihood_rolling(requests, disable_tqdm=True))
    words = sum(len(re.split(r"\s+", page)) for page in pages)
    (found,) = [
        score["value"] for score in result["scores"] if score["metric"] == "word_perplexity"
    ]
    assert math.log(found) == pytest.approx(nats / words, rel=1e-5)


def test_a_chat_template_asks_as_the_harness_does_and_is_recorded(
    tiny_dense, task_data, tmp_path, command, monkeypatch
):
    plain = tiny_dense("llama")
    options = {"tasks": "piqa", "task_data": task_data, "shots": 2, "device": "cpu", "json": []}
    said = command("evaluate", plain, **options, chat_template=[], out=tmp_path / "none")
    assert "has no chat template. Leave out --chat-template" in said.refusal()
    model = shutil.copytree(plain, tmp_path / "chat")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    (model / "chat_template.jinja").write_text(template)
    values = {}
    for chat in (False, True):
        options |= {"out": tmp_path / f"out-{chat}"}
        options |= {"chat_template": [], "repetition_penalty": 1.1} if chat else {}
        said = command("evaluate", model, **options)
        task = json.loads(said.out)["model"]["tasks"]["piqa"]
        values[chat] = {f"{row['metric']},none": row["value"] for row in task["scores"]}
        expected = by_the_harness(model, ["piqa"], 2, monkeypatch, apply_chat_template=chat)["piqa"]
        assert values[chat] == {name: expected[name] for name in values[chat]}
        assert task["identity"]["chat_answer"] == (1024 if chat else None)
        assert any("up to 128 tokens" in note for note in task["notes"]) == chat
        assert any("repetition_penalty 1.1" in note for note in task["notes"]) == chat
        assert task["identity"]["repetition_penalty"] == (1.1 if chat else None)
    refused = command("evaluate", model, **options | {"out": tmp_path / "out-False"}).refusal()
    assert "another chat_template (None, not True)" in refused


def test_a_group_in_a_group_counts_its_own_questions_and_chance(tiny_dense, tmp_path, monkeypatch):
    """As MMLU's: oracle: the number of rows, and one over the number of choices."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    sizes = {"few": (3, 2), "more": (5, 4), "most": (7, 5)}
    for name, (number, choices) in sizes.items():
        lines = [
            {"q": f"{name} {i}?", "choices": [f"{i}{c}" for c in "abcde"[:choices]], "answer": 0}
            for i in range(number)
        ]
        put(tmp_path, f"{name}.jsonl", rows=lines)
        definition = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / f"{name}.jsonl")}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{q}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
        (tmp_path / f"{name}.yaml").write_text(json.dumps(definition))
    groups = {"small": ["few", "more"], "whole": ["small", "most"]}
    for name, inside in groups.items():
        metrics = [{"metric": "acc", "weight_by_size": True}]
        group = {"group": name, "task": inside, "aggregate_metric_list": metrics}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(group))
    import lm_eval.tasks

    manager = lm_eval.tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    config = EvaluateConfig(model="m", load=LoadConfig(device="cpu"))
    runner = harness_model(tiny_dense("llama"), config)
    scored = run_tasks(runner, [manager.load(["whole"])["groups"]["whole"]], 0, None)["scores"]
    found = {row["task"]: (row["questions"], row["chance"]) for row in scored}
    assert found == {
        **{name: (number, pytest.approx(1 / choices)) for name, (number, choices) in sizes.items()},
        "small": (8, pytest.approx((3 / 2 + 5 / 4) / 8)),
        "whole": (15, pytest.approx((3 / 2 + 5 / 4 + 7 / 5) / 15)),
    }


def test_a_finished_task_is_not_run_again_and_other_settings_are_refused(
    tiny_dense, task_data, tmp_path, command
):
    model, out = tiny_dense("llama"), tmp_path / "out"
    options = {"tasks": "piqa", "task_data": task_data, "device": "cpu", "out": out, "json": []}
    first = json.loads(command("evaluate", model, **options).out)
    again = command("evaluate", model, **options)
    assert "piqa is finished already" in again.err
    assert json.loads(again.out)["model"] == first["model"]
    written = (file := out / "tasks" / "piqa.json").read_bytes()
    assert "another shots (0, not 1)" in command("evaluate", model, **options, shots=1).refusal()
    assert "another limit (None, not 2)" in command("evaluate", model, **options, limit=2).refusal()
    other = tiny_dense("llama", rms_norm_eps=1e-3)
    assert "another model" in command("evaluate", other, **options).refusal()
    assert file.read_bytes() == written
    file.unlink()
    limited = json.loads(command("evaluate", model, **options, limit=2, against=other).out)
    assert limited["against"]["tasks"]["piqa"]["scores"][0]["questions"] == 2
    assert (out / "against" / "piqa.json").is_file()
    assert "only the first 2 questions" in limited["model"]["tasks"]["piqa"]["notes"][0]


def test_results_of_models_of_one_name_do_not_meet(
    tiny_dense, finished, task_data, tmp_path, command, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    options = {"tasks": "piqa", "task_data": task_data, "device": "cpu", "limit": 2}
    for number, epsilon in enumerate((1e-6, 1e-3)):
        model = shutil.copytree(tiny_dense("llama", rms_norm_eps=epsilon), tmp_path / f"{number}/5")
        assert command("evaluate", model, **options).status == 0
        (folder,) = tmp_path.glob(f"evaluation-5-{fingerprint(model)[:8]}")
        found = read_json(folder / "tasks/piqa.json")
        assert found["model"]["fingerprint"] == found["identity"]["model"] == fingerprint(model)
    assert len([*tmp_path.glob("evaluation-*")]) == 2
    run = finished.copied_to(tmp_path / "run").folder
    for name in (run, run / "5_export", "run/5_export/"):
        said = command("evaluate", name, **options)
        assert (run / "6_evaluate/tasks/piqa.json").is_file()
        assert ("is finished already" in said.err) == (name != run)
    assert len([*tmp_path.glob("evaluation-*")]) == 2


def test_two_processes_do_not_write_to_one_folder(tiny_dense, task_data, tmp_path, command):
    options = {"tasks": "piqa", "task_data": task_data, "device": "cpu", "out": tmp_path / "out"}
    with alone_in(tmp_path / "out"):
        line = command("evaluate", tiny_dense("llama"), **options).refusal()
        assert f"{tmp_path / 'out'} is in use by another dotmoe process." in line
    assert not (tmp_path / "out").exists()
    assert command("evaluate", tiny_dense("llama"), **options).status == 0
    assert set(os.listdir(tmp_path / "out")) == {"tasks.json", "tasks"}


def test_requests_longer_than_the_context_are_counted(tiny_dense, task_data, tmp_path, command):
    model = tiny_dense("llama")  # one token a byte, and BOS; context 256
    for shots, is_told in ((3, True), (0, False)):
        options = {"tasks": "boolq", "task_data": task_data, "shots": shots, "device": "cpu"}
        said = command("evaluate", model, **options, out=(out := tmp_path / str(shots)))
        result = json.loads((out / "tasks" / "boolq.json").read_text())
        note = "12 of 12 requests are longer than 256 tokens"
        assert ("±" in said.out, note in said.out) == (True, is_told)
        assert any(note in each for each in result["notes"]) == is_told


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tasks": "papr"}, r"papr cannot be read from a folder.* Did you mean paper\?"),
        ({"tasks": "paper"}, "winogrande needs winogrande_xl/train.jsonl.gz"),
        ({"tasks": "piqa", "max_length": 257}, "--max-length is 257"),
        ({"tasks": "sciq"}, r"the data of sciq cannot be read .* Repair .*sciq/test\.jsonl"),
    ],
)
def test_wrong_use_is_refused_in_one_line_and_writes_nothing(
    options, words, tiny_dense, task_data, tmp_path, command
):
    put(task_data, "sciq/test.jsonl", rows=[{"question": "why"}])
    options |= {"task_data": task_data, "device": "cpu", "out": tmp_path / "out"}
    assert re.search(words, command("evaluate", tiny_dense("llama"), **options).refusal())
    assert not (tmp_path / "out").exists()


PRINTED = {
    "paper": (
        {
            **{("boolq", "acc"): 82.0, ("sciq", "acc"): 94.0, ("piqa", "acc"): 78.1},
            **{("winogrande", "acc"): 74.3, ("arc_challenge", "acc_norm"): 52.5},
            ("hellaswag", "acc_norm"): 78.9,
        },
        76.6,
    ),
    "paper_by_k": (
        {
            **{("arc_easy", "acc_norm"): 70.50, ("arc_challenge", "acc_norm"): 45.65},
            **{("piqa", "acc_norm"): 73.72, ("winogrande", "acc"): 63.38},
            ("hellaswag", "acc_norm"): 67.11,
        },
        64.07,
    ),
}
"""A row of tab:fine_tuned_results and one of tab:sparsity_detailed, each with its average."""


@pytest.mark.parametrize("table", PRINTED)
def test_an_average_is_that_of_the_papers_table_whatever_else_was_measured(table):
    printed, average = PRINTED[table]
    results = []
    for task in TASKS:
        scores = {(task, metric): 0.0 for metric in ("acc", "acc_norm")} | {
            key: value / 100 for key, value in printed.items() if key[0] == task
        }
        found = [
            {"task": task, "metric": metric, "value": value, "stderr": 0.01}
            for (_, metric), value in scores.items()
        ]
        mark_main(found, task)
        results.append({"task": task, "scores": found})
    asked = [result for result in results if result["task"] in SETS[table]]
    mean = summary_of_model("llama", results)["averages"][table]
    assert mean == summary_of_model("llama", asked)["averages"][table]
    assert 100 * mean["value"] == pytest.approx(average, abs=0.051)
    assert mean["stderr"] == pytest.approx(0.01 / len(printed) ** 0.5)
    assert table not in summary_of_model("llama", asked[1:])["averages"]


def test_a_mean_of_scores_with_an_unknown_error_has_none():
    scores = [{"task": "a", "metric": "acc", "value": 0.5, "stderr": each} for each in (0.1, None)]
    found = mean_of(scores)
    assert (found["value"], found["stderr"], with_error(found)) == (0.5, None, "50.0")


def test_one_metric_of_a_task_is_the_main_one_and_of_members_of_a_group_none():
    def mains(asked, *keys):
        found = [{"task": task, "metric": metric} for task, metric in keys]
        mark_main(found, asked)
        return [row["metric"] for row in found if row["is_main"]]

    both = {task: mains(task, (task, "acc"), (task, "acc_norm")) for task in PAPER}
    assert both == {task: [TASKS[task].metric] for task in PAPER}
    assert mains("mmlu", ("mmlu", "b"), ("mmlu", "acc"), ("mmlu_law", "acc")) == ["acc"]
    assert mains("mmlu", ("mmlu", "b")) == ["b"]
    metrics = ("acc", "exact_match,strict-match", "word_perplexity")
    assert [is_share({"metric": metric}) for metric in metrics] == [True, True, False]


def test_none_right_of_many_is_a_score_that_others_differ_from():
    none_right = {"value": 0.0, "stderr": 0.0}
    for stderr, apart in ((0.01, True), (0.03, False), (None, False)):
        assert differ(none_right, {"value": 0.05, "stderr": stderr}) == apart


def test_chance_counts_choices_and_the_answer_that_is_right_most_often():
    def sample(answers, target):
        return {"arguments": [("question", answer) for answer in answers], "target": target}

    boolq = [sample(("no", "yes"), 1)] * 62 + [sample(("no", "yes"), 0)] * 38
    assert chance_of(boolq) == pytest.approx(0.62)
    last_is_right = [sample((f"a{i}", f"b{i}", f"c{i}", f"d{i}"), 3) for i in range(8)]
    assert chance_of(last_is_right) == 0.25
    assert chance_of([*last_is_right, *last_is_right, sample("ab", 0)]) == pytest.approx(4.5 / 17)
    assert chance_of([{"arguments": [("prompt", {"until": []})], "target": "4"}]) is None


def test_the_first_file_that_exists_is_taken_and_stand_ins_are_told(tmp_path):
    def found(task, shots):
        files, notes = local_files(tmp_path, task, shots)
        return {split: path.name for split, path in files.items()}, notes

    put(tmp_path, "boolq/validation.json", "boolq/test.jsonl")
    assert found("boolq", 0) == ({"validation": "validation.json"}, [])
    with pytest.raises(UserError, match="boolq needs boolq/train"):
        found("boolq", 1)
    put(tmp_path, "boolq/train.jsonl.gz", "boolq/train.jsonl")
    assert found("boolq", 32) == ({"train": "train.jsonl.gz", "validation": "validation.json"}, [])
    for task in set(TASKS) - {"boolq"}:
        with pytest.raises(UserError, match=rf"{task} needs .*\.jsonl\.gz.* below {tmp_path}"):
            found(task, 0)
    put(tmp_path, "hellaswag/validation.jsonl", "hellaswag/train_fewshot_11.jsonl")
    put(tmp_path, "sciq/validation.jsonl")
    files, (note,) = found("hellaswag", 10)
    assert (files["train"], "11 rows" in note) == ("train_fewshot_11.jsonl", True)
    assert found("hellaswag", 0)[1] == []
    files, (note,) = found("sciq", 0)
    assert (list(files), "validation split" in note) == (["validation"], True)
    put(tmp_path, "hellaswag/train.jsonl", "sciq/test.jsonl")
    assert found("hellaswag", 10)[1] == []
    assert found("sciq", 0) == ({"test": "test.jsonl"}, [])


PROBLEMS = {
    "double": ("def double(x):\n", "    return 2 * x\n", "assert candidate(4) == 8"),
    "first": ("def first(row):\n", "    return row[1]\n", "assert candidate([7, 8]) == 7"),
    "up": ("def up(text):\n", "    return text.upper()\n", "assert candidate('a') == 'A'"),
}
"""Start of a function, its end as a model writes it, and a test; the second end is wrong."""


def test_written_programs_and_sums_are_scored(tiny_dense, tmp_path, command, monkeypatch):
    """Oracle: the right answers, counted by hand, and the harness's own regular expressions."""
    from lm_eval.models import huggingface

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)  # no git repository
    made = [
        {"task_id": name, "prompt": start, "entry_point": name}
        | {"test": f"def check(candidate):\n    {test}\n", "canonical_solution": end}
        for name, (start, end, test) in PROBLEMS.items()
    ]
    sums = [{"question": f"{i} and {i}?", "answer": f"It is\n#### {2 * i}"} for i in range(9)]
    put(tmp_path / "data", "humaneval/test.jsonl", rows=made)
    put(tmp_path / "data", "gsm8k/test.jsonl", rows=sums[:4])
    put(tmp_path / "data", "gsm8k/train_fewshot_64.jsonl", rows=sums[4:])
    asked = []

    def answers(self, requests, disable_tqdm=False):
        assert self.batch_size == 64  # though the logits of one whole context would fill the memory
        for request in requests:
            asked.append(prompt := request.args[0])
            ends = (end for start, end, _ in PROBLEMS.values() if start in prompt)
            last = re.findall(r"(\d) and \d\?", prompt)[-1:]
            yield next(ends, None) or f"So 3 and 1 make\n#### {2 * int(last[0]) % 6}"

    monkeypatch.setattr(
        huggingface.HFLM, "generate_until", lambda *args, **named: [*answers(*args, **named)]
    )
    model = tiny_dense("llama", max_position_embeddings=1 << 20)
    options = {"task_data": tmp_path / "data", "device": "cpu", "out": tmp_path / "out", "json": []}
    said = command("evaluate", model, tasks=["humaneval", "humaneval_instruct", "gsm8k"], **options)
    assert "git" not in said.err
    found = json.loads(said.out)["model"]
    main = {
        name: next(row for row in task["scores"] if row["is_main"])
        for name, task in found["tasks"].items()
    }
    value = {name: (row["value"], row["per_question"], row["shots"]) for name, row in main.items()}
    assert value == {
        "humaneval": (pytest.approx(2 / 3), [1, 0, 1], 0),
        "humaneval_instruct": (pytest.approx(2 / 3), [1, 0, 1], 0),
        "gsm8k": (0.75, [1, 1, 1, 0], 5),
    }
    assert found["averages"]["tasks"]["value"] == pytest.approx((2 / 3 + 2 / 3 + 0.75) / 3)
    assert "64 rows" in found["tasks"]["gsm8k"]["notes"][0]
    assert [len(re.findall("Question:", each)) for each in asked if "Question" in each] == [6] * 4
    monkeypatch.undo()
    options["out"] = tmp_path / "other"
    said = command("evaluate", tiny_dense("llama"), tasks="gsm8k", **options)  # context 256
    assert (said.status, "Choose another task, or a longer context" in said.err) == (2, True)


def test_answers_are_those_that_the_harness_writes_by_itself(tiny_dense):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = tiny_dense("llama")
    config = EvaluateConfig(model=str(model), tasks=("gsm8k",), load=LoadConfig(device="cpu"))
    runner = harness_model(model, config)
    asked = ["One", "Two and two", "Why? Because of it", "x" * 60, "3 + 4"]
    plain = HFLM(pretrained=runner.model, tokenizer=runner.tokenizer, batch_size=3, max_length=128)
    free = plain.generate_until([request(Instance, text, "\n\n\n") for text in asked])
    for stop in ("\n\n\n", free[1][4:6], free[4][1:2]):
        requests = [request(Instance, text, stop) for text in asked]
        assert runner.generate_until(requests) == plain.generate_until(requests)


def request(instance, text, stop):
    options = {"until": [stop], "max_gen_toks": 12, "do_sample": False}
    return instance("generate_until", {}, (text, options), 0)


@pytest.mark.parametrize("shows_bars", [True, False])
def test_bars_are_shown_or_not(shows_bars, capsys):
    with harness.quiet_harness(shows_bars=shows_bars):
        assert list(tqdm([1, 2], disable=False)) == [1, 2]
    assert ("100%" in capsys.readouterr().err) == shows_bars
    assert list(tqdm([3])) == [3]
    assert "100%" in capsys.readouterr().err


def test_the_harness_leaves_logging_bars_and_random_numbers_as_they_were():
    def drawn():
        return random.random(), np.random.rand(), float(torch.rand(()))  # noqa: NPY002

    def seed():
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)

    seed()
    expected = drawn()
    seed()
    datasets.enable_progress_bars()
    logging.disable(logging.INFO)
    try:
        with harness.quiet_harness(shows_bars=True):
            assert logging.root.manager.disable == logging.WARNING
            torch.manual_seed(7)
            drawn()
        assert logging.root.manager.disable == logging.INFO
    finally:
        logging.disable(logging.NOTSET)
    assert drawn() == expected
    assert not datasets.are_progress_bars_disabled()


@pytest.mark.parametrize("definition", ["cruxeval/cruxeval_input", "cruxeval/cruxeval_output"])
def test_tasks_that_run_programs_without_limits_are_refused(definition, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    row = {"code": "x", "input": "1", "output": "2", "question": "q", "test": "t"}
    put(tmp_path, "test.jsonl", rows=[row])
    local = {"a_task": (definition, {"test": tmp_path / "test.jsonl"})}
    with harness.quiet_harness(shows_bars=True):
        message = refusal(harness.loaded_tasks, ["a_task"], local, [])
    assert message.startswith("a_task is marked by the harness as running programs")


HARMFUL = {
    "time": "while True: pass",
    "memory": "rows = [0] * 10**9",
    "a file": "open('made', 'w')",
    "a removed file": "import os\nos.remove('/tmp/none')",
    "network": "import socket\nsocket.create_connection(('127.0.0.1', 9))",
    "a process": "import os\nos.fork()",
    "native code": "import ctypes\nctypes.CDLL(None)",
    "an early end": "import sys\nsys.exit(0)",
    "not Python": "def f(:",
}


@pytest.mark.parametrize("program", HARMFUL.values(), ids=HARMFUL)
def test_a_program_stays_within_limits(program, monkeypatch):
    monkeypatch.setitem(programs._MOST, "CPU", 1)
    assert programs.passes("import math, random\nassert math.comb(5, 2) == 10")
    inside = f"try:\n    {program.replace(chr(10), chr(10) + '    ')}\nexcept BaseException: raise"
    assert not programs.passes(inside if program != "def f(:" else program)


def test_pass_at_k_is_the_share_of_draws_with_a_right_answer():
    right, wrong = "x = 1", "x = 2"
    tests, answers = ["assert x == 1"] * 2, [[right, wrong, wrong, right], [wrong] * 4]
    draws = list(itertools.combinations(answers[0], 2))
    expected = sum(right in draw for draw in draws) / len(draws) / 2
    found, _ = programs.CodeEval().compute(tests, answers, k=[1, 2])
    assert found == {"pass@1": pytest.approx(0.25), "pass@2": pytest.approx(expected)}


def test_a_difference_of_two_models_is_over_pairs_of_answers():
    """Oracle: SciPy's standard error of the differences, which is less than for two samples."""
    ours, theirs = [1] * 9 + [0] * 3, [1] * 5 + [0] * 7
    made = [{"value": fmean(each), "stderr": float(sem(each))} for each in (ours, theirs)]
    paired = [row | {"per_question": each} for row, each in zip(made, (ours, theirs), strict=True)]
    error = 100 * sem([a - b for a, b in zip(ours, theirs, strict=True)])
    assert (differ(*paired), differ(*made)) == (True, False)
    assert shown_change(*(row | {"metric": "acc"} for row in paired)) == f"+33.3 ± {error:.2g} *"


def test_what_is_kept_of_an_average_is_said_of_all_and_above_guessing():
    """Of the paper's 76.6, 69.4: 90.6 %; above guessing at 40 %, 80.3 %."""
    ours, dense = ({"value": value, "stderr": 0.01, "chance": 0.4} for value in (0.694, 0.766))
    shares = share_kept(ours, dense)
    assert shares["of_all"][0] == pytest.approx(0.906, abs=5e-4)
    assert shares["above_guessing"][0] == pytest.approx(0.294 / 0.366)
    spread = [
        share_kept(ours | {"value": 0.694 + step}, dense)["of_all"][0] for step in (-1e-6, 1e-6)
    ]
    others = [
        share_kept(ours, dense | {"value": 0.766 + step})["of_all"][0] for step in (-1e-6, 1e-6)
    ]
    slopes = [(each[1] - each[0]) / 2e-6 for each in (spread, others)]
    assert shares["of_all"][1] == pytest.approx(0.01 * math.hypot(*slopes), rel=1e-4)
    assert share_kept(ours | {"chance": None}, dense)["above_guessing"] is None
