import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dotmoe.errors import UserError
from dotmoe.evaluate import EvaluateConfig, GenerateConfig, continuations, repetition
from dotmoe.evaluate.generation import cut_prompts
from dotmoe.load import LoadConfig
from dotmoe.measure import MeasureConfig, measure_generation

PROMPTS = [[0, 40, 41, 42], [0, 99, 98, 97, 96, 95]]


@pytest.fixture
def model(tiny_dense):
    return AutoModelForCausalLM.from_pretrained(tiny_dense("llama")).eval()


@pytest.fixture
def tokenizer(tiny_dense):
    return AutoTokenizer.from_pretrained(tiny_dense("llama"))


def argmaxed(model, prompt, new_tokens, end):
    ids = list(prompt)
    for _ in range(new_tokens):
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        if token == end:
            break
        ids.append(token)
    return ids[len(prompt) :]


def test_greedy_is_the_argmax_token_by_token_whatever_the_model_prefers(model, tokenizer):
    model.generation_config.repetition_penalty = 2.0
    model.generation_config.no_repeat_ngram_size = 1
    made = continuations(model, tokenizer, PROMPTS, GenerateConfig(generate=12))
    expected = [argmaxed(model, prompt, 12, tokenizer.eos_token_id) for prompt in PROMPTS]
    assert made.greedy == expected


def test_sampling_is_drawn_from_the_seed_and_not_greedy(model, tokenizer):
    first, again, other = (
        continuations(
            model, tokenizer, PROMPTS, GenerateConfig(generate=16, sampling_seed=seed)
        ).sampled
        for seed in (0, 0, 5)
    )
    assert first == again != other


def test_a_top_p_near_nothing_is_greedy(model, tokenizer):
    made = continuations(model, tokenizer, PROMPTS, GenerateConfig(generate=8, top_p=1e-6))
    assert made.sampled == made.greedy


def test_an_end_of_text_ends_the_continuation_and_is_not_in_it(model, tokenizer):
    with torch.no_grad():
        free = argmaxed(model, PROMPTS[0], 8, None)
    tokenizer.eos_token_id = free[3]
    made = continuations(model, tokenizer, PROMPTS[:1], GenerateConfig(generate=8))
    assert made.greedy == [free[: free.index(free[3])]]


def test_prompts_are_cut_at_equal_distances():
    config = GenerateConfig(num_prompts=3, prompt_tokens=4)
    assert cut_prompts(range(31), config) == [
        [0, 1, 2, 3],
        [10, 11, 12, 13],
        [20, 21, 22, 23],
    ]
    assert len(cut_prompts(range(9), config)) == 2
    with pytest.raises(UserError, match="the text has 3 tokens"):
        cut_prompts(range(3), config)


def test_both_models_continue_the_same_prompts(tiny_dense, tmp_path):
    (tmp_path / "text.txt").write_text("Some text, long enough to be cut. " * 9)
    config = MeasureConfig(
        model=str(tiny_dense("llama")),
        against=str(tiny_dense("llama", rms_norm_eps=1e-2)),
        generation=GenerateConfig(generate=6, num_prompts=2, prompt_tokens=8),
        evaluate=EvaluateConfig(text=(str(tmp_path / "text.txt"),)),
        load=LoadConfig(device="cpu"),
    )
    found = measure_generation(config, lambda *told: None)
    ours, theirs = found["model"], found["against"]
    assert ours["prompts"] == theirs["prompts"]
    assert ours["prompts"][0] == "Some te"  # after <s>
    assert ours["greedy"]["texts"] != theirs["greedy"]["texts"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_dense("llama"))
    model = AutoModelForCausalLM.from_pretrained(tiny_dense("llama")).eval()
    ids = [argmaxed(model, tokenizer(p).input_ids, 6, 1) for p in ours["prompts"][:1]]
    assert tokenizer.batch_decode(ids) == ours["greedy"]["texts"][:1]
    assert ours["greedy"]["repetition"]["tokens"] <= 12
    assert repetition(ids).tokens == len(ids[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"generate": 0}, "generate is 0"),
        ({"generate": 300}, "context is 256"),
        ({"generate": 4, "temperature": 0.0}, "temperature is 0.0"),
        ({"generate": 4, "top_p": 1.5}, "top_p is 1.5"),
        ({"generate": 4, "prompts": ()}, "nothing to continue"),
    ],
)
def test_settings_out_of_range_are_refused(options, words, tiny_dense):
    generation = GenerateConfig(**{"prompts": ("a",), **options})
    config = MeasureConfig(model=str(tiny_dense("llama")), generation=generation)
    with pytest.raises(UserError, match=words):
        measure_generation(config, lambda *told: None)
