"""Tokenizers with and without a BOS token."""

import pytest

from dotmoe.load import LoadConfig, load_dense


@pytest.fixture(scope="session")
def with_bos(tiny_dense):
    return load_dense(str(tiny_dense("llama")), LoadConfig(device="cpu")).tokenizer


@pytest.fixture(scope="session")
def without_bos(tiny_dense):
    return load_dense(str(tiny_dense("qwen2")), LoadConfig(device="cpu")).tokenizer
