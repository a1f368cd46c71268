import gzip
import hashlib
import json

import pytest

from dotmoe.errors import UserError
from dotmoe.evaluate.local_tasks import LOCAL_TASKS, local_files, write_definition
from dotmoe.evaluate.paper_tasks import (
    PAPER,
    averages,
    columns_of,
    expanded,
    paper_shots,
    require_known,
)

DENSE_LLAMA_2 = {
    "boolq": {"acc": 0.820},
    "sciq": {"acc": 0.940},
    "piqa": {"acc": 0.781, "acc_norm": 0.0},
    "winogrande": {"acc": 0.743},
    "arc_challenge": {"acc": 0.0, "acc_norm": 0.525},
    "hellaswag": {"acc": 0.0, "acc_norm": 0.789},
}
"""A row of tab:fine_tuned_results; its average is printed as 76.6."""


def put(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".gz":
            with gzip.open(path, "wt") as file:
                file.write("{}\n")
        else:
            path.write_text("{}\n")


def test_the_average_is_that_of_the_papers_table():
    assert round(100 * averages(["paper"], DENSE_LLAMA_2)["paper"], 1) == 76.6


def test_there_is_no_average_of_a_part_or_of_tasks_named_one_by_one():
    part = {name: DENSE_LLAMA_2[name] for name in list(DENSE_LLAMA_2)[:5]}
    assert averages(["paper"], part) == {}
    assert averages([task.name for task in PAPER], DENSE_LLAMA_2) == {}


def test_sets_are_expanded_and_each_task_named_once():
    names = expanded(["paper", "arc_easy", "boolq", "mmlu"])
    assert names == (*(task.name for task in PAPER), "arc_easy", "mmlu")
    assert [task.metric for task in columns_of(["piqa"])] == ["acc"]
    by_k = {task.name: task.metric for task in columns_of(["paper-by-k"])}
    assert by_k["piqa"] == "acc_norm"
    assert [paper_shots(name) for name in ("boolq", "arc_challenge", "mmlu")] == [32, 25, None]


def test_an_unknown_task_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"hellaswog is no task .* Did you mean hellaswag\?"):
        require_known(["hellaswog"], ["hellaswag", "boolq"])


def test_the_first_file_that_exists_is_taken_and_its_digest_told(tmp_path):
    put(tmp_path, "boolq/train.jsonl.gz", "boolq/validation.json", "boolq/test.jsonl")
    found = local_files(tmp_path, "boolq", 32)
    assert {split: path.name for split, path in found.files.items()} == {
        "train": "train.jsonl.gz",
        "validation": "validation.json",
    }
    assert found.notes == ()
    digest = hashlib.sha256((tmp_path / "boolq/validation.json").read_bytes()).hexdigest()
    assert found.digests()["validation"] == {"file": "boolq/validation.json", "sha256": digest}


@pytest.mark.parametrize("task", LOCAL_TASKS)
def test_a_missing_file_is_named(task, tmp_path):
    with pytest.raises(UserError, match=rf"{task} needs .*\.jsonl\.gz.* below {tmp_path}"):
        local_files(tmp_path, task, 0)


def test_solved_examples_need_a_training_split(tmp_path):
    put(tmp_path, "boolq/validation.jsonl")
    assert list(local_files(tmp_path, "boolq", 0).files) == ["validation"]
    with pytest.raises(UserError, match="boolq needs boolq/train"):
        local_files(tmp_path, "boolq", 1)


def test_stand_ins_are_told(tmp_path):
    put(tmp_path, "hellaswag/validation.jsonl", "hellaswag/train_fewshot_11.jsonl")
    put(tmp_path, "sciq/validation.jsonl")
    assert "11 rows" in local_files(tmp_path, "hellaswag", 10).notes[0]
    assert local_files(tmp_path, "hellaswag", 0).notes == ()
    assert "validation split" in local_files(tmp_path, "sciq", 0).notes[0]
    put(tmp_path, "hellaswag/train.jsonl", "sciq/test.jsonl")
    assert local_files(tmp_path, "hellaswag", 10).notes == ()
    assert local_files(tmp_path, "sciq", 0).notes == ()
    assert "test" in local_files(tmp_path, "sciq", 0).files


def test_a_task_without_a_place_is_refused(tmp_path):
    with pytest.raises(UserError, match="mmlu has no place in a local folder"):
        local_files(tmp_path, "mmlu", 5)


def test_a_definition_changes_nothing_but_the_source_of_the_rows(tmp_path):
    put(tmp_path, "sciq/validation.jsonl")
    write_definition(tmp_path, "sciq", tmp_path / "own.yaml", local_files(tmp_path, "sciq", 0))
    written = json.loads((tmp_path / "sciq.yaml").read_text())
    assert written == {
        "include": str(tmp_path / "own.yaml"),
        "task": "sciq",
        "tag": [],
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"validation": str(tmp_path / "sciq/validation.jsonl")}},
        "training_split": None,
        "validation_split": "validation",
        "test_split": None,
    }
