"""Shared by all tests: seeds, one thread, no network, tiny dense checkpoints, real data."""

import json
import shutil
import socket
import zlib
from functools import cache
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from dotmoe.cli import run
from dotmoe.common import worker
from dotmoe.common.distributed import fsdp_mesh
from dotmoe.export.config import GgufConfig
from dotmoe.export.write import export
from dotmoe.method.calibrate import START_ROUNDS
from dotmoe.method.layout import ALWAYS_ON, ExpertLayout
from runs import (
    REQUIRED,
    TEXT,
    TINY_CONVERT,
    TINY_FINETUNE,
    Outcome,
    TinyRun,
    loaded,
    rewritten,
    words,
)

SHARED_DATA = Path(__file__).resolve().parents[1] / "../shared/data"

LOOPBACK = ("127.", "::1", "localhost")

ENGLISH = (
    "The miller's youngest son had nothing but the cat, and sat down by the road to think "
    "about what could be made of it. 'Give me a pair of boots and a bag,' said the cat, 'and "
    "you will see that your share is not so bad as it looks.' Numbers: 3.14159, 2.71828; "
    "def f(x): return x * (x - 1) // 2  # triangular. Then they went on, one behind the "
    "other, over seven hills and through seven valleys, and nobody counted them but the crows."
)
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 264,
    "max_position_embeddings": 256,
}
"""Config of every tiny model. The tokenizer has 258 entries; real models have spare rows too."""


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _no_network():
    """Only this machine and local sockets can be reached; anything else fails the test."""
    with pytest.MonkeyPatch.context() as patch:
        real_connect, real_lookup = socket.socket.connect, socket.getaddrinfo

        def connect(self, address):
            if self.family != socket.AF_UNIX and not str(address[0]).startswith(LOOPBACK):
                pytest.fail(f"a test tried to reach the network: {address}")
            real_connect(self, address)

        def lookup(host, *rest, **options):
            if host and str(host) != socket.gethostname() and not str(host).startswith(LOOPBACK):
                pytest.fail(f"a test tried to look up {host!r}")
            return real_lookup(host, *rest, **options)

        patch.setattr(socket.socket, "connect", connect)
        patch.setattr(socket, "getaddrinfo", lookup)
        # The harness records it after each evaluation, by processes of pip, gcc and others.
        patch.setattr("torch.utils.collect_env.get_pretty_env_info", str)
        yield


@pytest.fixture(autouse=True, scope="session")
def _short_runs():
    """Without pictures of reports, but in `report`, and with two rounds of a start from data.

    Versions of packages, which every stage records, are looked up once. Files are not synced with
    the disk: tests kill processes, and no machine.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dotmoe.measure.report.page.quality_svg", lambda *figures: b"<svg/>")
        patch.setattr("dotmoe.method.calibrate.START_ROUNDS", 2)
        patch.setattr("dotmoe.run.provenance.version", cache(version))
        patch.setattr("os.fsync", lambda handle: None)
        yield


@pytest.fixture(scope="module")
def all_rounds():
    """A module that uses this has all rounds of a start from data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dotmoe.method.calibrate.START_ROUNDS", START_ROUNDS)
        yield


@pytest.fixture(scope="module")
def ranks():
    """This process alone, over which FSDP2 divides weights all the same."""
    with fsdp_mesh(torch.device("cpu"), shard=True) as mesh:
        yield mesh


@pytest.fixture
def forked_workers(monkeypatch):
    """Each `Worker` is a fork of this process, which imports nothing anew."""

    def fork(command, **how):
        process = get_context("fork").Process(target=worker.main)
        with patch("sys.argv", command[-2:]):
            process.start()
        return SimpleNamespace(kill=process.kill, wait=process.join)

    forks = SimpleNamespace(Popen=fork, DEVNULL=None)
    monkeypatch.setattr("dotmoe.common.worker.subprocess", forks)


@pytest.fixture(scope="session")
def shared_data():
    """Folder of real checkpoints, text and benchmark rows beside the repository."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no real data at {SHARED_DATA}")
    return SHARED_DATA.resolve()


@pytest.fixture(scope="session")
def tiny_dense(tmp_path_factory):
    """Writes a tiny random dense checkpoint folder; the same arguments give the same folder.

    The folder is shared between tests: copy it before changing a file in it. `head_only`: a tied
    checkpoint that stores its matrix as `lm_head.weight` alone.
    """
    made = {}

    def make(family_name, *, tied=False, dtype="float32", head_only=False, **config_overrides):
        arguments = [family_name, tied, dtype, head_only, config_overrides]
        key = json.dumps(arguments, sort_keys=True)
        if key not in made:
            folder = tmp_path_factory.mktemp(family_name)
            tokenizer = byte_tokenizer(has_bos=not family_name.startswith("qwen"))
            settings = (
                TINY
                | REQUIRED.get(family_name, {})
                | {
                    "tie_word_embeddings": tied or head_only,
                    "bos_token_id": tokenizer.bos_token_id,
                    "eos_token_id": tokenizer.eos_token_id,
                    "pad_token_id": None,
                }
            )
            config = AutoConfig.for_model(family_name, **settings | config_overrides)
            write_checkpoint(config, folder, getattr(torch, dtype), seed=zlib.crc32(key.encode()))
            tokenizer.save_pretrained(folder)
            if head_only:
                with rewritten(folder) as tensors:
                    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
            made[key] = folder
        return made[key]

    return make


@pytest.fixture
def copied(tiny_dense, tmp_path):
    """A tiny LLaMA folder of a test's own, to change."""
    return Path(shutil.copytree(tiny_dense("llama"), tmp_path / "model"))


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """Some 12,000 tokens of text."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="session")
def heldout_file(tmp_path_factory):
    """Other text, to measure on."""
    path = tmp_path_factory.mktemp("heldout") / "held.txt"
    path.write_text("\n".join(f"Line {i}: the hen ate {i * 7 % 13} figs." for i in range(100)))
    return path


@pytest.fixture(scope="session")
def finished(tiny_dense, text_file, tmp_path_factory):
    """A finished `dotmoe convert` with a few steps; copy it before changing it."""
    out = tmp_path_factory.mktemp("finished") / "run"
    options = {"data": text_file, **TINY_CONVERT}
    return TinyRun("convert", tiny_dense("llama"), out, options).made()


@pytest.fixture(scope="session")
def finetuned(finished, tmp_path_factory):
    """A finished `dotmoe finetune` of `finished`, which it leaves; copy it before changing it."""
    out, before = tmp_path_factory.mktemp("finetuned") / "run", finished.contents()
    made = TinyRun("finetune", finished.folder, out, TINY_FINETUNE).made()
    assert finished.contents() == before
    return made


@pytest.fixture
def command(capfd):
    """Runs `dotmoe` in this process: `command("convert", model, out, steps=3)`."""

    def execute(*positional, **options):
        capfd.readouterr()
        try:
            status = run(words(*positional, **options))
        except SystemExit as stop:  # after --help
            status = int(stop.code or 0)
        said = capfd.readouterr()
        return Outcome(status, said.out, said.err)

    return execute


@pytest.fixture(scope="session")
def dense_of(tiny_dense):
    """Loads a tiny dense model: the arguments of `tiny_dense`, and `load_dtype`."""

    def load(family_name, *, load_dtype="float32", **arguments):
        folder = tiny_dense(family_name, **arguments)
        return loaded(folder, dtype=load_dtype)

    return load


@pytest.fixture
def dense(dense_of):
    """A tiny LLaMA of a test's own."""
    return dense_of("llama")


@pytest.fixture(scope="session")
def layout_of():
    """Balanced experts at random of neurons or query heads; router logits deviate by about 1.5."""

    def make(
        dense,
        num_experts=12,
        *,
        active_experts=3,
        shared_size=0,
        dense_layers=0,
        dtype=torch.float32,
        target="ffn",
    ):
        layers, width = dense.widths.layers, dense.widths.model
        units = dense.widths.ffn if target == "ffn" else dense.config.num_attention_heads
        generator = torch.Generator().manual_seed(5)
        routed = torch.arange(num_experts)
        routed = routed.repeat_interleave((units - shared_size) // num_experts)
        experts = torch.cat([torch.full((shared_size,), ALWAYS_ON), routed])
        order = [torch.randperm(units, generator=generator) for _ in range(layers)]
        assignment = torch.stack([experts[numbers] for numbers in order])
        assignment[:dense_layers] = ALWAYS_ON
        router = torch.randn(layers, num_experts, width, generator=generator) * 1.5 / width**0.5
        router = router - router.mean(dim=1, keepdim=True)
        return ExpertLayout(
            expert_of_neuron_LN=assignment,
            router_LED=router.to(dtype).float(),
            active_experts=active_experts,
            target=target,
        )

    return make


@pytest.fixture
def exported(dense_of, layout_of, tokens_BT, tmp_path):
    """Exports a model, by its family or itself, with layouts or one of `layout_of` by its options.

    Gives the dense model, the layout or layouts, the folder and the record.
    """

    def make(dense="llama", layout=None, *, out="out", text_BT=tokens_BT, origin=None, **config):
        dense = dense_of(dense) if isinstance(dense, str) else dense
        if not isinstance(layout, ExpertLayout | tuple):
            layout = layout_of(dense, **layout or {})
        layouts = layout if isinstance(layout, tuple) else (layout,)
        folder, config = tmp_path / out, GgufConfig(**config)
        record = export(dense, layouts, folder, config, text_BT, origin=origin)
        return SimpleNamespace(dense=dense, layout=layout, folder=folder, record=record)

    return make


@pytest.fixture(scope="session", name="tokens_BT")
def text_tokens():
    """Four rows of 96 tokens of English that every tiny tokenizer knows."""
    return torch.tensor([2 + byte for byte in ENGLISH.encode()[:384]]).view(4, 96)


def byte_tokenizer(*, has_bos):
    """One token a byte (ids 2 to 257), `<s>` 0 put before a text if `has_bos`, end of text 1."""
    end = "</s>" if has_bos else "<|endoftext|>"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, end: 1} | {sign: 2 + i for i, sign in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", end)])
    if has_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>" if has_bos else None,
        eos_token=end,
        clean_up_tokenization_spaces=False,
        model_max_length=TINY["max_position_embeddings"],
    )


def write_checkpoint(config, folder, dtype, *, seed):
    """Random weights whose logits have a standard deviation near 2, so that no argmax is a tie."""
    with torch.random.fork_rng():  # whether a folder was cached must not change a test's numbers
        model = AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            is_norm = name.endswith("norm.weight")
            parameter.data = 1 + 0.2 * noise if is_norm else 0.5 * noise
        elif "embed_tokens" in name or "lm_head" in name:
            parameter.data = 0.25 * noise
        else:
            parameter.data = 1.5 * parameter.shape[1] ** -0.5 * noise
    model.tie_weights()
    model.to(dtype).save_pretrained(folder)
