"""The functions of the package. Oracle: the command line with the same options, and stock files."""

import inspect
import json
import logging
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path

import datasets
import pandas
import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import dotmoe
from dotmoe.api.functions import Call
from dotmoe.api.inputs import Inputs
from dotmoe.cli.arguments import config_of
from dotmoe.cli.start import command_options
from dotmoe.common.errors import UserError
from dotmoe.common.files import read_json
from dotmoe.common.options import values_of
from dotmoe.common.progress import warn_once, warnings_once
from dotmoe.pipeline import stages
from runs import TEXT, TINY_CONVERT, refusal, weights_of, words

OPTIONS = {name: value for name, value in TINY_CONVERT.items() if name != "no_repair"}
OPTIONS |= {"repair": False, "progress": False}
FUNCTIONS = ("bench", "compare", "convert", "evaluate", "export", "finetune", "inspect", "prune")
MESSAGES = [
    [{"role": "user", "content": f"Figs {i}?"}, {"role": "assistant", "content": f"{i * 7}."}]
    for i in range(3)
]


@pytest.fixture(scope="module")
def loaded_model(tiny_dense):
    """A model and its tokenizer, as Transformers loads them."""
    folder = tiny_dense("llama")
    model = AutoModelForCausalLM.from_pretrained(folder)
    return {"model": model, "tokenizer": AutoTokenizer.from_pretrained(folder)}


@pytest.fixture(scope="module")
def converted(tiny_dense, text_file, tmp_path_factory):
    """A conversion by keywords."""
    out = tmp_path_factory.mktemp("converted") / "run"
    return dotmoe.convert(tiny_dense("llama"), out, data=text_file, **OPTIONS)


def test_names_complete_and_none_is_a_module():
    assert dir(dotmoe) == sorted([*dotmoe.__all__, "__version__"])
    assert list(dotmoe.__all__) == sorted(dotmoe.__all__)
    assert all(inspect.isfunction(getattr(dotmoe, name)) for name in FUNCTIONS)
    program = "import dotmoe.export.write, dotmoe; print(dotmoe.export.__module__)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.stdout.split() == ["dotmoe.api.functions"], said.stderr


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "prune"])
def test_a_function_has_the_options_of_its_command(name):
    signature = inspect.signature(getattr(dotmoe, name)).parameters
    options = {each.name for each in command_options(name) if not each.is_argument} - {"json"}
    arguments = {"model", "out", "run", "dense", "moe", "tokenizer", "progress"}
    assert set(signature) - arguments == options - arguments
    doc = getattr(dotmoe, name).__doc__
    assert "Returns:" in doc
    assert "UserError" in doc


def test_keywords_give_the_run_of_the_command_line(converted, finished):
    assert converted.folder.name == "run"
    ours, theirs = (read_json(run / "config.json") for run in (converted.folder, finished.folder))
    assert {name for name in ours if ours[name] != theirs[name]} == {"out"}
    moe = weights_of(converted.export)
    assert all(
        torch.equal(moe[name], each)
        for name, each in weights_of(finished.folder / "5_export").items()
    )


@pytest.mark.parametrize(
    ("command", "given"),
    [
        ("convert", {"active": 0.75, "data": "a.jsonl"}),
        ("convert", {"recipe": "small", "data": ("a", "b"), "steps": 7}),
        ("convert", {"targets": "both", "format": "dotmoe", "seq_len": 64}),
        ("convert", {"time": "2h", "eval_text": ["x.txt", "y.md"]}),
        ("inspect", {"gpu": "h100", "gpus": 2, "active": 0.5}),
        ("compare", {"methods": "cmoe", "seeds": [0, 1], "eval_text": Path("x.txt")}),
        ("finetune", {"steps": 2, "train": "lora", "lora_rank": 4}),
        ("evaluate", {"text": "x.txt", "window": 64, "against": "b"}),
        ("export", {"format": "gguf", "gguf_type": "q8_0"}),
        ("bench", {"batch_sizes": 1, "prompt_tokens": 0, "threads": 1}),
    ],
)
def test_a_call_means_what_its_command_line_means(command, given, tmp_path):
    places = ["a"] if command in ("inspect", "evaluate") else ["a", "b"]
    found = Call(command, *[*places, None][:2], None, given).config(Inputs(tmp_path))
    assert found == config_of(command, words(*places, **given))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activ": 0.5}, "activ is no option of dotmoe.convert. Did you mean active?"),
        ({"active": "75%"}, "active is '75%', but it must be a number or None."),
        ({"active": 75}, "active is 75, but it must be at most 1. Did you mean 0.75?"),
        ({"repair": "yes"}, "repair is 'yes', but it must be True or False."),
        (
            {"targets": "ffns"},
            "targets is 'ffns', but it must be one of ffn, attention, both. Did you",
        ),
        ({"eval_tokens": 2.5}, "eval_tokens is 2.5, but it must be a whole number."),
        ({"data_weights": "a"}, "data_weights is 'a', but it must be a number, or a list of such"),
        ({"lte_steps": 4}, "lte_steps is 4, but it is for method lte alone."),
        ({"recipe": "defalt"}, "Did you mean default?"),
        ({"data": 3}, "data is a int, but must be a source"),
        ({"data": datasets.DatasetDict()}, "Of a DatasetDict, name one split."),
        ({"data": ""}, "'' names no source. Name a file"),
        ({"data": []}, "data has no rows. Give texts, or leave data out."),
        ({"data": iter(())}, "data has no rows."),
        ({"data": ["a.txt", "Once there was a cat."]}, "names of sources, such as 'a.txt', and"),
        ({"data": [{"text": object()}]}, "row 1 of data cannot be written as JSON"),
        ({"data": iter([3])}, "row 1 of data is a int"),
        ({"data": "no/such.txt"}, "no/such.txt"),
        ({"tokenizer": object()}, "which has its own. Leave tokenizer out"),
        ({"config": {"active": 0.5}}, "but it must be text or a path. Give options as keywords."),
        ({"progress": "no"}, "progress is 'no', but it must be True or False."),
        ({"data": ["a.txt", "b.txt"], "data_weights": [1]}, "1 numbers, but data has 2 sources"),
        ({"json": True}, "json is for the command line; the result is a dict."),
        ({"model": 3}, "model is a int, which is no model of Transformers."),
        ({"model": torch.nn.Linear(2, 2)}, "model is a Linear, which is no model of Transformers."),
        ({"model": None}, "Missing from dotmoe.convert: model (Local folder"),
        ({"out": None}, "Missing from dotmoe.convert: out (Folder to write"),
    ],
)
def test_a_bad_call_says_so_in_one_line_and_writes_nothing(options, message, tmp_path):
    given = {"model": "embedded", "out": tmp_path / "out", "progress": False, **options}
    said = refusal(dotmoe.convert, **given)
    assert message in said
    assert "\n" not in said
    assert "--" not in said
    assert not list(tmp_path.iterdir())


def test_a_config_file_is_refused_for_an_option_without_effect(tmp_path):
    file = tmp_path / "config.json"
    values = values_of(dotmoe.recipe(model="embedded", out="OUT"))
    values["baseline"]["lte_steps"] = 7
    file.write_text(json.dumps(values))
    said = refusal(dotmoe.convert, config=file, progress=False)
    assert said.startswith(f"lte_steps in {file} is 7, but it is for method lte alone.")


def test_a_loaded_model_needs_its_tokenizer_and_all_of_its_weights(
    loaded_model, tmp_path, monkeypatch
):
    out = {"out": tmp_path / "out", "progress": False}
    assert "tokenizer=" in refusal(dotmoe.convert, loaded_model["model"], **out)
    with torch.device("meta"):
        hollow = AutoModelForCausalLM.from_config(loaded_model["model"].config)
    tokenizer = {"tokenizer": loaded_model["tokenizer"]}
    assert "not all in memory" in refusal(dotmoe.convert, hollow, **tokenizer, **out)
    named = {"tokenizer": "embedded", **out}
    assert "which has its own" in refusal(dotmoe.convert, "embedded", **named)
    own = loaded_model["model"].generation_config
    monkeypatch.setattr(own, "temperature", 0.5)
    monkeypatch.setattr(own, "do_sample", False)
    monkeypatch.setattr(own, "early_stopping", "sometimes")
    assert "cannot save" in refusal(dotmoe.convert, **loaded_model, **out)
    assert not list(tmp_path.iterdir())


def test_a_place_in_use_is_refused_before_anything_is_written(loaded_model, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    said = refusal(dotmoe.convert, out=tmp_path, data=iter([TEXT]), **loaded_model, **OPTIONS)
    assert "is in the way" in said
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_what_is_in_memory_gives_the_run_of_its_files(loaded_model, converted, tmp_path):
    out = tmp_path / "run"
    rows = datasets.Dataset.from_dict({"text": [TEXT], "at": [datetime(2020, 1, 2)]})
    first = dotmoe.convert(out=out, data=rows, **loaded_model, **OPTIONS)
    assert first.results["moe"]["loss"] == converted.results["moe"]["loss"]
    kept = sorted(path.name for path in (out / "inputs").iterdir())
    assert len(kept) == 2
    assert kept[1].startswith("text-")
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    texts = [{"text": TEXT, "at": "2020-01-02 00:00:00"}]
    again = dotmoe.convert(out=out, data=texts, **loaded_model, **OPTIONS)
    assert again.results == first.results
    assert times == {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}

    other = refusal(dotmoe.convert, out=out, data=iter(["other"]), **loaded_model, **OPTIONS)
    assert "holds a run with other options: data" in other
    with torch.no_grad():
        weight = loaded_model["model"].lm_head.weight
        weight[0, 0] += 1
        changed = refusal(dotmoe.convert, out=out, data=rows, **loaded_model, **OPTIONS)
        weight[0, 0] -= 1
    assert "model" in changed
    assert kept == sorted(path.name for path in (out / "inputs").iterdir())


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        (["One cat\nsat."], [{"text": "One cat\nsat."}]),
        (["One cat sat.", "Two cats."], [{"text": "One cat sat."}, {"text": "Two cats."}]),
        ("Once there was a cat.", [{"text": "Once there was a cat."}]),
        (iter(["one.txt"]), [{"text": "one.txt"}]),
        (MESSAGES, [{"messages": chat} for chat in MESSAGES]),
        (({"messages": chat} for chat in MESSAGES), [{"messages": chat} for chat in MESSAGES]),
        (datasets.Dataset.from_dict({"prompt": ["Wie?"]}), [{"prompt": "Wie?"}]),
        (datasets.Dataset.from_dict({"a": [1]}).to_iterable_dataset(), [{"a": 1}]),
    ],
)
def test_texts_chats_and_data_sets_become_rows(given, rows, tmp_path):
    (file,) = Inputs(tmp_path / "inputs").text_sources(given, "data")
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == rows


def test_a_table_is_its_rows_and_what_has_no_order_is_refused(tmp_path):
    """Oracle: the same rows as a list."""
    table = pandas.DataFrame({"text": ["One.", None], "label": [1, 2]})
    (file,) = Inputs(tmp_path / "inputs").text_sources(table, "data")
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    assert rows == [{"text": "One.", "label": 1}, {"text": None, "label": 2}]
    for given in ({"One.", "Two."}, {"text": ["One."]}):
        assert "to iterate over in their order" in refusal(
            Inputs(tmp_path / "in").text_sources, given, "x"
        )
    half = refusal(Inputs(tmp_path / "in").text_sources, ["abc \ud800 def", "x y"], "data")
    assert "row 1 of data cannot be written as JSON in UTF-8" in half


def test_two_calls_write_their_inputs_side_by_side(tmp_path):
    """Each into a file of its own, until it has the name of its content."""
    first, second = Inputs(tmp_path / "inputs"), Inputs(tmp_path / "inputs")

    def rows():
        yield "Alice wrote this."
        (other,) = second.text_sources(["Bob wrote this."], "data")
        assert "Bob" in Path(other).read_text()
        yield "And this."

    (file,) = first.text_sources(rows(), "data")
    assert Path(file).read_text().count("\n") == 2
    assert "Bob" not in Path(file).read_text()
    assert len(list((tmp_path / "inputs").iterdir())) == 2


def test_a_call_of_a_tokenizer_changes_no_run(loaded_model, tmp_path):
    inputs = Inputs(tmp_path / "inputs")
    before = inputs.model_folder(**loaded_model)
    loaded_model["tokenizer"](["a b", "c"], truncation=True, max_length=4)
    assert inputs.model_folder(**loaded_model) == before
    assert "transformers_version" not in read_json(Path(before) / "config.json")
    plain = tokenizers.Tokenizer.from_file(f"{before}/tokenizer.json")
    assert len(plain.encode(TEXT[:200]).ids) > 4


def test_a_run_of_what_is_in_memory_may_be_moved(loaded_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dotmoe.convert(out="run", data=iter([TEXT]), **loaded_model, **OPTIONS)
    absolute = dotmoe.convert(out=tmp_path / "run", data=iter([TEXT]), **loaded_model, **OPTIONS)
    assert absolute.export.is_dir()
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    dotmoe.export(tmp_path / "moved", tmp_path / "again", active_experts=1)
    assert (tmp_path / "again/config.json").is_file()
    moved = dotmoe.convert(out=tmp_path / "moved", data=iter([TEXT]), **loaded_model, **OPTIONS)
    assert moved.export.is_relative_to(tmp_path / "moved"), "the same call goes on there"
    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    copied = dotmoe.convert(out=tmp_path / "copy", data=iter([TEXT]), **loaded_model, **OPTIONS)
    assert copied.export.is_relative_to(tmp_path / "copy"), "and in a copy beside it"


@pytest.fixture
def odd_torch():
    """Torch as a program may have left it: another dtype, no gradients, autocast."""
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.set_default_dtype(torch.float64)
        yield
    torch.set_default_dtype(torch.float32)


def test_a_call_is_the_same_whatever_a_program_has_set_in_torch(loaded_model, tmp_path, request):
    options = {name: each for name, each in OPTIONS.items() if name != "calibration_tokens"}
    options |= {"recipe": "paper", "steps": 2, "batch_size": 2, "data": iter([TEXT])}
    usual = dotmoe.convert(out=tmp_path / "usual", **loaded_model, **options)
    request.getfixturevalue("odd_torch")
    options["data"] = iter([TEXT])
    other = dotmoe.convert(out=tmp_path / "other", **loaded_model, **options)
    assert torch.get_default_dtype() == torch.float64
    assert torch.is_inference_mode_enabled()
    found = [load_file(run.folder / "2_align/state.safetensors") for run in (usual, other)]
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(
    "given",
    ["python-stdlib", "allenai/c4:en", "a file.txt", ["x.jsonl@test#body", "b.parquet"], "~/x"],
)
def test_names_stay_names(given, tmp_path):
    found = Inputs(tmp_path / "inputs").text_sources(given, "data")
    assert list(found) == ([given] if isinstance(given, str) else given)
    assert not list(tmp_path.iterdir())


def test_a_recipe_takes_single_options_and_whole_groups():
    config = dotmoe.recipe("default", active=0.75, data="x.jsonl", steps=3)
    assert (config.experts.active, config.data.data, config.align.steps) == (0.75, ("x.jsonl",), 3)
    assert dotmoe.recipe(data=dotmoe.DataConfig(data=("x.jsonl",))).data == config.data
    assert dotmoe.finetune_recipe("small", steps=2, run=Path("r")).finetune.steps == 2
    with pytest.raises(UserError, match=r"activ is no option of dotmoe.recipe. Did you mean act"):
        dotmoe.recipe(activ=0.5)
    with pytest.raises(ValueError, match="data is 3"):
        dotmoe.recipe(data=3)


def test_a_whole_config_is_given_alone(converted, text_file, tiny_dense):
    options = {name: value for name, value in OPTIONS.items() if name != "progress"}
    given = {"model": tiny_dense("llama"), "out": converted.folder, "data": text_file}
    config = dotmoe.recipe(**given, **options)
    assert dotmoe.convert(config, progress=False).results == converted.results
    assert "is given beside a whole config" in refusal(dotmoe.convert, config, active=0.5)
    assert "takes a FinetuneRunConfig" in refusal(dotmoe.finetune, config)


class _Cells(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.cells = []
        self.feed(text)

    def handle_data(self, data):
        self.cells.append(data)


def test_results_print_and_show_their_tables(converted, tiny_dense, text_file):
    loss = converted.results["dense"]["perplexity"]
    evaluated = dotmoe.evaluate(converted, text=[TEXT], max_tokens=512, progress=False)
    dense = tiny_dense("llama")
    plan = dotmoe.inspect(dense, expert_size=8, active=0.25)
    exported = dotmoe.export(converted, converted.folder.parent / "moe", progress=False)
    for result, word in [
        (converted, f"{loss:.2f}"),
        (evaluated, f"{evaluated['perplexity']['perplexity']:.2f}"),
        (plan, f"{plan['counts']['stored']:,}"),
        (exported, f"{exported['total_bytes']:,}"),
    ]:
        assert word in repr(result)
        assert word in " ".join(_Cells(result._repr_html_()).cells)
        assert len(repr(result)) < 8_000
    json.dumps(evaluated)
    assert str(converted.export) in repr(replace(converted, folder=Path("moved")))
    assert str(converted.export) in repr(converted)


def test_loaded_models_are_inspected_and_evaluated(loaded_model, tiny_dense, text_file):
    folder = tiny_dense("llama")
    options = {"text": text_file, "max_tokens": 512, "progress": False}
    ours = dotmoe.evaluate(**loaded_model, **options)["perplexity"]
    assert ours["loss"] == dotmoe.evaluate(folder, **options)["perplexity"]["loss"]
    ours, theirs = (
        dotmoe.inspect(**loaded_model, expert_size=8),
        dotmoe.inspect(folder, expert_size=8),
    )
    assert ours["counts"] == theirs["counts"]


def test_progress_is_shown_unless_it_is_off(converted, text_file, capfd):
    options = {"text": text_file, "max_tokens": 512}
    capfd.readouterr()
    dotmoe.evaluate(converted, **options)
    assert " of " in capfd.readouterr().err
    dotmoe.evaluate(converted, **options, progress=False)
    assert capfd.readouterr().err == ""


def test_other_functions_take_the_result_and_what_is_in_memory(converted, loaded_model, tmp_path):
    tuned = dotmoe.finetune(
        converted, tmp_path / "tuned", data=iter([TEXT]), steps=2, batch_size=2, progress=False
    )
    assert tuned.results["moe"]["loss"] > 0
    assert len(list((tmp_path / "tuned/inputs").iterdir())) == 1
    options = {name: OPTIONS[name] for name in ("seq_len", "eval_tokens", "calibration_tokens")}
    options |= {"data": [{"text": TEXT}], "progress": False}
    pruned = dotmoe.prune(out=tmp_path / "pruned", method="wanda_2_4", **loaded_model, **options)
    assert f"{pruned['pruned']['perplexity']:.2f}" in repr(pruned)
    options |= {"eval_text": iter([TEXT]), "methods": "random_split", "expert_size": 8}
    compared = dotmoe.compare(out=tmp_path / "compared", active=0.25, **loaded_model, **options)
    assert "random_split" in compared._repr_html_()
    assert len(list((tmp_path / "compared/inputs").iterdir())) == 2


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        ("compare", {"time": "1h"}, "time is no option"),
        ("convert", {"other_text": "a.txt"}, "other_text is no option"),
        ("convert", {"followed": ["active"]}, "followed is no option"),
        ("prune", {"method": "modegpt", "repair_epochs": 5}, "repair_epochs is 5.* no such step"),
        ("prune", {"method": "modegpt", "time": "1h"}, "time is 1h.* no such step"),
        ("prune", {"method": "modegpt", "ridge": 0.1}, "ridge is 0.1.* no such step"),
        ("prune", {"method": "modegpt", "tau_end": 0.2}, "tau_end is 0.2.* no such step"),
        ("prune", {"method": "modegpt", "steps": 5}, "disp_llm"),
        ("prune", {"method": "wanda_2_4", "active": 0.25}, "zeroes two of four weights"),
    ],
)
def test_what_is_no_option_or_has_no_effect_is_refused(
    function, options, words, tiny_dense, tmp_path
):
    call = getattr(dotmoe, function)
    with pytest.raises(UserError, match=words):
        call(str(tiny_dense("llama")), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_inputs_of_a_stopped_run_are_kept(loaded_model, tmp_path, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "export", stopped)
    with pytest.raises(KeyboardInterrupt):
        dotmoe.convert(out=tmp_path / "run", data=iter([TEXT]), **loaded_model, **OPTIONS)
    assert len(list((tmp_path / "run/inputs").iterdir())) == 2


def test_a_warning_of_a_call_comes_once(monkeypatch, capsys):
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler()])
    for _ in range(2):
        with warnings_once():
            for _ in range(3):
                logging.getLogger("dotmoe.models").warning("no chat template")
                warn_once(logging.getLogger("dotmoe.text"), "a field is not read")
    assert capsys.readouterr().err == "no chat template\na field is not read\n" * 2


def test_a_model_in_memory_is_compared_with_a_run(converted, loaded_model, text_file):
    """Its tokenizer is of the loaded side alone."""
    model, tokenizer = loaded_model["model"], loaded_model["tokenizer"]
    how = {"text": text_file, "max_tokens": 300, "window": 64, "progress": False}
    found = dotmoe.evaluate(converted, against=model, tokenizer=tokenizer, **how)
    expected = dotmoe.evaluate(converted, against=model.name_or_path, **how)
    for side in ("against", "model"):
        assert found["perplexity"][side]["loss"] == expected["perplexity"][side]["loss"]
    with pytest.raises(UserError, match="which has its own"):
        dotmoe.evaluate(str(converted.folder), tokenizer=tokenizer, **how)


def test_an_error_names_no_file_that_is_gone(loaded_model, tmp_path):
    """The folder of a model in memory is removed with the run that did not begin."""
    model = loaded_model["model"]
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    model.config.tie_word_embeddings = True
    with pytest.raises(UserError) as caught:
        dotmoe.convert(out=tmp_path / "run", data=iter([TEXT]), **loaded_model, **OPTIONS)
    assert "in the loaded model differ" in str(caught.value)
    assert str(tmp_path) not in str(caught.value)
    chat = [[{"role": "user", "content": "Hi"}]]
    with pytest.raises(UserError) as caught:
        dotmoe.convert(loaded_model["model"].name_or_path, tmp_path / "x", data=chat, **OPTIONS)
    assert str(tmp_path / "x") not in str(caught.value)
