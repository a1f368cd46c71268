"""What MoE and dense files share: write, read back, run, put on record."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Int
from torch import Tensor

from dotmoe.artifacts import DenseModel
from dotmoe.export.format import exported_context, granularity_of
from dotmoe.export.record import RECORD_FILE, installed_version
from dotmoe.export.verify import sample_tokens
from dotmoe.gguf_export.card import write_card
from dotmoe.gguf_export.config import GgufConfig
from dotmoe.gguf_export.decoder import DecoderForm, Metadata
from dotmoe.gguf_export.file_writer import file_metadata, write_gguf
from dotmoe.gguf_export.gguf_file import GgufFile
from dotmoe.gguf_export.read_back import check_dense_values, check_metadata, check_names
from dotmoe.gguf_export.record import GgufRecord, GgufVerification
from dotmoe.gguf_export.router_check import RouterCheck
from dotmoe.gguf_export.run_check import RunCheck, check_run
from dotmoe.gguf_export.tensor_plan import GgufTensor
from dotmoe.gguf_export.tokenizer import TokenizerMetadata, general_name, tokenizer_metadata
from dotmoe.granularity import Granularity
from dotmoe.layout import ExpertLayout
from dotmoe.llama_cpp import is_installed
from dotmoe.parameters import count_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenGguf:
    """A file on disk, read back and found right."""

    path: Path
    dense: DenseModel
    layout: ExpertLayout | None
    """Split of the FFNs; None: a dense file."""
    form: DecoderForm
    config: GgufConfig
    tokenizer: TokenizerMetadata
    tensors: Sequence[GgufTensor]
    total_bytes: int
    """Bytes of all tensors."""
    storing_error: float
    """See `GgufVerification.storing_error`."""


def write_and_read_back(
    folder: Path,
    dense: DenseModel,
    layout: ExpertLayout | None,
    form: DecoderForm,
    keys: Metadata,
    tensors: Sequence[GgufTensor],
    config: GgufConfig,
) -> WrittenGguf:
    """Write `folder/model-TYPE.gguf` and compare every key and dense weight with what was meant.

    Args:
        folder: An existing folder.
        dense: The dense model.
        layout: Split of the FFNs; None: a dense file.
        form: Architecture of the file.
        keys: Keys of the architecture, without its prefix.
        tensors: All tensors.
        config: Number format and tokenizer.

    Raises:
        UserError: The disk has too little room.
        VerificationError: The file does not hold what it should.
    """
    tokenizer = tokenizer_metadata(dense, config.tokenizer)
    name = general_name(dense.source, tokenizer)
    metadata = {**file_metadata(name, form.arch, keys, config.type), **tokenizer.keys}
    path = folder / f"model-{config.type}.gguf"
    total = write_gguf(path, form.arch, metadata, tensors, config.type)
    file = GgufFile(path)
    check_names(file, {tensor.name for tensor in tensors})
    check_metadata(file, {"general.architecture": form.arch, **metadata})
    return WrittenGguf(
        path=path,
        dense=dense,
        layout=layout,
        form=form,
        config=config,
        tokenizer=tokenizer,
        tensors=tensors,
        total_bytes=total,
        storing_error=check_dense_values(file, dense, form, layout),
    )


def run_where_possible(
    written: WrittenGguf, token_ids: Int[Tensor, "B T"], *, exact_gates: bool, most_active: int = 0
) -> RunCheck | None:
    """`check_run` where llama-cpp-python is installed; else None.

    Raises:
        VerificationError: llama.cpp computes or tokenises something else.
    """
    if not is_installed():
        return None
    context = exported_context(written.dense)
    return check_run(
        written.path,
        written.dense,
        written.form,
        written.layout,
        sample_tokens(token_ids, written.config.verify_tokens, context),
        weights=written.config.type,
        exact_gates=exact_gates,
        most_active=most_active,
        tokenizer=written.tokenizer,
    )


def put_on_record(
    written: WrittenGguf,
    *,
    name: str,
    format_name: str,
    run: RunCheck | None,
    routers: Sequence[RouterCheck],
    notes: Sequence[str],
) -> GgufRecord:
    """Write `dotmoe.json` and `README.md` beside the file.

    Args:
        written: The file.
        name: Name that the folder will have.
        format_name: Format of the file.
        run: How it ran in llama.cpp.
        routers: Its routers; none for a dense file.
        notes: What a user must know of the architecture.
    """
    dense, layout, config = written.dense, written.layout, written.config
    kinds = {tensor.name: tensor.kind(config.type).name for tensor in written.tensors}
    matrices = {tensor.name for tensor in written.tensors if tensor.role != "exact"}
    tokenizer = written.tokenizer
    record = GgufRecord(
        name=name,
        format=format_name,
        arch=written.form.arch,
        source=dense.source,
        revision=dense.revision,
        dotmoe_version=installed_version(),
        type=config.type,
        tensor_types=dict(Counter(kinds.values())),
        fallbacks=sorted(n for n in matrices if kinds[n] == "F16" and config.type != "f16"),
        num_layers=dense.widths.layers,
        num_experts=None if layout is None else layout.num_experts,
        expert_size=None if layout is None else layout.expert_size,
        active_experts=None if layout is None else layout.active_experts,
        shared_size=None if layout is None else layout.shared_size,
        first_dense_layers=None if layout is None else layout.first_dense_layers,
        parameters=_parameters(dense, layout),
        files=[written.path.name],
        total_bytes=written.total_bytes,
        tokenizer="/".join(filter(None, (tokenizer.model, tokenizer.pre))),
        context=exported_context(dense),
        routers=list(routers),
        verification=GgufVerification(
            tensors=len(written.tensors), storing_error=written.storing_error, run=run
        ),
        notes=[*notes, *tokenizer.notes, *_context_notes(dense, written.form)],
    )
    folder = written.path.parent
    (folder / RECORD_FILE).write_text(record.to_json(), encoding="utf-8")
    write_card(folder, record)
    return record


def _parameters(dense: DenseModel, layout: ExpertLayout | None) -> dict[str, int]:
    whole = Granularity(num_experts=1, expert_size=dense.widths.ffn, active_experts=1)
    split = whole if layout is None else granularity_of(layout)
    counts = count_parameters(dense.config, dense.family, split)
    if layout is None:
        return {"dense": counts.dense_total}
    return {
        "dense": counts.dense_total,
        "stored": counts.stored,
        "active": counts.active,
        "active_with_routers": counts.active_with_routers,
        "active_without_embeddings": counts.active_without_embeddings,
    }


def _context_notes(dense: DenseModel, form: DecoderForm) -> list[str]:
    context = exported_context(dense)
    if context == dense.widths.context:
        return []
    return [
        f"The dense model attends through a sliding window of {context} tokens, which llama.cpp's "
        f"architecture {form.arch} has not: context_length is lowered from {dense.widths.context} "
        "to the window, up to which the two are the same."
    ]
