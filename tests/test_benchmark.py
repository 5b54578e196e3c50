"""The benchmark's bookkeeping and inputs; the timings themselves need a GPU."""

import argparse
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import decode, report, timing
from benchmarks.cases import CASE_NAMES, parse_case, select_cases
from benchmarks.flash_mla_provider import FlashMLA
from benchmarks.report import BASELINE, COLUMNS, Record, append, make_record, newest_run, read
from mla_kernels.problem import TensorSpec, make_problem

ENVIRONMENT = {
    "date": "2030-01-02T03:04:05Z",
    "commit": "0123456789",
    "gpu": "NVIDIA H200",
    "torch": "2.13",
    "jax": "0.10",
    "triton": "3.7",
}


def record(provider: str, case: str, p50: float, timing: str = "graph", **changes) -> Record:
    implementation = "1.0.0" if provider == BASELINE else "triton"
    made = make_record(ENVIRONMENT, provider, implementation, timing, case, (p50 * 0.9, p50, p50 * 1.1))
    return replace(made, **changes)


def full_run(**changes) -> list[Record]:
    run = []
    for i, case in enumerate(CASE_NAMES):
        for provider, factor in ((BASELINE, 1.0), ("mla_torch", 2.0), ("mla_jax", 2.5)):
            run.append(record(provider, case, (i + 1) * 10 * factor, **changes))
    return run


def test_there_are_25_rows_and_their_names_are_parsed_and_unparsed():
    assert len(CASE_NAMES) == len(set(CASE_NAMES)) == 25
    assert sum(name.startswith("dense") for name in CASE_NAMES) == 15
    for name in CASE_NAMES:
        case = parse_case(name)
        head = f"b{case.batch}-q{case.s_q}-"
        if case.sparse:
            kind = {"v32_fp8": "v32", "model1_fp8": "model1"}[case.format]
            again = f"{kind}-{head}h{case.h_q}-t{case.topk}" + (f"x{case.extra_topk}" if case.extra_topk else "")
        else:
            again = f"dense-{head}k{case.keys}-h{case.h_q}" + "-causal" * case.causal + "-ragged" * case.ragged
        assert again == name


def test_rows_have_the_pages_and_keys_of_the_published_ones():
    v32, model1 = parse_case("v32-b128-q2-h128-t2048"), parse_case("model1-b128-q2-h64-t128x512")
    assert (v32.keys, v32.page_size, v32.d_qk, v32.extra_page_size) == (8192, 64, 576, 0)
    assert (model1.keys, model1.extra_keys, model1.page_size, model1.extra_page_size) == (4096, 4096, 256, 64)
    assert parse_case("v32-b2-q2-h128-t2048").keys == 32768
    assert parse_case("model1-b2-q2-h128-t128x1024").extra_keys == 16384
    assert all(case.attn_sink == case.sparse for case in select_cases())


@pytest.mark.parametrize(
    ("name", "us", "tflops"), [("dense-b128-q1-k4096-h128", 220, 664), ("v32-b128-q2-h128-t2048", 345, 423)]
)
def test_throughput_is_counted_as_in_the_published_rows(name, us, tflops):
    assert record("mla_torch", name, us).tflops == pytest.approx(tflops, abs=1)


@pytest.mark.parametrize("name", CASE_NAMES)
def test_counts_are_those_of_the_problem(name):
    case = parse_case(name)
    q = TensorSpec((case.batch, case.s_q, case.h_q, case.d_qk), "bfloat16")
    int32 = "int32"
    if case.sparse:
        width = 656 if case.format == "v32_fp8" else 584
        extra = {}
        if case.extra_topk:
            extra = {
                "extra_kv_cache": TensorSpec((1, case.extra_page_size, 1, width), "uint8"),
                "extra_indices": TensorSpec((case.batch, case.s_q, case.extra_topk), int32),
            }
        problem = make_problem(
            q,
            TensorSpec((1, case.page_size, 1, width), "uint8"),
            indices=TensorSpec((case.batch, case.s_q, case.topk), int32),
            **extra,
        )
        keys, extra_keys = case.batch * case.s_q * case.topk, case.batch * case.s_q * case.extra_topk
        assert case.flops() == problem.flops(keys + extra_keys)
        assert case.bytes() == problem.bytes(keys, extra_keys)
    else:
        table, lengths = TensorSpec((case.batch, 1), int32), TensorSpec((case.batch,), int32)
        problem = make_problem(q, TensorSpec((1, case.page_size, 1, 576), "bfloat16"), table, lengths)
        keys = int(case.lengths().sum())
        # Of two queries under a causal mask the first sees one key less.
        unseen = case.batch * problem.flops(1) // case.s_q if case.causal else 0
        assert case.flops() == problem.flops(keys) - unseen
        assert case.bytes() == problem.bytes(keys)


def test_ragged_lengths_are_normal_at_least_one_and_always_the_same():
    case = parse_case("dense-b4096-q1-k1000-h16-ragged")
    lengths = case.lengths()
    assert lengths.dtype == np.int32
    assert lengths.min() == 1
    assert np.median(lengths) == pytest.approx(1000, rel=0.05)
    assert np.percentile(lengths, 84.13) == pytest.approx(1500, rel=0.05)
    assert (lengths == case.lengths()).all()
    assert (parse_case("dense-b8-q1-k1000-h16").lengths() == 1000).all()


def test_causal_pairs_are_counted_one_by_one():
    case = parse_case("dense-b5-q3-k2-h4-causal-ragged")
    pairs = sum(max(int(length) - 3 + 1 + j, 0) for length in case.lengths() for j in range(3))
    assert case.attended() == pairs < int(case.lengths().sum()) * 3


def test_cases_are_selected_by_glob_or_named_in_full():
    assert [case.name for case in select_cases()] == list(CASE_NAMES)
    assert len(select_cases("dense-*-h16*")) == 5
    assert [case.name for case in select_cases("v32-b2-*,dense-b1-q1-k4096-h128")] == [
        "dense-b1-q1-k4096-h128",
        "v32-b2-q2-h128-t2048",
    ]
    assert select_cases("dense-b3-q1-k77-h5")[0].keys == 77
    with pytest.raises(ValueError, match="matches none"):
        select_cases("sparse-*")
    with pytest.raises(ValueError, match="neither"):
        select_cases("dense-b3")
    with pytest.raises(ValueError, match="more than the 8192 keys"):
        select_cases("v32-b8-q1-h64-t9000")


def test_lines_are_appended_under_one_header_and_read_back(tmp_path):
    path = tmp_path / "results" / "decode.csv"
    assert read(path) == []
    first = [record("flash_mla", CASE_NAMES[0], 220.5), record("mla_torch", CASE_NAMES[0], 441.0)]
    append(path, first)
    append(path, [record("mla_torch", CASE_NAMES[1], 16.25, "eager", implementation="triton[block_n=32,num_warps=4]")])
    lines = path.read_text().splitlines()
    assert lines[0] == ("date,commit,gpu,torch,jax,triton,provider,implementation,timing,case,p20_us,p50_us,p80_us,tflops,gbps")
    assert len(lines) == 4
    back = read(path)
    assert [one.p50_us for one in back] == [220.5, 441.0, 16.25]
    assert back[2].implementation == "triton[block_n=32,num_warps=4]"
    assert back[0].tflops == pytest.approx(first[0].tflops, rel=1e-4)
    assert tuple(COLUMNS) == tuple(lines[0].split(","))


def test_a_file_with_other_columns_is_left_alone(tmp_path):
    path = tmp_path / "decode.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="expected columns date, commit"):
        append(path, [record("mla_torch", CASE_NAMES[0], 1.0)])
    assert path.read_text() == "a,b\n1,2\n"


def test_the_report_is_the_newest_run_with_ratios():
    old = full_run(date="2029-12-31T00:00:00Z")
    assert {one.date for one in newest_run([*full_run(), *old])} == {ENVIRONMENT["date"]}
    text = report.report([*old, *full_run(), record("mla_torch", "dense-b1-q1-k4096-h128", 40.0, "eager")])
    assert "commit 0123456789" in text
    assert "**" not in text
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == 26
    assert rows[0].startswith("| `dense-b128-q1-k4096-h128` | 10.0 | 20.0 | 0.50 | 25.0 | 0.40 |")
    assert "| geometric mean |  |  | 0.50 |  | 0.40 |" in text
    assert "Eager" in text
    assert report.report([]) == "No run is recorded."


def test_the_report_says_what_is_missing_or_unclean():
    run = [one for one in full_run() if not (one.provider == "mla_jax" and one.case == CASE_NAMES[3])]
    text = report.report(run)
    assert f"mla_jax: 1 of 25 cases are missing: {CASE_NAMES[3]}." in text
    assert "unclean" not in text
    assert "not that of a commit: 0123456789-dirty" in report.report(full_run(commit="0123456789-dirty"))
    assert "not that of a commit: unknown" in report.report(full_run(commit="unknown"))
    alone = [one for one in full_run() if one.provider == "mla_torch"]
    text = report.report(alone)
    assert "flash_mla was not timed: there are no ratios." in text
    assert "ratio |" not in text
    # a row in which FlashMLA is missing has no ratio, and the mean leaves it out
    text = report.report([one for one in full_run() if not (one.provider == BASELINE and one.case == CASE_NAMES[0])])
    assert "| `dense-b128-q1-k4096-h128` | - | 20.0 | - | 25.0 | - |" in text


def test_rows_outside_the_list_are_reported_too():
    text = report.report([*full_run(), record("mla_torch", "dense-b3-q1-k77-h5", 5.0)])
    assert "| `dense-b3-q1-k77-h5` | - | 5.0 | - | - | - |" in text


def test_arguments():
    parser = decode.make_parser()
    args = parser.parse_args(["--providers", "mla_torch,flash_mla", "--override", "block_n=32,num_warps=4", "--budget", "60"])
    assert args.providers == ["mla_torch", "flash_mla"]
    assert args.override == [{"block_n": 32, "num_warps": 4}]
    assert args.budget == 60
    for text in ("block_n", "block_n=", "=3", "block_n=x"):
        with pytest.raises(argparse.ArgumentTypeError, match="NAME=INTEGER"):
            decode.parse_override(text)
    with pytest.raises(argparse.ArgumentTypeError, match="expected some of"):
        decode.parse_providers("numpy")
    with pytest.raises(SystemExit):
        decode.main(["--cases", "nothing-*"])


def test_variants_are_not_recorded_among_the_runs():
    parser = decode.make_parser()
    assert decode.Run(parser.parse_args([])).path == report.RESULTS
    assert decode.Run(parser.parse_args(["--override", "block_n=32"])).path is None
    assert str(decode.Run(parser.parse_args(["--override", "block_n=32", "--csv", "x.csv"])).path) == "x.csv"


def test_listing_and_reporting_need_no_gpu(capsys, tmp_path):
    assert decode.main(["--list", "--cases", "dense-b1-*"]) == 0
    assert capsys.readouterr().out.count("GFLOP") == 3
    assert decode.main(["--report", "--csv", str(tmp_path / "none.csv")]) == 0
    assert "No run is recorded." in capsys.readouterr().out


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert decode.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_the_commit_is_named_and_marked_when_the_code_differs(tmp_path):
    import subprocess

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert decode.commit_name(tmp_path / "nowhere") == "unknown"
    git("init")
    code = tmp_path / "kernels" / "a.py"
    code.parent.mkdir()
    code.write_text("1")
    git("add", ".")
    git("commit", "-m", "a")
    clean = decode.commit_name(tmp_path)
    assert len(clean) >= 10
    (tmp_path / "notes.txt").write_text("not code")
    results = tmp_path / "benchmarks" / "results" / "decode.csv"
    results.parent.mkdir(parents=True)
    results.write_text("a record")
    assert decode.commit_name(tmp_path) == clean
    (code.parent / "b.py").write_text("new")
    assert decode.commit_name(tmp_path) == clean + "-dirty"


def test_the_budget_stops_before_the_next_case(monkeypatch):
    torch = pytest.importorskip("torch")
    run = decode.Run(decode.make_parser().parse_args(["--budget", "5"]))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    started = []

    def time_case(case):
        started.append(case.name)
        run.begin -= 3

    monkeypatch.setattr(run, "time_case", time_case)
    run.all_cases(select_cases("dense-b128-*"))
    assert started == list(CASE_NAMES[:2])
    assert "over the budget of 5 s" in run.wrong[0]
    assert CASE_NAMES[2] in run.wrong[0]


def test_samples_hold_whole_rounds_of_copies_and_last_long_enough():
    assert timing.calls_per_sample(1e-3, 2, 0.012, 256) == (12, 1)
    assert timing.calls_per_sample(16e-6, 32, 0.012, 256) == (256, 3)
    assert timing.calls_per_sample(1.0, 8, 0.012, 256) == (8, 1)
    assert timing.calls_per_sample(1e-5, 32, 0.025, 16) == (32, 79)
    for seconds in (1e-6, 1e-5, 3e-4, 2e-3):
        for copies in (1, 3, 32):
            calls, repetitions = timing.calls_per_sample(seconds, copies, 0.012, 256)
            assert calls % copies == 0
            assert calls <= 256
            assert calls * repetitions * seconds >= 0.012 * 0.99


def test_contestants_take_turns_after_an_untimed_round():
    order = []

    def sampler(name, values):
        values = iter(values)

        def sample():
            order.append(name)
            return next(values)

        return sample

    taken = timing.alternate({"a": sampler("a", [9, 1, 2, 3]), "b": sampler("b", [9, 4, 5, 6])}, 3)
    assert order == ["a", "b"] * 4
    assert taken["a"].tolist() == [1, 2, 3]
    assert taken["b"].tolist() == [4, 5, 6]


def test_flash_mla_gets_a_fresh_schedule_each_call_and_its_own_names(monkeypatch):
    calls = []

    def with_option(*args, use_legacy=False, **options):
        calls.append((args, options, use_legacy))
        return "out", "lse"

    def without(*args, causal, is_fp8_kvcache, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache):
        calls.append((args, {"causal": causal}, None))
        return "out", "lse"

    for function, legacy in ((with_option, True), (without, None)):
        calls.clear()
        module = SimpleNamespace(flash_mla_with_kvcache=function, get_mla_metadata=lambda: (object(), None), __version__="1.2")
        monkeypatch.setitem(sys.modules, "flash_mla", module)
        provider = FlashMLA()
        assert provider.version == "1.2"
        assert provider.decode("q", "cache", "table", "lengths", causal=True) == ("out", "lse")
        provider.decode("q", "cache", indices="indices", attn_sink="sink", extra_kv_cache="extra", extra_indices="more")
        dense, sparse = calls
        assert dense[0][:5] == ("q", "cache", "table", "lengths", 512)
        assert dense[1]["causal"] is True
        assert dense[2] is legacy
        assert dense[0][5] is not sparse[0][5]
        if legacy:
            assert dense[1]["is_fp8_kvcache"] is False
            assert sparse[1] == {
                "causal": False,
                "is_fp8_kvcache": True,
                "indices": "indices",
                "attn_sink": "sink",
                "extra_k_cache": "extra",
                "extra_indices_in_kvcache": "more",
            }


def test_flash_mla_that_is_not_there_is_an_import_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    monkeypatch.setitem(sys.modules, "sgl_flash_mla", SimpleNamespace())
    with pytest.raises(ImportError, match=r"flash_mla: .*; sgl_flash_mla: has no flash_mla_with_kvcache"):
        FlashMLA()


def test_a_missing_provider_is_an_error_only_if_it_was_asked_for(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    monkeypatch.setitem(sys.modules, "sgl_flash_mla", None)
    for arguments, errors in (([], 0), (["--providers", "flash_mla"], 1)):
        run = decode.Run(decode.make_parser().parse_args(arguments))
        run._load("flash_mla")
        assert "flash_mla" not in run.wanted
        assert len(run.wrong) == errors
        assert "flash_mla is not timed: flash_mla: " in capsys.readouterr().err


TINY = ("dense-b3-q2-k130-h4-causal-ragged", "v32-b2-q2-h4-t40", "model1-b2-q1-h4-t20x30")


@pytest.fixture
def tiny(request):
    """Data of a tiny row on the CPU, in four copies."""
    pytest.importorskip("torch")
    from benchmarks.data import make_data

    case = replace(parse_case(request.param), keys=130, extra_keys=130 if "x" in request.param.split("-")[-1] else 0)
    return make_data(case, device="cpu", rotated_bytes=4 * case.cache_bytes())


@pytest.mark.parametrize("tiny", TINY, indirect=True)
def test_copies_name_pages_of_their_own(tiny):
    case = tiny.case
    assert tiny.copies == 4
    assert tiny.call(5)["q"] is tiny.call(0)["q"]
    seen: dict[str, set[int]] = {}
    names = ("indices", "extra_indices") if case.sparse else ("block_table",)
    for i in range(tiny.copies):
        for name in names:
            if name not in tiny.call(i):
                assert case.extra_topk == 0
                continue
            size = case.extra_page_size if name.startswith("extra") else case.page_size
            cache = tiny.shared["extra_kv_cache" if name.startswith("extra") else "kv_cache"]
            table = tiny.call(i)[name].numpy()
            if case.sparse:
                assert all(len(set(row)) == len(row) for row in table.reshape(-1, table.shape[-1]).tolist())
                requests = [set((rows // size).reshape(-1).tolist()) for rows in table]
            else:
                counts = -(-case.lengths() // size)
                requests = [set(row[:n].tolist()) for row, n in zip(table, counts, strict=True)]
                assert sum(map(len, requests)) == counts.sum()
            for pages in requests:
                assert not pages & seen.setdefault(name, set())
                seen[name] |= pages
            assert min(seen[name]) >= 0
            assert max(seen[name]) < cache.shape[0]


def test_the_number_of_copies_follows_the_bytes():
    pytest.importorskip("torch")
    from benchmarks.data import num_copies

    assert num_copies(parse_case("dense-b128-q1-k4096-h128")) == 1
    assert num_copies(parse_case("v32-b128-q1-h128-t2048")) == 2
    assert num_copies(parse_case("dense-b1-q1-k32768-h128")) == 9
    assert num_copies(parse_case("dense-b1-q1-k4096-h128")) == 32


@pytest.mark.parametrize("tiny", TINY, indirect=True)
def test_both_front_ends_get_the_same_call(tiny):
    pytest.importorskip("jax")
    import torch

    from benchmarks.providers import JaxContestant, cosine_difference
    from mla_torch import decode as torch_decode

    jax_side = JaxContestant("reference", tiny, 1e-3)
    assert jax_side.label == "mla_jax:reference"
    for i, (out, lse) in enumerate(jax_side.results()):
        expected, expected_lse = torch_decode(**tiny.call(i), implementation="reference")
        assert cosine_difference(out, expected) < 1e-5
        torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-4)
    sample = jax_side.graph_sampler()
    assert 0 < sample() < 1e6
    assert jax_side.eager_sampler() is None


def test_unrolled_calls_are_all_computed():
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    def fake(q, table, softmax_scale, power):
        return jnp.cos(q * table * softmax_scale) ** power, jnp.float32(0)

    rotated = [{"table": jnp.float32(i)} for i in range(2)]
    unrolled = timing.Unrolled(fake, {"q": jnp.ones((1, 1, 1, 4))}, rotated, {"power": 1})
    run, arguments = unrolled.compile(3)
    results = run(*arguments)
    assert [float(out[0, 0, 0, 0]) for out, _ in results] == pytest.approx([1, np.cos(0.5)] * 3)
    # Calls that are equal in all arguments would be computed once, and those whose results nobody uses never.
    assert run.as_text().count(" cosine(") == 6
    run, arguments = unrolled.compile(3, first_values=True)
    assert run(*arguments).tolist() == pytest.approx([1, np.cos(0.5)] * 3)
    assert run.as_text().count(" cosine(") == 6


def test_disagreements_are_found():
    torch = pytest.importorskip("torch")
    from benchmarks.providers import disagreements

    def contestant(provider, implementation, out, lse):
        return SimpleNamespace(
            provider=provider, implementation=implementation, label=f"{provider}:{implementation}", results=lambda: [(out, lse)]
        )

    out, lse = torch.randn(1, 1, 2, 8).bfloat16(), torch.randn(1, 2, 1)
    own = contestant("mla_torch", "triton", out, lse)
    near = out.float().mul(1.001).bfloat16()
    assert disagreements([own, contestant("mla_jax", "triton", out.clone(), lse)], own) == []
    assert disagreements([contestant("flash_mla", "1", near, lse + 0.001)], own) == []
    changed = out.clone()
    changed[0, 0, 0, 0] += 0.25
    bits = disagreements([contestant("mla_jax", "triton", changed, lse)], own)
    assert bits == ["mla_jax:triton and mla_torch:triton on copy 0: out differs in bits"]
    assert disagreements([contestant("mla_jax", "hopper", near, lse)], own) == []
    assert "largest difference of lse" in disagreements([contestant("flash_mla", "1", out, lse + 1)], own)[0]
    assert "cosine" in disagreements([contestant("flash_mla", "1", out * float("nan"), lse)], own)[0]
    assert "cosine" in disagreements([contestant("flash_mla", "1", -out, lse)], own)[0]


def test_variants_are_registered_under_a_name_that_says_what_they_replace(monkeypatch):
    pytest.importorskip("torch")
    from benchmarks.providers import register_overrides
    from mla_kernels.device import KNOWN_DEVICES
    from mla_torch import api

    monkeypatch.setattr(api, "IMPLEMENTATIONS", dict(api.IMPLEMENTATIONS))
    name = register_overrides("triton", {"block_n": 16, "num_warps": 4})
    assert name == "triton[block_n=16,num_warps=4]"
    entry = api.IMPLEMENTATIONS[name]
    facts = KNOWN_DEVICES["NVIDIA H200"]
    assert not entry.automatic(facts)
    problem = make_problem(
        TensorSpec((2, 1, 16, 576), "bfloat16"),
        TensorSpec((8, 64, 1, 576), "bfloat16"),
        TensorSpec((2, 4), "int32"),
        TensorSpec((2,), "int32"),
    )
    plan = entry.plan(problem, facts)
    attend = next(launch for launch in plan.launches if "BLOCK_N" in launch.constexprs)
    assert (attend.constexprs["BLOCK_N"], attend.num_warps) == (16, 4)
    with pytest.raises(ValueError, match="override: expected --implementation to be one of"):
        register_overrides("reference", {"block_n": 16})


@pytest.mark.gpu
def test_a_small_run_on_a_gpu(tmp_path, capsys):
    path = tmp_path / "decode.csv"
    names = "dense-b2-q1-k256-h16,v32-b2-q1-h64-t64,model1-b1-q1-h64-t64x64"
    assert decode.main(["--cases", names, "--quick", "--csv", str(path), "--providers", "mla_torch,mla_jax"]) == 0
    records = read(path)
    assert {(one.provider, one.case) for one in records} == {
        (provider, name) for provider in ("mla_torch", "mla_jax") for name in names.split(",")
    }
    assert all(0 < one.p20_us <= one.p50_us <= one.p80_us < 1e4 for one in records)
    assert "us (" in capsys.readouterr().out


@pytest.fixture
def cpu_run(monkeypatch, tmp_path):
    """A run whose contestants compute references on the CPU and whose clock is the host's."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("jax")
    import mla_torch
    from benchmarks import data, providers

    def host_sampler(call, copies, seconds):
        def sample():
            begin = time.perf_counter()
            call(0)
            return (time.perf_counter() - begin) * 1e6

        return sample

    def make_data(case):
        small = replace(case, keys=min(case.keys, 130), extra_keys=min(case.extra_keys, 130))
        return data.CaseData(
            case, **{k: v for k, v in vars(original(small, "cpu", 2 * small.cache_bytes())).items() if k != "case"}
        )

    original = data.make_data
    monkeypatch.setattr(data, "make_data", make_data)
    monkeypatch.setattr(providers, "estimate_seconds", lambda call, copies: call(0) and 1e-2)
    monkeypatch.setattr(providers, "graph_sampler", host_sampler)
    monkeypatch.setattr(providers, "eager_sampler", host_sampler)
    monkeypatch.setattr(decode, "EAGER_BELOW_US", 1e9)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def start(*arguments):
        arguments = ["--csv", str(tmp_path / "decode.csv"), "--rounds", "2", "--implementation", "reference", *arguments]
        run = decode.Run(decode.make_parser().parse_args(arguments))
        run.environment = ENVIRONMENT
        run.flash_mla = SimpleNamespace(version="1.0", decode=mla_torch.decode)
        return run

    return start


CPU_CASES = "dense-b2-q2-k130-h4-causal,v32-b2-q1-h4-t40,model1-b1-q1-h4-t20x30"


def test_a_run_records_every_contestant_of_every_case(cpu_run, capsys):
    run = cpu_run()
    run.all_cases(select_cases(CPU_CASES))
    # The two references round differently, and a guard of bits must notice; nothing else may go wrong.
    assert all("differs in bits" in sentence and sentence.split(":")[1] == " MISMATCH" for sentence in run.wrong)
    records = read(run.path)
    timed = {(one.provider, one.implementation, one.timing, one.case) for one in records}
    for case in CPU_CASES.split(","):
        for provider, implementation in (("flash_mla", "1.0"), ("mla_torch", "reference")):
            assert {(provider, implementation, timing, case) for timing in ("graph", "eager")} <= timed
        assert ("mla_jax", "reference", "graph", case) in timed
    assert len(records) == len(timed) == 15
    printed = capsys.readouterr()
    assert printed.out.count(" us (") == 15
    assert printed.out.count("x\n") == 15
    assert "[2/3, " in printed.err


def test_what_fails_is_said_and_the_rest_is_still_timed(cpu_run):
    run = cpu_run("--no-eager", "--providers", "flash_mla,mla_torch")

    def broken(**call):
        raise RuntimeError("no kernel for this")

    run.flash_mla.decode = broken
    run.all_cases(select_cases("dense-b2-q2-k130-h4-causal"))
    assert run.wrong == ["dense-b2-q2-k130-h4-causal, flash_mla: RuntimeError: no kernel for this"]
    assert [one.provider for one in read(run.path)] == ["mla_torch"]


def test_a_lost_device_ends_the_run(cpu_run, monkeypatch):
    run = cpu_run()
    started = []

    def lost(case):
        started.append(case.name)
        raise RuntimeError("no memory" if len(started) == 1 else "CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(run, "time_case", lost)
    run.all_cases(select_cases("dense-b128-*"))
    assert started == list(CASE_NAMES[:2])
    assert [sentence.split(":")[0] for sentence in run.wrong] == started


def test_a_wrong_result_is_a_mismatch(cpu_run):
    run = cpu_run("--quick", "--providers", "flash_mla,mla_torch")
    right = run.flash_mla.decode
    run.flash_mla.decode = lambda **call: (lambda out, lse: (-out, lse))(*right(**call))
    run.all_cases(select_cases("v32-b2-q1-h4-t40"))
    assert len(run.wrong) == 2
    assert all("MISMATCH: flash_mla:1.0 and mla_torch:reference on copy" in sentence for sentence in run.wrong)
