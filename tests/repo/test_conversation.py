"""A conversation with a model. Oracle: the chat itself, as the template writes it."""

import shutil
from types import SimpleNamespace

import conversation
from dotmoe.measure.evaluate.models import StockModel, loaded
from dotmoe.models.config import LoadConfig
from runs import put_into

CHATML = (
    "{% for m in messages %}<u>{{ m['role'] }}:{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<u>assistant:{% endif %}"
)


def test_each_question_comes_after_all_that_was_said(tiny_dense, tmp_path, monkeypatch):
    folder = shutil.copytree(tiny_dense("qwen2"), tmp_path / "speaker")
    put_into(folder / "tokenizer_config.json", chat_template=CHATML)
    tokenizer = loaded(folder, LoadConfig()).tokenizer
    asked = []

    def answer(model, tokenizer, prompts, new_tokens):
        asked.append(tokenizer.decode(prompts[0]))
        said = tokenizer(f"answer {len(asked)}").input_ids
        return [said if len(asked) % 2 else (said * new_tokens)[:new_tokens]]

    monkeypatch.setattr(conversation, "generated", answer)
    monkeypatch.setattr(conversation, "QUESTIONS", ("One?", "Two?", "Three?"))
    stock = StockModel(SimpleNamespace(), tokenizer, "float32", 1024)
    turns = conversation.conversation(stock, 40, lambda done, total: None)
    assert [turn["ended"] for turn in turns] == [True, False, True]
    said = []
    for turn, prompt in zip(turns, asked, strict=True):
        said.append({"role": "user", "content": turn["question"]})
        assert prompt == tokenizer.apply_chat_template(
            said, tokenize=False, add_generation_prompt=True
        )
        said.append({"role": "assistant", "content": turn["answer"]})
