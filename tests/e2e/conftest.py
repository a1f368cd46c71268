"""A tiny model that chats, and answers of a few tokens."""

import shutil

import pytest
from speakers import CHATML

from dotmoe.text import answering, writing
from runs import put_into


@pytest.fixture
def short_answers(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    short = writing.Sampling(new_tokens=24)
    for name in ("ANSWERS", "TURNS", "FREE"):
        monkeypatch.setattr(writing, name, short)
    monkeypatch.setattr("dotmoe.measure.evaluate.own_answers.ANSWERS", short)
    monkeypatch.setattr(answering, "AT_ONCE", 8)


@pytest.fixture
def speaker(tiny_dense, tmp_path):
    folder = shutil.copytree(tiny_dense("qwen2"), tmp_path / "speaker")
    put_into(folder / "tokenizer_config.json", chat_template=CHATML)
    return folder
