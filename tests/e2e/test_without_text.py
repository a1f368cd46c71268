"""Conversions of models that write their own text, on tiny models, by the command itself."""

import json
import shutil

import pytest
from speakers import CHATML, OPTIONS, stock_closeness

from dotmoe.common.cache import cache_folder
from dotmoe.common.files import read_json
from dotmoe.models.chat import has_chats, states_chats
from dotmoe.models.load import describe_dense
from dotmoe.text import answering, expected, writing
from dotmoe.text.answers import num_answer_tokens, num_chat_tokens, read_answers
from dotmoe.text.questions import own_prompts, question
from dotmoe.text.tokenise import TokenisedText
from runs import TINY_CONVERT, TinyRun, put_into, words

pytestmark = pytest.mark.usefixtures("short_answers")


def test_a_chat_model_is_converted_without_text_and_measured_on_held_out_answers(
    speaker, tmp_path, command
):
    run = TinyRun("convert", speaker, tmp_path / "run", OPTIONS)
    done = command(*run.command())
    assert done.status == 0, done.err
    fitted = read_answers(run.folder / "0_answers/fitted.jsonl")
    assert num_chat_tokens(fitted) >= 800
    prompts = [each for each in own_prompts("asked") if not each.is_heldout]
    asked = {each.messages[0]["content"] for each in prompts}
    assert {each.messages[0]["content"] for each in fitted if each.kind != "self"} <= asked
    measured = run.results()["own_answers"]["moe"]
    assert measured["alike"]["answers"] == measured["others"]["answers"] == 3
    assert measured["alike"]["kl"] > 0
    told = " ".join(done.out.split())
    assert "On answers that the dense model wrote itself" in told
    assert "nats per answer token" in told


def test_other_k_at_load_time_are_measured_on_held_out_answers(speaker, tmp_path, command):
    """Oracle: stock Transformers, which loads the export with that k; at k = E the dense model."""
    run = TinyRun("convert", speaker, tmp_path / "run", OPTIONS)
    done = command(*run.command())
    curve = run.results()["own_answers_curve"]
    points = {point["active_experts"]: point for point in curve["points"]}
    assert list(points) == [1, 3, 6, 9, 12]
    assert curve["active_experts"] == 3
    exported = run.folder / "5_export"
    for active in (1, 3, 12):
        for name in ("alike", "others"):
            file = run.folder / f"0_answers/{name}.jsonl"
            kl, top1 = stock_closeness(speaker, exported, file, num_experts_per_tok=active)
            measured = points[active][name]
            assert measured["kl"] == pytest.approx(kl, rel=1e-3, abs=1e-6)
            assert measured["top1"] == pytest.approx(top1)
    assert points[12]["others"]["kl"] < 1e-6
    assert points[12]["others"]["top1"] == 1
    said = " ".join(done.out.split())
    for text in (said, (exported / "README.md").read_text()):
        assert "by num_experts_per_tok at load time" in text
        assert "100 % at 12 of 12." in text
    assert "Held-out answers at several k" in (run.folder / "7_report/report.md").read_text()


def test_a_format_that_fixes_k_has_no_curve(tiny_dense, tmp_path):
    folder = shutil.copytree(tiny_dense("llama"), tmp_path / "speaker")
    put_into(folder / "tokenizer_config.json", chat_template=CHATML)
    options = OPTIONS | {"format": "mixtral"}
    run = TinyRun("convert", folder, tmp_path / "run", options).made()
    results = run.results()
    assert results["own_answers"]
    assert not results["own_answers_curve"]
    assert "at several k" not in (run.folder / "7_report/report.md").read_text()


@pytest.mark.parametrize("option", ["answer_tokens", "heldout_answers"])
def test_options_of_answers_are_refused_where_none_are_written(
    option, tiny_dense, text_file, tmp_path, command
):
    how = TINY_CONVERT | {option: 3}
    said = command(
        "convert", tiny_dense("qwen2"), tmp_path / "run", data=text_file, **how
    ).refusal()
    assert "the data do not ask the model, and it has no chat template" in said
    assert not (tmp_path / "run/config.json").exists()


def test_held_out_prompts_are_never_fitted(speaker, tmp_path):
    run = TinyRun("convert", speaker, tmp_path / "run", OPTIONS).made()
    fitted = {
        each.messages[0]["content"] for each in read_answers(run.folder / "0_answers/fitted.jsonl")
    }
    for name in ("alike", "others"):
        held_out = read_answers(run.folder / f"0_answers/{name}.jsonl")
        assert not {each.messages[0]["content"] for each in held_out} & fitted


def test_a_base_model_goes_on_from_nothing(tiny_dense, tmp_path):
    run = TinyRun("convert", tiny_dense("llama"), tmp_path / "run", OPTIONS).made()
    fitted = read_answers(run.folder / "0_answers/fitted.jsonl")
    assert all(each.ids[0] == 0 and each.answer_start == 1 for each in fitted)
    assert not run.results()["own_answers"]
    assert not run.results()["own_answers_curve"]


def test_an_alignment_on_own_answers_has_as_many_tokens_as_it_reads(speaker, tmp_path):
    """Also where no calibration reads text, as from a random start."""
    how = {"steps": 3, "batch_size": 2, "start": "random", "data": ["prompts", "self"]}
    options = OPTIONS | how | {"answer_tokens": None, "calibration_tokens": None}
    given = {name: value for name, value in options.items() if value is not None}
    run = TinyRun("convert", speaker, tmp_path / "run", given).made()
    fitted = read_answers(run.folder / "0_answers/fitted.jsonl")
    assert num_chat_tokens(fitted) >= 3 * 2 * 64


def test_rows_that_ask_are_answered_and_text_beside_them_has_half(speaker, tmp_path, text_file):
    asking = tmp_path / "asking.jsonl"
    rows = [{"prompt": f"What is {number} + {number}?"} for number in range(40)]
    rows += [{"messages": [{"role": "user", "content": f"Name {number}."}]} for number in range(40)]
    asking.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = TinyRun("convert", speaker, tmp_path / "run", OPTIONS | {"data": [asking, text_file]})
    run.made()
    fitted = read_answers(run.folder / "0_answers/fitted.jsonl")
    assert {each.messages[0]["content"][:4] for each in fitted} == {"What", "Name"}
    sources = read_json(run.folder / "0_data/data.json")["training"]["sources"]
    own, *texts = sources
    assert own["name"] == "own answers"
    assert sum(each["tokens"] for each in texts) == pytest.approx(own["tokens"], rel=0.1)


def test_text_too_short_for_a_block_does_not_end_a_run_that_has_answers(speaker, tmp_path):
    asking = asking_of(tmp_path)
    with asking.open("a") as file:
        file.write(json.dumps({"text": "One row that does not ask."}) + "\n")
    run = TinyRun("convert", speaker, tmp_path / "run", OPTIONS | {"data": asking}).made()
    (note,) = run.results()["text_notes"]
    assert "tokens of text beside own answers are left out, too few for a block of 64" in note
    (source,) = read_json(run.folder / "0_data/data.json")["training"]["sources"]
    assert source["name"] == "own answers"


def asking_of(tmp_path, word="What", number=40, words=1):
    """A file of rows that ask."""
    file = tmp_path / "asking.jsonl"
    texts = [f"{word} is {place}{' and' * words}?" for place in range(number)]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return file


def test_rows_that_all_ask_are_fitted_to_alone_and_too_few_are_told(speaker, tmp_path):
    asking = asking_of(tmp_path)
    run = TinyRun("convert", speaker, tmp_path / "run", OPTIONS | {"data": asking}).made()
    fitted = read_answers(run.folder / "0_answers/fitted.jsonl")
    assert num_chat_tokens(fitted) >= 800
    assert not run.results()["text_notes"]
    more = run.at(tmp_path / "more", answer_tokens=9_000).made()
    (note,) = more.results()["text_notes"]
    assert "of 9,000 tokens asked" in note


def test_the_fit_reads_what_it_asks_for_beside_the_text_that_is_measured_on(speaker, tmp_path):
    """Without --answer-tokens and --eval-text: one token in eight is kept out."""
    options = {name: value for name, value in OPTIONS.items() if name != "answer_tokens"}
    options |= {"calibration_tokens": 2_048, "eval_tokens": 32_768}
    run = TinyRun("convert", speaker, tmp_path / "run", options).made()
    text = TokenisedText.load(run.folder / "0_data")
    assert text.training.num_tokens >= 2_048
    share = text.heldout.num_tokens / (text.training.num_tokens + text.heldout.num_tokens)
    assert 0.1 < share < 0.16


def test_answers_to_questions_that_were_changed_are_not_kept(speaker, tmp_path, command):
    asking, text = asking_of(tmp_path, "Old"), tmp_path / "text.txt"
    text.write_bytes(b"no text \xff")
    run = TinyRun("convert", speaker, tmp_path / "run", OPTIONS | {"data": [asking, text]})
    assert "UTF-8" in command(*run.command()).refusal()
    asking_of(tmp_path, "New")
    text.write_text("long enough now. " * 400)
    assert command(*run.command()).status == 0
    for name in ("fitted", "alike"):
        chats = read_answers(run.folder / f"0_answers/{name}.jsonl")
        assert {each.messages[0]["content"][:3] for each in chats} == {"New"}


def test_questions_that_leave_no_room_are_left_out_and_said(speaker, tmp_path, text_file, command):
    asking = asking_of(tmp_path)
    long = json.dumps({"prompt": "Why " * 90})
    asking.write_text(asking.read_text() + long + "\n")
    options = OPTIONS | {"data": [asking, text_file]}
    run = TinyRun("convert", speaker, tmp_path / "run", options)
    assert "1 of 41 questions are left out" in " ".join(command(*run.command()).err.split())
    fitted = read_answers(run.folder / "0_answers/fitted.jsonl")
    assert all(each.answer_start < len(each.ids) <= 64 for each in fitted)
    asking.write_text(long)
    other = run.at(tmp_path / "other")
    assert "no question of" in command(*other.command()).refusal()


def test_another_run_finds_the_answers_and_another_text_does_not(speaker, tmp_path, monkeypatch):
    first = TinyRun("convert", speaker, tmp_path / "first", OPTIONS).made()
    again = first.at(tmp_path / "again", active=0.5)
    with monkeypatch.context() as patch:
        patch.setattr(writing, "continuations", None)
        for name in ("in_turn", "cached_in"):  # a cache that is read-only cannot be locked
            patch.setattr(answering, name, None)
        again.made()
    name = "0_answers/fitted.jsonl"
    assert (again.folder / name).read_bytes() == (first.folder / name).read_bytes()
    other = first.at(tmp_path / "other", data_seed=1).made()
    assert (other.folder / name).read_bytes() != (first.folder / name).read_bytes()


def test_a_finetuning_reads_other_answers_and_measures_on_the_same(speaker, tmp_path, command):
    run = TinyRun("convert", speaker, tmp_path / "run", OPTIONS).made()
    tuned = tmp_path / "tuned"
    options = {"steps": 2, "batch_size": 2, "seq_len": 64, "answer_tokens": 2000}
    options |= {"heldout_answers": 3}
    done = command(*words("finetune", run.folder, tuned, **options))
    assert done.status == 0, done.err
    fitted, others = (
        {each.ids for each in read_answers(folder / "0_answers/fitted.jsonl")}
        for folder in (run.folder, tuned)
    )
    assert not fitted & others
    name = "0_answers/alike.jsonl"
    assert (tuned / name).read_bytes() == (run.folder / name).read_bytes()
    measured = read_json(tuned / "6_evaluate/results.json")["own_answers"]
    assert set(measured) >= {"moe"}


def test_a_finetuning_may_learn_from_the_answers_of_the_run_and_writes_what_they_lack(
    speaker, tmp_path, command, monkeypatch
):
    run = TinyRun("convert", speaker, tmp_path / "run", OPTIONS).made()
    kept = read_answers(run.folder / "0_answers/fitted.jsonl")
    options = {"steps": 2, "batch_size": 2, "seq_len": 64, "heldout_answers": 3}
    wanted = num_chat_tokens(kept) + 500
    more = tmp_path / "more"
    asked = words("finetune", run.folder, more, **options, answer_tokens=wanted)
    done = command(*asked, "--reuse-answers")
    assert done.status == 0, done.err
    fitted = read_answers(more / "0_answers/fitted.jsonl")
    assert fitted[: len(kept)] == kept
    assert num_chat_tokens(fitted) >= wanted
    assert not {each.ids for each in fitted[len(kept) :]} & {each.ids for each in kept}

    monkeypatch.setattr(writing, "continuations", None)
    shutil.rmtree(cache_folder() / "answers")
    enough = tmp_path / "enough"
    options["heldout_answers"] = 0
    done = command(*words("finetune", run.folder, enough, **options), "--reuse-answers")
    assert done.status == 0, done.err
    assert read_answers(enough / "0_answers/fitted.jsonl") == kept


def test_a_finetuning_that_reuses_answers_needs_some(speaker, tmp_path, text_file, command):
    options = OPTIONS | {"data": text_file, "answer_tokens": None}
    given = {name: value for name, value in options.items() if value is not None}
    run = TinyRun("convert", speaker, tmp_path / "run", given).made()
    tuned = tmp_path / "tuned"
    how = {"steps": 1, "batch_size": 1, "seq_len": 64}
    asked = (*words("finetune", run.folder, tuned, **how), "--reuse-answers")
    said = command(*asked).refusal()
    assert "was fitted to no answers of its model. Leave it out." in said
    said = command(*asked, "--data", text_file).refusal()
    assert "--data names another text than that of RUN" in said
    assert not tuned.exists()


def test_rivals_are_fitted_to_the_same_chats_and_measured_on_the_same_answers(
    speaker, tmp_path, heldout_file, command
):
    out = tmp_path / "compared"
    read = ("experts", "active_experts", "calibration_tokens", "seq_len", "heldout_answers")
    options = {name: OPTIONS[name] for name in read if name in OPTIONS}
    options |= {"eval_text": heldout_file, "repair_tokens": 512, "finetune_steps": 1}
    options["methods"] = ["dot_moe", "static_pruning", "magnitude_2_4", "slicegpt"]
    done = command("compare", speaker, out, **options)
    assert done.status == 0, done.err
    runs = ("dot_moe-untrained", "static_pruning-own", "magnitude_2_4", "slicegpt")
    for name in ("fitted", "alike", "others"):
        files = {(out / run / f"0_answers/{name}.jsonl").read_bytes() for run in runs}
        assert len(files) == 1
    rows = {
        (row["run"], row.get("weights")): row for row in read_json(out / "compare.json")["rows"]
    }
    for run in runs[2:]:
        measured = read_json(out / run / "6_evaluate/results.json")["own_answers"]["pruned"]
        assert rows[run, None]["kl_others"] == measured["others"]["kl"] > 0
    for run in (*runs[:2], "dot_moe-untrained-finetuned"):
        measured = read_json(out / run / "6_evaluate/results.json")["own_answers"]["moe"]
        weights = "finetuned" if run.endswith("finetuned") else "repaired"
        assert rows[run, weights]["kl_alike"] == measured["alike"]["kl"] > 0
    assert "KL, other answers" in (out / "compare.md").read_text()


def test_rows_that_ask_a_base_model_are_refused(tiny_dense, tmp_path, command):
    asking = tmp_path / "asking.jsonl"
    asking.write_text('{"prompt": "Who?"}\n')
    run = TinyRun("convert", tiny_dense("llama"), tmp_path / "run", OPTIONS | {"data": asking})
    assert "has no chat template" in command(*run.command()).refusal()


def test_a_folder_of_the_name_of_a_source_is_not_that_source(speaker, tmp_path, monkeypatch):
    """What a run without text reads must not depend on the folder that it starts in."""
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "mine.txt").write_text("not asked\n" * 400)
    monkeypatch.chdir(tmp_path)
    run = TinyRun("convert", speaker, tmp_path / "run", OPTIONS).made()
    sources = read_json(run.folder / "0_data/data.json")["training"]["sources"]
    assert [each["name"] for each in sources] == ["own answers"]


def planned(command, model):
    plan = json.loads(command("inspect", model, json=[], **OPTIONS).out)
    (stage,) = (row for row in plan["conversions"][0]["stages"] if row["stage"] == "answers")
    assert stage["hours"] == pytest.approx(sum(each["hours"] for each in stage["operations"]))
    return plan["run"], {each["what"]: each for each in plan["run"]["writing"]}


def generated(path):
    return num_answer_tokens(read_answers(path))


def test_a_plan_says_what_a_base_model_writes(tiny_dense, tmp_path, command):
    run = TinyRun("convert", tiny_dense("llama"), tmp_path / "run", OPTIONS).made()
    said, kinds = planned(command, run.source)
    fitted = run.folder / "0_answers/fitted.jsonl"
    made = read_answers(fitted)
    portion = 8 * (1 + 24)  # texts that end early may take one portion more
    assert list(kinds) == ["texts to fit to"]
    assert 0 <= generated(fitted) - kinds["texts to fit to"]["tokens"] < portion
    assert 800 == said["text_tokens"] <= num_chat_tokens(made) < 800 + portion


def test_a_plan_says_what_a_chat_model_writes(speaker, tmp_path, command, monkeypatch):
    roomy = OPTIONS | {"seq_len": 256}  # no question is too long
    run = TinyRun("convert", speaker, tmp_path / "run", roomy).made()
    fitted = read_answers(run.folder / "0_answers/fitted.jsonl")
    question = sum(each.answer_start for each in fitted) // len(fitted)
    monkeypatch.setattr(expected, "QUESTION_TOKENS", question)  # of this tokenizer
    _, kinds = planned(command, speaker)
    assert kinds["answers to fit to"]["texts"] == len(fitted)
    whole = run.folder / "0_answers/fitted.jsonl"
    assert kinds["answers to fit to"]["tokens"] == pytest.approx(generated(whole), rel=0.1)
    held_out = ("alike", "others", "alike_penalised", "others_penalised")
    measured = sum(generated(run.folder / f"0_answers/{name}.jsonl") for name in held_out)
    assert kinds["held-out answers"]["tokens"] == pytest.approx(measured, rel=0.1)


def test_files_say_whether_a_model_chats_as_its_tokenizer_does(speaker, tiny_dense):
    for folder, chats in ((speaker, True), (tiny_dense("llama"), False)):
        assert has_chats(describe_dense(str(folder)).tokenizer) == states_chats(folder) == chats


def measured_questions(number):
    return [each.messages[0]["content"] for each in own_prompts("heldout")[:number]]


def test_questions_that_every_run_is_measured_on_are_never_fitted(speaker, tmp_path, command):
    """Also where a file of prompts has them, and those that it repeats are asked once."""
    asking = asking_of(tmp_path, number=20)
    with asking.open("a") as file:
        for text in measured_questions(200) + ["What is 0?"] * 20:
            file.write(json.dumps({"prompt": text}) + "\n")
    run = TinyRun("convert", speaker, tmp_path / "run", OPTIONS | {"data": asking})
    done = command(*run.command())
    assert done.status == 0, done.err
    assert "they are not fitted to" in done.err
    fitted = read_answers(run.folder / "0_answers/fitted.jsonl")
    others = read_answers(run.folder / "0_answers/others.jsonl")
    asked = [each.messages[0]["content"] for each in fitted]
    assert not {each.messages[0]["content"] for each in others} & set(asked)
    assert asked.count("What is 0?") <= asked.count("What is 1?") + asked.count("What is 2?") + 1


def test_held_out_answers_that_are_training_text_are_counted_and_told(
    speaker, tmp_path, text_file, command
):
    """As where the answers of an earlier run are the text of another."""
    earlier = TinyRun("convert", speaker, tmp_path / "earlier", OPTIONS).made()
    answers_of = earlier.folder / "0_answers/others.jsonl"
    options = {name: value for name, value in OPTIONS.items() if name != "answer_tokens"}
    run = TinyRun("convert", speaker, tmp_path / "run", options | {"data": [answers_of, text_file]})
    done = command(*run.command())
    assert done.status == 0, done.err
    told = "3 held-out answers are in the training text"
    assert told in done.err
    assert any(told in note for note in run.results()["text_notes"])
    assert told in (run.folder / "5_export/README.md").read_text()


def test_a_fit_to_text_alone_does_not_call_prompts_fitted(speaker, tmp_path, text_file, command):
    options = {name: value for name, value in OPTIONS.items() if name != "answer_tokens"}
    run = TinyRun("convert", speaker, tmp_path / "run", options | {"data": text_file})
    done = command(*run.command())
    assert done.status == 0, done.err
    card = (run.folder / "5_export/README.md").read_text()
    assert "prompts as fitted" not in done.out + card
    assert "usual prompts" in card


def test_what_has_no_effect_on_answers_is_refused_or_said(speaker, tmp_path, text_file, command):
    asking = asking_of(tmp_path)
    for data in ([asking, text_file], ["self", "prompts"]):
        run = TinyRun("convert", speaker, tmp_path / "run", OPTIONS | {"data": data})
        said = run.at(tmp_path / "run", data_weights=[9, 1])
        assert "--data-weights" in command(*said.command()).refusal()
    told = command(
        *TinyRun("convert", speaker, tmp_path / "text", OPTIONS | {"data": text_file}).command()
    )
    assert "answer_tokens is not used" in told.err


def test_questions_that_are_all_held_out_are_refused_before_anything_is_written(
    speaker, tmp_path, text_file, command
):
    held = next(
        each.messages[0]["content"]
        for each in map(question, (f"Is {number} even?" for number in range(100)))
        if each.is_heldout
    )
    asking = tmp_path / "one.jsonl"
    asking.write_text(json.dumps({"prompt": held}) + "\n")
    for data in (asking, [asking, text_file]):
        run = TinyRun("convert", speaker, tmp_path / "run", OPTIONS | {"data": data})
        assert "none is left to fit to" in command(*run.command()).refusal()


def test_a_plan_counts_answers_to_rows_that_ask(speaker, tmp_path, text_file, command):
    read = ("experts", "active_experts", "calibration_tokens", "seq_len", "answer_tokens")
    how = {name: OPTIONS[name] for name in read if name in OPTIONS}

    def tokens_of_answers(data):
        plan = json.loads(command("inspect", speaker, json=[], data=data, **how).out)
        return sum(
            each["tokens"] for each in plan["run"]["writing"] if "answers to fit" in each["what"]
        )

    assert tokens_of_answers(asking_of(tmp_path)) > 0
    assert tokens_of_answers(text_file) == 0


def test_both_models_end_where_the_models_settings_say(speaker, tmp_path, command):
    """With all experts on, the export is the dense model: as many of its answers end."""
    ends = list(range(40, 80))
    settings = {"eos_token_id": ends, "transformers_version": "5.0.0"}
    (speaker / "generation_config.json").write_text(json.dumps(settings))
    whole = {name: value for name, value in OPTIONS.items() if name not in ("active", "shared")}
    run = TinyRun("convert", speaker, tmp_path / "run", whole | {"active": 1.0, "shared": 0.0})
    assert command(*run.command()).status == 0
    for name in ("fitted", "alike", "others"):
        for answer in read_answers(run.folder / f"0_answers/{name}.jsonl"):
            inside = answer.ids[answer.answer_start : -1] if answer.finished else ()
            assert not set(inside) & set(ends)
    for kind in ("alike", "others"):
        measured = run.results()["own_answers"]["moe"][kind]
        assert measured["kl"] == pytest.approx(0, abs=1e-5)
        assert measured["ended"] == measured["dense_ended"]
        assert measured["ended"] > 0


def test_runs_with_other_seeds_share_their_answers(speaker, tmp_path, command):
    """The text has a seed of its own, so that seeds and methods are measured on one."""
    runs = {
        name: TinyRun("convert", speaker, tmp_path / name, OPTIONS | given).made()
        for name, given in {
            "first": {},
            "seed": {"seed": 1},
            "text": {"data_seed": 1},
        }.items()
    }
    for name in ("fitted", "alike", "others"):
        first, seed, text = (
            read_answers(run.folder / f"0_answers/{name}.jsonl") for run in runs.values()
        )
        assert first == seed
        assert first != text
