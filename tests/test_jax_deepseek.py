"""The example model in JAX: against transformers' DeepSeek-V3, against itself, and what it compiles and keeps."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")

import jax.numpy as jnp

import mla_jax
from examples import jax_deepseek as deepseek
from examples.deepseek_config import Config, Yarn
from mla_jax import jax_triton_compat as compat
from tests.jax_lowered import kernel_calls

SMALL = Config(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    q_lora_rank=96,
    implementation="reference",
)
MODELS = {
    "experts": SMALL,
    "yarn": dataclasses.replace(SMALL, yarn=Yarn(4.0, 64, mscale=0.7, mscale_all_dim=1.0)),
    "no-q-lora": dataclasses.replace(SMALL, q_lora_rank=None, yarn=Yarn(40.0, 64)),
}
# Experts are chosen one way or another by a rounding, and then a token's logits jump: what only rounding moves is looked at
# in a model without them.
DENSE = dataclasses.replace(SMALL, first_k_dense_replace=2)
# Twice the largest error measured of logits of standard deviation 1 (0.025, 0.0032 and 0.3) where queries and the cache are
# rounded in two layers.  It goes with the formats' unit roundoffs: 2**-9, 2**-12 and, for latents in e4m3, 2**-4.
ROUNDING = {"bf16": 0.05, "fp16": 0.0065, "v32_fp8": 0.6}
EXACT = 1e-4  # the same in fp32 throughout: less than 5e-5 was measured
LENGTHS = np.array([3, 40, 64], np.int32)  # the last one begins a page with its next token

prefill = jax.jit(deepseek.prefill, static_argnums=0)
decode = jax.jit(deepseek.decode, static_argnums=0)


def make(config: Config) -> dict[str, Any]:
    return deepseek.arrange(config, deepseek.random_weights(config))


def random_tokens(b: int = 3, s: int = 80) -> np.ndarray:
    return np.random.default_rng(1).integers(2, SMALL.vocab_size, (b, s)).astype(np.int32)


def empty(config: Config, cache_format: str) -> tuple[Any, np.ndarray]:
    """Caches and a table for three requests of at most 128 tokens, out of order; fp32 is for `exact` alone."""
    table = np.array([[5, 0], [2, 4], [1, 3]], np.int32)
    if cache_format == "fp32":
        return tuple(jnp.zeros((6, 64, 1, 576)) for _ in range(config.num_hidden_layers)), table
    return deepseek.new_caches(config, 6, 64, cache_format), table


def prefill_logits(config: Config, params: Any, tokens: np.ndarray, cache_format: str = "bf16") -> np.ndarray:
    """Logits [b, s, vocab] in fp32: the cache is written and takes no part in them."""
    caches, table = empty(config, cache_format)
    hidden, _ = prefill(config, params, caches, table, tokens, np.full(len(tokens), tokens.shape[1], np.int32))
    return np.asarray(deepseek.logits(params, hidden))


def decode_logits(config: Config, params: Any, tokens: np.ndarray, cache_format: str, s_q: int = 1, n: int = 12) -> np.ndarray:
    """Logits [b, n, vocab] of n tokens behind LENGTHS of each row, s_q at a time, after a ragged prefill."""
    caches, table = empty(config, cache_format)
    _, caches = prefill(config, params, caches, table, tokens, LENGTHS)
    found = []
    for done in range(0, n, s_q):
        places = LENGTHS[:, None] + np.arange(done, done + s_q)
        given = np.take_along_axis(tokens, places, 1)
        hidden, caches = decode(config, params, caches, table, given, LENGTHS + np.int32(done))
        found.append(np.asarray(deepseek.logits(params, hidden)))
    return np.concatenate(found, 1)


def expected_rows(logits: np.ndarray, n: int = 12) -> np.ndarray:
    return np.stack([row[length : length + n] for row, length in zip(logits, LENGTHS, strict=True)])


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> str:
    """Attention and cache of the model in fp32, by the reference, so that nothing is rounded: the format to ask for."""

    def append(cache: Any, latent: Any, rope: Any, slots: Any, implementation: Any) -> Any:
        page = jnp.where(slots >= 0, slots // cache.shape[1], cache.shape[0])
        return cache.at[page, slots % cache.shape[1], 0].set(jnp.concatenate([latent, rope], 1), mode="drop")

    def decode(*arguments: Any, implementation: Any, **options: Any) -> Any:
        return mla_jax.decode_reference(*arguments, **options)

    monkeypatch.setattr(
        deepseek, "mla_jax", types.SimpleNamespace(append=append, decode=decode, token_slots=mla_jax.token_slots)
    )
    return "fp32"


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """One entry for each program that XLA compiles."""
    found: list[str] = []

    def note(event: str, duration: float, **more: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield found
    jax.monitoring.unregister_event_duration_listener(note)


class Transformers:
    """A model of transformers that was loaded from the file that ours is loaded from."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        reason = "it is not installed: pip install transformers"
        self.transformers = pytest.importorskip("transformers", reason=reason)
        safetensors = pytest.importorskip("safetensors.numpy", reason=reason)
        safetensors.save_file(deepseek.random_weights(config), folder / "model.safetensors", metadata={"format": "pt"})
        options = {k: v for k, v in vars(config).items() if k not in ("yarn", "rope_theta", "implementation")}
        rope = {"rope_type": "default"} if config.yarn is None else {"rope_type": "yarn", **dataclasses.asdict(config.yarn)}
        rope["rope_theta"] = config.rope_theta
        heads = config.num_attention_heads
        made = self.transformers.DeepseekV3Config(**options, num_key_value_heads=heads, rope_parameters=rope)
        made.save_pretrained(folder)
        self.model, info = self.transformers.DeepseekV3ForCausalLM.from_pretrained(
            folder, dtype=self.torch.float32, attn_implementation="eager", output_loading_info=True
        )
        assert not info["missing_keys"] and not info["unexpected_keys"]
        self.config, self.params = deepseek.load(folder)
        self.config = dataclasses.replace(self.config, implementation=config.implementation)
        assert self.config == config

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        with self.torch.no_grad():
            return self.model(self.torch.from_numpy(tokens).long()).logits.numpy()

    def greedy(self, prompt: list[int], n: int) -> tuple[list[int], list[float]]:
        """The next n tokens, each by a pass over all before it, and how far the best logit is above the second."""
        tokens, margins = list(prompt), []
        for _ in range(n):
            row = self.logits(np.array([tokens]))[0, -1]
            second, best = np.sort(row)[-2:]
            tokens.append(int(row.argmax()))
            margins.append(float(best - second))
        return tokens[len(prompt) :], margins


@pytest.mark.parametrize("name", MODELS)
def test_transformers_has_the_same_logits(name: str, exact: str, tmp_path: Path) -> None:
    """Prompts, and tokens after them one by one and three by three, in fp32 from one file."""
    theirs = Transformers(MODELS[name], tmp_path)
    tokens = random_tokens()
    expected = theirs.logits(tokens)
    assert expected.std() > 0.5
    np.testing.assert_allclose(prefill_logits(theirs.config, theirs.params, tokens, exact), expected, rtol=0, atol=EXACT)
    for s_q in (1, 3):
        found = decode_logits(theirs.config, theirs.params, tokens, exact, s_q)
        np.testing.assert_allclose(found, expected_rows(expected), rtol=0, atol=EXACT)


@pytest.mark.parametrize("cache_format", ROUNDING)
def test_transformers_has_the_same_logits_but_for_rounding(cache_format: str, tmp_path: Path) -> None:
    theirs = Transformers(DENSE, tmp_path)
    tokens = random_tokens()
    found = decode_logits(theirs.config, theirs.params, tokens, cache_format)
    np.testing.assert_allclose(found, expected_rows(theirs.logits(tokens)), rtol=0, atol=ROUNDING[cache_format])


def test_transformers_has_the_same_tokens(exact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them in fp32, one by one or with drafts."""
    theirs = Transformers(SMALL, tmp_path)
    prompts = [row[:n].tolist() for row, n in zip(random_tokens(), (5, 17, 30), strict=True)]
    use_fp32_caches(monkeypatch)
    expected = [theirs.greedy(prompt, 24)[0] for prompt in prompts]
    assert generated(theirs.config, theirs.params, prompts, 24) == expected
    assert generated(theirs.config, theirs.params, prompts, 24, drafts=2) == expected


@pytest.mark.parametrize("drafts", [0, 2])
def test_transformers_has_the_same_tokens_but_for_rounding(drafts: int, tmp_path: Path) -> None:
    """From fp16 pages: all tokens before the first one that is as good as another."""
    theirs = Transformers(DENSE, tmp_path)
    prompts = [row[:n].tolist() for row, n in zip(random_tokens(), (5, 17, 30), strict=True)]
    found = generated(theirs.config, theirs.params, prompts, 24, drafts, cache_format="fp16")
    compared = 0
    for prompt, row in zip(prompts, found, strict=True):
        expected, margins = theirs.greedy(prompt, 24)
        sure = next((i for i, margin in enumerate(margins) if margin < 2 * ROUNDING["fp16"]), 24)
        assert row[:sure] == expected[:sure]
        compared += sure
    assert compared >= 10


def use_fp32_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    def new_caches(config: Config, pages: int, page_size: int, cache_format: str) -> Any:
        return tuple(jnp.zeros((pages, page_size, 1, 576)) for _ in range(config.num_hidden_layers))

    monkeypatch.setattr(deepseek, "new_caches", new_caches)


def generated(
    config: Config,
    params: Any,
    prompts: list[list[int]],
    new_tokens: int,
    drafts: int = 0,
    eos: int = -1,
    cache_format: str = "bf16",
) -> list[list[int]]:
    state, padded = deepseek.new_state(config, prompts, new_tokens, drafts, cache_format=cache_format)
    state = deepseek.start(config, params, state, padded, eos)
    state, _ = deepseek.generate(config, params, state, np.int32(10**6), drafts, eos)
    rows, lengths = np.asarray(state.tokens), np.asarray(state.lengths)
    assert (rows[np.arange(rows.shape[1]) >= lengths[:, None]] == 0).all()
    return [row[len(prompt) : length].tolist() for row, length, prompt in zip(rows, lengths, prompts, strict=True)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("s_q", [1, 3])
def test_decoding_is_prefill(name: str, s_q: int, exact: str) -> None:
    """In fp32, for given tokens: the absorbed projections over pages say what plain attention does."""
    config = MODELS[name]
    params, tokens = make(config), random_tokens()
    found = decode_logits(config, params, tokens, exact, s_q)
    np.testing.assert_allclose(found, expected_rows(prefill_logits(config, params, tokens, exact)), rtol=0, atol=EXACT)


@pytest.mark.parametrize("cache_format", ROUNDING)
def test_decoding_is_prefill_but_for_rounding(cache_format: str) -> None:
    params, tokens = make(DENSE), random_tokens()
    found = decode_logits(DENSE, params, tokens, cache_format)
    expected = expected_rows(prefill_logits(DENSE, params, tokens))
    np.testing.assert_allclose(found, expected, rtol=0, atol=ROUNDING[cache_format])


@pytest.mark.interpret
@pytest.mark.parametrize("cache_format", ["bf16", "v32_fp8"])
def test_the_kernels_decode_the_model(cache_format: str) -> None:
    params, tokens = make(DENSE), random_tokens()
    expected = decode_logits(DENSE, params, tokens, cache_format, s_q=2, n=4)
    kernels = dataclasses.replace(DENSE, implementation="triton")
    found = decode_logits(kernels, params, tokens, cache_format, s_q=2, n=4)
    np.testing.assert_allclose(found, expected, rtol=0, atol=ROUNDING["bf16"] / 2)  # the weights of the softmax are rounded


def test_a_speculative_step_is_three_steps() -> None:
    """But for sums in fp32 that are taken in another order, after which a query may be rounded the other way."""
    params, tokens = make(DENSE), random_tokens()
    single = decode_logits(DENSE, params, tokens, "fp16", s_q=1)
    triple = decode_logits(DENSE, params, tokens, "fp16", s_q=3)
    np.testing.assert_allclose(triple, single, rtol=0, atol=1e-3)
    assert (triple.argmax(-1) == single.argmax(-1)).all()


@pytest.mark.once
def test_speculation_changes_no_token(exact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether drafts come true or not; where all do, a step gives three tokens."""
    use_fp32_caches(monkeypatch)
    params = make(SMALL)
    prompts = [[7, 8, 9] * 5, random_tokens()[0, :9].tolist()]
    expected = generated(SMALL, params, prompts, 40)
    assert generated(SMALL, params, prompts, 40, drafts=3) == expected

    state, padded = deepseek.new_state(SMALL, prompts, 40, drafts=3)
    state = deepseek.start(SMALL, params, state, padded)
    tokens = np.array([row[:3] for row in expected], np.int32)
    hidden, caches = decode(SMALL, params, state.caches, state.block_table, tokens, state.lengths - 1)
    greedy = deepseek.logits(params, hidden).argmax(-1)
    after = deepseek.accept(state, caches, tokens[:, 1:], greedy, eos=-1)
    assert (after.lengths - state.lengths).tolist() == [3, 3]
    for prompt, row, found in zip(prompts, expected, after.tokens, strict=True):
        assert found[len(prompt) : len(prompt) + 4].tolist() == row[:4]


def some_state(lengths: list[int], limits: list[int]) -> deepseek.State:
    b = len(lengths)
    tokens = jnp.where(jnp.arange(16) < jnp.array(lengths)[:, None], 5, 0)
    return deepseek.State((), jnp.zeros((b, 1), jnp.int32), tokens, jnp.array(lengths), jnp.array(limits))


@pytest.mark.once
def test_what_is_accepted() -> None:
    """Rows: no guess true, one, all, true behind a false one, the limit near, at the limit, the end within."""
    guesses = jnp.array([[1, 2], [7, 2], [7, 8], [1, 8], [7, 8], [7, 8], [7, 8]])
    greedy = jnp.array([[7, 8, 9]] * 6 + [[7, 8, 3]])
    greedy = greedy.at[6, 1].set(3)
    guesses = guesses.at[6, 1].set(3)
    state = some_state([4, 4, 4, 4, 4, 4, 4], [9, 9, 9, 9, 6, 4, 9])
    after = deepseek.accept(state, (), guesses, greedy, eos=3)
    assert (after.lengths - 4).tolist() == [1, 2, 3, 1, 2, 0, 2]
    assert after.limits.tolist() == [9, 9, 9, 9, 6, 4, 6]
    assert after.tokens[:, 4:8].tolist() == [
        [7, 0, 0, 0],
        [7, 8, 0, 0],
        [7, 8, 9, 0],
        [7, 0, 0, 0],
        [7, 8, 0, 0],
        [0, 0, 0, 0],
        [7, 3, 0, 0],
    ]


@pytest.mark.once
def test_guesses_follow_the_last_occurrence() -> None:
    tokens = jnp.array([[1, 2, 3, 1, 4, 5, 1, 0, 0, 0], [1, 2, 3, 4, 0, 0, 0, 0, 0, 0]])
    state = deepseek.State((), jnp.zeros((2, 1), jnp.int32), tokens, jnp.array([7, 4]), jnp.array([9, 9]))
    assert deepseek.propose(state, 2)[0].tolist() == [4, 5]
    assert deepseek.propose(state, 2).shape == (2, 2)
    assert deepseek.propose(state, 0).shape == (2, 0)


@pytest.mark.once
def test_a_request_ends_by_itself() -> None:
    """One ends with its token, and the others go on; all as if each were alone."""
    params = make(DENSE)
    prompts = [row[:n].tolist() for row, n in zip(random_tokens(), (5, 17, 30), strict=True)]
    whole = generated(DENSE, params, prompts, 20)
    eos = whole[1][6]
    expected = [row[: row.index(eos) + 1] if eos in row else row for row in whole]
    assert len(expected[1]) <= 7
    for drafts in (0, 2):
        assert generated(DENSE, params, prompts, 20, drafts, eos) == expected
    for prompt, row in zip(prompts, whole, strict=True):
        assert generated(DENSE, params, [prompt], 20)[0] == row


@pytest.mark.parametrize("drafts", [0, 2])
def test_lengths_compile_nothing(drafts: int, compilations: list[str]) -> None:
    """One program reads prompts and one generates, whatever the lengths, the limits, the pages and the number of steps."""
    config = dataclasses.replace(MODELS["experts"], rope_theta=9999.0 + drafts)  # known to no other test
    params, tokens = make(config), random_tokens()
    table = np.arange(6, dtype=np.int32)
    programs = [deepseek.start._cache_size(), deepseek.generate._cache_size()]
    for i, lengths in enumerate(([1, 1, 1], [3, 40, 64], [64, 2, 31], [9, 9, 9])):
        caches, _ = empty(config, "bf16")
        pages = np.roll(table, i).reshape(3, 2)
        limits = np.array(lengths, np.int32) + np.array([9, 1 + i, 30], np.int32)
        state = deepseek.State(caches, *map(jax.device_put, (pages, np.zeros((3, 128), np.int32), np.array(lengths), limits)))
        state = state._replace(lengths=jax.device_put(np.array(lengths, np.int32)))
        compilations.clear()
        state = deepseek.start(config, params, state, tokens[:, :64])
        assert len(compilations) == (i == 0)
        for steps in (1, 2, 3, 100):
            state, _ = deepseek.generate(config, params, state, np.int32(steps), drafts)
        assert len(compilations) == 2 * (i == 0)
        assert state.lengths.tolist() == limits.tolist()
    after = [deepseek.start._cache_size(), deepseek.generate._cache_size()]
    assert [b - a for a, b in zip(programs, after, strict=True)] == [1, 1]


@pytest.mark.parametrize("cache_format", ROUNDING)
def test_there_is_one_cache(cache_format: str) -> None:
    """The donated state is the new one, and steps need no memory that grows with the cache.

    But for bf16 on a CPU, where XLA makes a copy of one layer's pages to write into them.
    """
    config = dataclasses.replace(DENSE, rope_theta=9997.0)
    params = make(config)
    table = jnp.array([[0, 1], [2, 3]])

    def state(caches: Any) -> deepseek.State:
        return deepseek.State(caches, table + 0, jnp.zeros((2, 128), jnp.int32), jnp.array([3, 70]), jnp.array([90, 90]))

    large = jax.eval_shape(lambda: state(deepseek.new_caches(config, 5000, 64, cache_format)))
    size = sum(cache.size * cache.dtype.itemsize for cache in large.caches)
    memory = deepseek.generate.lower(config, params, large, np.int32(5), 2).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size
    copied = size // config.num_hidden_layers if cache_format == "bf16" else 0
    assert memory.temp_size_in_bytes < copied + size // 100

    before = state(deepseek.new_caches(config, 7, 64, cache_format))
    shape = before.caches[0].shape
    addresses = [cache.unsafe_buffer_pointer() for cache in before.caches]
    after, _ = deepseek.generate(config, params, before, np.int32(5), 2)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert [cache.unsafe_buffer_pointer() for cache in after.caches] == addresses
    assert sum(array.shape == shape for array in jax.live_arrays()) == config.num_hidden_layers


@pytest.mark.compile
@pytest.mark.skipif(not compat.available(), reason=f"kernels cannot be lowered: {compat.reason()}")
def test_a_step_on_a_gpu_writes_in_place() -> None:
    config = Config(implementation="triton")
    params = jax.eval_shape(lambda: make(config))
    caches = jax.eval_shape(lambda: deepseek.new_caches(config, 6))
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 2), (3, 3), (3,))]
    with mla_jax.device_facts("NVIDIA H200"):
        traced = jax.jit(deepseek.decode, static_argnums=0, donate_argnums=2).trace(config, params, caches, *integers)
        lowered = traced.lower(lowering_platforms=("cuda",))
    names = [call.name for call in kernel_calls(lowered)]
    assert names.count("append_kernel") == 1  # in a function that all layers call
    assert len(names) > 1
    assert kernel_calls(lowered)[names.index("append_kernel")].aliases == {0: 0}
    text = lowered.as_text()
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") == config.num_hidden_layers


def test_a_file_becomes_the_weights_of_the_model(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.flax", reason="it is not installed: pip install safetensors")
    config = Config(yarn=Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0))
    weights = {name: jnp.asarray(array, jnp.bfloat16) for name, array in deepseek.random_weights(config).items()}
    names = sorted(weights)
    extra = {f"model.layers.{config.num_hidden_layers}.eh_proj.weight": jnp.zeros((2, 2), jnp.bfloat16)}
    safetensors.save_file({name: weights[name] for name in names[:20]}, tmp_path / "model-00001-of-00002.safetensors")
    safetensors.save_file({name: weights[name] for name in names[20:]} | extra, tmp_path / "model-00002-of-00002.safetensors")
    # As DeepSeek publishes it: yarn under rope_scaling, by the name "type".
    values = {k: v for k, v in vars(config).items() if k not in ("yarn", "implementation")}
    rope = {"type": "yarn", **dataclasses.asdict(config.yarn)}  # type: ignore[call-overload]
    described = {**values, "rope_scaling": rope, "model_type": "deepseek_v3", "scoring_func": "sigmoid"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    found, params = deepseek.load(tmp_path, jnp.bfloat16)
    assert found == config
    expected = deepseek.arrange(config, weights, jnp.bfloat16)
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and bool((a == b).all()), params, expected))
    assert params["layers"][1]["mlp.gate.weight"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "deepseek_v2"}, "model_type is 'deepseek_v2', and this example knows 'deepseek_v3'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE of type 'linear'"),
    ],
)
def test_another_model_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", **changed}))
    with pytest.raises(NotImplementedError, match=message):
        Config.from_json(tmp_path / "config.json")


def test_weights_in_bf16() -> None:
    """16-bit activations, as on a GPU: the same logits to within their rounding, most tokens of most requests."""
    tokens = random_tokens()
    expected = expected_rows(prefill_logits(DENSE, make(DENSE), tokens))
    params = deepseek.arrange(DENSE, deepseek.random_weights(DENSE), jnp.bfloat16)
    found = decode_logits(DENSE, params, tokens, "bf16")
    np.testing.assert_allclose(found, expected, rtol=0, atol=3 * ROUNDING["bf16"])  # weights and activations are rounded, too


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["jax_deepseek.py", "--new-tokens", "3", "--prompt", "1,2,3", "--prompt", "4"])
    assert deepseek.main() == 0
    printed = capsys.readouterr().out
    assert "tokens/s" in printed
    assert "request 1, 1 + 3 tokens: [" in printed
