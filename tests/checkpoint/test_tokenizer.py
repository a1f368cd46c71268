"""Ids are those of tokenizer.json as the `tokenizers` library reads it; files stay as they are."""

import json
import shutil

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from dotmoe.cli import run
from dotmoe.common.errors import UserError
from dotmoe.models.save import write_weights
from dotmoe.models.source import _UNWANTED, _WANTED
from dotmoe.models.tokenizer import load_tokenizer, tokenizer_notes
from dotmoe.text.packing import pack
from dotmoe.text.rows import Document
from runs import TINY_CONVERT, loaded, put_into, words
from zoo import KINDS, write_tokenizer

TEXTS = [
    *("hello", " hello", "  the 1234 x", "\n\nthe\n\n\n", "\tx", " ", "", "IT'S the 2023 's"),
    *(
        "def f():\n    return 12345\n\n\n",
        "é日本 🙂 \u00a0 e\u0301",
        "a<s>b </s> <|im_end|> c<unk>",
    ),
]
REBUILT = {("llama2", "llama"), ("codellama", "llama"), ("yi", "llama"), ("smollm2", "llama")}
REBUILT |= {("r1_qwen", "qwen2")}
"""Kinds that Transformers rebuilds wrongly for a model type."""
OTHERS = [("qwen2", "qwen2"), ("qwen2", "qwen3"), ("phi3", "phi3")]
OTHERS += [("olmo2", "olmo2"), ("granite3", "granite"), ("mistral3", "mistral")]
OTHERS += [("llama2", "mistral"), ("nemo", "mistral"), ("phi4", "phi3")]
OTHERS += [(kind, "llama") for kind in ("llama3", "r1_llama", "falcon3", "yi", "phi4", "olmo2")]


def written(folder, kind, model_type="llama", **config):
    rows = write_tokenizer(folder, kind, **config)
    text = json.dumps({"model_type": model_type, "vocab_size": rows})
    (folder / "config.json").write_text(text)
    return rows


def ids_of(tokenizer, texts=TEXTS):
    return tokenizer(texts, add_special_tokens=False).input_ids


def ids_in_file(folder, texts=TEXTS):
    whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [whole.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.mark.parametrize(("kind", "model_type"), [*sorted(REBUILT), *OTHERS])
def test_ids_are_those_of_the_file(kind, model_type, tmp_path, caplog):
    rows = written(tmp_path, kind, model_type)
    tokenizer = load_tokenizer(tmp_path, rows)
    assert ids_of(tokenizer) == ids_in_file(tmp_path)
    assert max(map(max, filter(None, ids_of(tokenizer)))) < rows
    if (kind, model_type) in REBUILT:
        assert "does not give the ids of tokenizer.json" in caplog.text
    assert (tokenizer.bos_token, tokenizer.eos_token) == (KINDS[kind].bos, KINDS[kind].eos)
    named = AutoTokenizer.from_pretrained(tmp_path).all_special_tokens
    assert set(tokenizer.all_special_tokens) == set(named) & set(tokenizer.get_vocab())
    # Prompts get the BOS of the file's post-processor.
    begin = [tokenizer.bos_token_id] if KINDS[kind].adds_bos else []
    assert tokenizer("the").input_ids == [*begin, *ids_of(tokenizer, ["the"])[0]]


def test_texts_of_the_method_begin_with_the_bos_that_the_tokenizer_names(tmp_path):
    for kind in ("yi", "qwen2"):  # neither is put before a prompt
        rows = written(tmp_path / kind, kind)
        tokenizer = load_tokenizer(tmp_path / kind, rows)
        first = pack([Document("the"), Document("in")], tokenizer)[0].tolist()[0]
        assert (first == tokenizer.bos_token_id) == (kind == "yi")


def test_a_class_that_needs_other_code_is_read_from_the_file(tmp_path):
    auto_map = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    rows = written(tmp_path, "llama3", tokenizer_class="OwnTokenizer", auto_map=auto_map)
    assert ids_of(load_tokenizer(tmp_path, rows)) == ids_in_file(tmp_path)


def test_padding_and_truncation_in_the_file_do_not_count(tmp_path, caplog):
    rows = written(tmp_path, "llama3")
    expected = ids_in_file(tmp_path)
    whole = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    whole.enable_truncation(3)
    whole.enable_padding(length=3, pad_token="<|eot_id|>")
    whole.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path, rows)
    assert ids_of(tokenizer) == expected
    assert not caplog.text


@pytest.fixture
def model_of(tiny_dense, tmp_path):
    """A tiny llama folder with a tokenizer of a kind, and the additional files that hubs have."""

    def make(kind, *, rows=None, **config):
        folder = tmp_path / f"dense-{kind}"
        num_ids = write_tokenizer(tmp_path / kind, kind)
        dense = tiny_dense("llama", vocab_size=rows or num_ids, dtype="float32")
        shutil.copytree(dense, folder)
        for path in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (folder / path).unlink(missing_ok=True)
        shutil.copytree(tmp_path / kind, folder, dirs_exist_ok=True)
        put_into(folder / "config.json", **config)
        return folder

    return make


FURTHER = {
    "special_tokens_map.json": '{"bos_token":   "<s>"}\n',
    "added_tokens.json": "{ }",
    "tokenizer.model": "not read, because tokenizer.json is there",
    "merges.txt": "#version: 0.2\n",
    "chat_template.jinja": "{{ messages }}\n",
    "additional_chat_templates/rag.jinja": "{{ documents }}\n",
}


def test_files_stay_as_they_are_in_all_that_is_written(model_of, exported, tmp_path):
    folder = model_of("llama2")
    for name, text in FURTHER.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    names = [*FURTHER, "tokenizer.json", "tokenizer_config.json"]
    dense = loaded(folder)
    write_weights(dense, tmp_path / "again")  # what finetune and prune write
    export = exported(dense)
    for out in (tmp_path / "again", export.folder):
        for name in names:
            assert (out / name).read_bytes() == (folder / name).read_bytes(), name
    assert ids_of(AutoTokenizer.from_pretrained(export.folder)) == ids_in_file(folder)
    assert not tokenizer_notes(export.folder)
    assert [note for note in tokenizer_notes(folder) if "LlamaTokenizer of Transformers" in note]


def test_what_transformers_makes_of_other_files_is_written_beside_them(
    model_of, exported, caplog, monkeypatch
):
    folder = model_of("smollm2")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(model["merges"]))
    (folder / "tokenizer.json").unlink()
    made = exported(loaded(folder)).folder
    assert "has no tokenizer.json" in caplog.text
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        assert (made / name).read_bytes() == (folder / name).read_bytes()
    assert ids_in_file(made) == ids_of(AutoTokenizer.from_pretrained(folder))


def test_a_package_that_a_conversion_may_need_is_named(tmp_path):
    written(tmp_path, "llama2")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0b\x0a\x05<unk>\x15\x00\x00\x00\x00")
    with pytest.raises(UserError, match=r"no tokenizer\.json: .*pip install sentencepiece"):
        load_tokenizer(tmp_path)


def test_of_the_hubs_subfolders_only_chat_templates_are_fetched():
    names = ["tokenizer.json", "additional_chat_templates/rag.jinja", "merges.txt", "config.json"]
    others = ["original/tokenizer.model", "onnx/config.json", "original/consolidated.00.pth"]
    patterns = {"allow_patterns": _WANTED, "ignore_patterns": _UNWANTED}
    assert list(filter_repo_objects([*names, *others], **patterns)) == names


def with_pad(folder, number, **flags):
    path = folder / "tokenizer.json"
    parts = json.loads(path.read_text())
    token = parts["added_tokens"][0] | {"id": number, "content": "<pad>", **flags}
    parts["added_tokens"].append(token)
    path.write_text(json.dumps(parts))
    put_into(folder / "tokenizer_config.json", pad_token="<pad>")


@pytest.mark.parametrize(("kind", "pad"), [("llama2", "rows"), ("llama3", -1), ("llama2", None)])
def test_a_pad_token_beyond_the_embedding_converts(
    kind, pad, model_of, heldout_file, tmp_path, caplog
):
    rows = write_tokenizer(tmp_path / "size", kind)
    pad = rows if pad == "rows" else pad
    folder = model_of(kind, pad_token_id=pad)
    with_pad(folder, rows)
    dense = loaded(folder)
    assert "'<pad>' have ids beyond" in caplog.text
    ids = ids_of(dense.tokenizer, ["a <pad> in"])[0]
    assert max(ids) < rows
    assert dense.tokenizer.decode(ids).strip() == "a <pad> in"
    plain = model_of("qwen2", rows=rows)  # the same weights
    tokens = torch.arange(24).view(1, 24)
    expected = AutoModelForCausalLM.from_pretrained(plain)(input_ids=tokens).logits
    assert torch.equal(dense.model(input_ids=tokens).logits, expected)
    options = TINY_CONVERT | {"data": heldout_file, "steps": 0}
    assert run(words("convert", folder, tmp_path / "run", **options)) == 0
    out = tmp_path / "run" / "5_export"
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert json.loads((out / "config.json").read_text())["pad_token_id"] is None


def test_a_token_of_ordinary_text_beyond_the_embedding_is_refused(tmp_path):
    rows = written(tmp_path, "llama3")
    with pytest.raises(UserError, match=f"ids up to {rows - 1}, but the embedding has {rows - 1}"):
        load_tokenizer(tmp_path, rows - 1)
    with_pad(tmp_path, rows, special=False)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=f"ids up to {rows}, but the embedding has {rows}"):
        load_tokenizer(tmp_path, rows)
