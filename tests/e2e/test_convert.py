"""`dotmoe convert` on tiny models: whole runs of every family, and a run that is stopped.

`dotmoe quickstart`: two runs that differ in the method alone, and what must come out.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from dotmoe.cli.quickstart import quickstart, run_configs
from dotmoe.common.progress import Progress
from dotmoe.models.family import FAMILIES
from dotmoe.pipeline.convert import config_with_defaults
from dotmoe.run.config import QuickstartConfig
from export.comparison import logits_of, masked_logits, relative_error
from runs import TinyRun, loaded, slow_but, with_an_outlier

TWINS = {name: "DotMoeForCausalLM" for name, family in FAMILIES.items() if family.has_own_decoder}
TWINS["qwen3_5_text"] = "Qwen3_5MoeForCausalLM"
TWINS |= dict.fromkeys(("granite", "granitemoehybrid"), "GraniteMoeForCausalLM")
TWINS["olmo2"] = "FlexOlmoForCausalLM"


QUICK = ("phi3", "granitemoehybrid", "qwen3_5_text", "olmo2")
"""Families that differ most from LLaMA; `tests/export` and `tests/models` have them all."""


@pytest.mark.parametrize("family", slow_but(QUICK, FAMILIES))
def test_a_run_gives_a_stock_checkpoint_that_computes_what_its_layout_says(
    family, finished, tiny_dense, tokens_BT, tmp_path
):
    model = tiny_dense(family)
    made = TinyRun("convert", model, tmp_path / "run", finished.options | {"steps": 2}).made()
    exported = AutoModelForCausalLM.from_pretrained(made.folder / "5_export")
    assert type(exported).__name__ == TWINS.get(family, "Glm4MoeForCausalLM")
    expected = masked_logits(loaded(model), made.layout(), tokens_BT)
    assert relative_error(logits_of(exported, tokens_BT), expected) < 1e-3


@pytest.mark.parametrize(
    ("family", "method", "dense_layers"),
    [
        ("llama", "random_split", 1),
        pytest.param("olmo2", "random_split", 0, marks=pytest.mark.slow),
        pytest.param("olmo2", "dot_moe", 0, marks=pytest.mark.slow),
    ],
)
def test_the_defaults_are_three_quarters_active_and_an_outlier_dense_where_all_can_hold_it(
    family, method, dense_layers, finished, tiny_dense, command, tmp_path
):
    """None of these has a shared expert; one that has is in `inspection/test_inspect.py`."""
    model = with_an_outlier(tiny_dense(family, num_hidden_layers=12), tmp_path)
    options = {k: v for k, v in finished.options.items() if k not in ("active", "shared")}
    options, out = options | {"steps": 0, "method": method}, tmp_path / "run"
    assert command("convert", model, out, **options).status == 0
    split = json.loads((out / "6_evaluate/results.json").read_text())["granularity"]
    assert (split["active_experts"] * 8, split["shared_size"]) == (72, 0)
    assert split["first_dense_layers"] == dense_layers
    written = json.loads((out / "config.json").read_text())["experts"]
    assert (written["active"], written["shared"]) == (0.75, 0)


def test_the_two_runs_of_the_quickstart_differ_in_the_method_alone():
    static, dotmoe = run_configs(QuickstartConfig()).values()
    assert replace(static, method="dot_moe", out=dotmoe.out) == dotmoe
    assert (static.method, dotmoe.repair, dotmoe.align.steps) == ("static_pruning", True, 0)
    assert (
        config_with_defaults(static).experts.active
        == config_with_defaults(dotmoe).experts.active
        == 0.5
    )


@pytest.mark.slow
@pytest.mark.usefixtures("all_rounds")
def test_the_conversion_loses_less_than_static_pruning_with_the_same_repair(tmp_path):
    made = quickstart(QuickstartConfig(out=str(tmp_path / "quick")), Progress(quiet=True))
    start, dotmoe, static = (
        made[name]["loss"] - made["dense"]["loss"]
        for name in ("dotmoe_start", "dotmoe", "static_pruning")
    )
    assert 0 < dotmoe < 0.04 < static < start
    assert dotmoe < 0.75 * static
    assert made["verification"]["top1_agreement"] > 0.95
    assert all(any(each["dotmoe"].split()) for each in made["samples"])
    page = Path(made["report"]).read_text()
    assert "static pruning, same repair" in page
    assert "def read_config(path):" in page
