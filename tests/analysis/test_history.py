"""What is read from `metrics.jsonl`. Oracle: lines written by hand."""

import json

import pytest

from dotmoe.analyse.history import metric_columns, settling

LINES = [
    {"step": 1, "moved_fraction": 0.5, "soft_hard_gap": 0.9, "kl": 3.0},
    {"step": 2, "moved_fraction": 0.25, "soft_hard_gap": 0.5, "kl": None},
    {"step": 3, "moved_fraction": 0.0, "soft_hard_gap": 0.125, "kl": 1.0, "skipped": 1.0},
]


def written(tmp_path, lines):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return metric_columns(file)


def test_lines_become_columns(tmp_path):
    assert written(tmp_path, LINES) == {
        "steps": [1, 2, 3],
        "moved_fraction": [0.5, 0.25, 0.0],
        "soft_hard_gap": [0.9, 0.5, 0.125],
        "kl": [3.0, None, 1.0],
        "skipped": [None, None, 1.0],
    }


def test_settling_in_figures(tmp_path):
    lines = [LINES[0] | {"step": n + 1, "moved_fraction": 0.02 * n} for n in range(20)]
    lines[-1]["soft_hard_gap"] = 0.25
    assert settling(written(tmp_path, lines)) == pytest.approx(
        {
            "moved_first_tenth": 0.01,
            "moved_most": 0.38,
            "moved_most_at": 20,
            "moved_last_tenth": 0.37,
            "moved_last": 0.38,
            "moves_per_neuron": 3.8,
            "soft_hard_gap_first": 0.9,
            "soft_hard_gap_last": 0.25,
        }
    )


def test_a_run_of_an_earlier_version_or_with_a_fixed_split_has_less(tmp_path):
    older = [{"step": 1, "moved_fraction": 0.5}]
    assert settling(written(tmp_path, older))["soft_hard_gap_last"] is None
    assert settling(written(tmp_path, [{"step": 1, "kl": 1.0}])) == {}
