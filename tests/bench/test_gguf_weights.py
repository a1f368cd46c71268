"""The header of a GGUF file, beside what was put into it."""

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

from dotmoe.bench.work import Work  # noqa: E402 - needs gguf
from dotmoe.errors import UserError  # noqa: E402
from dotmoe.export.gguf_file import GgufFile  # noqa: E402

D, N, E, K, S, V, LAYERS = 64, 128, 4, 1, 32, 96, 2


def write(path, *, tied, experts):
    """A decoder with float16 matrices; gives the writer's tensors as {name: array}."""
    arrays = {"token_embd.weight": np.zeros((V, D), np.float16)}
    arrays["output_norm.weight"] = np.zeros(D, np.float32)
    if not tied:
        arrays["output.weight"] = np.zeros((V, D), np.float16)
    for layer in range(LAYERS):
        blk = f"blk.{layer}"
        arrays[f"{blk}.attn_norm.weight"] = np.zeros(D, np.float32)
        arrays[f"{blk}.attn_q.weight"] = np.zeros((D, D), np.float16)
        if experts:
            arrays[f"{blk}.ffn_gate_inp.weight"] = np.zeros((E, D), np.float32)
            arrays[f"{blk}.ffn_up_exps.weight"] = np.zeros((E, S, D), np.float16)
            arrays[f"{blk}.ffn_down_exps.weight"] = np.zeros((E, D, S), np.float16)
            arrays[f"{blk}.ffn_down_exps.scale"] = np.zeros(E, np.float32)
        else:
            arrays[f"{blk}.ffn_up.weight"] = np.zeros((N, D), np.float16)
            arrays[f"{blk}.ffn_down.weight"] = np.zeros((D, N), np.float16)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(D)
    writer.add_head_count(4)
    writer.add_context_length(77)
    if experts:
        writer.add_expert_count(E)
        writer.add_expert_used_count(K)
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("experts", [True, False])
def test_weights_are_grouped_by_use(tmp_path, tied, experts):
    arrays = write(tmp_path / "m.gguf", tied=tied, experts=experts)
    file = GgufFile(tmp_path / "m.gguf")
    weights = Work.of_gguf(file)
    assert (file.size("context_length"), file.most_bytes_in) == (77, "F16")
    assert weights.flops_per_key == 4 * LAYERS * D
    per_expert = {k: v for k, v in arrays.items() if "_exps." in k}
    head = arrays["token_embd.weight" if tied else "output.weight"]
    outside = {"token_embd.weight", "output.weight", *per_expert}
    fixed = [v for k, v in arrays.items() if k not in outside]
    assert weights.head.num_bytes == head.nbytes
    assert weights.fixed.num_bytes == sum(v.nbytes for v in fixed)
    assert weights.fixed.products == sum(v.size for v in fixed if v.ndim == 2)
    assert weights.expert.num_bytes * E == sum(v.nbytes for v in per_expert.values())
    assert weights.expert.products * E == sum(v.size for v in per_expert.values() if v.ndim == 3)
    assert weights.embedding_row_bytes == 2 * D
    assert (weights.num_experts, weights.active_experts) == ((E, K) if experts else (0, 0))


def test_a_file_that_is_no_decoder_is_refused_in_one_line(tmp_path):
    (tmp_path / "text.gguf").write_text("no")
    writer = gguf.GGUFWriter(tmp_path / "empty.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    for name in ("text.gguf", "empty.gguf", "missing.gguf"):
        with pytest.raises(UserError, match=name) as caught:
            Work.of_gguf(GgufFile(tmp_path / name))
        assert "\n" not in str(caught.value)
