"""The choice of the format for a model, by a name that the user gives."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from dotmoe.common.errors import UserError, require_package
from dotmoe.export.architectures import FORMATS
from dotmoe.export.config import GGUF_NAMES, require_format
from dotmoe.export.format import Format
from dotmoe.method.granularity import Splits, targets_of
from dotmoe.models.dense_model import DenseModel

OWN = "dotmoe"
NEEDS_OWN_CODE = (
    f"Format {OWN} runs with its own code (trust_remote_code=True), in Transformers and in vLLM's "
    "Transformers backend. SGLang and llama.cpp cannot load it, and there is no GGUF of it."
)

ALL_RUN = (
    "All experts run for each token: the MoE costs what the dense model does, and its routers "
    "besides. Give a smaller --active, or smaller experts."
)


def formats_like(name: str) -> Mapping[str, Format]:
    """All formats of the container (Transformers or GGUF) of `name`, in order of preference."""
    require_format(name)
    if name not in GGUF_NAMES:
        return FORMATS
    require_package("gguf", "gguf", f"export format {name}")
    from dotmoe.export.gguf_format import GGUF_FORMATS

    return {form.name: form for form in GGUF_FORMATS}


def format_for(dense: DenseModel, splits: Splits, name: str, dtype: torch.dtype) -> Format:
    """The format called `name`; for `auto` and `gguf` the one that is preferred for a model.

    `auto` and `gguf` take, in this order of preference:

    1. of the formats that hold the model with these splits, the one with the longest context, and
       of equal ones the first in `FORMATS`. Format dotmoe comes last, because servers run it
       only with the code in the export: it is taken only if no other can hold the model's decoder
       or what is split;
    2. if none is taken, a format that would hold the model split in another way: it is refused
       with its reason, which says what to change;
    3. else the first of all, which is refused with its reason, too.

    Raises:
        UserError: All layers stay dense; there is no format of this name; or it does not hold the
            model with these splits. The message names the formats that do.
    """
    leading, layers = splits[0].first_dense_layers, dense.widths.layers
    if leading >= layers:
        raise UserError(
            f"first_dense_layers is {leading}, but the model has {layers} layers, of which at "
            f"least one must be split. Choose 0 to {layers - 1}."
        )
    forms = formats_like(name)
    refusals = {form.name: form.unsupported(dense, splits, dtype) for form in forms.values()}
    holding = [form for form in forms.values() if form.has_experts and refusals[form.name] is None]
    holding.sort(key=lambda form: (form.name == OWN, -form.context(dense)))
    if name in forms:
        chosen = forms[name]
    else:
        may_be_own = _only_own_can_hold(dense, splits, forms)
        taken = [form for form in holding if form.name != OWN or may_be_own]
        chosen = taken[0] if taken else _nearly_holding(dense, splits, forms, dtype)
    if refusal := refusals[chosen.name]:
        names = ", ".join(form.name for form in holding)
        raise UserError(f"{refusal} Formats that can hold it: {names}." if names else refusal)
    return chosen


def _only_own_can_hold(dense: DenseModel, splits: Splits, forms: Mapping[str, Format]) -> bool:
    """Whether only format dotmoe can hold what is split, or the model's decoder."""
    has_twin = any(form.twin_of == dense.config.model_type for form in forms.values())
    return targets_of(splits) != "ffn" or (dense.traits.has_own_decoder and not has_twin)


def _nearly_holding(
    dense: DenseModel, splits: Splits, forms: Mapping[str, Format], dtype: torch.dtype
) -> Format:
    """The first format that refuses these splits, but holds the model with plain experts of 64."""
    plain = replace(splits[0], expert_size=64, shared_size=0, first_dense_layers=0), *splits[1:]
    for form in forms.values():
        if form.unsupported(dense, splits, dtype) and not form.unsupported(dense, plain, dtype):
            return form
    return next(iter(forms.values()))


def context_note(dense: DenseModel, splits: Splits, form: Format, dtype: torch.dtype) -> str:
    """A sentence that says that a context is lowered, why, and what keeps it; empty if it stays."""
    context, whole = form.context(dense), dense.widths.context
    if context == whole:
        return ""
    sentence = (
        f"Beyond {context:,} tokens the dense model has a sliding window or scales its queries, "
        f"which {form.name} does not: the context is lowered from {whole:,} to {context:,}."
    )
    if form.name not in FORMATS:  # no GGUF keeps a window
        return sentence
    plain = replace(splits[0], first_dense_layers=0)
    plain = plain.with_shared(-(plain.shared_size // plain.expert_size))
    longer = _taken_by_auto(dense, (plain, *splits[1:]), dtype)
    if longer and longer.context(dense) > context:
        options = "--shared 0 --first-dense-layers 0 --format auto"
        return f"{sentence} With {options} it is {longer.context(dense):,}, as {longer.name}."
    if not FORMATS[OWN].unsupported(dense, splits, dtype):
        return f"{sentence} With --format {OWN} it stays, but few servers run that."
    return sentence


def _taken_by_auto(dense: DenseModel, splits: Splits, dtype: torch.dtype) -> Format | None:
    """The format that `auto` takes, None if it takes none."""
    try:
        return format_for(dense, splits, "auto", dtype)
    except UserError:
        return None
