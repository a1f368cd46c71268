"""Tokenizers with and without a BOS token."""

import pytest


@pytest.fixture(scope="session")
def with_bos(dense_of):
    return dense_of("llama").tokenizer


@pytest.fixture(scope="session")
def without_bos(dense_of):
    return dense_of("qwen2").tokenizer
