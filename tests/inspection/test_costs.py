import pytest
import torch
from inspected_models import TINY, llama_3_8b, sizes, tiny
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from dotmoe.errors import UserError
from dotmoe.inspection.costs import (
    RunSize,
    alignment_flops,
    alignment_memory,
    calibration_memory,
    disk,
    exported_bytes,
    kept_per_token,
    total,
)
from dotmoe.layout import ExpertLayout
from dotmoe.models.family import family_of
from dotmoe.moe.masked import MaskedFFN, Masking
from dotmoe.parameters import meta_model

KINDS = [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config]


def amounts(items):
    return {item.name: item.amount for item in items}


def masked_model(config, dtype, num_experts):
    family, layers, neurons = family_of(config), config.num_hidden_layers, config.intermediate_size
    model = AutoModelForCausalLM.from_config(config).to(dtype).requires_grad_(False).eval()
    masking = Masking(
        expert_of_neuron_LN=(torch.arange(neurons) % num_experts).repeat(layers, 1),
        router_LED=torch.nn.Parameter(torch.randn(layers, num_experts, config.hidden_size)),
        active_experts=num_experts // 4,
        plan_LNE=torch.rand(layers, neurons, num_experts).requires_grad_(),
        surrogate="soft_top_k",
    )
    for index, layer in enumerate(family.layers(model)):
        layer.mlp = MaskedFFN(layer.mlp, family.ffn(layer), masking, index)
    return model


def bytes_autograd_keeps(model, tokens_BT):
    """Storages that autograd saves in a forward pass, parameters left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.model(input_ids=tokens_BT, use_cache=False).last_hidden_state
        del output
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_the_activation_estimate_is_what_autograd_really_keeps(kind, dtype):
    tokens = torch.randint(0, 512, (1, 128))
    shallow, deep = (
        bytes_autograd_keeps(masked_model(tiny(kind, num_hidden_layers=n), dtype, 16), tokens)
        for n in (2, 4)
    )
    real = (deep - shallow) / 2 / tokens.numel()
    estimate = kept_per_token(sizes(tiny(kind), experts=16, bytes_held=dtype.itemsize))
    assert estimate == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_teacher_and_backward_match_a_count_of_the_products_done(kind, tied):
    config = tiny(kind, tie_word_embeddings=tied)
    run = RunSize(steps=1, batch_size=3, seq_len=64, micro_batch_size=3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.requires_grad_(False)
    embedded = torch.randn(3, 64, 64, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        logits = model(inputs_embeds=embedded, use_cache=False).logits
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    # Eager attention computes the whole square of scores; the estimate counts the causal half.
    half_square = 2 * 64 * 4 * 32 * config.num_hidden_layers * run.tokens
    estimate = amounts(alignment_flops(sizes(config, experts=16), run))
    products = forward.get_total_flops() - 2 * half_square
    # Norms and biases are counted as products: a few hundred parameters.
    assert estimate["teacher forward"] == pytest.approx(products + half_square, rel=0.01)
    products = backward.get_total_flops() - 4 * half_square
    expected = pytest.approx(products + 2 * half_square, rel=0.01)
    assert estimate["backward through activations"] == expected


def flops_there_and_back(model):
    embedded = torch.randn(1, 64, 64, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state.sum().backward()
    return counter.get_total_flops()


def test_routers_and_assignment_add_the_flops_that_masking_adds():
    run = RunSize(steps=1, batch_size=1, micro_batch_size=1, seq_len=64)
    dense = AutoModelForCausalLM.from_config(tiny()).requires_grad_(False)
    masked = masked_model(tiny(), torch.float32, 16)
    estimate = amounts(alignment_flops(sizes(tiny(), experts=16), run))
    added = flops_there_and_back(masked) - flops_there_and_back(dense)
    assert estimate["routers and assignment gradient"] == added


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_exported_size_is_that_of_the_architecture_it_is_loaded_into(kind, tied, dtype):
    config = tiny(kind, tie_word_embeddings=tied)
    shared = {name: TINY[name] for name in TINY if name != "intermediate_size"}
    served = Glm4MoeConfig(
        **shared,
        intermediate_size=256,
        moe_intermediate_size=16,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_shared_experts=1,
        first_k_dense_replace=0,
        attention_bias=kind is Qwen2Config,
        tie_word_embeddings=False,
    )
    model = meta_model(served)
    parameters = sum(p.numel() for p in model.parameters())
    biases = sum(b.numel() for name, b in model.named_buffers() if "correction_bias" in name)
    assert biases == 2 * 16
    estimate = total(exported_bytes(sizes(config, experts=16, written=dtype)))
    assert estimate == dtype.itemsize * parameters + 4 * biases


def test_trainables_take_what_adamw_allocates():
    found = sizes(tiny(), experts=16)
    affinity = torch.nn.Parameter(torch.zeros(2, 256, 16))
    router = torch.nn.Parameter(torch.zeros(2, 16, 64))
    optimizer = torch.optim.AdamW([affinity, router])
    (affinity.sum() + router.sum()).backward()
    optimizer.step()
    tensors = [affinity, router]
    for state in optimizer.state.values():
        tensors += [state["exp_avg"], state["exp_avg_sq"]]
    estimate = amounts(alignment_memory(found, RunSize(), checkpointing=False))
    real = sum(tensor.nbytes for tensor in tensors)
    assert estimate["affinities, routers, Adam"] == real


def test_the_layout_on_disk_is_as_large_as_said(tmp_path):
    layout = ExpertLayout(
        expert_of_neuron_LN=(torch.arange(256) % 16).repeat(2, 1),
        router_LED=torch.zeros(2, 16, 64),
        active_experts=4,
    )
    layout.save(tmp_path / "layout.safetensors")
    said = amounts(disk(sizes(tiny(), experts=16), RunSize()))["layout"]
    assert said <= (tmp_path / "layout.safetensors").stat().st_size <= said + 1_024


def test_memory_of_alignment_by_hand_for_llama_3():
    run = RunSize(micro_batch_size=2)
    found = sizes(llama_3_8b())
    tokens = 2 * 2_048
    plain, again = (
        amounts(alignment_memory(found, run, checkpointing=flag)) for flag in (False, True)
    )
    assert plain["dense weights, one copy"] == 2 * 8_030_261_248
    plan, routers = 32 * 14_336 * 112, 32 * 112 * 4_096
    assert plain["soft plan and gradients"] == 4 * (plan + plan + routers)
    a_layer = 2 * (2 * 14_336 + 2 * (32 + 8) * 128) + 4 * (3 * 4_096 + 4 * 112)
    kept = "activations kept for the backward"
    assert plain[kept] == 32 * tokens * a_layer
    assert again[kept] == tokens * (32 * 2 * 4_096 + a_layer)
    assert plain["buffers of one layer, or one chunk of logits"] == 5 * 2 * 14_336 * tokens
    differing = {name for name in plain if plain[name] != again[name]}
    assert differing == {kept}


@pytest.mark.parametrize(("device", "rows"), [("cpu", 128), ("cuda", 167)])
def test_a_large_vocabulary_needs_one_chunk_of_logits(device, rows):
    config = tiny(vocab_size=200_000)
    run = RunSize(micro_batch_size=1, seq_len=256, device=device)
    estimate = amounts(alignment_memory(sizes(config), run, checkpointing=False))
    # Three tensors in float32, and the logits themselves in bfloat16.
    chunk = (3 * 4 + 2) * rows * 200_000
    assert estimate["buffers of one layer, or one chunk of logits"] == chunk


def test_a_second_micro_batch_finds_the_gradients_of_the_first():
    one, two = (
        amounts(
            alignment_memory(
                sizes(llama_3_8b()),
                RunSize(batch_size=n, micro_batch_size=2),
                checkpointing=False,
            )
        )["soft plan and gradients"]
        for n in (2, 4)
    )
    assert two - one == 4 * 32 * 112 * (14_336 + 4_096)


def test_with_few_tokens_the_peak_is_the_update_of_the_affinities():
    run = RunSize(micro_batch_size=1, seq_len=1)
    estimate = amounts(alignment_memory(sizes(tiny(), experts=64), run, checkpointing=False))
    assert estimate["soft plan and gradients"] == 3 * 4 * 2 * 256 * 64
    assert estimate["activations kept for the backward"] == 0


def test_float32_weights_take_twice_the_memory():
    half, full = (
        amounts(alignment_memory(sizes(tiny(), bytes_held=n), RunSize(), checkpointing=False))
        for n in (2, 4)
    )
    name = "dense weights, one copy"
    assert full[name] == 2 * half[name]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": -1}, "steps is -1, but it must be at least 0"),
        ({"seq_len": 0}, "seq_len is 0, but it must be at least 1"),
        ({"micro_batch_size": 65}, "micro_batch_size is 65, more than batch_size 64"),
        ({"bytes_per_weight": 3}, "bytes_per_weight is 3. Choose 2 or 4"),
        ({"calibration_tokens": -1}, "calibration_tokens is -1, but it must be at least 0"),
    ],
)
def test_a_run_that_cannot_be_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        RunSize(**settings)


def test_a_training_free_run_costs_only_its_calibration():
    flops = amounts(alignment_flops(sizes(tiny()), RunSize(steps=0)))
    work = {name: amount for name, amount in flops.items() if amount}
    assert set(work) == {"calibration forward"}


def test_calibration_holds_the_ffn_inputs_of_every_layer():
    config, run = tiny(), RunSize(calibration_tokens=128)
    inputs = []
    model = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with torch.no_grad():
        model(input_ids=torch.randint(0, 512, (4, 32)))
    estimate = amounts(calibration_memory(sizes(config, bytes_held=4), run))
    assert estimate["FFN inputs of all layers"] == sum(x.nbytes for x in inputs)


def test_disk_of_the_papers_run_by_hand():
    said = amounts(disk(sizes(llama_3_8b()), RunSize(calibration_tokens=0)))
    trainables = 32 * (14_336 * 112 + 112 * 4_096)
    assert said["dense checkpoint (unless it is there)"] == 2 * 8_030_261_248
    assert said["packed tokens"] == 4 * 3_500 * 64 * 2_048
    assert said["two alignment checkpoints"] == 2 * 3 * 4 * trainables
