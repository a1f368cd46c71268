"""Exit status and message of commands that cannot work: one line on standard error, status 2.

All that can be wrong with a model is in `test_load.py`, with a text in `data/test_sources.py`.
"""

import re

import pytest

REFUSED = {
    "nosuch": "nosuch.*convert",
    "convrt": "Did you mean convert",
    "convert": r"Missing from dotmoe convert: MODEL \(",
    "convert embedded": "OUT",
    "convert {tmp}/none OUT --data TEXT": "none does not exist",
    "convert embedded OUT --data {tmp}/none.txt": r"none\.txt does not exist",
    "convert embedded {text} --data TEXT": "is in the way",
    "convert embedded {run}/5_export/new --data TEXT": "new is inside .*/5_export, a model. Choose",
    "export RUN {run}/5_export/new": "new is inside .*/5_export, a model",
    "convert embedded {tmp}/\udcff/new --data TEXT": r"\\xff/new is not UTF-8\. Choose a folder",
    "export RUN {tmp}/\udcff": r"\\xff is not UTF-8",
    "convert embedded OUT --data {tmp}": "is an empty folder. Name one with files: .txt",
    "convert embedded {text}/run --data TEXT": "cannot be made",
    "convert embedded OUT --data TEXT --steps many": "many",
    f"convert embedded OUT --data TEXT --steps {'x' * 150}": f"'{'x' * 150}'",
    "convert embedded OUT --data TEXT --lr 0": r"lr is 0\.0.*above 0",
    "convert embedded OUT --data TEXT --lr nan": "lr is nan",
    "convert embedded OUT --data TEXT --active 1.5": r"1\.5.*at most 1",
    "convert embedded OUT --data TEXT --expert-size 7": "--expert-size is 7, which does not divide",
    "convert embedded OUT --data TEXT --format glm": "glm.*glm4_moe",
    "convert embedded OUT --data TEXT --method dotmoe": "Did you mean dot_moe",
    "convert embedded OUT --data TEXT --device bogus": "device is 'bogus', but it must be",
    "convert embedded OUT --recipe papr": "Did you mean paper",
    "convert embedded OUT --data TEXT --recipe paper --config x": "one of them",
    "convert embedded OUT --data TEXT --recipe": "expected one argument",
    "convert embedded OUT --data TEXT --active-experts 97": "--active-experts is 97, but a",
    "convert embedded OUT --data TEXT --expert-size 6": "6.*multiples of 8",
    "convert embedded OUT --data TEXT --dtype flot32": "Did you mean float32",
    "convert embedded OUT --data TEXT --device meta": "'meta'.*cuda:N",
    "convert embedded OUT --data TEXT --eval-text {tmp}/none.txt": "none.txt does not exist",
    "convert embedded OUT --data TEXT --kl-weight 0 --ce-weight 0": "nothing to learn",
    "convert --config {tmp}/none.json": r"none\.json cannot be read",
    "finetune {tmp}/none OUT": "none is no run with a finished extract",
    "export x[/y] OUT": r"x\[/y\] is no run",
    "export {tmp} OUT --gguf-type q9": "q9",
    "evaluate {tmp}/none --text TEXT": "none does not exist",
    "evaluate embedded --text {tmp}/none.txt": r"none\.txt does not exist",
    "evaluate RUN --text TEXT --curve --against MODEL": "--curve measures MODEL alone",
    "evaluate RUN --prompts x": "prompts is .* for --generate alone. Give --generate as well",
    "evaluate RUN --generate 3": "Give --prompts",
    "evaluate RUN --text TEXT --shots 0": "shots is 0, but it is for --tasks alone",
    "evaluate RUN": "there is nothing to measure. Give --text FILE",
    "evaluate RUN --fidelity --generate 3 --prompts x": "--text names no file",
    "convert --stpes 3": "--stpes is no option of dotmoe convert. Did you mean --steps",
    "finetune --actve 3": "--actve is no option of dotmoe finetune.* See dotmoe finetune",
    "report RUN --out x": "--out is no option of dotmoe report. It is one of dotmoe ",
    "compare --method cmoe": "--method is no option of dotmoe compare. It is one of .*convert",
    "inspect embedded --steps": "--steps has no value",
    "convert embedded OUT -data TEXT": "Did you mean --data",
    "convert embedded OUT --tasks paper": "--tasks is no option .* one of dotmoe evaluate",
    "convert embedded OUT extra": "extra is one word too many",
    "convert embedded OUT --repair no": "no is one word too many. --repair takes no value",
    "quickstart OUT": "one word too many",
    "finetune": r"Missing from dotmoe finetune: RUN \(.*\), OUT \(",
    "convert embedded OUT --active 25%": "--active is '25%', but it must be a number.* 0.25",
    "convert embedded OUT --seed x": "--seed is 'x', but it must be a whole number",
    "convert embedded OUT --data TEXT --lr 1e-4": "--lr is an option of the alignment, which is of",
    "convert embedded OUT --data TEXT --time 5": "time is '5', but it must be a duration, as 30m",
    "convert RUN OUT --data TEXT": "is a dotmoe run, not a model. Name its 5_export",
    "finetune RUN RUN": "RUN and OUT are both",
    "finetune RUN {run}/.": "RUN and OUT are both",
    "bench X X": "DENSE and MOE are both X",
    "bench MODEL {tmp}/none": "none does not exist",
    "inspect {tmp}/none": "none does not exist",
    "compare embedded OUT --data TEXT --methods nosuch": "nosuch",
    "analyse {tmp}/none": "none is no run with a finished extract",
    "report {tmp}/none": "none is no finished run",
    "quickstart {tmp} --steps -1": "--steps is no option of dotmoe quickstart",
    "finetune RUN OUT --train lore": "Did you mean lora?",
    "finetune RUN OUT --data self --recipe paper": r"would write [\d,]{12,} tokens itself.*--data",
    "convert embedded OUT --steps 999999": r"would write [\d,]{12,} tokens itself.*--answer-tokens",
    "finetune RUN OUT --kl-weight 0": "--kl-weight and --ce-weight are both 0",
    "finetune RUN OUT --data nothing.txt": "nothing.txt does not exist",
    "export RUN --active-experts 2": r"Missing from dotmoe export: OUT \(",
    "export RUN OUT --format mixtrel": "Did you mean mixtral?",
    "export RUN OUT --format qwen3_moe": "Formats that can hold it: glm4_moe, mixtral",
    "export RUN OUT --active-experts 13": "Choose 1 to 12",
    "convert MODEL OUT --data TEXT --format gguf": "dotmoe export RUN",
    "evaluate RUN --text TEXT --curve 99": "Choose 1 to 12",
    "evaluate GGUF --text TEXT": r"model\.gguf",
    "inspect embedded --gpus 0": "gpus is 0, but it must be at least 1",
    "inspect embedded --first-dense-layers 5": "--first-dense-layers is 5, .* Choose 0 to 4",
    "inspect embedded --active 25": r"active is 25\.0.*at most 1\. Did you mean 0\.25\?",
    "evaluate MODEL --text TEXT --out {text}": "text.txt is a file or in one",
    "evaluate MODEL --text TEXT --out {text}/results": "results is a file or in one",
    "export RUN OUT --gguf-type q8_0": "--gguf-type does not apply to format auto",
    "export RUN OUT --format gguf --export-dtype bfloat16": "--export-dtype .* gguf",
    "export RUN OUT --format gguf_llama --max-shard-gib 1": "--max-shard-gib .* gguf_llama",
    "export RUN OUT --format gguf_dense --active-experts 2": "--active-experts .* gguf_dense",
    "convert embedded OUT --data TEXT --heads-per-expert 2": "targets is ffn",
    "convert embedded OUT --data TEXT --targets both --shared 0.2": "only targets ffn can",
    "convert embedded OUT --data TEXT --targets attention --heads-per-expert 4": "divide the 6",
    "convert embedded OUT --data TEXT --targets both --format glm4_moe": "can hold it: dotmoe",
    "convert embedded OUT --data TEXT --targets both --method cmoe": "cmoe splits only FFNs",
    "compare embedded OUT --eval-text TEXT --targets both --finetune-steps 2": "neurons only",
    "compare embedded OUT --data TEXT": "--eval-text names no text.*--eval-text",
    "compare embedded OUT --eval-text TEXT --methods": "methods names none",
    "finetune RUN OUT --data-seed 1": "data names no source",
    "convert embedded OUT --data TEXT --tau-end 5": "--tau-end is 5.0, but it is for --steps",
    "convert embedded OUT --data TEXT --tau-start 5": "--tau-start is 5.0, but it is for --steps",
    "convert embedded OUT --data TEXT --data-weights 1 2": "--data-weights has 2 .* 1 sources",
    "convert embedded OUT --data prompts TEXT --data-weights 1": "has 1 numbers, .* 2 sources",
    "convert embedded OUT --data-weights 1": "numbers, but data has 0 sources",
    "convert embedded OUT --data {text}#text": "names the field text, but .*text.txt has none",
    "convert embedded OUT --data TEXT --eval-text self": "self asks .* a file or folder .* ./self",
    "evaluate embedded --text prompts": "prompts asks the model to write",
    "evaluate RUN --curve": "--curve reads text, but --text names no file",
    "compare embedded OUT --eval-text TEXT --seeds 0 1 0": "--seeds names 0 twice",
    "compare embedded OUT --eval-text TEXT --methods cmoe cmoe": "--methods names cmoe twice",
    "inspect embedded --tau-end 5": "--tau-end is 5.0, but it is for --steps or --start",
}


@pytest.mark.parametrize(
    "line",
    [
        ["convert", "embedded", ""],
        ["convert", "", "OUT"],
        ["convert", "embedded", "OUT", "--data", ""],
        ["convert", "embedded", "OUT", "--config", ""],
        ["evaluate", "embedded", "--text", ""],
        ["evaluate", "embedded", "--against", "", "--tasks", "paper"],
    ],
)
def test_an_empty_word_is_no_value(line, tmp_path, command, monkeypatch):
    """It would mean this folder, or nothing."""
    monkeypatch.chdir(tmp_path)
    assert " is empty. Give it: " in command(*line).refusal()
    assert not list(tmp_path.iterdir())


@pytest.fixture(autouse=True, scope="module")
def _the_run_stays(finished):
    before = finished.contents()
    yield
    assert finished.contents() == before


@pytest.mark.parametrize("line", REFUSED)
def test_one_line_says_what_is_wrong_and_nothing_is_left(
    line, finished, text_file, tmp_path, command
):
    words = [w.format(tmp=tmp_path, text=text_file, run=finished.folder) for w in line.split()]
    gguf = text_file.with_name("model.gguf")
    gguf.write_bytes(b"GGUF")
    places = {"OUT": tmp_path / "out", "TEXT": text_file, "GGUF": gguf}
    places |= {"RUN": finished.folder, "MODEL": finished.source}
    refused = command(*[places.get(word, word) for word in words])
    assert re.search(REFUSED[line], refused.refusal()), refused.err
    assert len(refused.err.splitlines()) == 1, refused.err
    assert not list(tmp_path.iterdir())
