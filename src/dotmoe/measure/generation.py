"""What models write: side by side, and how much of it repeats."""

from dataclasses import asdict
from typing import Any

from dotmoe.errors import UserError
from dotmoe.evaluate import continuations, repetition
from dotmoe.evaluate.generation import cut_prompts, require_generable
from dotmoe.evaluate.perplexity import packed_text
from dotmoe.measure.config import MeasureConfig
from dotmoe.measure.models import loaded, named_folders
from dotmoe.narration import Update
from dotmoe.run_folder import provenance


def measure_generation(config: MeasureConfig, on_progress: Update) -> dict[str, Any]:
    """Greedy and sampled continuations by the model and the one it is compared with.

    Prompts from `config.evaluate.text` are cut by the tokenizer of each model: where the two have
    another tokenizer their prompts may differ at the ends.

    Raises:
        UserError: No model, no prompt, or a number out of range.
    """
    require_generable(config.generation)
    if not config.generation.prompts and not config.evaluate.text:
        raise UserError("there is nothing to continue. Give --prompts, or --text to cut them from.")
    measured: dict[str, Any] = {}
    for label, folder in named_folders(config, "generation").items():
        stock = loaded(folder, config.load)
        prompts = _prompts(config, stock.tokenizer)
        made = continuations(stock.model, stock.tokenizer, prompts, config.generation, on_progress)
        decode = stock.tokenizer.batch_decode
        measured[label] = {
            "name": config.model if label == "model" else config.against,
            "dtype": stock.dtype,
            "prompts": decode(prompts, skip_special_tokens=True),
            **{
                way: {"repetition": asdict(repetition(texts)), "texts": decode(texts)}
                for way, texts in (("greedy", made.greedy), ("sampled", made.sampled))
            },
        }
    settings = asdict(config.generation)
    del settings["prompts"]
    return {
        "origin": "measured",
        **measured,
        "settings": settings,
        "text": list(config.evaluate.text),
        "provenance": provenance(seed=config.generation.sampling_seed),
    }


def _prompts(config: MeasureConfig, tokenizer: Any) -> list[list[int]]:
    if config.generation.prompts:
        return [tokenizer(prompt).input_ids for prompt in config.generation.prompts]
    tokens = packed_text(config.evaluate, tokenizer).tokens.tolist()
    return cut_prompts(tokens, config.generation)
