"""The whole benchmark on a tiny pair: what it tells, and what it refuses. No speed is judged."""

import json
import re
import sys
import time
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache

from dotmoe.bench import BenchConfig, bench, ratio_quartiles, tables
from dotmoe.bench.runners import (
    Point,
    Setup,
    TransformersRunner,
    counted_experts,
    forget_peak,
    peak_bytes,
)
from dotmoe.bench.sources import sources
from dotmoe.bench.work import Work, causal_keys, expected_experts
from dotmoe.errors import UserError
from dotmoe.export import FORMATS, ExportConfig, GgufConfig, export
from dotmoe.tables import to_markdown

SMALL = {
    "batch_sizes": (1, 3),
    "prompt_tokens": 9,
    "context_tokens": 5,
    "decode_steps": 2,
    "rounds": 2,
    "threads": 1,
}
TOKENS = 7


@pytest.fixture(scope="module")
def pair(dense_of, layout_of, tokens_BT, tmp_path_factory):
    """Folder with `dense`, `glm4_moe` and `mixtral`, in float32: 12 experts of 8, 3 active."""
    folder = tmp_path_factory.mktemp("pair")
    dense = dense_of("llama")
    (folder / "dense").symlink_to(dense.folder)
    for name in ("glm4_moe", "mixtral"):
        export(dense, layout_of(dense), folder / name, ExportConfig(format=name), tokens_BT)
    return folder


@pytest.fixture(scope="module")
def gguf_pair(dense_of, layout_of, tokens_BT, tmp_path_factory):
    """Dense model and MoE as GGUF files in f32, to run."""
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    folder, dense = tmp_path_factory.mktemp("gguf_pair"), dense_of("llama")
    gguf = GgufConfig(type="f32", tokenizer="none")
    for kind, name in (("dense", "gguf_dense"), ("moe", "gguf_llama")):
        config = ExportConfig(format=name, verify_tokens=64)
        export(dense, layout_of(dense), folder / kind, config, tokens_BT, gguf=gguf)
    return folder / "dense/model-f32.gguf", folder / "moe/model-f32.gguf"


def measured(dense, moe):
    told = []
    config = BenchConfig(dense=str(dense), moe=str(moe), **SMALL)
    result = bench(config, lambda done, total, note: told.append((done, total)))
    assert told[0] == (0, 6)
    assert told[-1] == (6, 6)
    return json.loads(json.dumps(result))


@pytest.fixture(scope="module")
def checkpoints(pair):
    return measured(pair / "dense", pair / "glm4_moe")


def require_sound(result):
    assert result["origin"] == "measured"
    assert {"commit", "versions", "hardware", "threads", "seed"} <= result["provenance"].keys()
    assert [(p["point"]["name"], p["point"]["batch"]) for p in result["points"]] == [
        ("prefill", 1),
        ("decode", 1),
        ("decode", 3),
    ]
    for point in result["points"]:
        dense, moe = point["dense"], point["moe"]
        is_decode = point["point"]["name"] == "decode"
        for side in (dense, moe):
            assert side["timing"]["samples"] == (4 if is_decode else 2)
            assert side["tokens_per_s"] > 0
            assert side["peak_bytes"] > 0
        assert point["speed_ratio"] == pytest.approx(moe["tokens_per_s"] / dense["tokens_per_s"])
        figure = "weight_bytes" if is_decode else "flops_per_token"
        assert point["ideal_ratio"] == pytest.approx(dense[figure] / moe[figure])
        assert point["share_of_ideal"] * point["ideal_ratio"] == pytest.approx(point["speed_ratio"])
        assert dense["experts_touched"] == 0
        assert 3 <= moe["experts_touched"] <= 12
    assert result["points"][1]["moe"]["experts_touched"] == 3
    printed = "\n".join(map(to_markdown, tables(result)))
    assert "decode x 3" in printed
    assert "| 3 of 12 |" in printed


def test_checkpoints_are_measured_in_transformers(checkpoints):
    require_sound(checkpoints)
    assert checkpoints["runtime"] == "transformers"
    assert {p["moe"]["experts_touched_by"] for p in checkpoints["points"]} == {"measured"}
    # An FFN of 96 neurons with 24 of them active, and a shared expert of zeros of 8.
    ffn, attention = 3 * 64 * 96, 2 * 64 * 64 + 2 * 64 * 32
    fixed = 2 * attention + 64 * 264
    dense, moe = fixed + 2 * ffn, fixed + 2 * (ffn * 32 // 96 + 12 * 64)
    decode, keys = checkpoints["points"][1], 2 * 4 * 64 * (6 + 7) / 2
    assert decode["dense"]["flops_per_token"] == 2 * dense + keys
    assert decode["moe"]["flops_per_token"] == 2 * moe + keys


def test_gguf_files_are_measured_in_llama_cpp(gguf_pair, checkpoints):
    result = measured(*gguf_pair)
    require_sound(result)
    assert result["runtime"] == "llama.cpp"
    assert {p["moe"]["experts_touched_by"] for p in result["points"]} == {"independent routing"}
    assert result["provenance"]["versions"]["llama_cpp_python"]
    for side, group in (("dense", "fixed"), ("dense", "head"), ("moe", "expert")):
        in_gguf, stock = (r[side]["loaded"]["weights"][group] for r in (result, checkpoints))
        assert in_gguf["products"] == stock["products"]


def setup_for(folder, **changes):
    setup = Setup(
        path=str(folder),
        device="cpu",
        dtype="float32",
        threads=1,
        clock="wall",
        seed=3,
    )
    return replace(setup, **changes)


def test_every_round_of_decode_computes_what_a_forward_over_all_tokens_does(pair):
    setup, point = setup_for(pair / "dense"), Point(name="decode", batch=2, tokens=6, steps=3)
    runner = TransformersRunner(setup)
    runner.load()
    runner.prepare(point)
    ids_BT = torch.tensor(setup.tokens(264, point)).view(2, 9)
    model = AutoModelForCausalLM.from_pretrained(pair / "dense", dtype=torch.float32)
    with torch.no_grad():
        whole_BTV = model(ids_BT, past_key_values=DynamicCache()).logits
    seen = []
    runner._model.register_forward_hook(lambda module, args, output: seen.append(output.logits))
    for _ in range(2):
        runner.run()
        assert torch.allclose(torch.cat(seen, dim=1), whole_BTV[:, 6:], atol=1e-4)
        seen.clear()


def test_a_run_folder_means_its_export(pair, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "5_export").symlink_to(pair / "mixtral")
    _, _, moe = sources(str(pair / "dense"), str(run))
    assert moe.path == run / "5_export"
    assert moe.num_experts == 12


def test_models_that_cannot_be_compared_are_refused(pair, tiny_dense, tmp_path):
    dense, moe = str(pair / "dense"), str(pair / "glm4_moe")
    for arguments, expected in (
        ((dense, "moe.gguf"), r"moe.gguf is a GGUF file and .* is not"),
        ((moe, dense), r"has 12 experts a layer. Give the dense model first"),
        ((dense, dense), r"has no experts"),
        ((dense, str(tmp_path / "nowhere")), r"nowhere does not exist"),
    ):
        with pytest.raises(UserError, match=expected):
            sources(*arguments)
    for change, expected in (
        ({"vocab_size": 300}, r"vocabulary of .* is 300 and of .* 264"),
        ({"num_hidden_layers": 3}, r"number of layers of .* is 3 and of .* 2"),
        ({"hidden_size": 32}, r"model width of .* is 32 and of .* 64"),
    ):
        with pytest.raises(UserError, match=expected):
            sources(str(tiny_dense("llama", **change)), moe)


def test_gguf_files_without_llama_cpp_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(UserError, match=r"pip install 'dotmoe\[llama-cpp\]'"):
        sources("dense.gguf", "moe.gguf")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"batch_sizes": (0,)}, "batch_sizes is 0, but it must be at least 1"),
        ({"rounds": 0}, "rounds is 0, but it must be at least 1"),
        ({"batch_sizes": (), "prompt_tokens": 0}, "nothing to measure"),
        ({"prompt_tokens": 257}, "prompt_tokens is 257, but .* has a context of 256"),
        ({"context_tokens": 255}, r"context_tokens \+ decode_steps is 257"),
        ({"threads": 2, "clock": "cpu"}, "clock is cpu with 2 threads"),
    ],
)
def test_what_cannot_be_measured_is_refused(pair, changes, expected):
    models = {"dense": str(pair / "dense"), "moe": str(pair / "glm4_moe")}
    with pytest.raises(UserError, match=expected):
        bench(BenchConfig(**models, **{**SMALL, **changes}))


def test_time_of_the_processor_stands_still_while_a_process_sleeps(tmp_path):
    setup, wall = setup_for(tmp_path, clock="cpu"), setup_for(tmp_path)
    start, start_wall = setup.now(), wall.now()
    time.sleep(0.2)
    assert setup.now() - start < 0.1
    assert wall.now() - start_wall >= 0.2


def loaded(folder, **options):
    options = {"attn_implementation": "eager", **options}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def counted(model, head_rows):
    """Operations in products with weights and in attention, counted while they run."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(input_ids=torch.arange(TOKENS)[None], use_cache=False, logits_to_keep=head_rows)
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    attention = counts.pop("aten.bmm")
    return sum(counts.values()), attention


def stored(folder):
    """Bytes of every tensor in the checkpoint's files."""
    sizes = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            sizes |= {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
    return sizes


@pytest.mark.parametrize("name", ["dense", "glm4_moe", "mixtral"])
def test_operations_are_those_that_torch_counts(pair, name):
    model = loaded(pair / name, **({} if name == "dense" else {"experts_implementation": "eager"}))
    work = Work.of_model(model)
    for head_rows in (1, TOKENS):
        in_products, in_attention = counted(model, head_rows)
        assert work.flops(TOKENS, 0, head_rows=head_rows) == in_products
        # Eager attention also computes what the mask then hides.
        assert TOKENS**2 * work.flops_per_key == in_attention


@pytest.mark.parametrize("name", ["glm4_moe", "mixtral"])
def test_bytes_are_those_of_the_files(pair, name):
    work, sizes = Work.of_model(loaded(pair / name)), stored(pair / name)
    expert_of = {key: re.search(r"\.experts\.(\d+)\.", key) for key in sizes}
    # A bias of the choice, which is no parameter once it is loaded.
    extra = sum(size for key, size in sizes.items() if "score_correction" in key)
    embedding = sizes["model.embed_tokens.weight"]
    always = sum(sizes[key] for key, found in expert_of.items() if not found) - embedding - extra
    chosen = sum(sizes[key] for key, found in expert_of.items() if found and int(found[1]) < 3)
    assert work.touched_bytes(1, 3) == always + chosen + embedding // 264
    assert work.stored_bytes == sum(sizes.values()) - embedding - extra


def test_a_tied_head_is_read_whole_and_once(tiny_dense):
    folder = tiny_dense("llama", tied=True)
    work, sizes = Work.of_model(loaded(folder)), stored(folder)
    assert "lm_head.weight" not in sizes
    assert work.head.num_bytes == sizes["model.embed_tokens.weight"]
    assert work.stored_bytes == sum(sizes.values())


def test_distinct_experts_are_counted_at_the_router(pair):
    model, output = loaded(pair / "glm4_moe"), FORMATS["glm4_moe"]
    blocks, inputs = output.blocks(model), []
    for block in blocks:
        block.register_forward_pre_hook(lambda module, args: inputs.append(args[0].flatten(0, 1)))
    ids_BT = torch.randint(264, (5, 1), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), counted_experts(model) as touched:
        model(ids_BT)
    expected = [
        len(set(output.chosen_experts(block, x_TD).flatten().tolist()))
        for block, x_TD in zip(blocks, inputs, strict=True)
    ]
    assert touched == expected
    assert 3 < max(touched) <= 12


def test_counts_are_those_of_all_choices_and_of_a_mask():
    choices = list(combinations(range(5), 2))
    distinct = [len({*a, *b, *c}) for a, b, c in product(choices, repeat=3)]
    assert expected_experts(5, 2, 3) == pytest.approx(sum(distinct) / len(distinct), rel=1e-12)
    mask = torch.ones(9, 9).tril()
    assert causal_keys(9) == int(mask.sum())
    assert causal_keys(4, before=5) == int(mask[5:].sum())


def test_a_slow_spell_of_both_models_does_not_move_the_ratio_of_rounds():
    dense = [[2.0, 2.0], [20.0, 20.0], [4.0, 4.0]]
    moe = [[1.0, 1.0], [10.0, 10.0], [2.0, 2.0]]
    assert ratio_quartiles(dense, moe) == [2.0, 2.0]


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells no peak that can be reset")
def test_a_peak_is_seen_and_forgotten():
    forget_peak()
    start = peak_bytes()
    block = np.ones(64 << 20, dtype=np.uint8)
    assert peak_bytes() - start > 60 << 20
    del block
    forget_peak()
    if peak_bytes() - start > 60 << 20:
        pytest.skip("this system does not let a process reset its peak")
    assert peak_bytes() - start < 30 << 20
