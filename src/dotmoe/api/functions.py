"""The functions of the package: each command of the command line, with its options as keywords.

An option has the name of the command line with underscores, and is checked by the same table. The
first arguments take what is in memory too: models with their tokenizers, texts and chats.
"""

import inspect as signatures
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dotmoe.api.inputs import Inputs, source_names
from dotmoe.api.results import Result
from dotmoe.cli.options import Option, options_of
from dotmoe.cli.start import CONFIGS, start_of, with_open_defaults, with_start
from dotmoe.cli.table import COMMANDS
from dotmoe.common.distributed import require_one_process
from dotmoe.common.errors import UserError
from dotmoe.common.files import expanded, write_json
from dotmoe.common.options import (
    ARGUMENT,
    REQUIRED,
    built,
    check,
    in_python,
    marked_fields,
    require_effect,
)
from dotmoe.common.precision import torch_as_usual
from dotmoe.common.progress import Progress, warnings_once
from dotmoe.measure.bench import bench as bench_by
from dotmoe.measure.bench import table as bench_table
from dotmoe.measure.evaluate import MEASUREMENTS
from dotmoe.measure.evaluate import evaluate as evaluate_by
from dotmoe.measure.evaluate.perplexity import perplexity_table
from dotmoe.measure.inspection import plan_of
from dotmoe.measure.inspection.tables import tables_of
from dotmoe.models.stock import quiet_transformers
from dotmoe.pipeline.compare import compare as compare_by
from dotmoe.pipeline.conversion import Conversion
from dotmoe.pipeline.convert import convert as convert_by
from dotmoe.pipeline.finetune import finetune as finetune_by
from dotmoe.pipeline.prune import prune as prune_by
from dotmoe.pipeline.reexport import reexport, said_of_export
from dotmoe.pipeline.rows import said_of_comparison
from dotmoe.run.config import FinetuneRunConfig, PruneRunConfig, RunConfig, overridden
from dotmoe.run.folder import INPUTS, RunFolder

Place = str | os.PathLike[str]
"""A path or name, or the result of `convert`, which stands for its folder."""
Function = TypeVar("Function", bound=Callable[..., Any])

_CONFIGS = {**CONFIGS, "prune": PruneRunConfig}
_TEXTS = ("data", "eval_text", "other_text", "text")
"""Options that name text, and take texts, chats and data sets."""
_MODELS = ("model", "against")
"""Options that name a model, and take a loaded one."""
_KEEPS_INPUTS = ("convert", "finetune", "prune", "compare")
"""Functions whose `out` keeps what they were given in memory."""
_NOT_HERE = ("json",)
"""Options of the command line that say how a result is printed."""


def _with_options_of(command: str) -> Callable[[Function], Function]:
    """Gives a function the options of a command as its signature, for help and tab completion."""

    def signed(function: Function) -> Function:
        *own, _ = signatures.signature(function).parameters.values()
        named = {each.name for each in own}
        more = [
            signatures.Parameter(
                option.name,
                signatures.Parameter.KEYWORD_ONLY,
                default=None if option.default is REQUIRED else option.default,
            )
            for option in _options(command)
            if option.name not in named and not option.is_argument
        ]
        function.__signature__ = signatures.Signature([*own, *more])  # type: ignore[attr-defined]
        return function

    return signed


def _options(command: str) -> list[Option]:
    """The options that a function takes, with the defaults of its first recipe."""
    like = "convert" if command == "prune" else command
    start = start_of(like, {}).config
    options = with_start(like, tuple(options_of(CONFIGS[like], start)))
    return [option for option in options if option.name not in _NOT_HERE]


@_with_options_of("convert")
def convert(
    model: Place | PreTrainedModel | RunConfig | None = None,
    out: Place | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: bool = True,
    **options: Any,
) -> Conversion:
    """Turn a dense model into a sparse Mixture-of-Experts checkpoint.

    A call that was stopped goes on where it was: stages that `out` holds are not run again.

    Args:
        model: Folder, GGUF file or hub name of a dense model; `embedded` is the bundled one. Or a
            loaded Transformers model, which is written to `out/inputs`. Or the config of a whole
            run, from `recipe`, and nothing else.
        out: Folder of the run to write; the checkpoint is in its `5_export`.
        tokenizer: Tokenizer of a loaded model.
        progress: Whether bars and lines show what is done.
        **options: Options of `dotmoe convert`, with underscores: `active=0.75`,
            `expert_size=32`, `recipe="small"`. Those that name text, such as `data`, take a path, a
            list of paths, or what can be iterated over: a `datasets.Dataset`, texts, chats or
            rows. These are read to their end and written to `out/inputs`. Without `data` the model
            writes the text itself.

    Returns:
        Where the files are, and what was measured.

    Raises:
        UserError: The input is bad, an option has no effect, or another process uses `out`.
    """
    with _called("convert", model, out, tokenizer, options, progress) as (config, bars):
        return convert_by(config, bars)


@_with_options_of("inspect")
def inspect(
    model: Place | PreTrainedModel | RunConfig | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: bool = True,
    **options: Any,
) -> Result:
    """Show what a conversion would give and cost: parameters, memory, time, disk, warnings.

    Args:
        model: As for `convert`; of a loaded model the config alone is read.
        tokenizer: Not needed; taken so that the arguments of `convert` can be given.
        progress: Not needed, likewise.
        **options: Options of `dotmoe inspect`: those of `convert`, and `gpu`, `gpus` and others.

    Returns:
        The plan: a dict that prints as its tables.

    Raises:
        UserError: As for `convert`.
    """
    with _called("inspect", model, None, tokenizer, options, progress) as (config, _):
        plan = plan_of(config)
        return Result(plan, tables_of(plan))


@_with_options_of("compare")
def compare(
    model: Place | PreTrainedModel | RunConfig | None = None,
    out: Place | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: bool = True,
    **options: Any,
) -> Result:
    """Convert one model by several methods on one budget, and measure all on the same text.

    Args:
        model: As for `convert`.
        out: Folder to write; it holds a run folder for each run.
        tokenizer: Tokenizer of a loaded model.
        progress: Whether bars and lines show what is done.
        **options: Options of `dotmoe compare`: `methods`, `eval_text` and those of `convert`.

    Returns:
        The content of `compare.json`: a dict that prints as its table. Runs that failed are listed
        in `left_out` with the reason.

    Raises:
        UserError: As for `convert`, or all runs failed.
    """
    with _called("compare", model, out, tokenizer, options, progress) as (config, bars):
        summary = compare_by(config, bars)
        return Result(summary, said_of_comparison(summary, config.out))


@_with_options_of("finetune")
def finetune(
    run: Place | FinetuneRunConfig | None = None,
    out: Place | None = None,
    *,
    progress: bool = True,
    **options: Any,
) -> Conversion:
    """Train a converted model further, to make up for what the conversion lost.

    Args:
        run: Folder of a finished conversion, or the result of `convert`; it is not changed. Or a
            config from `finetune_recipe`, and nothing else.
        out: Folder of the run to write; the checkpoint is in its `5_export`.
        progress: Whether bars and lines show what is done.
        **options: Options of `dotmoe finetune`; those that name text take what `convert` takes.

    Returns:
        As for `convert`.

    Raises:
        UserError: As for `convert`; or `run` is not finished, or is finetuned already.
    """
    with _called("finetune", run, out, None, options, progress) as (config, bars):
        return finetune_by(config, bars)


@_with_options_of("prune")
def prune(
    model: Place | PreTrainedModel | RunConfig | None = None,
    out: Place | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: bool = True,
    **options: Any,
) -> Result:
    """Prune a dense model by a published method, to compare with: a row of `compare` alone.

    Args:
        model: As for `convert`.
        out: Folder of the run to write; the checkpoint is in its `4_prune`.
        tokenizer: Tokenizer of a loaded model.
        progress: Whether bars and lines show what is done.
        **options: `method`, which must be given, and options of `dotmoe convert`.

    Returns:
        The content of `6_evaluate/results.json`: a dict that prints as its table.

    Raises:
        UserError: As for `convert`; or the method does not fit the model.
    """
    with _called("prune", model, out, tokenizer, options, progress) as (config, bars):
        results = prune_by(config, bars)
        sides = {name: results[name] for name in ("dense", "pruned")}
        return Result(results, [perplexity_table(sides)])


@_with_options_of("export")
def export(
    run: Place | None = None, out: Place | None = None, *, progress: bool = True, **options: Any
) -> Result:
    """Write a finished run in another format or with another number of active experts.

    Args:
        run: Folder of a finished run, or the result of `convert` or `finetune`.
        out: Folder to write; it must be new or empty.
        progress: Whether a bar shows what is done.
        **options: Options of `dotmoe export`: `format`, `active_experts`, `gguf_type` and others.

    Returns:
        The content of the export's `dotmoe.json`: a dict that prints as a summary.

    Raises:
        UserError: The run is not finished, the format cannot hold it, or an option has no effect.
    """
    with _called("export", run, out, None, options, progress) as (config, bars):
        with bars.bar("export") as update:
            record = reexport(config, update)
        return Result(asdict(record), ["\n".join(said_of_export(record, config.out))])


@_with_options_of("evaluate")
def evaluate(
    model: Place | PreTrainedModel | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | Place | None = None,
    progress: bool = True,
    **options: Any,
) -> Result:
    """Measure a model: perplexity, benchmark tasks, fidelity to the dense model, samples.

    Args:
        model: Dense model, exported checkpoint or run folder, the result of `convert`, or a loaded
            Transformers model, which is written to a temporary folder. `against` takes the same.
        tokenizer: Tokenizer of a loaded model, also of that of `against`; or the option of that
            name, for a GGUF file.
        progress: Whether bars and lines show what is done.
        **options: Options of `dotmoe evaluate`: `text`, `tasks`, `generate`, `against`, ...

    Returns:
        Results by the name of the measurement, such as `perplexity`: a dict that prints as their
        tables.

    Raises:
        UserError: Nothing is to be measured, or model and text do not fit the options.
    """
    with _called("evaluate", model, None, tokenizer, options, progress) as (config, bars):
        results = evaluate_by(config, bars)
        parts = [part for name, result in results.items() for part in MEASUREMENTS[name][1](result)]
        return Result(results, parts)


@_with_options_of("bench")
def bench(
    dense: Place | None = None, moe: Place | None = None, *, progress: bool = True, **options: Any
) -> Result:
    """Compare the speed of a dense model and its MoE.

    Args:
        dense: Folder, GGUF file or hub name of the dense model.
        moe: Its MoE: a run folder, an export, or the result of `convert`.
        progress: Whether a bar shows what is done.
        **options: Options of `dotmoe bench`: `batch_sizes`, `prompt_tokens` and others.

    Returns:
        The measurements: a dict that prints as its table.

    Raises:
        UserError: The two are not a dense model and its MoE, or do not fit into memory.
    """
    with _called("bench", dense, moe, None, options, progress) as (config, bars):
        with bars.bar("bench") as update:
            result = bench_by(config, update)
        if config.out is not None:
            write_json(expanded(config.out), result)
        return Result(result, [bench_table(result)])


@contextmanager
def _called(
    command: str,
    first: Any,
    second: Any,
    tokenizer: Any,
    options: Mapping[str, Any],
    progress: bool,
) -> Iterator[tuple[Any, Progress]]:
    """The checked config of a call, and what shows its progress.

    Within this context torch is as in a new process, each warning comes once, and errors name
    options as Python has them. What was written for a call that began no run is removed.
    """
    if not isinstance(progress, bool):
        raise UserError(f"progress is {progress!r}, but it must be True or False.")
    bars = Progress(quiet=not progress)
    with (
        torch_as_usual(),
        quiet_transformers(),
        warnings_once(),
        TemporaryDirectory(prefix="dotmoe-") as temporary,
    ):
        inputs = Inputs(Path(temporary) / INPUTS)
        try:
            if command not in COMMANDS or not COMMANDS[command].is_shared:
                require_one_process(f"dotmoe.{command}")
            if is_dataclass(first) and not isinstance(first, Conversion):
                config = _given_config(command, first, second, options)
            else:
                call = Call(command, first, second, tokenizer, options)
                call.config(None)  # all is checked before anything is written
                if command in _KEEPS_INPUTS:
                    inputs = _inputs_in(command, call.out)
                config = call.config(inputs)
            yield config, bars
        except BaseException as error:
            inputs.forget()
            if isinstance(error, UserError):
                said = inputs.without_paths(str(error))
                error.args = (_as_in_python(said, command),)
            raise


def _given_config(command: str, config: Any, second: Any, options: Mapping[str, Any]) -> Any:
    """A whole config that was given, and nothing else."""
    cls = _CONFIGS[command]
    if type(config) is not cls:
        raise UserError(
            f"dotmoe.{command} takes a {cls.__name__}, but was given a {type(config).__name__}."
        )
    others = list(options) if second is None else ["out", *options]
    if others:
        raise UserError(
            f"{others[0]} is given beside a whole config, which has it. Give it to the recipe: "
            f"dotmoe.recipe(NAME, {others[0]}=...)."
        )
    return config


def _inputs_in(command: str, out: Path) -> Inputs:
    """The inputs of a run, or of the runs of a comparison; `out` must be one or be free."""
    folder = RunFolder(out)
    if command != "compare" and not folder.exists:
        folder.require_place()
    return Inputs(out / INPUTS)


class Call:
    """The arguments of a call, and the config that they mean."""

    def __init__(
        self, command: str, first: Any, second: Any, tokenizer: Any, options: Mapping[str, Any]
    ) -> None:
        self.command = command
        self.cls = _CONFIGS[command]
        self.tokenizer = tokenizer
        starts = ("recipe", "config")
        self.given = {
            name: value
            for name, value in options.items()
            if name not in starts and not (name in _TEXTS and value is None)
        }
        for name in _NOT_HERE:
            if name in self.given:
                raise UserError(
                    f"{name} is for the command line; the result is a dict. Leave it out."
                )
        start = {name: options[name] for name in starts if options.get(name) is not None}
        for name, value in start.items():
            if not isinstance(value, str | os.PathLike):
                raise UserError(
                    f"{name} is {value!r}, but it must be text or a path. Give options as keywords."
                )
        self.file = str(start.get("config", ""))
        self.start = start_of("convert" if command == "prune" else command, start)
        names = [name for name, _, marks in marked_fields(self.cls) if ARGUMENT in marks]
        given = {name: each for name, each in zip(names, (first, second), strict=False) if each}
        self.arguments = {**self.start.named, **given}
        self._require_all()

    @property
    def out(self) -> Path:
        """The folder to write."""
        return Path(self.arguments["out"])

    def config(self, inputs: Inputs | None) -> Any:
        """The checked config; without `inputs`, with names in the place of what is in memory."""
        values = {**self.arguments, **self.given}
        if self._names_tokenizer:
            values["tokenizer"] = self.tokenizer
        options = {option.name for option in options_of(self.cls)}
        for name in _MODELS:
            if values.get(name) is not None and name in options:
                values[name] = self._model(values[name], inputs)
        for name in _TEXTS:
            if name in values:
                names = source_names(values[name]) or ("in-memory",)
                values[name] = inputs.text_sources(values[name], name) if inputs else names
        values = in_python(self.cls, values, f"dotmoe.{self.command}")
        config = built(self.cls, self.start.config, values)
        config = with_open_defaults(overridden(config, self.given), self.start, self.given)
        check(config, self.given)
        require_effect(config, self.start.unused, self.file)
        return config

    def _model(self, model: Any, inputs: Inputs | None) -> str:
        if inputs is None:
            return "in-memory"
        if self.command == "inspect":
            return inputs.config_folder(model)
        is_named = isinstance(model, str | os.PathLike)
        is_anothers = self._has_loaded_model or self._names_tokenizer
        tokenizer = None if is_named and is_anothers else self.tokenizer
        return inputs.model_folder(model, tokenizer)

    @property
    def _names_tokenizer(self) -> bool:
        """Whether the tokenizer is an option of the command, which names one."""
        return self.command == "evaluate" and isinstance(self.tokenizer, str | os.PathLike)

    @property
    def _has_loaded_model(self) -> bool:
        """Whether a model is given that is in memory."""
        given = {**self.arguments, **self.given}
        models = [given[name] for name in _MODELS if given.get(name) is not None]
        return any(not isinstance(model, str | os.PathLike) for model in models)

    def _require_all(self) -> None:
        """Refuse a call that lacks what has no default."""
        given = {**self.arguments, **self.given}
        required = [
            option
            for option in options_of(self.cls)
            if option.is_required and option.name not in given
        ]
        if required:
            texts = [f"{each.name} ({each.help.rstrip('.')})" for each in required]
            raise UserError(f"Missing from dotmoe.{self.command}: {', '.join(texts)}.")


def _as_in_python(message: str, command: str) -> str:
    """A message with options as keywords: `seq_len`, not `--seq-len`."""
    for option in _options(command):
        name = option.typed.removeprefix("--")
        message = re.sub(rf"--no-{name}(?![\w-])", f"{option.name}=False", message)
        message = re.sub(rf"--{name}(?![\w-])", option.name, message)
    return message
