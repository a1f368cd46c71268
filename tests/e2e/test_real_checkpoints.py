"""The two real checkpoints, through the real command and compared once more."""

import json

import pytest
from transformers import AutoTokenizer

from dotmoe.measure.config import TextConfig
from dotmoe.measure.evaluate.models import stock_nats
from dotmoe.measure.evaluate.perplexity import packed_text, perplexity
from dotmoe.method.layout import ExpertLayout
from export.comparison import masked_logits, relative_error, stock_logits
from runs import loaded

TEXT = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "def read(path):\n    with open(path) as file:\n        return file.read()\n"
) * 3
SIZES = {"no_repair": [], "seq_len": 128, "calibration_tokens": 2048, "eval_tokens": 2048}


@pytest.mark.parametrize(
    ("name", "dtype"),
    # The FFN width of stories260K, 172, has no expert size that runs in bfloat16.
    [pytest.param("embedded", "bfloat16", marks=pytest.mark.slow), ("stories260K", "float32")],
)
def test_a_training_free_conversion_is_exact(name, dtype, command, request, tmp_path):
    model, sizes = name, SIZES | {"export_dtype": dtype}
    if name == "embedded":
        sizes["expert_size"] = 16
    else:
        model = str(request.getfixturevalue("shared_data") / "models" / name)
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text(TEXT * 40)
    assert command("convert", model, out, data=text, **sizes).status == 0
    assert not (out / "2_align/metrics.jsonl").exists()
    found = json.loads((out / "6_evaluate" / "results.json").read_text())["verification"]
    assert found["dtype"] == dtype
    assert found["largest_block_error"] < (2e-3 if dtype == "float32" else 6e-3)

    layout = ExpertLayout.load(out / "3_extract" / "layout.safetensors")
    ids = AutoTokenizer.from_pretrained(out / "5_export")(TEXT, return_tensors="pt")["input_ids"]
    rows = ids[0, : len(ids[0]) // 12 * 12].view(12, -1)
    found, expected = (
        stock_logits(out / "5_export", rows),
        masked_logits(loaded(model), layout, rows),
    )
    assert relative_error(found, expected) < (2e-3 if dtype == "float32" else 2e-2)
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.97


def test_the_embedded_model_is_what_its_record_says():
    """Its loss is on this machine's own library, which may be another Python's: so only roughly."""
    dense = loaded("embedded")
    record = json.loads((dense.folder / "training.json").read_text())
    assert sum(p.numel() for p in dense.model.parameters()) == record["parameters"] >= 2_500_000
    assert dense.widths.layers >= 4
    assert (dense.folder / "model.safetensors").stat().st_size <= 12_000_000
    config = TextConfig(text=("python-stdlib-heldout",), max_tokens=8_000)
    text = packed_text(config, dense.tokenizer)
    result = perplexity(stock_nats(dense.model), text, 512)
    assert result["loss"] == pytest.approx(record["heldout_loss_nats_per_token"], abs=0.3)
