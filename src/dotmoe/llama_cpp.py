"""llama.cpp by way of llama-cpp-python: logits and tokens of a GGUF, and the k that it can run."""

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dotmoe.errors import UserError
from dotmoe.worker import Worker

if TYPE_CHECKING:  # torch stays out of the child process
    import numpy as np
    from jaxtyping import Float, Int
    from torch import Tensor

    from dotmoe.granularity import Granularity
    from dotmoe.models.traits import DecoderTraits

_BUILT_ELSEWHERE = "Install a llama-cpp-python that was built for this machine."
REMEDIES = {
    "SIGILL": _BUILT_ELSEWHERE,
    "SIGABRT": "An assertion of llama.cpp failed; it cannot run this file.",
    "": "Export the file again.",
}
"""What a user can do when llama.cpp ends its process."""

_F32 = 0
"""`GGML_TYPE_F32`, of cached keys and values."""

_NODES_A_TENSOR, _FEWEST_NODES = 8, 1024
_NODES_OUTSIDE, _NODES_A_LAYER = 16, 56


def most_active_experts(num_tensors: int, num_layers: int, moe_layers: int) -> int:
    """Largest k that llama.cpp runs of a file; it aborts beyond (`GGML_ASSERT(obj_new)`).

    Its graph has room for 8 nodes a tensor of the file, at least 1,024. A layer takes 52 to
    56 nodes, and the sum over the k experts of a token 2 k - 1 more (llama-cpp-python 0.3.36).

    Args:
        num_tensors: Tensors of the file.
        num_layers: Layers.
        moe_layers: Layers that are split, at least 1.
    """
    room = max(_FEWEST_NODES, _NODES_A_TENSOR * num_tensors) - _NODES_OUTSIDE
    return max(0, ((room - num_layers * _NODES_A_LAYER) // moe_layers + 1) // 2)


def most_active_experts_of(
    traits: "DecoderTraits", split: "Granularity", num_layers: int, moe_tensors: int = 8
) -> int:
    """`most_active_experts` of a file that is not written yet.

    Args:
        traits: Of the dense model.
        split: Its leading dense layers count.
        num_layers: Layers.
        moe_tensors: Tensors of a split FFN: 8 in `gguf_glm4moe`, 5 in `gguf_llama`.
    """
    attention = 6 + 3 * traits.qkv_bias + traits.output_bias + 2 * (traits.qk_norm != "none")
    moe_layers = num_layers - split.first_dense_layers
    tensors = 2 + num_layers * attention + 3 * split.first_dense_layers + moe_layers * moe_tensors
    return most_active_experts(tensors, num_layers, moe_layers)


def is_installed() -> bool:
    """Whether llama-cpp-python is there; nothing of it is loaded."""
    return importlib.util.find_spec("llama_cpp") is not None


class LlamaCppModel(Worker):
    """A GGUF held by llama.cpp on the CPU, in a process of its own; use it in a `with` block."""

    def __init__(self, path: Path, *, context: int) -> None:
        """Load a file.

        Args:
            path: The GGUF.
            context: Tokens of the longest text, at least 1.

        Raises:
            UserError: llama-cpp-python is not installed, or cannot load the file.
        """
        import torch

        if not is_installed():
            raise UserError(
                "llama-cpp-python is not installed, and only it can run a GGUF here. "
                "Run pip install 'dotmoe[llama-cpp]'; it compiles llama.cpp."
            )
        self.context = context
        super().__init__(
            "dotmoe.llama_cpp:Runtime",
            str(path),
            context,
            torch.get_num_threads(),
            name=f"llama.cpp on {path}",
            remedies=REMEDIES,
        )

    def logits(self, tokens_T: "Int[Tensor, ' T']") -> "Float[Tensor, 'T V']":
        """Logits of every token of one text, float32; texts do not see each other."""
        import torch

        if len(tokens_T) > self.context:
            raise UserError(
                f"The text has {len(tokens_T)} tokens, but llama.cpp was given a context of "
                f"{self.context}. Cut the text, or give more context."
            )
        return torch.from_numpy(self.ask("logits", tokens_T.tolist()))

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text; the names of special tokens in it become those tokens."""
        ids: list[int] = self.ask("tokenize", text)
        return ids


class Runtime:
    """The model in the child process of `LlamaCppModel`."""

    def __init__(self, path: str, context: int, threads: int) -> None:
        self._library = importlib.import_module("llama_cpp")
        _keep_weights_as_stored()
        batch = min(context, 512)
        self._model = self._library.Llama(
            path,
            n_ctx=context,
            n_batch=batch,
            n_ubatch=batch,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=0,
            logits_all=True,
            flash_attn=False,
            type_k=_F32,
            type_v=_F32,
            # The wrapper's own defaults would override what the file says.
            yarn_attn_factor=-1.0,
            yarn_beta_fast=-1.0,
            yarn_beta_slow=-1.0,
        )

    def version(self) -> str:
        """Version of llama-cpp-python."""
        return str(self._library.__version__)

    def logits(self, tokens: list[int]) -> "np.ndarray":
        """Logits of every token of one text, [T, V]."""
        self._model.reset()
        self._model.eval(tokens)
        logits: np.ndarray = self._model.scores[: len(tokens)].copy()
        return logits

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = self._model.tokenize(text.encode(), add_bos=True, special=True)
        return ids


def _keep_weights_as_stored() -> None:
    """Use the plain kernels, for which the wrapper has no option; those for AMX have crashed."""
    functions: Any = importlib.import_module("llama_cpp.llama_cpp")
    defaults = functions.llama_model_default_params

    def plain() -> Any:
        parameters = defaults()
        if hasattr(parameters, "use_extra_bufts"):
            parameters.use_extra_bufts = False
        return parameters

    functions.llama_model_default_params = plain
