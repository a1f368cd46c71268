"""Runs a checkpoint folder in stock Transformers, on a CPU or a GPU."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from dotmoe.bench.points import LoadedModel, Point, WorkerSetup, random_tokens
from dotmoe.bench.process_memory import forget_peak, peak_bytes, resident_bytes
from dotmoe.bench.transformers_weights import expert_modules, model_weights, num_experts
from dotmoe.errors import UserError
from dotmoe.load import resolved_dtype

WARM_UP_ROUNDS = 2


class TransformersRunner:
    """See `Runner`."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._device = torch.device(setup.device)
        self._model: Any = None
        self._point: Point | None = None
        self._cache: Any = None
        self._inputs: Tensor | None = None

    def load(self) -> LoadedModel:
        """See `Runner.load`."""
        torch.set_num_threads(self._setup.threads)
        before = self._resident()
        config = AutoConfig.from_pretrained(self._setup.path, local_files_only=True)
        chosen = {"experts_implementation": self._setup.experts_implementation}
        model, loaded = AutoModelForCausalLM.from_pretrained(
            self._setup.path,
            dtype=resolved_dtype(self._setup.dtype, self._device),
            local_files_only=True,
            output_loading_info=True,
            **(chosen if num_experts(config) else {}),
        )
        if loaded["missing_keys"]:
            raise UserError(
                f"{min(loaded['missing_keys'])} is not in the checkpoint {self._setup.path}, so it "
                "would be random. Get the checkpoint again."
            )
        self._model = model.eval().to(self._device)
        return LoadedModel(
            weights=model_weights(self._model),
            dtype=str(self._model.dtype).removeprefix("torch."),
            before_bytes=before,
            loading_peak_bytes=self._peak(),
        )

    @torch.inference_mode()
    def prepare(self, point: Point) -> float | None:
        """See `Runner.prepare`."""
        self._forget_peak()
        self._point = point
        after = point.steps if point.name == "decode" else 0
        count = point.batch * (point.tokens + after)
        ids = random_tokens(self._model.config.vocab_size, count, self._setup.seed)
        ids_BT = torch.tensor(ids, device=self._device).view(point.batch, point.tokens + after)
        self._inputs = ids_BT
        if point.name == "decode":
            self._cache = DynamicCache(config=self._model.config)
            self._forward(ids_BT[:, : point.tokens], self._cache)
            self._inputs = ids_BT[:, point.tokens :]
        with watched_experts(self._model) as touched:
            self.run()
        for _ in range(WARM_UP_ROUNDS - 1):
            self.run()
        return sum(touched) / len(touched) if touched else None

    @torch.inference_mode()
    def run(self) -> list[float]:
        """See `Runner.run`."""
        assert self._point is not None
        assert self._inputs is not None
        if self._point.name == "prefill":
            config = self._model.config
            return [
                self._timed(self._inputs, DynamicCache(config=config))
                for _ in range(self._point.steps)
            ]
        cache = _same_start(self._cache)
        return [self._timed(ids_B1, cache) for ids_B1 in torch.split(self._inputs, 1, dim=1)]

    def finish(self) -> int:
        """See `Runner.finish`."""
        peak = self._peak()
        self._point = self._cache = self._inputs = None
        return peak

    def _timed(self, ids_BT: Tensor, cache: Any) -> float:
        self._wait()
        start = self._setup.now()
        self._forward(ids_BT, cache)
        self._wait()
        return self._setup.now() - start

    def _forward(self, ids_BT: Tensor, cache: Any) -> None:
        self._model(input_ids=ids_BT, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _resident(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return resident_bytes()

    def _peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return peak_bytes()

    def _forget_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            forget_peak()


@contextmanager
def watched_experts(model: nn.Module) -> Iterator[list[int]]:
    """Collects how many distinct experts each split layer runs, in order of the calls."""
    touched: list[int] = []

    def count(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        chosen_TK = arguments[1] if len(arguments) > 1 else named["top_k_index"]
        touched.append(int(chosen_TK.unique().numel()))

    handles = [
        module.register_forward_pre_hook(count, with_kwargs=True)
        for module in expert_modules(model)
    ]
    try:
        yield touched
    finally:
        for handle in handles:
            handle.remove()


def _same_start(cache: Any) -> Any:
    """A cache with the same content; growing it leaves the first as it is.

    A dynamic layer grows by making new tensors, so that both can share what they start from.
    """
    fresh = copy.copy(cache)
    fresh.layers = [copy.copy(layer) for layer in cache.layers]
    return fresh
