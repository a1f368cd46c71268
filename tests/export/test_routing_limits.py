import math
import sys
from dataclasses import replace

import pytest
import torch

from dotmoe.export import ExportConfig, VerificationError, export
from dotmoe.export.gating import Gating
from dotmoe.export.router_scale import router_scale
from dotmoe.export.routing_limits import RoutingLimits, require_routable

LIMITS = RoutingLimits(misrouted=0.01, gate_deviation=0.02)


def scale_with(**figures):
    """A scale whose second runtime has these figures; the others are well within the limits."""
    gating = Gating(score="softmax", renormalised=False, constant=6.0)
    scale = router_scale(torch.randn(64, 6), torch.eye(6), 2, gating, torch.float32)
    rows = [replace(row, misrouted=0.0, gate_deviation=0.0) for row in scale.runtimes]
    rows[1] = replace(rows[1], **figures)
    return replace(scale, runtimes=rows)


def test_figures_at_the_limits_pass():
    require_routable([3], [scale_with(misrouted=0.01, gate_deviation=0.02)], 10**9, LIMITS)


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"misrouted": 0.0101}, r"misrouted tokens is 0.0101, limit 0.01\. Choose a larger expert"),
        ({"gate_deviation": 0.021}, r"gate from 1 is 0.021, limit 0.02\. Align the routers"),
        ({"gate_deviation": math.nan}, "gate from 1 is nan"),
        ({"misrouted": math.nan}, "misrouted tokens is nan"),
    ],
)
def test_a_figure_beyond_its_limit_is_named_with_layer_and_runtime(figures, words):
    scales = [scale_with(), scale_with(**figures)]
    with pytest.raises(VerificationError, match=rf"layer 4 in vLLM on CUDA: .*{words}"):
        require_routable(range(3, 5), scales, 10**9, LIMITS)


def test_a_small_sample_may_lie_four_standard_errors_above():
    # 100 tokens: 0.01 + 4 sqrt(0.01 / 100) = 0.05.
    require_routable([0], [scale_with(misrouted=0.0499)], 100, LIMITS)
    with pytest.raises(VerificationError, match=r"limit 0.05\."):
        require_routable([0], [scale_with(misrouted=0.0501)], 100, LIMITS)


@pytest.mark.parametrize(
    ("log2_scaled_std", "words"),
    [(-20.0, "layer 0 in Transformers: share of misrouted"), (-0.5, "deviation of a gate")],
    ids=["p too large", "p too small"],
)
@pytest.mark.parametrize("target", ["glm4_moe", "mixtral"])
def test_an_export_that_a_runtime_would_misroute_is_unverified(
    target, log2_scaled_std, words, dense_of, layout_of, tokens_BT, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        sys.modules["dotmoe.export.router_scale"], "LOG2_SCALED_STD", log2_scaled_std
    )
    dense = dense_of("llama")
    config = ExportConfig(format=target)
    with pytest.raises(VerificationError, match=words):
        export(dense, layout_of(dense), tmp_path / "out", config, tokens_BT)
    assert not (tmp_path / "out").exists()


def test_a_p_too_large_for_others_only_is_refused_too(
    dense_of, layout_of, tokens_BT, tmp_path, monkeypatch
):
    # Stock Transformers routes a GraniteMoe right at any p: verification alone would pass it.
    monkeypatch.setattr(sys.modules["dotmoe.export.router_scale"], "LOG2_SCALED_STD", -30.0)
    dense = dense_of("llama")
    config = ExportConfig(format="granitemoe")
    with pytest.raises(VerificationError, match="layer 0 in vLLM on CUDA"):
        export(dense, layout_of(dense), tmp_path / "out", config, tokens_BT)


def test_the_record_and_the_card_hold_the_figures_of_every_runtime(
    dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of("qwen2", dtype="bfloat16")
    layout = layout_of(dense, dtype=torch.bfloat16)
    config = ExportConfig(format="qwen2_moe")
    record = export(dense, layout, tmp_path / "out", config, tokens_BT)
    assert type(record).load(tmp_path / "out") == record
    card = (tmp_path / "out" / "README.md").read_text()
    for index, row in enumerate(record.routers[0].runtimes):
        worst = max(scale.runtimes[index].gate_deviation for scale in record.routers)
        (line,) = [line for line in card.splitlines() if line.startswith(f"| {row.runtime} |")]
        assert f"| {worst:.4g} |" in line
    assert "to be expected" in card


def test_layers_that_stay_dense_have_no_router_to_judge(dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("llama", num_hidden_layers=3)
    layout = layout_of(dense)
    experts = layout.expert_of_neuron_LN.clone()
    experts[0] = -1
    layout = replace(layout, expert_of_neuron_LN=experts)
    record = export(dense, layout, tmp_path / "out", ExportConfig(), tokens_BT)
    assert (record.first_dense_layers, len(record.routers)) == (1, 2)
    assert "in 2 of its 3 layers" in (tmp_path / "out" / "README.md").read_text()
