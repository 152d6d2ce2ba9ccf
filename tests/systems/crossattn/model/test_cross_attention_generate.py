"""Generation with caches equals computing every token anew."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from src.errors import ConfigError
from src.training.parallel.memory import checkpoint_layers

GREEDY = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}


def prompts_and_contexts(batch, lengths=(4, 2, 3)):
    """Left-padded prompts (3, 4) and their contexts."""
    mask = torch.arange(4) >= 4 - torch.tensor(lengths)[:, None]
    return {**batch, "input_ids": batch["input_ids"][:, :4].clamp(min=3) * mask, "attention_mask": mask}


def one_token_at_a_time(model, ids, context_ids, context_mask, steps=6):
    """Greedy continuation of one prompt (T) by whole forwards: no cache of any kind."""
    for _ in range(steps):
        logits = model(ids[None], torch.ones(1, len(ids), dtype=torch.bool), context_ids[None], context_mask[None])
        ids = torch.cat((ids, logits[0, -1].argmax()[None]))
    return ids


@pytest.mark.parametrize("settings", [{}, {"final_layer": True, "shared_weights": True}])
@pytest.mark.parametrize("model_type", ["gpt2", "gpt_bigcode", "gpt_neox", "llama", "mistral", "qwen2"])
def test_greedy_with_caches_and_left_padding(make, batch, model_type, settings):
    model = make(model_type, **settings)
    inputs = prompts_and_contexts(batch)
    got = model.generate(**inputs, **GREEDY)
    assert got.shape == (3, 10)
    for b in range(3):
        prompt = inputs["input_ids"][b][inputs["attention_mask"][b]]
        expected = one_token_at_a_time(model, prompt, inputs["context_ids"][b], inputs["context_mask"][b])
        assert got[b, -len(expected) :].tolist() == expected.tolist()


def test_the_context_is_encoded_and_projected_once_and_past_tokens_never_again(make, batch):
    model = make()
    encoded, projected, decoded = [], [], []
    for block in model.blocks.values():
        block.attention.k.register_forward_hook(lambda *_: projected.append(1))
        block.attention.q.register_forward_hook(lambda _, args, __: decoded.append(args[0].shape[1]))
    model.base.transformer.register_forward_pre_hook(
        lambda _, __, kwargs: encoded.append(model._reading is None), with_kwargs=True
    )
    model.generate(**prompts_and_contexts(batch), **GREEDY)
    assert sum(encoded) == 1
    assert len(projected) == 2
    assert decoded == [4, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_have_separate_contexts(make, batch, threads):
    model = make()
    inputs = prompts_and_contexts(batch)
    requests = [{name: tensor[[i % 3]] for name, tensor in inputs.items()} for i in range(24)]
    alone = [model.generate(**request, **GREEDY).tolist() for request in requests]
    assert len({str(ids) for ids in alone}) == 3, "the setting of the test"
    with ThreadPoolExecutor(threads) as pool:
        together = list(pool.map(lambda request: model.generate(**request, **GREEDY).tolist(), requests))
    assert together == alone


def test_layers_that_are_computed_again_in_another_thread_have_read_the_right_context(make, batch):
    """The backward pass of a GPU runs in a thread of its own, where no context is set."""
    gradients = []
    for recompute in (False, True):
        model = make(num_layers=4, stride=1).train()
        if recompute:
            assert checkpoint_layers(model) == 8
        loss = model(**batch).logsumexp(-1).sum()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(loss.backward).result()
        gradients.append({name: parameter.grad for name, parameter in model.blocks.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0])


def test_further_questions_on_one_context(make, batch):
    model = make()
    inputs = prompts_and_contexts(batch)
    projected = []
    model.blocks["3"].attention.k.register_forward_hook(lambda *_: projected.append(1))
    questions = [{name: inputs[name] for name in ("input_ids", "attention_mask")}]
    questions.append({name: tensor.flip(0) for name, tensor in questions[0].items()})
    with torch.no_grad(), model.reading(model.encode(inputs["context_ids"], inputs["context_mask"])):
        answers = [model.generate(**question, **GREEDY) for question in questions]
    assert len(projected) == 1
    for question, answer in zip(questions, answers, strict=True):
        assert torch.equal(answer, model.generate(**{**inputs, **question}, **GREEDY))
    with pytest.raises(ConfigError, match=r"no context: pass context_ids and context_mask, or call it inside"):
        model.generate(**questions[0], **GREEDY)


@pytest.mark.parametrize("model_type", ["gpt_bigcode", "llama"])
def test_beams_read_the_context_of_their_sample(make, batch, model_type):
    """Batched beam search finds what it finds for each sample alone, where no context can be mixed up."""
    model = make(model_type)
    inputs = prompts_and_contexts(batch)
    got = model.generate(**inputs, num_beams=3, num_return_sequences=2, **GREEDY)
    assert got.shape == (6, 10)
    for b in range(3):
        alone = model.generate(
            **{name: tensor[b : b + 1] for name, tensor in inputs.items()},
            num_beams=3,
            num_return_sequences=2,
            **GREEDY,
        )
        assert torch.equal(got[2 * b : 2 * b + 2], alone)


@pytest.mark.parametrize("model_type", ["gpt_bigcode", "gpt_neox", "llama"])
@pytest.mark.parametrize(
    "way", [{}, {"num_beams": 3}, {"do_sample": True, "temperature": 1.5}, {"num_beams": 2, "do_sample": True}]
)
def test_every_way_of_generating_is_the_same_without_caches(make, batch, model_type, way):
    model = make(model_type)
    inputs = prompts_and_contexts(batch)
    outputs = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        outputs.append(model.generate(**inputs, **{**GREEDY, "max_new_tokens": 12, **way}, use_cache=use_cache))
    assert torch.equal(*outputs)


def test_encoded_contexts_are_answered_like_their_ids(make, batch):
    model = make()
    inputs = prompts_and_contexts(batch)
    context = model.encode(inputs.pop("context_ids"), inputs.pop("context_mask"))
    got = model.generate(**inputs, context_hidden=context.hidden, context_mask=context.mask, **GREEDY)
    assert torch.equal(got, model.generate(**prompts_and_contexts(batch), **GREEDY))


def test_beams_of_a_duplicated_sample_are_duplicates(make, batch):
    model = make()
    inputs = {name: tensor[:1].repeat_interleave(2, 0) for name, tensor in prompts_and_contexts(batch).items()}
    got = model.generate(**inputs, num_beams=2, **GREEDY)
    assert torch.equal(got[0], got[1])


def test_sampling_follows_the_seed(make, batch):
    model = make()
    inputs, sampling = prompts_and_contexts(batch), {**GREEDY, "do_sample": True, "temperature": 2.0}
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(model.generate(**inputs, **sampling))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_generation_stops_at_eos_and_pads(make, batch):
    model = make()
    inputs = prompts_and_contexts(batch)
    free = model.generate(**inputs, **GREEDY)
    eos = int(free[0, 5])
    with_eos = model.generate(**inputs, **{**GREEDY, "eos_token_id": eos})
    first = (free[0, 4:] == eos).nonzero()[0, 0] + 5
    assert torch.equal(with_eos[0, :first], free[0, :first])
    assert (with_eos[0, first:] == 0).all()


def test_without_context_generation_is_finite(make, batch):
    model = make()
    inputs = prompts_and_contexts(batch)
    inputs["context_mask"] = torch.zeros_like(inputs["context_mask"])
    got = model.generate(**inputs, output_logits=True, return_dict_in_generate=True, **GREEDY)
    assert all(step.isfinite().all() for step in got.logits)
