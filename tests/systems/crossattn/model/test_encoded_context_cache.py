"""The cache of encoded contexts: what comes out is what was encoded, whoever writes, dies or damages meanwhile."""

import os
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from src.errors import CheckpointError, ConfigError, DataError, RunError
from src.systems.crossattn.model.encoded_context_cache import ContextCache, base_digest
from tests.core.models.conftest import make_base
from tests.systems.crossattn.model.test_cross_attention_generate import GREEDY, prompts_and_contexts

PLENTY = 10**9


@pytest.fixture
def contexts():
    """Twenty contexts (20, 1, 9) of 9 tokens, and their mask."""
    ids = torch.randint(3, 23, (20, 1, 9), generator=torch.Generator().manual_seed(5))
    return ids, torch.ones(20, 1, 9, dtype=torch.bool)


def entries(folder):
    return sorted(folder.glob("??/*.safetensors"))


def same(one, other):
    return torch.equal(one.hidden, other.hidden) and torch.equal(one.mask, other.mask)


@pytest.mark.parametrize("model_type", ["gpt_bigcode", "llama"])
def test_what_is_cached_is_what_is_encoded(make, batch, tmp_path, model_type):
    model = make(model_type)
    chunks = batch["context_ids"], batch["context_mask"]
    expected = model.encode(*chunks)
    expected.hidden *= expected.mask[..., None]  # what stands at padding is not cached
    cache = ContextCache(tmp_path / "c", model, PLENTY, "float32")
    for hits, misses in ((0, 5), (5, 5)):  # three samples of two chunks, one of them empty
        assert same(cache.contexts(*chunks), expected)
        assert (cache.hits, cache.misses) == (hits, misses)
    again = ContextCache(tmp_path / "c", model, PLENTY, "float32")
    assert same(again.contexts(*chunks), expected)
    assert (again.hits, again.misses) == (5, 0)


def test_answers_are_the_same_from_the_cache(make, batch, tmp_path):
    model = make("llama")
    inputs = prompts_and_contexts(batch)
    expected = model.generate(**inputs, **GREEDY)
    cache = ContextCache(tmp_path / "c", model, PLENTY, "float32")
    ids, mask = inputs.pop("context_ids"), inputs.pop("context_mask")
    for _ in range(2):
        context = cache.contexts(ids, mask)
        got = model.generate(**inputs, context_hidden=context.hidden, context_mask=context.mask, **GREEDY)
        assert torch.equal(got, expected)


def test_bfloat16_rounds_once_and_int8_by_half_a_step(make, contexts, tmp_path):
    model = make()
    exact = model.encode(*contexts).hidden
    for _ in range(2):
        assert torch.equal(
            ContextCache(tmp_path / "b", model, PLENTY).contexts(*contexts).hidden, exact.bfloat16().float()
        )
    eighths = [ContextCache(tmp_path / "i", model, PLENTY, "int8").contexts(*contexts).hidden for _ in range(2)]
    assert torch.equal(*eighths)
    steps = exact.abs().amax(-1, keepdim=True) / 127
    assert ((eighths[0] - exact).abs() <= steps * 0.501).all()
    sizes = {name: sum(path.stat().st_size for path in entries(tmp_path / name)) / 20 for name in "bi"}
    assert sizes["b"] == pytest.approx(9 * 16 * 2, abs=200)  # the header takes the rest
    assert sizes["i"] == pytest.approx(9 * (16 + 4), abs=260)


def test_padding_and_repetition_make_no_other_context(make, tmp_path):
    cache = ContextCache(tmp_path / "c", make(), PLENTY, "float32")
    ids = torch.tensor([[[5, 6, 7, 0, 0]], [[0, 0, 5, 6, 7]], [[5, 6, 7, 7, 7]]])
    mask = torch.tensor([[[1, 1, 1, 0, 0]], [[0, 0, 1, 1, 1]], [[1, 1, 1, 0, 0]]]).bool()
    hidden = cache.contexts(ids, mask).hidden
    assert (cache.hits, cache.misses) == (0, 1)
    assert torch.equal(hidden[0, :3], hidden[1, 2:])
    assert torch.equal(hidden[0], hidden[2])
    assert not hidden[0, 3:].any()
    assert not cache.contexts(ids, torch.zeros_like(mask)).hidden.any()


def damage_cut(path):
    os.truncate(path, path.stat().st_size - 1)


def damage_empty(path):
    path.write_bytes(b"")


def damage_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def damage_zeros(path):
    path.write_bytes(bytes(path.stat().st_size))


def damage_other(path):
    """The file of another context."""
    other = next(p for p in entries(path.parents[1]) if p != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [damage_cut, damage_empty, damage_byte, damage_zeros, damage_other])
def test_a_damaged_entry_is_never_served(make, contexts, tmp_path, damage):
    model = make()
    first = ContextCache(tmp_path / "c", model, PLENTY).contexts(*contexts)
    victim = entries(tmp_path / "c")[7]
    damage(victim)
    cache = ContextCache(tmp_path / "c", model, PLENTY)
    assert same(cache.contexts(*contexts), first)
    assert (cache.hits, cache.misses, cache.damaged) == (19, 1, 1)
    assert set(load_file(victim)) == {"states", "checksum"}
    assert same(cache.contexts(*contexts), first)
    assert cache.damaged == 1


def test_the_least_recently_read_go_first(make, contexts, tmp_path):
    model, (ids, mask) = make(), contexts
    first = ContextCache(tmp_path / "c", model, PLENTY)
    first.contexts(ids[:1], mask[:1])
    size = first.num_bytes()
    cache = ContextCache(tmp_path / "c", model, size * 10)
    cache.contexts(ids[:10], mask[:10])
    assert cache.num_bytes() == size * 10
    cache.contexts(ids[:1], mask[:1])  # read again, so the second is now the oldest
    cache.contexts(ids[10:11], mask[10:11])
    assert cache.num_bytes() == size * 9
    cache.hits = cache.misses = 0
    for n, found in ((0, True), (1, False)):
        assert (cache._read_entry(cache.key(ids[n, 0])) is not None) is found
    for n in range(20):
        cache.contexts(ids[n : n + 1], mask[n : n + 1])
        assert cache.num_bytes() <= size * 10
    with pytest.raises(ConfigError, match=rf"max_bytes: {size - 1} cannot hold one context of {size} bytes"):
        ContextCache(tmp_path / "d", model, size - 1).contexts(ids[:1], mask[:1])


def test_a_cache_of_another_base_is_refused_and_never_hit(make, contexts, tmp_path):
    model = make()
    cache = ContextCache(tmp_path / "c", model, PLENTY)
    cache.contexts(*contexts)
    other = make_base("gpt_bigcode")
    with torch.no_grad():
        other.transformer.h[1].mlp.c_fc.weight += 1e-3
    with pytest.raises(
        ConfigError,
        match=r"c: caches contexts of .* \(weights \w{12}\), but this model's base is .* \(weights \w{12}\)",
    ):
        ContextCache(tmp_path / "c", make(base=other), PLENTY)
    assert ContextCache(tmp_path / "o", make(base=other), PLENTY).key(contexts[0][0, 0]) != cache.key(contexts[0][0, 0])
    with pytest.raises(ConfigError, match=r"c: caches bfloat16, not int8"):
        ContextCache(tmp_path / "c", model, PLENTY, "int8")
    (tmp_path / "c" / "cache.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"cache\.json: not of a cache of format 1\. Delete the folder"):
        ContextCache(tmp_path / "c", model, PLENTY)


def test_a_base_is_known_by_its_weights_wherever_it_comes_from(tmp_path):
    base = make_base("llama")
    base.save_pretrained(tmp_path / "m")
    copy = type(base).from_pretrained(tmp_path / "m")
    assert base_digest(copy) == base_digest(base)
    assert base_digest(copy.bfloat16()) != base_digest(base)
    assert base_digest(make_base("llama", rms_norm_eps=1e-3)) != base_digest(base)
    unscaled = make_base("gpt_bigcode", scale_attn_weights=False)  # the same weights, and other states
    assert base_digest(unscaled) != base_digest(make_base("gpt_bigcode"))


def test_the_blocks_do_not_matter_and_the_base_alone_will_do(make, contexts, tmp_path):
    model = make()
    ContextCache(tmp_path / "c", model.base, PLENTY).contexts(*contexts)
    cache = ContextCache(tmp_path / "c", make(num_layers=1, stride=1), PLENTY)
    cache.contexts(*contexts)
    assert (cache.hits, cache.misses) == (20, 0)


def test_a_base_that_is_training_is_read_as_it_is_served(contexts, tmp_path):
    base = make_base("gpt_bigcode", embd_pdrop=0.5, resid_pdrop=0.5)
    expected = base.transformer(input_ids=contexts[0][:, 0]).last_hidden_state
    cache = ContextCache(tmp_path / "c", base.train(), PLENTY, "float32")
    assert (cache.contexts(*contexts).hidden - expected).abs().max() < 1e-4
    assert base.training
    assert base.transformer.drop.training


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 3.4e38])
def test_states_that_are_not_finite_are_refused_and_not_kept(contexts, tmp_path, dtype, bad):
    base = make_base("gpt_bigcode")
    with torch.no_grad():
        base.transformer.ln_f.weight.fill_(0.0)
        base.transformer.ln_f.bias.fill_(bad)
    cache = ContextCache(tmp_path / "c", base, PLENTY, dtype)
    if bad == 3.4e38 and dtype != "bfloat16":  # finite as it is; bfloat16 rounds it up, and has no such number
        assert cache.contexts(*contexts).hidden.isfinite().all()
        return
    with pytest.raises(
        DataError, match=rf"c: states of a context of 9 tokens are not finite in {dtype}\. The base is damaged"
    ):
        cache.contexts(*contexts)
    assert not entries(tmp_path / "c")


@pytest.mark.parametrize("reopened", [True, False])
def test_a_lost_lock_does_not_lift_the_bound(make, contexts, tmp_path, reopened):
    model, (ids, mask) = make(), contexts
    first = ContextCache(tmp_path / "c", model, PLENTY)
    first.contexts(ids[:1], mask[:1])
    most = first.num_bytes() * 4
    cache = ContextCache(tmp_path / "c", model, most)
    cache.contexts(ids[:4], mask[:4])
    (tmp_path / "c" / ".lock").unlink()
    if reopened:
        cache = ContextCache(tmp_path / "c", model, most)
    for n in range(4, 9):
        cache.contexts(ids[n : n + 1], mask[n : n + 1])
        assert cache.num_bytes() <= most


def test_an_entry_that_cannot_be_read_is_named(make, contexts, tmp_path):
    cache = ContextCache(tmp_path / "c", make(), PLENTY)
    cache.contexts(*contexts)
    victim = entries(tmp_path / "c")[3]
    victim.unlink()
    victim.mkdir()  # root may read everything, but no folder as a file
    with pytest.raises(RunError, match=rf"{victim.name}: cannot read: Is a directory\."):
        cache.contexts(*contexts)


def in_child(work):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def test_several_processes_and_one_that_is_killed(make, contexts, tmp_path):
    """All read and write one folder that holds half of what they want."""
    model, (ids, mask) = make(), contexts
    expected = model.encode(ids, mask).hidden.bfloat16().float()
    probe = ContextCache(tmp_path / "probe", model, PLENTY)
    probe.contexts(ids[:1], mask[:1])
    most = probe.num_bytes() * 10

    def work(seed, rounds):
        cache = ContextCache(tmp_path / "c", model, most)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(rounds):
            chosen = torch.randperm(20, generator=generator)[:3]
            got = cache.contexts(ids[chosen], mask[chosen]).hidden
            assert torch.allclose(got, expected[chosen], atol=1e-2)
        assert cache.damaged == 0

    victim = in_child(lambda: work(0, 10**6))
    children = [in_child(lambda seed=seed: work(seed, 60)) for seed in (1, 2)]
    deadline = time.monotonic() + 300
    while len(entries(tmp_path / "c")) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    cache = ContextCache(tmp_path / "c", model, most)
    assert cache.num_bytes() <= most
    got = cache.contexts(ids, mask)
    assert cache.damaged == 0
    assert cache.hits > 0
    assert torch.allclose(got.hidden, expected, atol=1e-2)


def test_who_comes_second_does_not_count_a_context_again(make, contexts, tmp_path):
    cache = ContextCache(tmp_path / "c", make(), PLENTY)
    cache.contexts(*contexts)
    for _ in range(2):
        cache._write_entry(cache.key(contexts[0][0, 0]), cache._to_disk(torch.zeros(9, 16)))
    assert int.from_bytes((tmp_path / "c" / ".lock").read_bytes(), "little") == cache.num_bytes()
    assert cache.contexts(*contexts).hidden[0].any()


def test_what_killed_writers_left_is_removed_in_time(make, contexts, tmp_path):
    model, (ids, mask) = make(), contexts
    cache = ContextCache(tmp_path / "c", model, PLENTY)
    cache.contexts(ids[:1], mask[:1])
    old, new = tmp_path / "c" / ".old", tmp_path / "c" / ".new"
    for path in (old, new):
        path.write_bytes(b"x" * 1000)
    os.utime(old, (1, 1))
    small = ContextCache(tmp_path / "c", model, cache.num_bytes() * 2)
    small.contexts(ids[1:4], mask[1:4])
    assert not old.exists()
    assert new.exists()
