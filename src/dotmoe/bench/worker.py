"""A process for one model, so that its memory is its own: `python -m dotmoe.bench.worker`.

It is spoken to by pickled requests on standard input and answers on standard output; whatever
libraries print goes to standard error.
"""

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

import torch

from dotmoe.bench.llama_runner import LlamaRunner
from dotmoe.bench.points import Runner, WorkerSetup
from dotmoe.bench.transformers_runner import TransformersRunner
from dotmoe.errors import UserError


def main() -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    requests = sys.stdin.buffer
    setup: WorkerSetup = pickle.load(requests)
    made: list[Runner] = []
    _answer(answers, lambda: made.append(_runner(setup)))
    while made:
        try:
            name, arguments = pickle.load(requests)
        except EOFError:
            return
        _answer(answers, partial(getattr(made[0], name), *arguments))


def _runner(setup: WorkerSetup) -> Runner:
    if setup.runtime == "llama.cpp":
        return LlamaRunner(setup)
    return TransformersRunner(setup)


def _answer(answers: BinaryIO, work: Callable[[], Any]) -> None:
    """Send ("done", value), ("refused", line) for the user, or ("failed", traceback)."""
    try:
        reply = ("done", work())
    except UserError as error:
        reply = ("refused", str(error))
    except torch.OutOfMemoryError as error:
        line = f"out of GPU memory ({error}). Lower batch_sizes, prompt_tokens or context_tokens."
        reply = ("refused", line)
    except Exception:  # noqa: BLE001 - reported to the parent, which raises it
        reply = ("failed", traceback.format_exc())
    pickle.dump(reply, answers)
    answers.flush()


if __name__ == "__main__":
    main()
