"""One campaign: every row and measure of the evidence on one model, at one commit.

    python experiments/campaign.py smollm2 --wiki FILE --books FILE --task-data FOLDER --plan
    python experiments/campaign.py smollm2 --wiki FILE --books FILE --task-data FOLDER
    python experiments/campaign.py embedded --tiny     # every part in a minute or two

Rows are models: the dense one, and what dotmoe, rivals and the paper's recipe make of it
(`campaign_rows.py`). Each is a run folder in the campaign's folder, and each measure of it
(`campaign_measures.py`) one file in `measures/ROW`. What is finished is not made again, so that the
same command goes on after a stop. The plan with its hours is printed before anything starts;
`--plan` prints it alone.

A row or measure that fails, or that this machine cannot make, is left out with the reason. The
commit must be clean. `campaign.json` in the folder has the results of finished rows. At the end
they go to results/campaign_MODEL.json, from which documents have their tables.
"""

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import dotmoe
from campaign_measures import MEASURES, PYTHON_TEXT, Measure, Subject
from campaign_plan import Expected, Line, measured_hours, probed, table
from campaign_rows import MODELS, TINY, Plan, Row, rows_of, with_sources
from dotmoe.cli.arguments import settings as settings_of
from dotmoe.common.errors import UserError, nearest, one_line
from dotmoe.common.files import Values, alone_in, read_json, remove, sha256_of, write_json
from dotmoe.common.options import ARGUMENT, PLACE, flat
from dotmoe.common.tables import in_time, shown_as_text
from dotmoe.measure.evaluate.difference import IncomparableError
from dotmoe.measure.evaluate.models import gguf_file, model_folder
from dotmoe.models.chat import has_chats
from dotmoe.models.config import LoadConfig
from dotmoe.models.identity import fingerprint
from dotmoe.models.load import describe_dense
from dotmoe.run.config import FinetuneRunConfig, PruneRunConfig, RunConfig
from dotmoe.run.defaults import default_sources
from dotmoe.run.folder import RunFolder
from dotmoe.run.provenance import commit, provenance
from dotmoe.text.sources import fingerprints_of
from idle_experts import drop_idle

ROOT = Path(__file__).resolve().parents[1]
FAILURES = (UserError, MemoryError, RuntimeError, ArithmeticError)
"""What ends one row or measure and not the others; an interrupt or a full disk ends all."""
_CONFIGS: dict[str, Any] = {
    "convert": RunConfig,
    "finetune": FinetuneRunConfig,
    "prune": PruneRunConfig,
}
"""Config of the run of a row, by what makes the row."""
_READ_FILES = {"wiki", "books", "python", "task_data"}
"""Settings that name what measures read."""
LEFT_IN_FILES = {
    # of single questions, windows and answers
    "per_question",
    "window_losses",
    "answer_kls",
    "answer_tokens",
    "answer_ends",
    # of each task, with paths of this machine
    "provenance",
    "identity",
    "name",
}
"""Values that the results leave to the files of the measures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """A model of the campaign, and what is given of it."""

    name: Annotated[str, ARGUMENT]
    """Model of the campaign: smollm2, gemma3_270m, qwen25_coder_0.5b, qwen25_coder_1.5b or
    embedded."""
    model: str | None = None
    """Its folder, GGUF file or hub name. Default: where `make campaign` puts it."""
    folder: Path | None = None
    """Folder of runs and measures. Default: campaign/MODEL."""
    data: tuple[str, ...] = ()
    """Text that all rows are fitted to. Default: the model's own answers."""
    wiki: str | None = None
    """WikiText-2, test split, as a source of text."""
    books: str | None = None
    """Books, as a source of text."""
    python: str = PYTHON_TEXT
    """Python programs, as a source of text."""
    task_data: Annotated[str | None, PLACE] = None
    """Folder with the data of the tasks. Default: from the hub."""
    vllm_python: str | None = None
    """Interpreter of an environment with vLLM."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the weights in memory, of every row and measure."""
    rows: tuple[str, ...] = ()
    """Rows to make, by name, `*` for any letters; what they are made of is made too. Default: those
    that the plan shows."""
    measures: tuple[str, ...] = ()
    """Measures to make, by name. Default: all."""
    plan: bool = False
    """Print the plan, and make nothing."""
    tiny: bool = False
    """Little text and few questions: for a trial."""
    allow_dirty: bool = False
    """Go on though the source tree has changes that no commit has."""
    out: Path | None = None
    """File of the results. Default: results/campaign_MODEL.json; of a trial campaign.json in the
    folder."""


class Campaign:
    """Rows and measures of one model in one folder."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        if settings.name not in MODELS:
            known = ", ".join(MODELS)
            hint = nearest(settings.name, list(MODELS))
            raise UserError(f"there is no model {settings.name}. Models: {known}.{hint}")
        about = MODELS[settings.name]
        given = settings.model or about.path
        if given is None:
            raise UserError(f"give {settings.name} as a file or folder: --model PATH.")
        self.model: str = given
        self.folder = settings.folder or Path("campaign") / settings.name
        self.amounts = TINY if settings.tiny else about.amounts
        dense = describe_dense(self.model)
        is_chat = has_chats(dense.tokenizer)
        if settings.tiny:
            short = {**about.split, "seq_len": TINY.finetune_seq_len}
            about = replace(about, shares=(0.5,), split=short)
        self.plan = Plan(
            model=about,
            amounts=self.amounts,
            width=dense.widths.model,
            ffn=dense.widths.ffn,
            data=settings.data or default_sources(is_chat=is_chat),
            is_chat=is_chat,
            dtype=settings.dtype,
        )
        self.all_rows = rows_of(self.plan)
        self.rows = self._chosen_rows()
        self.measures = self._chosen_measures()
        self.left_out: dict[tuple[str, str], str] = {}
        """Why a row (with an empty second name) or a measure of it is not there."""
        self.cache: dict[str, Any] = {}
        self.fingerprints: dict[str, str] = {}
        self.contents: dict[str, Any] = {}

    def _chosen_rows(self) -> list[Row]:
        names = [row.name for row in self.all_rows if row.by_default]
        if self.settings.rows:
            names = []
            for pattern in self.settings.rows:
                found = [row.name for row in self.all_rows if fnmatch(row.name, pattern)]
                if not found:
                    known = ", ".join(row.name for row in self.all_rows)
                    raise UserError(f"--rows {pattern} is no row. Rows: {known}.")
                names += found
        return with_sources(self.all_rows, names)

    def _chosen_measures(self) -> list[Measure]:
        for name in self.settings.measures:
            if name not in MEASURES:
                raise UserError(f"--measures {name} is none. Measures: {', '.join(MEASURES)}.")
        names = self.settings.measures or [*MEASURES]
        return [measure for name, measure in MEASURES.items() if name in names]

    @cached_property
    def by_name(self) -> dict[str, Row]:
        """All rows by their names."""
        return {row.name: row for row in self.all_rows}

    # --- what is there ------------------------------------------------------------------------

    def place(self, row: Row) -> Path | str:
        """The model of a row, as `dotmoe evaluate` takes it."""
        if row.by == "nothing":
            return self.model
        if row.by == "quantise":
            return self.folder / row.name / "model.gguf"
        return self.folder / row.name

    def is_made(self, row: Row) -> bool:
        """Whether a row is finished, of the same dense model and with the options of today."""
        if row.by == "nothing":
            return True
        if (row.name, "") in self.left_out:
            return False
        if row.of is not None and not self.is_made(self.by_name[row.of]):
            return False
        if row.by in _CONFIGS:
            return self._is_run_as_asked(row)
        place, origin = Path(self.place(row)), self._origin_file(row)
        is_there = place.is_file() or (place / "config.json").is_file()
        return is_there and origin.is_file() and read_json(origin) == self._origin(row)

    def _is_run_as_asked(self, row: Row) -> bool:
        """Whether the run of a row is finished, of this dense model and with these options."""
        run = RunFolder(Path(self.place(row)))
        if not run.has("evaluate"):
            return False
        if run.manifest["inputs"]["model"] != self._fingerprint(self.all_rows[0]):
            return False
        held = flat(run.config(_CONFIGS[row.by]))
        asked = {name: value for name, value in row.given.items() if name in held}
        return all(held[name] == value for name, value in asked.items())

    def _origin_file(self, row: Row) -> Path:
        """The file that says of what a row that no run made was made."""
        return self.folder / "origins" / f"{row.name}.json"

    def _origin(self, row: Row) -> Values:
        """Of what a row that no run makes is made: the export of its source, and how."""
        assert row.of is not None
        return {"source": self._fingerprint(self.by_name[row.of]), "options": dict(row.given)}

    def file(self, row: Row, measure: str) -> Path:
        """The file of a measure of a row."""
        return self.folder / "measures" / row.name / f"{measure}.json"

    def found(self, row: Row, measure: Measure) -> Values | None:
        """The record of a finished measure; None if there is none, or it was asked otherwise."""
        file = self.file(row, measure.name)
        if not file.is_file() or not self.is_made(row):
            return None
        record = read_json(file)
        asked = {"fingerprint": self._fingerprint(row), "asked": self._asked(measure)}
        return record if all(record.get(name) == value for name, value in asked.items()) else None

    def _asked(self, measure: Measure) -> Values:
        """Settings that change what a measure says."""
        known = {**asdict(self.settings), **asdict(self.amounts)}
        asked = {name: known[name] for name in measure.reads}
        for name in asked.keys() & _READ_FILES:
            asked[f"{name}_content"] = self._content(asked[name])
        return asked | ({"dtype": self.settings.dtype} if measure.reads else {})

    def _content(self, source: str | None) -> Any:
        """What identifies the content of a text or of the data of tasks; each is read once."""
        if source is None:
            return None
        if source not in self.contents:
            place = Path(source)
            if place.is_dir():  # data of tasks
                files = sorted(path for path in place.rglob("*") if path.is_file())
                self.contents[source] = {str(f.relative_to(place)): sha256_of(f) for f in files}
            else:
                self.contents[source] = fingerprints_of((source,))
        return self.contents[source]

    def _fingerprint(self, row: Row) -> str:
        """What identifies the model of a finished row; its files are read once."""
        if row.name not in self.fingerprints:
            self.fingerprints[row.name] = fingerprint(model_folder(str(self.place(row))))
        return self.fingerprints[row.name]

    # --- making -------------------------------------------------------------------------------

    def expected(self) -> tuple[list[Line], Expected]:
        """The plan: hours of each row and its measures; what is finished takes nothing."""
        rates = probed(self.model, self.settings.dtype)
        hours = Expected(self.model, self.plan, self.all_rows, rates)
        lines = []
        for row in self.rows:
            subject = self.subject(row)
            measures = {
                each.name: self._hours_of(row, each, hours)
                for each in self.measures
                if not each.why_not(subject) and self.found(row, each) is None
            }
            make = 0.0 if self.is_made(row) else hours.row(row)
            lines.append(Line(row.name, row.what, make, measures))
        return lines, hours

    def _hours_of(self, row: Row, measure: Measure, hours: Expected) -> float:
        """Hours of a measure: as long as it took for other rows, else by the rates."""
        is_dense_alone = measure.name == "answers" and row.by == "nothing"
        if is_dense_alone:
            return 0.0
        files = self.folder.glob(f"measures/*/{measure.name}.json")
        taken = [read_json(file)["seconds"] for file in files if file.parent.name != "dense"]
        return measured_hours(taken) or hours.measure(measure.name)

    def said_of_missing(self) -> list[str]:
        """Measures that cannot be made here, a sentence for each reason."""
        subjects = [self.subject(row) for row in self.rows]
        said = list[str]()
        for measure in self.measures:
            reasons = {measure.why_not(subject) for subject in subjects} - {""}
            said += [f"{measure.name} is left out: {why}" for why in sorted(reasons)]
        return said

    def make(self, row: Row) -> None:
        """Make a row, unless it is finished; a stopped run goes on."""
        out = self.folder / row.name
        source = self.folder / row.of if row.of else None
        if row.by == "convert":
            dotmoe.convert(self.model, out, **row.given)
        elif row.by == "finetune":
            dotmoe.finetune(source, out, **row.given)
        elif row.by == "prune":
            dotmoe.prune(self.model, out, **row.given)
        elif not self.is_made(row):
            remove(out)
            self._make_without_run(row)
            write_json(self._origin_file(row), self._origin(row))
        self.fingerprints.pop(row.name, None)  # its files may be others now

    def _make_without_run(self, row: Row) -> None:
        """Make a row that is no run of its own, from the run that it is made of."""
        assert row.of is not None
        if row.by == "quantise":
            self._quantise(row)
        elif row.by == "drop_idle":
            load = LoadConfig(dtype=self.settings.dtype)
            drop_idle(self.folder / row.of, self.folder / row.name, row.options["share"], load)

    def _quantise(self, row: Row) -> None:
        """Write the dense model as a quantised file, by the export of a run that left it as it is.

        The file is taken out of its export, so that Transformers reads it as a dense model.
        """
        assert row.of is not None
        out = self.folder / row.name
        partial = self.folder / f"{row.name}.partial"
        remove(partial)
        source = self.folder / row.of
        dotmoe.export(source, partial, format="gguf_dense", **row.given, progress=False)
        file = gguf_file(partial)
        assert file is not None
        out.mkdir()
        file.rename(out / "model.gguf")
        remove(partial)

    def subject(self, row: Row) -> Subject:
        """A finished row, for its measures."""
        settings = self.settings
        return Subject(
            row=row,
            place=self.place(row),
            folder=self.folder,
            model=self.model,
            amounts=self.amounts,
            data=self.plan.data,
            texts={"wiki": settings.wiki, "books": settings.books, "python": settings.python},
            task_data=settings.task_data,
            vllm_python=settings.vllm_python,
            dtype=settings.dtype,
            source=self.subject(self.by_name[row.of]) if row.of else None,
            cache=self.cache,
        )

    def run(self, on_row: Callable[[], None] = lambda: None) -> None:
        """Make every row and measure that is not finished; `on_row` is called after each row."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with alone_in(self.folder):
            for row in self.rows:
                self._run_row(row)
                on_row()

    def _run_row(self, row: Row) -> None:
        """Make a row and its measures; what fails is left out with the reason."""
        if row.of and (row.of, "") in self.left_out:
            self.left_out[row.name, ""] = f"{row.of}, of which it is made, is left out"
            return
        say(f"{row.name}: {row.what}")
        try:
            self.make(row)
        except FAILURES as error:
            self._leave_out(row.name, "", error)
            return
        subject = self.subject(row)
        for measure in self.measures:
            if measure.why_not(subject) or self.found(row, measure) is not None:
                continue
            say(f"{row.name}: {measure.name}")
            try:
                self._measure(subject, measure)
            except FAILURES as error:
                self._leave_out(row.name, measure.name, error)

    def _measure(self, subject: Subject, measure: Measure) -> None:
        """Make a measure and write its file."""
        file = self.file(subject.row, measure.name)
        if file.exists():  # of another model, or asked otherwise
            remove(file)
            remove(subject.out(measure.name))
        started = time.monotonic()
        values = measure.make(subject)
        record = {
            "origin": "measured",
            "row": subject.row.name,
            "measure": measure.name,
            "fingerprint": self._fingerprint(subject.row),
            "asked": self._asked(measure),
            "seconds": round(time.monotonic() - started, 3),
            "values": values,
            "provenance": provenance(0),
        }
        write_json(file, record)

    def _leave_out(self, row: str, measure: str, error: BaseException) -> None:
        why = str(error) if isinstance(error, UserError) else one_line(repr(error))
        self.left_out[row, measure] = why
        say(f"{row}{': ' if measure else ''}{measure} failed: {why}")

    # --- results ------------------------------------------------------------------------------

    def _records_of(self, row: Row) -> dict[str, Values]:
        """The finished measures of a row, by name."""
        records = dict[str, Values]()
        for name, measure in MEASURES.items():
            record = self.found(row, measure)
            if record is not None:
                records[name] = record
        return records

    def collected(self, expected: Expected) -> Values:
        """Every row with every measure that is finished, and why another is not."""
        found = {row.name: self._records_of(row) for row in self.all_rows}
        records = [record for of_row in found.values() for record in of_row.values()]
        return {
            "origin": "measured",
            "model": {
                "name": self.settings.name,
                "title": self.plan.model.title,
                "file": Path(self.model).name,
                "fingerprint": self._fingerprint(self.all_rows[0]),
            },
            "is_trial": self.settings.tiny,
            "data": [Path(source).name for source in self.plan.data],
            "amounts": asdict(self.amounts),
            "rows": [self._collected_row(row, found, expected) for row in self.all_rows],
            "made_at": sorted({str(record["provenance"]["commit"]) for record in records}),
            "provenance": provenance(0),
        }

    def _collected_row(
        self, row: Row, found: dict[str, dict[str, Values]], expected: Expected
    ) -> Values:
        """A row with its measures, and how far they are from the dense row and the one beside."""
        records = found[row.name]
        why = {name: self._why_not(row, name) for name in MEASURES if name not in records}
        collected: Values = {
            "name": row.name,
            "what": row.what,
            "share": row.share,
            "by": row.by,
            "options": _without_paths(row.given),
            "made_of": row.of,
            "is_made": self.is_made(row),
            "measures": {name: _short(record["values"]) for name, record in records.items()},
            "not_measured": why,
            "above_dense": self._apart(records, found["dense"]) if row.name != "dense" else {},
        }
        if row.beside is not None:
            collected["beside"] = row.beside
            collected["above_beside"] = self._apart(records, found.get(row.beside, {}))
        if not collected["is_made"]:
            collected["why_not_made"] = self.left_out.get((row.name, ""), "not asked for")
            collected["expected_hours"] = expected.row(row)
        return collected

    def _apart(self, records: dict[str, Values], others: dict[str, Values]) -> Values:
        """Differences of two rows in every measure that both have, each with its error."""
        apart: Values = {}
        for name in records.keys() & others.keys():
            try:
                changes = MEASURES[name].apart(records[name]["values"], others[name]["values"])
            except IncomparableError:
                continue
            if changes:
                apart[name] = {key: list(change) for key, change in changes.items()}
        return dict(sorted(apart.items()))

    def _why_not(self, row: Row, measure: str) -> str:
        """Why a measure of a row is not there."""
        if not self.is_made(row):
            return "the row is not made"
        cannot = MEASURES[measure].why_not(self.subject(row))
        return cannot or self.left_out.get((row.name, measure), "not asked for")


def _short(values: Any) -> Any:
    """Values of a measure as the results have them."""
    if isinstance(values, list):
        return [_short(each) for each in values]
    if not isinstance(values, dict):
        return values
    kept = {name: _short(each) for name, each in values.items() if name not in LEFT_IN_FILES}
    if "text" in kept:
        kept["text"] = [Path(source).name for source in kept["text"]]
    return kept


def _without_paths(options: Values) -> Values:
    """Options with names of sources in the place of their paths."""
    data = options.get("data")
    return options | ({"data": [Path(each).name for each in data]} if data else {})


def require_clean_commit(settings: Settings) -> None:
    """Refuse a source tree that no commit names, unless that is allowed."""
    name = commit()
    if settings.plan or settings.tiny or settings.allow_dirty:
        return
    if name is None or "+" in name:
        raise UserError(
            f"the commit is {name}: results could not name what made them. Commit all changes, or "
            "give --allow-dirty."
        )


def say(text: str) -> None:
    print(text, flush=True)


def said_of_commits(made_at: Iterable[str]) -> str:
    """A warning if measures are of several commits; empty if they are not."""
    commits = [*made_at]
    if len(commits) < 2:
        return ""
    return f"measures were made at {len(commits)} commits: {', '.join(commits)}"


def main() -> None:
    settings = settings_of(Settings, __doc__)
    require_clean_commit(settings)
    campaign = Campaign(settings)
    lines, expected = campaign.expected()
    answers = expected.answers(campaign.rows, [r for r in campaign.rows if campaign.is_made(r)])
    say(shown_as_text([table(lines, answers, expected.rates), *campaign.said_of_missing()]))
    if settings.plan:
        return
    hours = answers + sum(line.hours for line in lines)
    say(f"This takes about {in_time(hours)}. Stopped, it goes on with the same command.")
    so_far = campaign.folder / "campaign.json"
    campaign.run(on_row=lambda: write_json(so_far, campaign.collected(expected)))
    default = so_far if settings.tiny else ROOT / f"results/campaign_{settings.name}.json"
    out = settings.out or default
    results = read_json(so_far)
    write_json(out, results)
    if warning := said_of_commits(results["made_at"]):
        say(f"warning: {warning}")
    say(f"{out} is written; python scripts/update_documents.py puts it into the documents")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
