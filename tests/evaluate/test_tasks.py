"""Tasks through `dotmoe evaluate --tasks`, beside the harness itself on the same rows."""

import gzip
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dotmoe.cli import run
from dotmoe.errors import UserError
from dotmoe.evaluate.harness import chance_of, require_harness
from dotmoe.evaluate.task_sets import (
    PAPER,
    TASK_SETS,
    TASKS,
    averages,
    expanded,
    local_files,
    main_metric,
    require_known,
    sets_with,
)

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")

HUB = {"boolq": "aps/super_glue", "piqa": "baber/piqa", "hellaswag": "Rowan/hellaswag"}
"""Data set of each task, as the harness's own definitions name it."""


def rows(task, count, start=0):
    """Rows in the field names of the harness; lengths differ, so that acc_norm is not acc."""
    for i in range(start, start + count):
        if task == "boolq":
            yield {
                "passage": f"Crow {i} flew. " * 3,
                "question": f"did crow {i} fly",
                "label": i % 2,
            }
        elif task == "piqa":
            yield {"goal": f"count {i}", "sol1": f"say {i} " * 4, "sol2": "no", "label": i % 2}
        else:
            yield {
                "activity_label": "Counting",
                "ctx_a": f"Crow {i} sits.",
                "ctx_b": "It",
                "endings": ["flies away slowly.", "sits.", f"counts to {i}.", "is a large crow."],
                "label": str(i % 4),
            }


@pytest.fixture
def task_data(tmp_path):
    """Folder with a few rows of three tasks."""
    for task in HUB:
        (tmp_path / "data" / task).mkdir(parents=True)
        for split, count, start in (("train", 7, 50), ("validation", 6, 0)):
            path = tmp_path / "data" / task / f"{split}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows(task, count, start)))
    return tmp_path / "data"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def by_the_harness(folder, shots, monkeypatch, limit=None):
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
        return datasets.DatasetDict(
            train=datasets.Dataset.from_list(list(rows(task, 7, 50))),
            validation=datasets.Dataset.from_list(list(rows(task, 6))),
        )

    with monkeypatch.context() as patch:
        patch.setattr(datasets, "load_dataset", hub)
        return {
            task: simple_evaluate(
                model="hf",
                model_args={"pretrained": str(folder), "dtype": "float32"},
                tasks=[task],
                num_fewshot=count,
                batch_size=4,
                device="cpu",
                limit=limit,
                task_manager=manager,
            )["results"][task]
            for task, count in shots.items()
        }


def evaluated(arguments, capsys):
    capsys.readouterr()
    assert run(["evaluate", *map(str, arguments)]) == 0
    said = capsys.readouterr()
    return json.loads(said.out), said.err


def refused(arguments, capsys):
    capsys.readouterr()
    assert run(["evaluate", *map(str, arguments)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_every_number_is_the_one_of_the_harness(
    tiny_dense, task_data, tmp_path, capsys, monkeypatch
):
    model = tiny_dense("qwen2")
    shots = {"boolq": 3, "piqa": 3, "hellaswag": 3}
    options = ["--task-data", task_data, "--shots", 3, "--batch-size", 4, "--device", "cpu"]
    found, said = evaluated([model, "--tasks", *shots, *options, "--out", tmp_path / "out"], capsys)
    expected = by_the_harness(model, shots, monkeypatch)
    for task, plain in expected.items():
        result = json.loads((tmp_path / "out" / "tasks" / f"{task}.json").read_text())
        assert found["model"]["tasks"][task] == result
        values = {k: v for k, v in plain.items() if k.endswith(",none") and "stderr" not in k}
        errors = {k: v for k, v in plain.items() if k.endswith("_stderr,none")}
        scores = {score["metric"]: score for score in result["scores"]}
        assert {f"{name},none": score["value"] for name, score in scores.items()} == values
        assert {f"{name}_stderr,none": score["stderr"] for name, score in scores.items()} == errors
        for score in scores.values():
            assert (score["task"], score["shots"]) == (task, 3)
            assert (score["questions"], score["all_questions"]) == (6, 6)
            assert score["chance"] == (0.25 if task == "hellaswag" else 0.5)
        main = [score["metric"] for score in scores.values() if score["is_main"]]
        assert main == ["acc_norm" if task == "hellaswag" else "acc"]
        assert result["data"][task]["rows"] == {"train": 7, "validation": 6}
        assert "±" in said
    assert found["model"]["averages"] == {}
    by_name = {s["metric"]: s["sets"] for s in found["model"]["tasks"]["piqa"]["scores"]}
    assert by_name == {"acc": ["paper"], "acc_norm": ["paper-by-k"]}


def test_a_finished_task_is_not_run_again_and_other_settings_are_refused(
    tiny_dense, task_data, tmp_path, capsys
):
    model, out = tiny_dense("llama"), tmp_path / "out"
    options = ["--tasks", "piqa", "--task-data", task_data, "--device", "cpu", "--out", out]
    first, _ = evaluated([model, *options], capsys)
    again, said = evaluated([model, *options], capsys)
    assert "1 of 1 tasks are finished already" in said
    assert again["model"] == first["model"]
    written = (out / "tasks" / "piqa.json").read_bytes()
    assert "another limit (None, not 2)" in refused([model, *options, "--limit", 2], capsys)
    other = tiny_dense("llama", rms_norm_eps=1e-3)
    assert "another model" in refused([other, *options], capsys)
    assert (out / "tasks" / "piqa.json").read_bytes() == written
    (out / "tasks" / "piqa.json").unlink()
    limited, _ = evaluated([model, *options, "--limit", 2, "--against", other], capsys)
    assert limited["against"]["tasks"]["piqa"]["scores"][0]["questions"] == 2
    assert (out / "against" / "piqa.json").is_file()
    assert "only the first 2 questions" in limited["model"]["tasks"]["piqa"]["notes"][0]


def test_requests_longer_than_the_context_are_counted(tiny_dense, task_data, tmp_path, capsys):
    model = tiny_dense("llama")  # one token a byte, and BOS; context 256
    options = ["--tasks", "boolq", "--task-data", task_data, "--shots", 3, "--device", "cpu"]
    found, said = evaluated([model, *options, "--out", tmp_path / "out"], capsys)
    result = found["model"]["tasks"]["boolq"]
    prompt = "Crow 9 flew. " * 3 + "\nQuestion: did crow 9 fly?\nAnswer: no\n\n"
    assert 4 * len(prompt) > 257
    assert (result["requests"], result["truncated"]) == (12, 12)
    assert "12 of 12 requests are longer than 256 tokens" in said
    options[options.index(3)] = 0
    short, _ = evaluated([model, *options, "--out", tmp_path / "two"], capsys)
    assert short["model"]["tasks"]["boolq"]["truncated"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "hellaswog"], "hellaswog has no place in a local folder"),
        (["--tasks", "paper"], "sciq needs sciq/test.jsonl.gz"),
        (["--tasks", "piqa", "--max-length", "257"], "max_length is 257"),
        (["--tasks", "piqa", "--fidelity"], "--tasks and --fidelity ask for two"),
    ],
)
def test_wrong_use_is_refused_in_one_line_and_writes_nothing(
    arguments, words, tiny_dense, task_data, tmp_path, capsys
):
    out = tmp_path / "out"
    options = ["--task-data", task_data, "--device", "cpu", "--out", out]
    assert words in refused([tiny_dense("llama"), *arguments, *options], capsys)
    assert not out.exists()


@pytest.mark.slow
def test_an_unknown_task_and_a_hub_that_is_out_of_reach_are_told(tiny_dense, capsys, tmp_path):
    options = ["--device", "cpu", "--out", tmp_path / "out"]
    said = refused([tiny_dense("llama"), "--tasks", "hellaswog", *options], capsys)
    assert "Did you mean hellaswag?" in said
    said = refused([tiny_dense("llama"), "--tasks", "piqa", *options], capsys)
    assert "the data of piqa cannot be read" in said
    assert "--task-data" in said


def test_without_the_extra_it_is_named(monkeypatch):
    monkeypatch.setattr("dotmoe.evaluate.harness.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'dotmoe\[eval\]'"):
        require_harness()


def test_the_harness_is_not_imported_before_a_task_is_run():
    code = "import sys, dotmoe.evaluate; sys.exit('lm_eval' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


LLAMA_2 = {
    ("boolq", "acc"): 0.820,
    ("sciq", "acc"): 0.940,
    ("piqa", "acc"): 0.781,
    ("winogrande", "acc"): 0.743,
    ("arc_challenge", "acc_norm"): 0.525,
    ("hellaswag", "acc_norm"): 0.789,
    ("hellaswag", "acc"): 0.0,
    ("arc_easy", "acc_norm"): 0.0,
}
"""A row of tab:fine_tuned_results, and metrics that are not in it; its average is 76.6."""


def test_the_average_is_that_of_the_papers_table_whatever_else_was_measured():
    scores = [{"value": v, "sets": sets_with(*key)} for key, v in LLAMA_2.items()]
    assert round(100 * averages(["paper"], scores)["paper"], 1) == 76.6
    assert averages(["paper"], scores[1:]) == {}
    assert averages(PAPER, scores) == {}
    mains = {task: main_metric(task, ["acc", "acc_norm"]) for task in PAPER}
    assert mains == TASK_SETS["paper"]
    assert [main_metric("mmlu", each) for each in (["b", "acc"], ["b"], [])] == ["acc", "b", None]


def test_sets_are_expanded_and_an_unknown_task_is_refused_with_the_nearest():
    assert expanded(["paper", "arc_easy", "boolq", "mmlu"]) == (*PAPER, "arc_easy", "mmlu")
    with pytest.raises(UserError, match=r"hellaswog is no task .* Did you mean hellaswag\?"):
        require_known(["hellaswog"], ["hellaswag", "boolq"])


def test_chance_counts_choices_and_the_answer_that_is_right_most_often():
    def sample(answers, target):
        return {"arguments": [("question", answer) for answer in answers], "target": target}

    boolq = [sample(("no", "yes"), 1)] * 62 + [sample(("no", "yes"), 0)] * 38
    assert chance_of(boolq) == pytest.approx(0.62)
    last_is_right = [sample((f"a{i}", f"b{i}", f"c{i}", f"d{i}"), 3) for i in range(8)]
    assert chance_of(last_is_right) == 0.25
    assert chance_of([*last_is_right, *last_is_right, sample("ab", 0)]) == pytest.approx(4.5 / 17)
    assert chance_of([{"arguments": [("prompt", {"until": []})], "target": "4"}]) is None
    assert chance_of([]) is None


def put(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with (gzip.open if path.suffix == ".gz" else open)(path, "wt") as file:
            file.write("{}\n")


def test_the_first_file_that_exists_is_taken_and_its_digest_told(tmp_path):
    put(tmp_path, "boolq/validation.json", "boolq/test.jsonl")
    assert list(local_files(tmp_path, "boolq", 0).files) == ["validation"]
    with pytest.raises(UserError, match="boolq needs boolq/train"):
        local_files(tmp_path, "boolq", 1)
    put(tmp_path, "boolq/train.jsonl.gz", "boolq/train.jsonl")
    found = local_files(tmp_path, "boolq", 32)
    files = {split: path.name for split, path in found.files.items()}
    assert files == {"train": "train.jsonl.gz", "validation": "validation.json"}
    assert found.notes == []
    digest = hashlib.sha256((tmp_path / "boolq/validation.json").read_bytes()).hexdigest()
    assert found.digests()["validation"] == {"file": "boolq/validation.json", "sha256": digest}
    for task in set(TASKS) - {"boolq"}:
        with pytest.raises(UserError, match=rf"{task} needs .*\.jsonl\.gz.* below {tmp_path}"):
            local_files(tmp_path, task, 0)


def test_stand_ins_are_told(tmp_path):
    put(tmp_path, "hellaswag/validation.jsonl", "hellaswag/train_fewshot_11.jsonl")
    put(tmp_path, "sciq/validation.jsonl")
    assert "11 rows" in local_files(tmp_path, "hellaswag", 10).notes[0]
    assert local_files(tmp_path, "hellaswag", 0).notes == []
    assert "validation split" in local_files(tmp_path, "sciq", 0).notes[0]
    put(tmp_path, "hellaswag/train.jsonl", "sciq/test.jsonl")
    assert local_files(tmp_path, "hellaswag", 10).notes == []
    assert local_files(tmp_path, "sciq", 0).notes == []
    assert "test" in local_files(tmp_path, "sciq", 0).files
