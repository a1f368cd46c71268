"""Perplexity at several k. Oracle: the masked dense model with that k."""

import json
import math
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from dotmoe.errors import UserError
from dotmoe.evaluate import EvaluateConfig, TextConfig, active_experts_curve, evaluate, ladder
from dotmoe.export import ExportConfig, export, set_active_experts
from dotmoe.layout import ExpertLayout
from dotmoe.load import LoadConfig, load_dense
from dotmoe.moe.surgery import masked_by
from dotmoe.report import curve_table, draw_curve, require_drawable

TEXT = "The crows counted seven hills and seven valleys, and went on counting until dusk. " * 10
WINDOW = 64


@pytest.fixture
def case(tiny_dense, tmp_path):
    """A dense model, a layout of 12 experts with k = 3, its export, and a text."""
    dense = load_dense(str(tiny_dense("llama")), LoadConfig(device="cpu"))
    layout = ExpertLayout(
        expert_of_neuron_LN=torch.arange(12).repeat_interleave(8).expand(2, 96).clone(),
        router_LED=torch.randn(2, 12, 64) / 8,
        active_experts=3,
    )
    ids = torch.tensor(dense.tokenizer(TEXT).input_ids[:384]).view(4, 96)
    export(dense, layout, tmp_path / "out", ExportConfig(), ids)
    (tmp_path / "text.txt").write_text(TEXT)
    return SimpleNamespace(dense=dense, layout=layout, folder=tmp_path / "out", root=tmp_path)


def curve_of(case, *active_experts, window=WINDOW):
    config = TextConfig(text=(str(case.root / "text.txt"),), window=window)
    told = []
    curve = active_experts_curve(
        case.folder,
        config,
        active_experts,
        LoadConfig(device="cpu"),
        lambda done, total, note="": told.append((done, total)),
    )
    return curve, told


def dense_loss(dense):
    """Mean cross-entropy of the dense model, windows scored one by one."""
    ids = torch.tensor(dense.tokenizer(TEXT).input_ids)
    nats, scored = 0.0, 0
    for window in ids.split(WINDOW):
        with torch.no_grad():
            logits = dense.model(input_ids=window[None]).logits[0]
        nats += float(F.cross_entropy(logits[:-1], window[1:], reduction="sum"))
        scored += len(window) - 1
    return nats / scored


def test_every_point_is_the_masked_model_with_that_k(case):
    curve, told = curve_of(case, 7, 1)
    points = {point["active_experts"]: point for point in curve["points"]}
    assert list(points) == [1, 7, 12]
    for active, point in points.items():
        with masked_by(case.dense, case.layout.with_active_experts(active)):
            expected = dense_loss(case.dense)
        assert point["loss"] == pytest.approx(expected, rel=2e-3)
        assert point["perplexity"] == pytest.approx(math.exp(point["loss"]))
        assert point["loss_above_all_experts"] == point["loss"] - points[12]["loss"]
    assert len({round(point["loss"], 3) for point in points.values()}) == 3
    assert points[12]["loss"] == pytest.approx(dense_loss(case.dense), rel=1e-4)
    assert told == sorted(told)
    assert told[-1] == (told[0][1], told[0][1])


def test_each_point_says_what_it_activates(case):
    curve, _ = curve_of(case, 3)
    total = sum(parameter.numel() for parameter in case.dense.model.parameters())
    ffn = 3 * 64 * 96 * 2
    first = curve["points"][0]
    assert first["active_fraction"] == 0.25
    assert first["active_parameters"] == total - ffn * 9 // 12
    assert first["active_parameters_with_routers"] == total - ffn * 9 // 12 + 2 * 12 * 64
    assert curve["dense_parameters"] == total == curve["points"][-1]["active_parameters"]
    assert curve["all_experts"]["perplexity"] == curve["points"][-1]["perplexity"]
    assert curve["all_experts"]["model"] == "dense"
    assert json.loads(json.dumps(curve)) == curve


def test_the_ladder_is_taken_where_no_k_is_named_and_files_stay_as_they_are(case):
    before = (case.folder / "config.json").read_text()
    curve, _ = curve_of(case)
    assert [point["active_experts"] for point in curve["points"]] == [2, 3, 4, 6, 9, 12]
    assert (case.folder / "config.json").read_text() == before


def test_an_edited_export_has_the_same_curve_with_its_new_k_marked(case):
    before, _ = curve_of(case, 3, 6)
    set_active_experts(case.folder, 6)
    after, _ = curve_of(case, 3, 6)
    assert after["points"] == before["points"]
    assert (before["active_experts"], after["active_experts"]) == (3, 6)


@pytest.mark.parametrize(
    ("num_experts", "active", "expected"),
    [(48, 12, (6, 12, 18, 24, 36, 48)), (2, 1, (1, 2)), (16, 5, (2, 4, 5, 6, 8, 12, 16))],
)
def test_ladders(num_experts, active, expected):
    assert ladder(num_experts, active) == expected


@pytest.mark.parametrize("active_experts", [0, 13])
def test_a_k_out_of_range_is_refused(active_experts, case):
    with pytest.raises(UserError, match=f"active_experts is {active_experts}, .* Choose 1 to 12"):
        curve_of(case, 3, active_experts)


def test_a_format_whose_k_is_fixed_has_no_curve(case):
    ids = torch.tensor(case.dense.tokenizer(TEXT).input_ids[:384]).view(4, 96)
    config = ExportConfig(format="mixtral")
    export(case.dense, case.layout, case.root / "mixtral", config, ids)
    fixed = SimpleNamespace(**vars(case) | {"folder": case.root / "mixtral"})
    with pytest.raises(UserError, match=r"k is fixed at 3.* Export the run as glm4_moe"):
        curve_of(fixed)


def test_of_a_finetuned_export_all_experts_are_not_the_dense_model(case):
    """Its weights are those that training left; the dense model is the run's that was trained."""
    for name, values in (
        ("convert", {"command": "convert", "model": "org/dense"}),
        ("finetune", {"command": "finetune", "run": str(case.root / "convert")}),
    ):
        (case.root / name).mkdir()
        (case.root / name / "config.json").write_text(json.dumps(values))
    trained = case.root / "finetune" / "4_finetune" / "model"
    shutil.copytree(case.dense.folder, trained)
    dense = load_dense(str(trained), LoadConfig(device="cpu"))
    ids = torch.tensor(dense.tokenizer(TEXT).input_ids[:384]).view(4, 96)
    export(dense, case.layout, case.root / "finetune" / "5_export", ExportConfig(), ids)
    corpus = TextConfig(text=(str(case.root / "text.txt"),), window=WINDOW)
    config = EvaluateConfig(model=str(case.root / "finetune"), curve=(3,), corpus=corpus)
    curve = evaluate(config)
    assert curve["all_experts"]["model"] == "finetuned"
    assert curve["source"] == "org/dense"
    assert "dense" not in curve
    assert "dense" not in str(curve_table(curve).rows)


def test_the_table_has_a_row_for_each_k(case):
    curve, _ = curve_of(case, 3)
    table = curve_table(curve)
    assert [row[0] for row in table.rows] == ["3 (now)", "12 (dense)"]
    assert [row[4] for row in table.rows] == [f"{p['perplexity']:.3f}" for p in curve["points"]]


def test_the_figure_shows_every_k_and_is_the_same_every_time(case):
    pytest.importorskip("matplotlib")
    curve, _ = curve_of(case, 3)
    for name in ("a.svg", "b.svg", "c.png"):
        draw_curve(curve, case.root / name)
    assert (case.root / "a.svg").read_bytes() == (case.root / "b.svg").read_bytes()
    assert (case.root / "c.png").read_bytes().startswith(b"\x89PNG")


def test_a_figure_that_cannot_be_drawn_is_refused_at_once(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"a\.gif has no known type"):
        require_drawable(tmp_path / "a.gif")
    with pytest.raises(UserError, match="its folder does not exist"):
        require_drawable(tmp_path / "missing" / "a.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'dotmoe\[plots\]'"):
        require_drawable(tmp_path / "a.svg")
