"""`--keep` chooses the share by what it keeps. Oracle: stock Transformers on the answers."""

import pytest
from speakers import OPTIONS, stock_closeness

from dotmoe.common.files import read_json
from dotmoe.pipeline import keep
from runs import TinyRun, put_into

pytestmark = pytest.mark.usefixtures("short_answers")
KEEP = {name: value for name, value in OPTIONS.items() if name not in ("active", "shared")}
SHARES = [2, 3, 4, 6, 8, 9, 10]  # eighths of 12 experts


def kept_by_stock(run, speaker):
    """Share of equal top tokens of a run's export, of the worse set of answers."""
    files = (run.folder / f"0_answers/{name}.jsonl" for name in ("alike", "others"))
    return min(stock_closeness(speaker, run.folder / "5_export", file)[1] for file in files)


def run_experts(run):
    """Experts of 8 neurons that run for a token, shared ones included."""
    record = read_json(run.folder / "5_export/dotmoe.json")
    return record["active_experts"] + record["shared_size"] // 8


def test_the_smallest_share_that_keeps_enough_is_converted_and_verified(speaker, tmp_path, command):
    """With so little text a trial reads all of it: it is the conversion itself."""
    options = {name: value for name, value in KEEP.items() if name != "no_repair"}
    options |= {"keep": 0.65, "repair_epochs": 0}
    run = TinyRun("convert", speaker, tmp_path / "run", options)
    done = command(*run.command())
    assert done.status == 0, done.err
    kept = run.results()["keep"]
    tried = {each["active_experts"]: each["kept"] for each in kept["trials"]}
    chosen = kept["active_experts"]
    assert tried.keys() <= set(SHARES)
    assert chosen == min(active for active, share in tried.items() if share >= 0.65)
    below = SHARES[SHARES.index(chosen) - 1]
    assert tried[below] < 0.65 <= kept["kept"]
    assert kept["kept"] == pytest.approx(kept_by_stock(run, speaker))
    assert tried[chosen] == pytest.approx(kept["kept"], abs=0.02)
    assert run_experts(run) == chosen
    said = " ".join(done.out.split())
    assert f"{chosen} of 12 experts run" in said
    assert f"the export keeps {100 * kept['kept']:.1f} ± " in said


def test_if_the_export_misses_the_next_larger_share_is_taken(
    speaker, tmp_path, monkeypatch, command
):
    def promised(run, dense, active, *more):
        return {"active_experts": active, "num_experts": 12, "kept": float(active >= 6)}

    monkeypatch.setattr(keep, "_tried", promised)
    run = TinyRun("convert", speaker, tmp_path / "run", KEEP | {"keep": 0.65})
    done = command(*run.command())
    assert done.status == 0, done.err
    kept = run.results()["keep"]
    missed = {each["active_experts"]: each["kept"] for each in kept["missed"]}
    assert list(missed) == SHARES[3 : SHARES.index(kept["active_experts"])]
    assert missed
    assert max(missed.values()) < 0.65 <= kept["kept"]
    assert kept["kept"] == pytest.approx(kept_by_stock(run, speaker))
    assert run_experts(run) == kept["active_experts"]
    assert "Exported with 6 experts first, it kept" in " ".join(done.out.split())


def test_where_no_share_keeps_so_much_the_run_stops_before_it_pays(
    speaker, tmp_path, monkeypatch, command
):
    run = TinyRun("convert", speaker, tmp_path / "run", KEEP | {"keep": 1.0})
    said = command(*run.command()).refusal()
    assert "keep is 1, but no share below 100 % keeps so much: 83 % of the experts keep" in said
    assert not list(run.folder.glob("[2-5]_*"))
    monkeypatch.setattr(keep, "_tried", None)  # nothing paid is lost
    assert command(*run.command()).refusal() == said


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"heldout_answers": 0}, "--heldout-answers is 0"),
        ({"active": 0.5}, "keep chooses how many experts run"),
        ({"method": "weight_clusters"}, "for --method dot_moe alone"),
        ({"start": "random"}, "for --start data alone"),
        ({"targets": "both"}, "for --targets ffn alone"),
        ({"time": "2h"}, "tries several shares"),
    ],
)
def test_what_keep_cannot_choose_is_refused(changes, why, speaker, tmp_path, command):
    run = TinyRun("convert", speaker, tmp_path / "run", KEEP | {"keep": 0.9} | changes)
    assert why in command(*run.command()).refusal()


def test_only_a_conversion_of_a_chat_model_keeps(speaker, tiny_dense, tmp_path, command):
    base = TinyRun("convert", tiny_dense("llama"), tmp_path / "run", KEEP | {"keep": 0.9})
    assert "no chat template, so it has no answers to keep" in command(*base.command()).refusal()
    put_into(speaker / "tokenizer_config.json", chat_template="{{ raise_exception('ask no one') }}")
    asked = TinyRun("convert", speaker, tmp_path / "run", KEEP | {"keep": 0.9})
    line = command(*asked.command()).refusal()
    assert "do not suit the model's chat template (ask no one)" in line
    assert "Or give --active instead." in line
    for name in ("inspect", "compare"):
        more = [tmp_path / "out"] if name == "compare" else []
        said = command(name, speaker, *more, keep=0.9).refusal()
        assert "only dotmoe convert measures what a share keeps" in said
