"""Continuations. Oracles: argmax token by token, frequencies of samples, the tokenizer's chat."""

import copy
import json

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from dotmoe.common.errors import UserError
from dotmoe.measure.evaluate.generation import generated
from dotmoe.models.sampling import Sampling, continuations

PROMPTS = [[0, 40, 41, 42], [0, 99, 98, 97, 96, 95]]


@torch.no_grad()
def argmaxed(model, prompt, new_tokens, end):
    ids = list(prompt)
    for _ in range(new_tokens):
        token = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        if token == end:
            break
        ids.append(token)
    return ids[len(prompt) :]


def test_greedy_is_the_argmax_token_by_token_whatever_the_model_prefers(dense):
    model, tokenizer = dense.model, dense.tokenizer
    model.generation_config.repetition_penalty = 2.0
    model.generation_config.no_repeat_ngram_size = 1
    made = generated(model, tokenizer, PROMPTS, 12)
    assert made == [argmaxed(model, prompt, 12, tokenizer.eos_token_id) for prompt in PROMPTS]


def test_a_penalty_on_repetition_is_the_same_as_of_tasks(dense):
    model, tokenizer = dense.model, dense.tokenizer
    ends = [tokenizer.eos_token_id]
    how = Sampling(temperature=0.0, new_tokens=12, repetition_penalty=1.5)
    side_by_side = [each.ids for each in sorted(continuations(model, PROMPTS, how, ends))]
    assert generated(model, tokenizer, PROMPTS, 12, repetition_penalty=1.5) == side_by_side
    assert generated(model, tokenizer, PROMPTS, 12) != side_by_side


def test_an_end_of_text_ends_the_continuation_and_is_not_in_it(dense):
    free = argmaxed(dense.model, PROMPTS[0], 8, None)
    dense.tokenizer.eos_token_id = free[3]
    made = generated(dense.model, dense.tokenizer, PROMPTS[:1], 8)
    assert made == [free[: free.index(free[3])]]


def test_a_token_that_the_model_names_as_an_end_is_one_too(dense):
    """As of Gemma and Phi-3, whose turns end with another token than a text."""
    free = argmaxed(dense.model, PROMPTS[0], 8, None)
    dense.model.generation_config.eos_token_id = [dense.tokenizer.eos_token_id, free[2]]
    made = generated(dense.model, dense.tokenizer, PROMPTS[:1], 8)
    assert made == [free[: free.index(free[2])]]


def test_samples_follow_the_tempered_softmax_and_repeat(dense):
    model, tokenizer, prompt = dense.model, dense.tokenizer, PROMPTS[0]
    made = generated(model, tokenizer, [prompt], 100, temperature=0.5)[0]
    state = torch.get_rng_state()
    assert generated(model, tokenizer, [prompt], 100, temperature=0.5)[0] == made
    assert torch.equal(torch.get_rng_state(), state)
    ids = torch.tensor([[*prompt, *made]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    log_p = (logits / 0.5).log_softmax(-1)
    nats = -log_p[torch.arange(len(made)), made]
    entropy = -(log_p.exp() * log_p).sum(-1)
    assert abs(nats.mean() - entropy.mean()) < 5 * (nats - entropy).std() / len(made) ** 0.5


def test_a_prompt_goes_on_where_its_tokenizer_ends_every_text(copied, command, dense):
    """As that of a checkpoint with `add_eos_token` does."""
    asked = {"generate": 8, "prompts": "A figure", "json": []}
    expected = json.loads(command("evaluate", copied, **asked).out)["model"]["texts"]
    tokenizer = copy.deepcopy(dense.tokenizer)
    begin, end = tokenizer.bos_token, tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A {end}",
        special_tokens=[(begin, tokenizer.bos_token_id), (end, tokenizer.eos_token_id)],
    )
    tokenizer.save_pretrained(copied)
    found = json.loads(command("evaluate", copied, **asked).out)["model"]["texts"]
    assert found == expected


def test_a_chat_model_is_asked_by_its_template(copied, dense, command):
    asked = {"generate": 4, "prompts": "Who?", "chat_template": []}
    assert "has no chat template" in command("evaluate", copied, **asked).refusal()
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    (copied / "chat_template.jinja").write_text(template)
    said = command("evaluate", copied, **asked, json=[])
    prompt = dense.tokenizer("<user>Who?<assistant>", add_special_tokens=False).input_ids
    expected = dense.tokenizer.batch_decode(generated(dense.model, dense.tokenizer, [prompt], 4))
    assert json.loads(said.out)["model"]["texts"] == expected
    plain = {"text": copied / "config.json", "chat_template": []}
    assert "is for --tasks or --generate" in command("evaluate", copied, **plain).refusal()


@pytest.mark.parametrize(
    ("new_tokens", "prompt", "words"),
    [(300, [0, 40], "to 256, the model's context"), (4, [], "a prompt has no tokens")],
)
def test_a_prompt_that_is_empty_or_too_long_is_refused(new_tokens, prompt, words, dense):
    with pytest.raises(UserError, match=words):
        generated(dense.model, dense.tokenizer, [prompt], new_tokens)


def test_every_prompt_is_shown(tiny_dense, command):
    prompts = ["one", "two", "three", "four", "five", "six"]
    done = command("evaluate", tiny_dense("llama"), generate=2, prompts=prompts)
    assert done.out.count("prompt:") == len(prompts)


def test_a_result_of_another_model_is_not_overwritten(tiny_dense, command, tmp_path):
    out = tmp_path / "out"
    how = {"generate": 2, "prompts": "one", "out": out}
    model, other = tiny_dense("llama"), tiny_dense("qwen2")
    for _ in range(2):  # its own is measured again
        assert command("evaluate", model, **how).status == 0
    before = (out / "generation.json").read_text()
    said = command("evaluate", other, **how).refusal()
    assert "is a result of" in said
    assert "another model" in said
    assert (out / "generation.json").read_text() == before


@pytest.mark.parametrize("bad", ["a \udcff b", "a \0 b"])
def test_a_prompt_that_is_no_text_is_refused(tiny_dense, command, bad):
    said = command("evaluate", tiny_dense("llama"), generate=2, prompts=["one", bad]).refusal()
    assert "prompt 2 of --prompts" in said
