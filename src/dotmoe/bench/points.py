"""What is measured on one model: points, the facts of a model, and who measures it."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from dotmoe.bench.weights import ModelWeights

Runtime = Literal["transformers", "llama.cpp"]
Clock = Literal["wall", "cpu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One thing to time."""

    name: Literal["prefill", "decode"]
    batch: int
    """Sequences at once (B); 1 for prefill."""
    tokens: int
    """Prefill: length of the prompt. Decode: tokens of each sequence in the cache at the start."""
    steps: int
    """Timed steps a round; a step is a whole prompt, or one token of each sequence."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens that a step computes."""
        return self.tokens if self.name == "prefill" else self.batch


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSetup:
    """One model, and how its process runs it."""

    runtime: Runtime
    path: str
    """Checkpoint folder, or GGUF file."""
    device: str
    dtype: str
    """As in `LoadConfig`; a GGUF file has its own."""
    threads: int
    experts_implementation: str
    """Of Transformers."""
    repack: bool
    """Whether llama.cpp may rearrange weights."""
    clock: Clock
    seed: int

    @property
    def now(self) -> Callable[[], float]:
        """Seconds on the clock."""
        return time.process_time if self.clock == "cpu" else time.perf_counter


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model in a process of its own."""

    weights: ModelWeights
    dtype: str
    """Of most weights, as they are held."""
    before_bytes: int
    """Memory of the process before loading."""
    loading_peak_bytes: int
    """Largest memory while loading; a GPU's own memory on a GPU."""


class Runner(Protocol):
    """Runs one model in its own process. One point at a time: `prepare`, `run`s, `finish`."""

    def load(self) -> LoadedModel:
        """Load the model, once."""
        ...

    def prepare(self, point: Point) -> float | None:
        """Fill caches and warm up.

        Returns:
            Distinct experts a split layer that ran in a step, mean over steps and layers; None if
            the runtime does not tell, and for a dense model.
        """
        ...

    def run(self) -> list[float]:
        """One round: seconds of each step. Every round starts from the same cache."""
        ...

    def finish(self) -> int:
        """Drop the caches; gives the largest memory since `prepare`, in bytes."""
        ...


def random_tokens(vocabulary: int, count: int, seed: int) -> list[int]:
    """Token ids drawn evenly from a vocabulary; the same arguments give the same ids."""
    return random.Random(seed).choices(range(vocabulary), k=count)
