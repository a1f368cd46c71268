"""Skips where GGUF files cannot be written, or llama.cpp is not installed."""

import pytest

pytest.importorskip("gguf")


@pytest.fixture(scope="session")
def llama_cpp() -> None:
    """Skips where llama-cpp-python is not installed."""
    pytest.importorskip("llama_cpp")
