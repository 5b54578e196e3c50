"""`mla_torch.models` in the models of transformers: greedy tokens and logits against transformers' own attention."""

import importlib
import sys

import pytest

torch = pytest.importorskip("torch")

from tests.conftest import INTERPRETED

transformers = pytest.importorskip("transformers", minversion="5.24", reason="transformers 5.24 or newer is not installed")

from examples import torch_deepseek as example
from mla_torch.models import PagedCache

NEW = 12
# rms error of the logits over their standard deviation.  Measured are 1.4 roundings of a cached value at most.
ROUNDING = {"fp16": 2.0**-11, "bf16": 2.0**-8, "v32_fp8": 2.0**-4}
VARIANTS = {
    "v3": ("v3", {}),
    "v3-half-rope-no-yarn": ("v3", {"rope_interleave": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "v3-no-q-lora-bf": ("v3", {"q_lora_rank": None, "attention_bias": True}),
    "v2": ("v2", {}),
    "v2-lite": ("v2", {"q_lora_rank": None}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_in_fp32_are_those_of_transformers(variant):
    version, options = VARIANTS[variant]
    model, prompts = example.make_model(version, **options), example.make_prompts()
    expected = example.greedy(model, prompts, NEW)
    cache = example.make_cache(model, max(example.LENGTHS) + NEW)
    assert (example.greedy(model, prompts, NEW, cache) == expected).all()
    assert len(expected.unique()) > NEW  # it is not one token over and over
    assert cache.cache_seqlens.tolist() == [length + NEW - 1 for length in example.LENGTHS]  # padding takes no slots

    logits = example.logits_of(model, prompts, expected, example.make_cache(model, 64))
    expected_logits = example.logits_of(model, prompts, expected)
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-4)  # fp32 sums in another order; 1.1e-5 measured


def test_softmax_scale_has_the_factor_of_yarn():
    scaling = example.make_model("v3").model.layers[0].self_attn.scaling
    assert scaling > 1.8 * 192**-0.5  # so that the tests above would notice a scale without it


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("cache_format", ROUNDING)
@pytest.mark.parametrize("version", ["v2", "v3"])
def test_logits_with_a_rounded_cache(version, cache_format, step, device):
    """An fp32 model, so that nothing but queries, cache and attention is rounded; no experts, whose choice is a jump."""
    model, prompts = example.make_model(version, first_k_dense_replace=2), example.make_prompts()
    new = 3 if INTERPRETED else NEW
    tokens = example.greedy(model, prompts, new)
    expected = example.logits_of(model, prompts, tokens)
    prompts = {name: x.to(device) for name, x in prompts.items()}
    cache = example.make_cache(model, 40, cache_format)
    logits = example.logits_of(model.to(device), prompts, tokens.to(device), cache, step).cpu()
    difference = (logits - expected)[:, 1:]  # the prompt's own logits are not decoded
    assert difference.square().mean().sqrt() <= 3 * ROUNDING[cache_format] * expected.std()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_logits_of_a_model_in_bf16(device):
    """Compared with the same weights in fp32, as close as transformers' own attention in bf16 is, within half of it."""
    model, prompts = example.make_model("v3", first_k_dense_replace=2).bfloat16(), example.make_prompts()
    exact = example.make_model("v3", first_k_dense_replace=2)
    exact.load_state_dict(model.state_dict())
    tokens = example.greedy(exact, prompts, 3)
    expected = example.logits_of(exact, prompts, tokens)
    prompts = {name: x.to(device) for name, x in prompts.items()}
    model, tokens = model.to(device), tokens.to(device)
    cache = example.make_cache(model, 40)
    ours, theirs = (example.logits_of(model, prompts, tokens, c).float().cpu() for c in (cache, None))
    assert cache.layers[0].kv_cache.dtype == torch.bfloat16
    errors = [(x - expected)[:, 1:].square().mean().sqrt() for x in (ours, theirs)]
    assert errors[0] <= 1.5 * errors[1]


def test_speculation_and_reset():
    model = example.make_model("v3")
    prompt = torch.arange(1, 8).repeat(1, 3)  # which prompt lookup finds something in
    expected = model.generate(prompt, max_new_tokens=NEW, do_sample=False)
    model.set_attn_implementation("mla_decode")
    cache = PagedCache(model.config, batch_size=1, max_tokens=64, page_size=16)
    for options in ({"prompt_lookup_num_tokens": 4}, {}):
        tokens = model.generate(prompt, max_new_tokens=NEW, do_sample=False, cache=cache, **options)
        assert (tokens == expected).all()
        assert cache.cache_seqlens.tolist() == [expected.shape[1] - 1]
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.cache_seqlens.tolist() == [0]


def test_rejected_tokens_are_forgotten():
    model, prompts = example.make_model("v3"), example.make_prompts()
    tokens = example.greedy(model, prompts, 4)
    expected = example.logits_of(model, prompts, tokens)
    cache = example.make_cache(model, 64)
    example.logits_of(model, prompts, torch.full((3, 6), 99), cache, step=5)
    cache.crop(-5)
    assert cache.cache_seqlens.tolist() == list(example.LENGTHS)
    mask = torch.ones((3, 22), dtype=torch.long)
    mask[:, :21] = prompts["attention_mask"]
    with torch.no_grad():
        positions = mask.sum(1, keepdim=True) - 1
        logits = model(tokens[:, :1], attention_mask=mask, position_ids=positions, cache=cache).logits
    torch.testing.assert_close(logits[:, 0], expected[:, 1], rtol=0, atol=1e-4)


def test_prompts_may_be_padded_on_the_right():
    """Then all that is left out stands between a prompt and what follows it, and takes neither slots nor attention."""
    model, prompts = example.make_model("v3"), example.make_prompts()
    tokens, mask = prompts["input_ids"], prompts["attention_mask"]
    answers = example.greedy(model, prompts, 3)
    expected = example.logits_of(model, prompts, answers)
    ends = mask.sum(1)
    right = [torch.stack([row.roll(int(n)) for row, n in zip(x, ends, strict=True)]) for x in (tokens, mask)]
    model.set_attn_implementation("mla_decode")
    cache = example.make_cache(model, 40)
    with torch.no_grad():
        logits = model(right[0], attention_mask=right[1], cache=cache).logits
        found = [logits[torch.arange(3), ends - 1]]
        for i in range(2):
            seen = torch.nn.functional.pad(right[1], (0, i + 1), value=1)
            call = {"attention_mask": seen, "position_ids": ends[:, None] + i, "cache": cache}
            found.append(model(answers[:, i : i + 1], **call).logits[:, 0])
    torch.testing.assert_close(torch.stack(found, 1), expected, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def model():
    model = example.make_model("v3")
    model.set_attn_implementation("mla_decode")
    return model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size: expected a positive number, got 0"),
        ({"cache_format": "model1_fp8"}, "cache_format: expected one of"),
        ({"block_table": torch.zeros(2, 3)}, r"block_table: expected int32 or int64 of shape \[batch_size=2, at least 4\]"),
        ({"block_table": torch.full((2, 4), -1)}, "block_table: expected pages from 0 on, got -1"),
        ({"config": transformers.LlamaConfig()}, "config: expected one of a model with latent attention, LlamaConfig has no"),
    ],
)
def test_wrong_caches_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        PagedCache(**{"config": model.config, "batch_size": 2, "max_tokens": 64, "page_size": 16} | options)


def test_wrong_calls_are_refused(model):
    prompt = torch.ones((2, 5), dtype=torch.long)
    with pytest.raises(ValueError, match="cache: attention 'mla_decode' needs an mla_torch"):
        model.generate(prompt, max_new_tokens=2)
    with pytest.raises(ValueError, match="batch_size: the cache was made for 3 requests, the model is given 2"):
        model.generate(prompt, max_new_tokens=2, cache=PagedCache(model.config, 3, 64))
    with pytest.raises(ValueError, match="max_tokens: the cache holds 6 of a request, 7 are needed"):
        model.generate(prompt, max_new_tokens=4, do_sample=False, cache=PagedCache(model.config, 2, 6))
    with pytest.raises(NotImplementedError, match="beam search"):
        model.generate(prompt, max_new_tokens=4, num_beams=2, cache=PagedCache(model.config, 4, 64))


def test_the_example_says_that_all_tokens_are_equal(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["torch_deepseek.py", "--new-tokens", "4"])
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" of the tokens")[0] for line in lines] == ["DeepSeek-V2: 100%", "DeepSeek-V3: 100%"]


def test_missing_transformers_is_one_clear_sentence(monkeypatch):
    monkeypatch.delitem(sys.modules, "mla_torch.models", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"mla_torch\.models needs transformers: pip install 'mla-decode\[models\]'"):
        importlib.import_module("mla_torch.models")
