import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig

from dotmoe.cli import run as run_cli
from dotmoe.granularity import ExpertsConfig
from dotmoe.inspection.costs import RunSize, total
from dotmoe.inspection.device_time import DeviceRates
from dotmoe.inspection.inspect_model import inspect_model
from dotmoe.inspection.tables import render
from dotmoe.inspection.units import in_bytes, in_time
from dotmoe.models.family import family_of

LLAMA_3_8B = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8_192,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}

EXACT = [
    "8,030,261,248",  # published
    "8,044,941,312",  # + 32 * 112 * 4,096 of routers
    "3,802,402,816",  # the paper's
    "3,817,082,880",
    "2,751,729,664",
    "2,393,116,672",  # all but 3 * 4,096 * 14,336 * 32 of the FFNs
    "1,342,443,520",
    "525,336,576",
]


def inspected(**run):
    config = LlamaConfig(**LLAMA_3_8B)
    rates = DeviceRates(device="this CPU", dtype="float32", flops_per_s=1e11, bytes_per_s=1e10)
    return inspect_model(
        config,
        family_of(config),
        ExpertsConfig(),
        RunSize(device="cpu", **run),
        stored=torch.bfloat16,
        rates=rates,
    )


def shown(inspection, width, **options):
    console = Console(file=io.StringIO(), width=width)
    console.print(render(inspection, **options))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_show_the_exact_counts_and_the_split(width):
    text = shown(inspected(), width)
    for part in [
        *EXACT,
        "112 experts of 128 neurons",
        "28 run per token",
        "bfloat16",
        "measured",
        "quoted",
    ]:
        assert part in text


@pytest.mark.parametrize(
    "run", [{}, {"steps": 10}, {"micro_batch_size": 8}, {"steps": 500_000, "micro_batch_size": 64}]
)
def test_everything_fits_eighty_columns_without_cutting_a_word(run):
    for details in (False, True):
        text = shown(inspected(**run), 80, details=details)
        assert max(len(line) for line in text.splitlines()) <= 80
        assert "\N{HORIZONTAL ELLIPSIS}" not in text
    lines = shown(inspected(**run), 80).splitlines()
    assert sum("8 x H200" in line for line in lines) == 1


def test_the_short_form_fits_a_screen_and_details_show_every_item():
    inspection = inspected()
    short, long = (shown(inspection, 80, details=flag) for flag in (False, True))
    assert len(short.splitlines()) <= 50
    lists = (inspection.memory, inspection.export_memory, inspection.disk, inspection.exported)
    for item in [item for items in lists for item in items]:
        assert item.name in long
        assert in_bytes(item.amount) in long
    for items in lists:
        assert in_bytes(total(items)) in short
        assert in_bytes(total(items)) in long


def test_a_training_free_run_shows_no_memory_of_alignment():
    text = shown(inspected(steps=0), 80)
    assert "start from data" in text
    assert "tokens at once" not in text


def test_warnings_are_named_as_such():
    assert "warning: The run sees 1,310,720 tokens" in shown(inspected(steps=10), 80)
    assert "warning" not in shown(inspected(), 80)


def write_config(folder, **changes):
    (folder / "config.json").write_text(json.dumps({**LLAMA_3_8B, **changes}))
    return str(folder)


def test_the_command_prints_json_that_parses(tmp_path, capsys):
    model = write_config(tmp_path)
    assert run_cli(["inspect", model, "--json", "--device", "cpu", "--active", "0.5"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["model"] == model
    assert record["granularity"] == {
        "num_experts": 112,
        "expert_size": 128,
        "active_experts": 56,
        "shared_size": 0,
        "first_dense_layers": 0,
    }
    assert record["counts"]["dense_total"] == 8_030_261_248
    assert record["run"]["bytes_per_weight"] == 4
    assert (record["stored_dtype"], record["written_dtype"]) == ("bfloat16", "bfloat16")


def test_the_command_prints_tables_with_the_exact_counts(tmp_path, capsys):
    assert run_cli(["inspect", write_config(tmp_path), "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    for count in EXACT:
        assert count in text


def test_the_command_believes_the_weights_more_than_the_config(tiny_dense, capsys):
    folder = tiny_dense("llama", dtype="float16")
    assert run_cli(["inspect", str(folder), "--json", "--device", "cpu"]) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert sum("stored as float16" in warning for warning in warnings) == 1
    options = ["--json", "--device", "cpu", "--export-dtype", "bfloat16", "--expert-size", "8"]
    assert run_cli(["inspect", str(folder), *options]) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert not any("Export refuses" in warning for warning in warnings)


def test_a_split_that_does_not_fit_ends_in_one_line(tmp_path, capsys):
    assert run_cli(["inspect", write_config(tmp_path), "--expert-size", "100"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Choose 64 or 112." in error


def test_help_shows_every_flag_once(capsys):
    with pytest.raises(SystemExit):
        run_cli(["inspect", "--help"])
    text = capsys.readouterr().out
    for flag in ("--expert-size", "--active-experts", "--bytes-per-weight", "--export-dtype"):
        assert text.count(f"{flag} ") == 1


def test_a_real_checkpoint_is_inspected(shared_data: Path, capsys):
    folder = shared_data / "models" / "stories260K"
    assert run_cli(["inspect", str(folder), "--json", "--device", "cpu"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["granularity"] == {
        "num_experts": 43,
        "expert_size": 4,
        "active_experts": 11,
        "shared_size": 0,
        "first_dense_layers": 0,
    }
    assert record["stored_dtype"] == "float32"
    assert not any("Export refuses" in warning for warning in record["warnings"])


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0 B"), (1_023, "1023 B"), (1_536, "1.50 KiB"), (5 * 2**40, "5.00 TiB")],
)
def test_sizes_are_told_in_binary_units(amount, text):
    assert in_bytes(amount) == text


@pytest.mark.parametrize(
    ("hours", "text"),
    [(0, "0 s"), (99 / 3_600, "99 s"), (1.5, "90 min"), (47, "47.0 h"), (72, "3.0 days")],
)
def test_durations_are_told_in_the_unit_that_suits(hours, text):
    assert in_time(hours) == text
