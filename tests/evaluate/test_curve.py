"""Perplexity at several k. Oracle: the masked dense model with that k."""

import math
from dataclasses import replace

import pytest
import torch

from dotmoe.common.errors import UserError
from dotmoe.export.record import ExportRecord
from dotmoe.measure.evaluate import EvaluateConfig, evaluate
from dotmoe.measure.evaluate.models import stock_nats
from dotmoe.measure.evaluate.perplexity import curve_table, ks_of_text_curve
from dotmoe.method.masked import masked_by
from runs import put_into


def curve_of(case, *active_experts):
    config = EvaluateConfig(model=str(case.folder), curve=active_experts, corpus=case.corpus)
    return evaluate(config)["curve"]


def test_every_point_is_the_masked_model_with_that_k(exported):
    case = exported()
    curve = curve_of(case, 3, 1)
    points = {point["active_experts"]: point for point in curve["points"]}
    assert list(points) == [1, 3, 12]
    nats, windows = stock_nats(case.dense.model), torch.tensor(case.ids).split(48)

    def loss():
        return float(torch.cat([nats(window[None])[0] for window in windows]).mean())

    for active, point in points.items():
        with masked_by(case.dense, replace(case.layout, active_experts=active)):
            assert point["loss"] == pytest.approx(loss(), rel=2e-3)
        assert point["perplexity"] == pytest.approx(math.exp(point["loss"]))
        assert point["loss_above_all_experts"] == point["loss"] - points[12]["loss"]
        assert (point["loss_above_all_experts_stderr"] > 0) == (active < 12)
    assert len({round(point["loss"], 3) for point in points.values()}) == 3
    assert points[12]["loss"] == pytest.approx(loss(), rel=1e-4)
    total = sum(parameter.numel() for parameter in case.dense.model.parameters())
    assert points[3]["active_fraction"] == 0.25
    assert points[3]["active_parameters"] == total - 3 * 64 * 96 * 2 * 9 // 12
    assert curve["dense_parameters"] == total == points[12]["active_parameters"]
    assert curve["all_experts"] == {"model": "dense", "perplexity": points[12]["perplexity"]}
    assert [row[0] for row in curve_table(curve).rows] == ["1", "3 (now)", "12 (dense)"]


def test_default_ks_are_taken_where_no_k_is_named_and_the_export_stays_as_it_is(exported):
    case = exported()
    before = (case.folder / "config.json").read_text()
    curve = curve_of(case)
    assert [point["active_experts"] for point in curve["points"]] == [2, 3, 4, 6, 9, 12]
    assert (case.folder / "config.json").read_text() == before
    assert ks_of_text_curve(2, 1) == (1, 2)
    assert ks_of_text_curve(16, 5) == (2, 4, 5, 6, 8, 12, 16)


def test_an_edited_k_is_the_one_now_and_counts_are_those_of_each_k(exported):
    case = exported()
    written = curve_of(case, 3, 5)["points"]
    put_into(case.folder / "config.json", num_experts_per_tok=5)
    curve = curve_of(case, 3, 5)
    assert curve["points"] == written
    assert [row[0] for row in curve_table(curve).rows] == ["3", "5 (now)", "12 (dense)"]


def test_what_has_no_curve_is_refused(exported):
    case = exported(format="mixtral")
    with pytest.raises(UserError, match=r"k is fixed at 3, so it has no curve\. Export the run"):
        curve_of(case)
    replace(ExportRecord.load(case.folder), format="dotmoe").write(case.folder)  # of two targets
    with pytest.raises(UserError, match=r"so it has no curve\. Convert with FFNs or attention"):
        curve_of(case)


def test_of_a_finetuned_run_all_experts_are_not_the_dense_model(finished, finetuned, exported):
    """Its weights are those that training left; the dense model is the run's that was trained."""
    corpus = exported().corpus
    curve = evaluate(EvaluateConfig(model=str(finetuned.folder), curve=(3,), corpus=corpus))[
        "curve"
    ]
    assert curve["all_experts"]["model"] == "other weights"
    assert curve["source"] == finished.source.name
    assert "dense" not in str(curve_table(curve).rows)
