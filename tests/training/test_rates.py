"""No stage of a training steps at a rate of zero, or begins where another one's schedule ended."""

import json
import sys

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

import finetune_rate
import lte_stages
import recovery_curve
from runs import TINY_CONVERT, TINY_FINETUNE, TinyRun

SHORT = {"steps": 6, "warmup_ratio": 0.2}


@pytest.fixture
def stages():
    """The rates of all parameter groups at each step, by optimizer."""
    rates = {}

    def note(optimizer, *_):
        step = [group["lr"] for group in optimizer.param_groups]
        rates.setdefault(optimizer, []).append(step)

    handle = register_optimizer_step_pre_hook(note)
    yield rates
    handle.remove()


def peaks(stages):
    """The largest rates of each stage, which its first half reaches. No step has a rate of zero."""
    for steps in stages.values():
        assert min(map(min, steps)) > 0
        assert max(steps[: len(steps) // 2]) == max(steps)
    return [max(steps) for steps in stages.values()]


def test_alignment_repair_and_finetuning_each_have_their_own_schedule(
    stages, tiny_dense, text_file, tmp_path
):
    options = TINY_CONVERT | SHORT | {"data": text_file, "repair": [], "repair_epochs": 2}
    del options["no_repair"]
    made = TinyRun("convert", tiny_dense("llama"), tmp_path / "run", options).made()
    TinyRun("finetune", made.folder, tmp_path / "tuned", TINY_FINETUNE | SHORT).made()
    aligned, *repairs, tuned = peaks(stages)
    assert aligned == [1e-2, 1e-2]
    assert len(repairs) == 2  # one for each layer
    assert tuned == [1e-3]  # routers, whose rate is 0, are not among what is trained


@pytest.mark.parametrize(
    "script", [lte_stages, pytest.param(recovery_curve, marks=pytest.mark.slow)]
)
def test_the_stages_of_an_experiment_start_at_their_peaks(
    script, stages, finished, heldout_file, tmp_path, monkeypatch
):
    made = str(finished.folder)
    if script is lte_stages:
        words = [made, str(tmp_path / "out"), "--soft-steps", "6", "--hard-steps", "4"]
        expected = [[1e-3, 3e-3], [1e-3]]
    else:
        words = [made, str(tmp_path / "out"), "--text-of", made]
        words += ["--points", "2", "--heldout-tokens", "256"]
        monkeypatch.setattr(script, "HELDOUT", (str(heldout_file),))
        expected = [[6e-4]]  # weights; the rate of routers is 0
    monkeypatch.setattr(sys, "argv", ["experiment", *words])
    stages.clear()
    script.main()
    assert peaks(stages) == expected


def test_kl_at_the_default_rate_is_that_of_a_finetuning(finished, text_file, tmp_path, monkeypatch):
    options = {"data": text_file, "seq_len": 32, "steps": 4, "batch_size": 2}
    tuned = TinyRun("finetune", finished.folder, tmp_path / "tuned", options).made().folder
    lines = (tuned / "4_finetune/metrics.jsonl").read_text().splitlines()
    expected = [json.loads(line)["kl"] for line in lines[:3]]
    words = [str(finished.folder), str(tmp_path / "rates.json"), "--rates", "0", "1"]
    words += ["--text", str(tuned / "0_data/training.safetensors"), "--steps", "3"]
    words += ["--of-steps", "4", "--batch-size", "2", "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", ["experiment", *words])
    finetune_rate.main()
    start, default = json.loads((tmp_path / "rates.json").read_text())["rows"]
    assert default["kl"] == pytest.approx(expected, rel=1e-5)
    assert start["kl"][0] == default["kl"][0]
    assert start["kl"][1:] != default["kl"][1:]
    assert start["rate"] == 0
