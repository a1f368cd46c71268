"""Train the small dense Llama that is part of the package (`src/dotmoe/models/embedded`).

    python scripts/train_embedded_model.py --steps 3000 --decay-steps 600

Text: this machine's Python standard library with its test suite; one file in 16 is held out by a
hash of its path. The schedule is warm-up, constant, linear decay to zero: a run stopped in the
constant part resumes with `--resume` and a larger `--steps`. Hidden matrices are trained with Muon,
the rest with AdamW. Every `--save-every` steps `--work` gets the state; at the end the model is
written to `--out` in bfloat16, with `training.json` beside it (tokens seen, held-out loss).
"""

import argparse
import json
import math
import platform
import time
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

from dotmoe.text.sources import stdlib_documents

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 2048
CONTEXT = 512


class Float32Muon(torch.optim.Optimizer):
    """Muon whose orthogonalisation runs in float32.

    `torch.optim.Muon` runs it in bfloat16, which a CPU emulates: 4 s a step here instead of 0.2 s.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                average = state.setdefault("average", torch.zeros_like(weight))
                average.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonalised(weight.grad.lerp(average, group["momentum"]))
                gain = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
                weight.mul_(1 - 0.01 * group["lr"]).sub_(update, alpha=group["lr"] * gain)


def orthogonalised(matrix: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrix, roughly: five quintic Newton-Schulz steps."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x: Tensor = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--decay-steps", type=int, default=600)
    parser.add_argument("--warmup-steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=16, help="blocks of 512 tokens a step")
    parser.add_argument("--lr-muon", type=float, default=0.02)
    parser.add_argument("--lr-adam", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--work", type=Path, default=Path("embedded-training"))
    parser.add_argument("--out", type=Path, default=Path("src/dotmoe/models/embedded"))
    return parser.parse_args()


def train_tokenizer(documents: list[str]) -> transformers.PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def build_model() -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def packed_blocks(documents: list[str], tokenizer: transformers.PreTrainedTokenizerFast) -> Tensor:
    """All documents, each behind one end-of-text token, cut into rows of CONTEXT tokens."""
    stream: list[int] = []
    for encoding in tokenizer(documents, add_special_tokens=False)["input_ids"]:
        stream.append(tokenizer.bos_token_id)
        stream.extend(encoding)
    num_blocks = len(stream) // CONTEXT
    return torch.tensor(stream[: num_blocks * CONTEXT]).view(num_blocks, CONTEXT)


@torch.no_grad()
def heldout_loss(model: nn.Module, blocks: Tensor) -> float:
    """Mean loss in nats per token over windows of 512 tokens, without the first token of each."""
    model.eval()
    batches = torch.split(blocks, 8)
    losses = [float(model(input_ids=rows, labels=rows).loss) * len(rows) for rows in batches]
    model.train()
    return sum(losses) / len(blocks)


def schedule(step: int, args: argparse.Namespace) -> float:
    warm = min(1.0, (step + 1) / args.warmup_steps)
    cool = min(1.0, (args.steps - step) / args.decay_steps)
    return float(warm * cool)


def block_indices(step: int, num_blocks: int, args: argparse.Namespace) -> Tensor:
    """Blocks of one step: a new permutation each epoch, a pure function of step and seed."""
    steps_an_epoch = num_blocks // args.batch_size
    epoch, position = divmod(step, steps_an_epoch)
    generator = torch.Generator().manual_seed(args.seed * 1000 + epoch)
    order = torch.randperm(num_blocks, generator=generator)
    return order[position * args.batch_size : (position + 1) * args.batch_size]


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    train_documents = list(stdlib_documents("train", include_tests=True))
    tokenizer_folder = args.work / "tokenizer"
    if not tokenizer_folder.exists():
        train_tokenizer(train_documents).save_pretrained(tokenizer_folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    blocks = packed_blocks(train_documents, tokenizer)
    heldout = packed_blocks(list(stdlib_documents("heldout")), tokenizer)
    model = build_model()
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    other = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "layers" in n)]
    optimizers = [
        Float32Muon(hidden, lr=args.lr_muon),
        torch.optim.AdamW(other, lr=args.lr_adam, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    base_rates = [args.lr_muon, args.lr_adam]
    first_step = 0
    state_file = args.work / "state.pt"
    if args.resume and state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first_step = state["step"]
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, "
        f"{blocks.numel():,} training tokens, {heldout.numel():,} held out",
        flush=True,
    )
    started = time.monotonic()
    for step in range(first_step, args.steps):
        rows = blocks[block_indices(step, len(blocks), args)]
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rate in zip(optimizers, base_rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule(step, args)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 20 == 0:
            pace = (step + 1 - first_step) * rows.numel() / (time.monotonic() - started)
            print(f"step {step + 1} loss {loss.item():.4f} {pace:,.0f} tokens/s", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            value = heldout_loss(model, heldout)
            print(f"step {step + 1} held-out {value:.4f} nats, {math.exp(value):.2f}", flush=True)
            saved = {
                "model": model.state_dict(),
                "step": step + 1,
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            }
            torch.save(saved, state_file.with_suffix(".new"))
            state_file.with_suffix(".new").replace(state_file)
    write_model(model, tokenizer, args, blocks, heldout)


def write_model(
    model: transformers.LlamaForCausalLM,
    tokenizer: transformers.PreTrainedTokenizerFast,
    args: argparse.Namespace,
    blocks: Tensor,
    heldout: Tensor,
) -> None:
    model.to(torch.bfloat16)
    loss = heldout_loss(model.float(), heldout)  # what users get: weights rounded to bfloat16
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    record = {
        "origin": "measured",
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_text": "Python standard library with its tests, one file in 16 held out",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "steps": args.steps,
        "tokens_seen": args.steps * args.batch_size * CONTEXT,
        "training_tokens": blocks.numel(),
        "heldout_text": "held-out files without the library's tests",
        "heldout_tokens": heldout.numel(),
        "window_tokens": CONTEXT,
        "heldout_loss_nats_per_token": round(loss, 4),
        "heldout_perplexity": round(math.exp(loss), 3),
        "seed": args.seed,
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
