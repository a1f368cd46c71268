"""Contexts that look at, replace or recompute what modules of a model do."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.generation.utils import ALL_CACHE_NAMES

from dotmoe.models.dense_model import DenseModel


def cache_arguments(cache: Any) -> dict[str, Any]:
    """Arguments that let a model go on from a cache; Transformers 5.24 renamed the first."""
    return {ALL_CACHE_NAMES[0]: cache, "use_cache": True}


@contextmanager
def input_hooks(
    modules: Mapping[int, nn.Module], look: Callable[[int, Tensor], Tensor | None]
) -> Iterator[None]:
    """Within this context, `look` gets each module's number and input and may replace the input."""

    def before_forward(number: int, _: nn.Module, args: Any, kwargs: Any) -> Any:
        replaced = look(number, args[0] if args else kwargs["hidden_states"])
        return None if replaced is None else ((replaced, *args[1:]), kwargs)

    with ExitStack() as hooks:
        for number, module in modules.items():
            hook = partial(before_forward, number)
            hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield


@contextmanager
def computing(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Within this context, each module runs the given function in place of its `forward`."""
    before = {module: vars(module).get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module, own in before.items():
            if own is None:
                del module.forward  # uncovers the class's
            else:
                module.forward = own


def recomputing(dense: DenseModel, enabled: bool = True) -> AbstractContextManager[None]:
    """Within this context, layers keep only their input and recompute the rest, if `enabled`."""
    layers = list(dense.family.layers(dense.model)) if enabled else []
    return computing(
        {layer: partial(checkpoint, layer.forward, use_reentrant=False) for layer in layers}
    )
