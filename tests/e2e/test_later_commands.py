"""Commands on a finished run: export and evaluate."""

import json
from dataclasses import replace

import pytest

from dotmoe.export.llama_cpp import is_installed
from export.comparison import masked_logits, relative_error, stock_logits
from runs import loaded

QUICK = {"scale_tokens": 256, "verify_tokens": 128}


@pytest.fixture
def evaluated(command, tmp_path):
    """Runs `dotmoe evaluate`: the JSON that it keeps, and the tables that it prints."""

    def run(*positional, **options):
        kept = tmp_path / f"kept-{len(list(tmp_path.iterdir()))}"
        outcome = command("evaluate", *positional, out=kept, **options)
        assert outcome.status == 0, outcome.err
        return json.loads(next(kept.glob("*.json")).read_text()), outcome.out

    return run


@pytest.mark.parametrize(
    ("options", "model_type", "active_experts"),
    [
        ({"format": "mixtral", "active_experts": 5}, "mixtral", 5),
        ({"format": "granitemoe"}, "granitemoe", 3),
        ({"export_dtype": "bfloat16", "active_experts": 12}, "glm4_moe", 12),
    ],
)
def test_a_run_is_exported_again(
    options, model_type, active_experts, finished, command, tokens_BT, tmp_path
):
    before, out = finished.contents(), tmp_path / "again"
    assert command("export", finished.folder, out, **options, **QUICK).status == 0
    assert json.loads((out / "config.json").read_text())["model_type"] == model_type
    assert finished.contents() == before
    layout = replace(finished.layout(), active_experts=active_experts)
    expected = masked_logits(loaded(finished.source), layout, tokens_BT)
    most = 0.05 if "export_dtype" in options else 5e-3
    assert relative_error(stock_logits(out, tokens_BT), expected) < most


@pytest.mark.parametrize("name", ["gguf_glm4moe", "gguf_llama", "gguf_dense"])
def test_a_run_becomes_a_gguf_of_the_same_perplexity(
    name, finished, command, evaluated, text_file, tmp_path
):
    out, options = tmp_path / name, {"text": text_file, "max_tokens": 1024, "window": 64}
    said = command("export", finished.folder, out, format=name, gguf_type="f32", **QUICK).out
    assert ("not run without" in " ".join(said.split())) is not is_installed()
    pytest.importorskip("llama_cpp")
    stock = finished.source if name == "gguf_dense" else finished.folder
    expected, found = (evaluated(model, **options)[0]["perplexity"] for model in (stock, out))
    # Near-ties may be routed otherwise.
    assert found == pytest.approx(expected, rel=1e-4 if name == "gguf_dense" else 2e-2)
