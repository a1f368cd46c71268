"""The choice of the format for a model, by a name that the user gives."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from dotmoe.common.errors import UserError, require_package
from dotmoe.export.architectures import FORMATS
from dotmoe.export.config import GGUF_NAMES, require_format
from dotmoe.export.format import Format
from dotmoe.method.granularity import Splits, targets_of
from dotmoe.models.family import DenseModel

OWN = "dotmoe"
NEEDS_OWN_CODE = (
    f"Format {OWN} runs with its own code (trust_remote_code=True), in Transformers and in vLLM's "
    "Transformers backend. SGLang and llama.cpp cannot load it, and there is no GGUF of it."
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
    """The format called `name`, or for `auto` and `gguf` the first that can hold the model.

    Of those that can, `auto` and `gguf` take the first with the longest context; `auto` takes
    dotmoe, which no server runs, only for a model or split that no other format is for.
    If it cannot hold the model, the error names the formats that can; if none can, `auto` and
    `gguf` give the reason of a format that holds the model split in another way.
    """
    leading, layers = splits[0].first_dense_layers, dense.widths.layers
    if leading >= layers:
        raise UserError(
            f"first_dense_layers is {leading}, but the model has {layers} layers, of which at "
            f"least one must be split. Choose 0 to {layers - 1}."
        )
    forms = formats_like(name)
    refusals = {each: form.unsupported(dense, splits, dtype) for each, form in forms.items()}
    able = [each for each, refusal in refusals.items() if refusal is None and forms[each].splits]
    able.sort(key=lambda each: (each == OWN, -forms[each].context(dense)))
    has_twin = any(form.twin_of == dense.config.model_type for form in forms.values())
    may_be_own = targets_of(splits) != "ffn" or (dense.traits.is_own and not has_twin)
    taken = [each for each in able if each != OWN or may_be_own]
    plain = replace(splits[0], expert_size=64, shared_size=0, first_dense_layers=0), *splits[1:]
    native = [n for n in forms if refusals[n] and not forms[n].unsupported(dense, plain, dtype)]
    chosen = name if name in forms else [*taken, *native, *forms][0]
    if refusal := refusals[chosen]:
        others = f" Formats that can hold it: {', '.join(able)}." if able else ""
        raise UserError(refusal + others)
    return forms[chosen]
