"""`dotmoe inspect`: exact counts, tables of 80 columns, JSON that adds up, and the stored dtype."""

import io
import json
import shutil

import pytest
import torch
from inspected_models import LLAMA_3_8B, inspection, llama_3_8b, tiny
from rich.console import Console
from transformers import AutoConfig

from dotmoe.cli import run as run_cli
from dotmoe.errors import UserError
from dotmoe.inspection import RunSize, render, stored_dtype
from dotmoe.inspection.sizes import PAPER_TOKENS, bytes_held
from dotmoe.models.family import family_of
from dotmoe.tables import in_bytes

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


def inspected(first_dense_layers=0, **run):
    run = RunSize(device="cpu", **run)
    return inspection(llama_3_8b(), run, first_dense_layers=first_dense_layers)


def shown(found, width=80, **options):
    console = Console(file=io.StringIO(), width=width)
    console.print(render(found, **options))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_show_the_exact_counts_and_the_split(width):
    text = shown(inspected(), width)
    for part in [*EXACT, "every layer 112 experts of 128 neurons", "28 run per token", "measured"]:
        assert part in text
    assert "quoted" in text


def test_leading_dense_layers_are_named():
    text = " ".join(shown(inspected(first_dense_layers=16)).split())
    assert "layers 16 to 31: 112 experts of 128 neurons" in text
    assert "every layer" not in text


@pytest.mark.parametrize(
    "run", [{}, {"steps": 10}, {"micro_batch_size": 8}, {"steps": 500_000, "micro_batch_size": 64}]
)
def test_everything_fits_eighty_columns_without_cutting_a_word(run):
    for details in (False, True):
        text = shown(inspected(**run), details=details)
        assert max(len(line) for line in text.splitlines()) <= 80
        assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert sum("8 x H200" in line for line in shown(inspected(**run)).splitlines()) == 1


def test_the_short_form_fits_a_screen_and_details_show_every_item():
    found = inspected()
    short, long = (shown(found, details=flag) for flag in (False, True))
    assert len(short.splitlines()) <= 55
    for items in found.itemised.values():
        assert in_bytes(sum(items.values())) in short
        for name, amount in items.items():
            assert name in long
            assert in_bytes(amount) in long


def test_a_training_free_run_shows_no_memory_of_alignment():
    text = shown(inspected(steps=0))
    assert "start from data" in text
    assert "tokens at once" not in text


def test_warnings_are_named_as_such():
    assert "warning: The run sees 1,310,720 tokens" in shown(inspected(steps=10))
    assert "warning" not in shown(inspected())


def test_the_paper_s_run_is_three_forwards_of_all_products():
    found = inspected()
    assert found.run.tokens == PAPER_TOKENS == 458_752_000
    # Twice the parameters that multiply, to within attention scores, routers and assignment.
    simple = 3 * 2 * (8_030_261_248 - 128_256 * 4_096) * 458_752_000
    assert simple < found.flops < 1.15 * simple


def test_hours_here_are_those_of_as_many_steps():
    seven, one = (inspected(steps=n).here for n in (7, 1))
    assert seven.origin == "measured"
    assert seven.hours == pytest.approx(7 * one.hours)
    assert seven.hours < seven.hours_checkpointing < 1.5 * seven.hours


def test_the_record_is_json_and_its_totals_are_sums():
    record = json.loads(json.dumps(inspection(llama_3_8b()).as_dict()))
    assert record["origin"] == "estimated"
    assert record["counts"]["active"] == 3_802_402_816
    for name in ("memory", "memory_checkpointing", "calibration_memory", "export_memory", "disk"):
        assert record[f"{name}_total"] == sum(record[name].values()) > 0
    assert {plan["origin"] for plan in record["plans"]} == {"quoted"}
    for plan in record["plans"]:
        for choice in plan["choices"]:
            assert choice["memory_total"] == sum(choice["memory"].values()) > 0
            assert choice["step_s"] == pytest.approx(sum(choice["parts"].values()))


def test_sequences_longer_than_the_context_are_costed_as_they_would_run():
    short, long = (
        inspection(tiny(max_position_embeddings=512), RunSize(seq_len=n)) for n in (512, 2_048)
    )
    assert (long.run, long.memory, long.flops) == (short.run, short.memory, short.flops)


@pytest.mark.parametrize("device", ["banana", "cuda:99"])
def test_a_device_that_is_not_there_is_refused_in_one_line(device):
    with pytest.raises(UserError, match=f"^device is '{device}', .*cpu.*cuda.*[.]$"):
        inspection(tiny(), RunSize(device=device))


@pytest.mark.parametrize(("asked", "held"), [(None, 4), (2, 2)])
def test_a_cpu_holds_float32_weights_unless_asked_otherwise(asked, held):
    found = inspection(llama_3_8b(), RunSize(device="cpu", bytes_per_weight=asked))
    assert found.run.bytes_per_weight == held
    assert found.memory["dense weights, one copy"] == held * 8_030_261_248
    assert bytes_held(None, "cuda", torch.float16) == 2
    assert found.plans == inspection(llama_3_8b(), RunSize(bytes_per_weight=2)).plans


def write_config(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return str(folder)


def test_the_command_prints_json_or_tables(tmp_path, capsys):
    model = write_config(tmp_path)
    assert run_cli(["inspect", model, "--json", "--device", "cpu", "--active", "0.5"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["model"] == model
    assert record["granularity"]["active_experts"] == 56
    assert record["counts"]["dense_total"] == 8_030_261_248
    assert record["here"]["device"] == "this CPU"
    assert (record["stored_dtype"], record["written_dtype"]) == ("bfloat16", "bfloat16")
    assert run_cli(["inspect", model, "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert all(count in text for count in EXACT)
    assert run_cli(["inspect", model, "--expert-size", "100"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Choose 64 or 112." in error
    assert run_cli(["inspect", model, "--gpus", "0"]) == 2


def test_a_real_checkpoint_is_inspected(shared_data, capsys):
    folder = shared_data / "models" / "stories260K"
    assert run_cli(["inspect", str(folder), "--json", "--device", "cpu"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["granularity"]["num_experts"] == 43
    assert record["stored_dtype"] == "float32"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sharded", [False, True])
def test_the_stored_dtype_is_read_from_the_weights_not_from_the_config(
    tiny_dense, tmp_path, dtype, sharded
):
    folder = shutil.copytree(tiny_dense("llama", dtype=dtype), tmp_path / "model")
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stated, "dtype": "float64"}))
    if sharded:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        index = {"weight_map": {"model.layers.0.mlp.gate_proj.weight": "part.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = AutoConfig.from_pretrained(folder)
    assert stored_dtype(config, family_of(config), folder) == getattr(torch, dtype)


def test_without_weights_the_config_says_the_dtype_and_damaged_ones_are_refused(tmp_path):
    for stated, found in (("float16", torch.float16), (None, torch.bfloat16)):
        config = tiny(dtype=stated)
        assert stored_dtype(config, family_of(config), tmp_path) == found
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"model.safetensors cannot be read .*Get it again\.$"):
        stored_dtype(tiny(), family_of(tiny()), tmp_path)
