"""A tiny random pair, written once: checkpoints, and GGUF files where they can be written."""

from pathlib import Path

import pytest
import torch

from dotmoe.bench.random_pair import (
    Shape,
    load_random_dense,
    random_layout,
    random_text,
    write_random_dense,
)
from dotmoe.export import ExportConfig, export

SHAPE = Shape(width=32, ffn_width=96, layers=2, heads=4, kv_heads=2, vocabulary=320, context=256)
EXPERTS, ACTIVE = 12, 3


@pytest.fixture(scope="session")
def shape() -> Shape:
    """Sizes of the dense model."""
    return SHAPE


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `dense`, `glm4_moe` and `mixtral`, in float32."""
    folder = tmp_path_factory.mktemp("pair")
    write_random_dense(SHAPE, folder / "dense", torch.float32, seed=0)
    dense = load_random_dense(folder / "dense", torch.float32)
    layout = random_layout(SHAPE, EXPERTS, ACTIVE, seed=0)
    for name in ("glm4_moe", "mixtral"):
        config = ExportConfig(format=name, verify_tokens=256)
        export(dense, layout, folder / name, config, random_text(SHAPE, 256, seed=0))
    return folder


@pytest.fixture(scope="session")
def gguf_pair(pair: Path) -> tuple[Path, Path]:
    """Dense model and MoE as GGUF files in f32, to run."""
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    from dotmoe.gguf_export import GgufConfig, export_gguf, write_dense_gguf

    dense = load_random_dense(pair / "dense", torch.float32)
    layout = random_layout(SHAPE, EXPERTS, ACTIVE, seed=0)
    text_BT = random_text(SHAPE, 256, seed=0)
    config = GgufConfig(format="gguf_llama", tokenizer="none", verify_tokens=64)
    write_dense_gguf(dense, pair / "dense-f32", config, text_BT)
    export_gguf(dense, layout, pair / "moe-f32", config, text_BT)
    return pair / "dense-f32" / "model-f32.gguf", pair / "moe-f32" / "model-f32.gguf"
