"""`prune`: a dense model is pruned by a published method and measured.

answers -> tokenise -> prune -> evaluate
"""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from dotmoe.common.distributed import require_one_process
from dotmoe.common.files import read_json
from dotmoe.common.options import checked
from dotmoe.common.progress import Progress
from dotmoe.export.parameters import count_parameters
from dotmoe.export.write import export_dtype
from dotmoe.measure.evaluate.own_answers import closeness_on, states_on
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.load import describe_dense, left_on_disk, load_dense
from dotmoe.models.meta_model import num_parameters
from dotmoe.pipeline.stages import Run
from dotmoe.rivals import pruning
from dotmoe.run.config import PruneRunConfig, RunConfig
from dotmoe.run.defaults import splits_for


def prune(config: PruneRunConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Prune a dense model by a published method, write it as a checkpoint, and measure it.

    Returns:
        Contents of `6_evaluate/results.json`: perplexity of the `dense` and the `pruned` model,
        `parameters` of the dense one, and `pruning`, which `dotmoe.rivals.pruning.prune` describes.

    Raises:
        UserError: As for `convert`; or the method does not fit the model, or there are ranks.
    """
    require_one_process("prune")
    config = checked(config)
    run = Run(config, progress)
    with ExitStack() as work:
        if not run.start(work):
            dense = describe_dense(run.folder.model)
            tokens = config.calibrate.tokens(dense.widths.model)
            run.answer(dense, tokens)
            run.tokenise(dense, tokens)
            metrics = _prune(run, dense)
            run.write_results(lambda: _measure_pruned(run, dense, metrics))
        return run.results()


def budget_of(config: RunConfig, dense: DenseModel) -> int:
    """Active parameters per token of a conversion with these experts, without routers."""
    requested = splits_for("dot_moe", config, dense, export_dtype(dense, config.export))
    return count_parameters(dense.model, dense.family, requested).active


def _prune(run: Run, dense: DenseModel) -> dict[str, Any]:
    """Run the prune stage, which writes a checkpoint; returns the record of what was removed."""
    config = run.config

    def make(folder: Path) -> dict[str, Any]:
        blocks, size, seed = run.text.training, config.align.batch_size, config.seed
        with run.progress.bar(config.method) as update:
            inputs = pruning.PruneInputs(
                dense=load_dense(dense.source, config.load),
                tokens_BT=blocks.drawn(config.calibrate.tokens(dense.widths.model)),
                wanted=budget_of(config, dense),
                batch=lambda step: blocks.batch(step, size, seed),
                steps=config.align.steps,
                seed=seed,
                on_progress=update,
            )
            return pruning.prune(config.method, inputs, folder)

    return run.run_stage("prune", lambda folder: read_json(folder / pruning.PRUNING_METRICS), make)


def _measure_pruned(run: Run, dense: DenseModel, metrics: dict[str, Any]) -> dict[str, Any]:
    """Perplexity of the dense and the pruned model: a checkpoint, or a change made in memory."""
    folder = run.folder.path_of("prune")
    method = run.config.method
    applied = pruning.PRUNING[method].applied
    runnable = left_on_disk(dense, run.config.load)
    exports = {} if applied else {"pruned": folder / pruning.MODEL}
    dense_states = states_on(runnable, run.own)
    dtype = next(runnable.model.parameters()).dtype
    results = {"dense": run.dense_perplexity(runnable)}
    results |= run.export_perplexities(exports, runnable.tokenizer, dtype, runnable.device)
    if applied:
        change = partial(applied, runnable, **load_file(folder / pruning.TENSORS))
        results["pruned"] = run.perplexity_within(change(), method, runnable)
        with change():
            results["own_answers"] = {"pruned": closeness_on(dense_states, runnable.model, run.own)}
    else:
        results["own_answers"] = run.on_own_answers(runnable, exports, dense_states)
    return results | {"parameters": {"dense": num_parameters(dense.model)}, "pruning": metrics}
