"""How close an exported model stays to the dense model that it was made from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dotmoe.errors import UserError
from dotmoe.evaluate import fidelity
from dotmoe.evaluate.perplexity import batch_of, packed_text, window_of
from dotmoe.export import ExportRecord, output_named
from dotmoe.export.record import RECORD_FILE
from dotmoe.measure.config import MeasureConfig
from dotmoe.measure.models import StockModel, loaded, model_folder, named_folders
from dotmoe.measure.perplexity import require_text
from dotmoe.models.family import family_of
from dotmoe.narration import Update
from dotmoe.run_folder import provenance

FFNs = dict[int, tuple[nn.Module, Callable[[Tensor], Tensor]]]


def measure_fidelity(config: MeasureConfig, on_progress: Update) -> dict[str, Any]:
    """Compare a model with its dense model on `config.evaluate.text`, as plain values.

    Raises:
        UserError: No such model or text, no dense model named, or one that does not fit.
    """
    require_text(config.evaluate)
    folders = named_folders(config, "fidelity")
    record = _record(folders["model"])
    if "against" not in folders and record is None:
        raise UserError(
            f"{config.model} is no export of dotmoe, which would name its dense model. Name that "
            "with --against."
        )
    source = config.against or (record.source if record else "")
    dense = loaded(folders.get("against") or model_folder(source), config.load)
    other = loaded(folders["model"], config.load)
    contexts = [int(each.model.config.max_position_embeddings) for each in (dense, other)]
    window = window_of(config.evaluate, min(contexts))
    packed = packed_text(config.evaluate, dense.tokenizer)
    ffns, reason = _ffns(dense, other, record)
    result = fidelity(
        dense.model,
        other.model,
        packed.tokens,
        window,
        ffns=ffns,
        batch_size=batch_of(config.evaluate),
        on_progress=on_progress,
    )
    return {
        "origin": "measured",
        "name": config.model,
        "against": source,
        "dtype": {"model": other.dtype, "against": dense.dtype},
        **result.as_dict(),
        "active_experts": record.active_experts if record else None,
        "num_experts": record.num_experts if record else None,
        "ffn_left_out": reason,
        "text": list(config.evaluate.text),
        "window": window,
        "provenance": provenance(seed=0),
    }


def _record(folder: Path) -> ExportRecord | None:
    return ExportRecord.load(folder) if (folder / RECORD_FILE).is_file() else None


def _ffns(
    dense: StockModel, other: StockModel, record: ExportRecord | None
) -> tuple[FFNs, str | None]:
    """Pairs of FFNs by layer, or why there are none."""
    if record is None:
        return {}, "the model is no export of dotmoe, so that its FFNs are not known"
    output = output_named(record.format)
    if record.shared_size and not output.block_has_shared:
        return {}, f"{record.format} keeps its shared expert outside of the MoE block"
    layers = family_of(dense.model.config).layers(dense.model)
    blocks = output.blocks(other.model)
    split = range(record.first_dense_layers, record.num_layers)
    return {index: (layers[index].get_submodule("mlp"), blocks[index]) for index in split}, None
