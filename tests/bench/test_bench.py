"""The whole benchmark on a tiny pair: what it tells, and what it refuses. No speed is judged."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dotmoe.common.errors import UserError
from dotmoe.common.tables import to_markdown
from dotmoe.export.config import ExportConfig, GgufConfig
from dotmoe.export.write import export
from dotmoe.measure.bench import (
    LlamaRunner,
    TransformersRunner,
    bench,
    break_even,
    ratio_quartiles,
    table,
)
from dotmoe.measure.config import BenchConfig
from runs import slow_but, weights_of

SMALL = {"batch_sizes": (1, 3), "prompt_tokens": 9, "context_tokens": (5,), "decode_steps": 2}
SMALL |= {"rounds": 2, "threads": 1}


@pytest.fixture(scope="module")
def pair(dense_of, layout_of, tokens_BT, tmp_path_factory):
    """Folder with `dense`, `glm4_moe` and `mixtral`, in float32: 12 experts of 8, 3 active."""
    folder = tmp_path_factory.mktemp("pair")
    dense = dense_of("llama")
    (folder / "dense").symlink_to(dense.folder)
    for name in ("glm4_moe", "mixtral"):
        export(dense, (layout_of(dense),), folder / name, ExportConfig(format=name), tokens_BT)
    return folder


@pytest.fixture(scope="module")
def gguf_pair(dense_of, layout_of, tokens_BT, tmp_path_factory):
    """Dense model and MoE as GGUF files in f32, to run."""
    pytest.importorskip("llama_cpp")
    folder, dense = tmp_path_factory.mktemp("gguf_pair"), dense_of("llama")
    options = {"verify_tokens": 64, "gguf_type": "f32", "gguf_tokenizer": "none"}
    for kind, name in (("dense", "gguf_dense"), ("glm4_moe", "gguf_glm4moe")):
        config = GgufConfig(format=name, **options)
        export(dense, (layout_of(dense),), folder / kind, config, tokens_BT)
    return {kind: folder / kind / "model-f32.gguf" for kind in ("dense", "glm4_moe")}


@pytest.mark.parametrize("workers", slow_but(["forked"], ["forked", "fresh"]))
@pytest.mark.parametrize("runtime", ["transformers", "llama.cpp"])
def test_checkpoints_and_gguf_files_are_measured(runtime, workers, pair, request):
    if workers == "forked":
        request.getfixturevalue("forked_workers")
    is_gguf = runtime == "llama.cpp"
    models = request.getfixturevalue("gguf_pair") if is_gguf else pair
    dense, moe = (models[name] if is_gguf else pair / name for name in ("dense", "glm4_moe"))
    told = []
    config = BenchConfig(dense=dense, moe=moe, **SMALL)
    result = bench(config, lambda done, total, note: told.append((done, total)))
    assert (told[0], told[-1]) == ((0, 6), (6, 6))
    result = json.loads(json.dumps(result))
    assert (result["origin"], result["runtime"]) == ("measured", runtime)
    assert {"commit", "versions", "hardware", "threads", "seed"} <= result["provenance"].keys()
    assert ("llama_cpp_python" in result["provenance"]["versions"]) == is_gguf
    names = [(point["point"]["name"], point["point"]["batch"]) for point in result["points"]]
    assert names == [("prefill", 1), ("decode", 1), ("decode", 3)]
    for point in result["points"]:
        dense, moe = point["dense"], point["moe"]
        assert all(side["tokens_per_s"] > 0 for side in (dense, moe))
        assert point["speed_ratio"] == pytest.approx(moe["tokens_per_s"] / dense["tokens_per_s"])
    if not is_gguf:
        held = sum(weight.nbytes for weight in weights_of(pair / "dense").values())
        assert result["dense"]["weights"]["stored_bytes"] == held
    printed = to_markdown(table(result))
    assert "decode x 3" in printed
    assert "3 of 12 experts" in printed


def test_break_even_is_told_of_given_rates():
    """By hand: 1.44 at batch 4, its inverse at 16: even in the middle of their logarithms, 8."""
    speeds = {("prefill", 512): [(1, 0.9)], ("decode", 128): [(1, 2.0), (4, 1.44), (16, 1 / 1.44)]}
    speeds["decode", 2048] = [(1, 1.01)]
    speeds["decode", 4096] = [(1, 0.7)]
    spread = {1.01: 0.05}
    points = [
        {"point": {"name": name, "tokens": tokens, "batch": batch}, "speed_ratio": ratio}
        | {"speed_ratio_quartiles": [ratio - spread.get(ratio, 0.01), ratio + 0.01]}
        for (name, tokens), rows in speeds.items()
        for batch, ratio in reversed(rows)
    ]
    points[-1]["speed_ratio_quartiles"] = [1.03, 1.93]  # not as its ratio
    assert break_even(points) == [
        "prefill, 512 tokens: the MoE is slower at batch 1",
        "decode, 128 tokens: the MoE is faster at batch 1, 4; slower at batch 16; even at about 8, "
        "interpolated",
        "decode, 2,048 tokens: the MoE is inconclusive at batch 1",
        "decode, 4,096 tokens: the MoE is inconclusive at batch 1",
    ]


def runner_of(folder, clock="wall"):
    return TransformersRunner(str(folder), "float32", "cpu", 1, clock, 3)


@pytest.mark.parametrize("runtime", ["transformers", "llama.cpp"])
def test_every_round_of_decode_computes_what_a_forward_over_all_tokens_does(runtime, pair, request):
    if runtime == "llama.cpp":
        file = request.getfixturevalue("gguf_pair")["dense"]
        runner = LlamaRunner(str(file), "auto", "cpu", 1, "wall", 3)
    else:
        runner = runner_of(pair / "dense")
        runner._model.register_forward_hook(lambda module, args, output: seen.append(output.logits))
    seen = []
    runner.prepare(2, 6, 3)
    model = AutoModelForCausalLM.from_pretrained(pair / "dense", dtype=torch.float32)
    with torch.no_grad():
        last_BV = model(runner._ids_BT).logits[:, -1]
    for _ in range(2):
        assert len(runner.run()) == 3
        if runtime == "llama.cpp":
            found = runner._runtime.lib.llama_get_logits(runner._runtime.context)
            seen.append(torch.from_numpy(np.ctypeslib.as_array(found, (2, 264)).copy()))
        # llama.cpp keeps keys and values in float16.
        assert torch.allclose(seen[-1].view(2, 264), last_BV, atol=0.05)


@pytest.mark.parametrize(
    ("models", "changes", "expected"),
    [
        ("dense glm4_moe", {"batch_sizes": (0,)}, "batch_sizes is 0, but it must be at least 1"),
        ("dense glm4_moe", {"batch_sizes": (), "prompt_tokens": 0}, "nothing to measure"),
        ("dense glm4_moe", {"threads": 2, "clock": "cpu"}, "clock is cpu with 2 threads"),
        ("dense moe.gguf", {}, r"moe.gguf is a GGUF file and .* is not"),
        ("no_ones.gguf moe.gguf", {}, r"~no-such-user/m\.gguf does not exist"),
        ("dense glm4_moe", {"prompt_tokens": 257}, "257, but must lie in 0 to 256"),
        ("dense glm4_moe", {"context_tokens": (4, 255)}, r"tokens \+ decode_steps is 257"),
        ("run dense", {}, r"run has 12 experts per layer .* 0 and .* Give a dense model"),
        ("dense nowhere", {}, r"nowhere does not exist"),
        ("dense dense", {}, r"DENSE and MOE are both .*dense. Name the MoE"),
        ("dense wider", {}, r"is a dense model, and so is .*: there is no MoE"),
        ("dense convolutions", {}, r"is a dense model, and so is .*: there is no MoE"),
        ("wider glm4_moe", {}, r"embedding \[264, 32\], .* 12 and \[264, 64\]"),
    ],
)
@pytest.mark.usefixtures("forked_workers")
def test_what_cannot_be_measured_is_refused(models, changes, expected, pair, tiny_dense, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "5_export").symlink_to(pair / "mixtral")
    others = {"run": tmp_path / "run", "wider": tiny_dense("llama", hidden_size=32)}
    others["convolutions"] = tiny_dense("lfm2")
    others["no_ones.gguf"] = "~no-such-user/m.gguf"
    dense, moe = (str(others.get(name, pair / name)) for name in models.split())
    with pytest.raises(UserError, match=expected):
        bench(BenchConfig(dense=dense, moe=moe, **{**SMALL, **changes}))


def test_a_context_that_is_too_long_is_refused_before_models_are_loaded(pair, monkeypatch):
    monkeypatch.setattr("dotmoe.measure.bench.Worker", lambda *_, **__: pytest.fail("was loaded"))
    options = SMALL | {"context_tokens": (257,)}
    config = BenchConfig(dense=str(pair / "dense"), moe=str(pair / "mixtral"), **options)
    with pytest.raises(UserError, match="context_tokens"):
        bench(config)


def test_the_clock_that_is_asked_for_is_read(pair):
    clocks = [runner_of(pair / "dense", clock)._now for clock in ("cpu", "wall")]
    assert clocks == [time.process_time, time.perf_counter]


def test_a_slow_spell_of_both_models_does_not_move_the_ratio_of_rounds():
    dense = [[2.0, 2.0], [20.0, 20.0], [4.0, 4.0]]
    moe = [[1.0, 1.0], [10.0, 10.0], [2.0, 2.0]]
    assert ratio_quartiles(dense, moe) == [2.0, 2.0]


def test_a_file_that_cannot_take_the_result_is_refused_before_anything_is_measured(
    pair, tmp_path, monkeypatch
):
    monkeypatch.setattr("dotmoe.measure.bench._measured", lambda *given: pytest.fail("was paid"))
    (tmp_path / "blocked").write_text("")
    (tmp_path / "results.json").write_text('{"dense": {"loss": 1.0}}')
    other = {side: {"name": f"another {side}"} for side in ("dense", "moe")}
    (tmp_path / "bench.json").write_text(json.dumps(other))
    for out, said in {
        tmp_path: "is a folder. Name a file",
        tmp_path / "blocked/bench.json": "cannot be written",
        Path("/proc/self/bench.json"): "cannot be written",
        tmp_path / "results.json": "exists and is no result of bench",
        tmp_path / "bench.json": "is a result of another dense and another moe, another pair",
    }.items():
        config = BenchConfig(dense=pair / "dense", moe=pair / "mixtral", out=str(out), **SMALL)
        with pytest.raises(UserError, match=said):
            bench(config)


@pytest.mark.usefixtures("forked_workers")
def test_a_pair_is_known_however_its_places_are_spelt(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(pair)
    names = {side: {"name": name} for side, name in (("dense", "dense"), ("moe", "./mixtral/"))}
    (tmp_path / "bench.json").write_text(json.dumps(names))
    out = str(tmp_path / "bench.json")
    assert bench(BenchConfig(dense="./dense", moe=pair / "mixtral", out=out, **SMALL))["points"]
