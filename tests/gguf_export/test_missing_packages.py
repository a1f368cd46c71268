"""Both packages are extras: without them there is one line with the remedy."""

import subprocess
import sys

import pytest

from dotmoe import llama_cpp
from dotmoe.errors import UserError
from dotmoe.gguf_export import LlamaCppModel


def test_without_gguf_the_remedy_is_told():
    program = """
import sys
sys.modules["gguf"] = None  # makes every import of it fail, installed or not
from dotmoe.errors import UserError
try:
    import dotmoe.gguf_export
except UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pip install 'dotmoe[gguf]'" in done.stdout
    assert done.stdout.count("\n") == 1


def test_without_llama_cpp_the_remedy_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(llama_cpp, "is_installed", lambda: False)
    with pytest.raises(UserError, match=r"pip install 'dotmoe\[llama-cpp\]'"):
        LlamaCppModel(tmp_path / "model.gguf", context=8)
