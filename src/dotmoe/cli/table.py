"""The commands: what each is for, and the options that its short help shows."""

from typing import NamedTuple


class Command(NamedTuple):
    """Help text and options of one command in `COMMANDS`."""

    help: str
    common: tuple[str, ...] = ()
    """Options that `--help` shows; `--help-all` shows the others too. Empty: both show all."""
    is_shared: bool = False
    """Whether torchrun's processes share the work; any other command runs in one."""
    recipes: str | None = None
    """The command whose recipes and config files this one starts from."""
    notes: tuple[str, ...] = ()
    """Paragraphs of the help below the first line."""


_TEXT = ("data", "eval-text", "seq-len")
_SPLIT = ("active", "shared", "first-dense-layers")
_START = ("recipe", "config")
_MACHINE = ("dtype", "device")
_OF_CONVERSIONS = (
    "Defaults are those of --recipe default, which does not align; paper and those with a model's "
    "name are the paper's settings, small and quickstart align small models. MODEL may be left out "
    "where a recipe or config names it, as --recipe llama2_7b does.",
)

COMMANDS = {
    "quickstart": Command("Convert the bundled model on Python's standard library, in minutes."),
    "inspect": Command(
        "Show what a conversion would give and cost: parameters, memory, time, disk, warnings.",
        common=(
            "gpu",
            "gpus",
            "train",
            "finetune-recipe",
            "json",
            *_SPLIT,
            "expert-size",
            "steps",
            "repair",
            *_START,
            *_MACHINE,
        ),
        recipes="convert",
        notes=_OF_CONVERSIONS,
    ),
    "convert": Command(
        "Turn a dense checkpoint into an MoE checkpoint.",
        common=(
            "data",
            *_SPLIT,
            "keep",
            *_START,
            *_MACHINE,
            "time",
            "eval-text",
            "format",
            "method",
        ),
        is_shared=True,
        recipes="convert",
        notes=_OF_CONVERSIONS,
    ),
    "compare": Command(
        "Convert one model by several methods on one budget.",
        common=(
            "methods",
            "other-text",
            "router-steps",
            "repair",
            *_TEXT,
            *_SPLIT,
            *_START,
            "batch-size",
            "micro-batch-size",
            "lr",
            *_MACHINE,
        ),
        recipes="convert",
        notes=_OF_CONVERSIONS,
    ),
    "finetune": Command(
        "Train a converted model further, to make up for what the conversion lost.",
        common=(
            "train",
            "steps",
            "batch-size",
            "micro-batch-size",
            "lr",
            "lr-router",
            "kl-weight",
            *_TEXT,
            *_START,
            *_MACHINE,
            "format",
        ),
        is_shared=True,
        recipes="finetune",
        notes=(
            "Defaults are those of --recipe default: distillation from the dense model with fixed "
            "routers, as measured on a model of 135M parameters. paper is the paper's training on "
            "1.2B tokens, sft the same with our gradient of the routers, small is for models of a "
            "few million parameters.",
        ),
    ),
    "export": Command(
        "Write a finished run in another format or with another k.",
        notes=(
            "--active-experts sets k, the routed experts of a token without the shared one, in "
            "every format. Finished files take another k when they are loaded only as glm4_moe, "
            "and as dotmoe if FFNs or heads alone are split.",
            "glm4_moe: runs in Transformers, vLLM, SGLang.",
            "mixtral: runs in Transformers, vLLM, SGLang, llama.cpp's converter.",
            "qwen3_moe: runs in Transformers, vLLM, SGLang, llama.cpp's converter.",
            "qwen3_5_moe_text: runs in Transformers.",
            "granitemoe: runs in Transformers, vLLM, SGLang.",
            "flex_olmo: runs in Transformers, vLLM, SGLang.",
            "dotmoe: runs in Transformers (trust_remote_code=True), vLLM (--trust-remote-code "
            "--enforce-eager).",
            "gguf: for llama.cpp, gguf_glm4moe (gates exactly 1) or gguf_llama.",
        ),
    ),
    "evaluate": Command(
        "Measure a model: perplexity, benchmark tasks, fidelity to the dense model, samples.",
        notes=(
            "Asked for together, these are measured one after the other:",
            "perplexity: --text FILE, with --window, --max-tokens, --protocol.",
            "benchmark tasks: --tasks NAME, with --task-data, --shots, --limit, --max-length, "
            "--chat-template.",
            "samples: --generate TOKENS --prompts TEXT, with --temperature, --chat-template.",
            "closeness to the dense model: --fidelity --text FILE.",
            "perplexity at other numbers of active experts: --curve --text FILE, without "
            "--against.",
        ),
    ),
    "analyse": Command("Measure how evenly tokens use the experts of a finished run."),
    "bench": Command("Compare the speed of a dense model and its MoE."),
    "report": Command("Write one page with everything that was measured on a run."),
}
"""Commands by name; `run_NAME` in `dotmoe.cli.commands` runs each."""
