"""FLOPs, traces and searches of the benchmark of training steps, and its behaviour where a row fails."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxscale.models import TransformerConfig, llama3_8b

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "benchmarks"


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in ("measure", "record", "step_flops", "trace_summary", "train_gpu"):
        sys.modules.pop(name, None)


def test_pairs_of_packed_documents_are_those_of_the_mask():
    flops = importlib.import_module("step_flops")
    ids = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 3, 3]])
    seen = (ids[:, :, None] == ids[:, None, :]) & (ids > 0)[:, None, :] & np.tril(np.ones((6, 6), bool))
    assert flops.visible_pairs(flops.document_lengths(ids)) == seen.sum()


def test_model_flops_are_those_counted_by_hand_and_by_the_model():
    flops = importlib.import_module("step_flops")
    # two layers of queries and output 8 x 8, keys and values 8 x 4, feed-forward 3 x 8 x 12; the head 8 x 10
    model = TransformerConfig(depth=2, vocab=10, width=8, heads=2, kv_heads=1, head_dim=4, hidden=12)
    weights = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 12) + 8 * 10
    pairs = 5 * 6 // 2 + 3 * 4 // 2
    attention = 2 * (2 * 4) * 2 * 2 * pairs  # layers, heads x D, two products, multiply and add
    assert flops.model_flops(model, 8, [5, 3]) == 3 * (2 * 8 * weights + attention)
    assert flops.model_flops(model, 2 * 16, [16, 16]) == model.flops(2, 16)
    assert flops.palm_flops(model, 8, 8) == 8 * (6 * model.param_count() + 12 * 2 * 2 * 4 * 8)
    large = llama3_8b()
    assert flops.model_flops(large, 4096, [4096]) == large.flops(1, 4096)


def test_kernels_are_told_apart_by_their_scope_else_by_their_name():
    trace = importlib.import_module("trace_summary")
    scope = "jit(step)/transpose(jvp(runs/0))/while/body/blocks/0/"
    gemm, backward_loss = "nvjet_hsh_256x128_64x4_2x1_v_bz_TNT", "jit(step)/transpose(jvp(loss))/nv,ve->ne/dot_general"
    for kernel, where, group in (
        ("flash_forward_mosaic_gpu_kernel", "", "attention"),
        ("input_concatenate_fusion_2", scope + "attn/mix/stack", "attention"),
        ("blockwise_update_mosaic_gpu_kernel", "", "optimizer"),
        ("input_reduce_fusion_82", "jit(step)/reduce_and", "optimizer"),
        (gemm, backward_loss, "loss"),
        (gemm, scope + "mlp/up/dot_general", "matmuls"),
        (gemm, "", "matmuls"),
        ("MemcpyD2D", "", "copies"),
        ("loop_add_multiply_fusion", scope + "mlp/up/mul", "norm and elementwise"),
        ("ncclDevKernel_AllReduce", "", "other"),
    ):
        assert trace.group_of(kernel, where) == group, kernel


def test_a_trace_counts_loops_by_what_they_do_themselves_and_time_without_kernels_as_idle():
    trace = importlib.import_module("trace_summary")
    events = [
        trace.Event("while.1", "while.1", "a", 0.0, 100.0),
        trace.Event("gemm_fusion_dot_7", "", "a", 0.0, 60.0),  # of a CUDA graph: without an operation
        trace.Event("loop_add_fusion.3", "loop_add_fusion.3", "a", 60.0, 30.0),
        trace.Event("MemcpyD2D", "", "b", 150.0, 50.0),
    ]
    program = """
      %gemm_fusion_dot.7 = f32[2]{0} fusion(%x), metadata={op_name="jit(step)/jvp(loss)/dot_general" id=1}
      ROOT %loop_add_fusion.3 = f32[2]{0} fusion(%x), metadata={op_name="jit(step)/blocks/0/norm/mul"}
    """
    table = trace.table(events, trace.scopes_of(program), steps=2)
    ns = {name: round(group["ms"] * 2e6) for name, group in table["groups"].items()}
    assert ns == {"loss": 60, "norm and elementwise": 30, "other": 10, "copies": 50, "idle": 50}
    assert table["step_ms"] == pytest.approx(1e-4) and table["kernels"][0]["calls"] == 0.5


def test_a_kernel_launched_before_the_one_ahead_of_it_ends_counts_from_that_end():
    trace = importlib.import_module("trace_summary")
    events = [
        trace.Event("while.1", "", "a", 0.0, 100.0),
        trace.Event("nvjet_1", "", "a", 0.0, 60.0),
        trace.Event("flash_forward", "", "a", 20.0, 60.0),  # waits for nvjet_1
        trace.Event("memset", "", "a", 85.0, 5.0),
        trace.Event("nvjet_2", "", "a", 90.0, 30.0),  # begins within the loop's event and outlasts it
    ]
    table = trace.table(events, {}, steps=1)
    ns = {name: round(group["ms"] * 1e6) for name, group in table["groups"].items()}
    assert ns == {"matmuls": 60 + 20, "attention": 20, "copies": 5, "other": 100 - 60 - 20 - 5, "idle": 0}


@pytest.mark.parametrize("most", (100, 128, 3000, 70000, 10**9))
def test_the_search_for_the_longest_row_ends_between_one_that_fits_and_one_that_does_not(most):
    train_gpu = importlib.import_module("train_gpu")
    search, tried = train_gpu.Search(1024), []
    while (n := search.next()) is not None and n < 10**7:
        tried.append(n)
        search.record(n <= most)
    assert len(tried) == len(set(tried)) and search.fits <= most
    assert not search.fails or search.fails > most
    if 128 <= most < 10**7:
        assert search.fails <= 2 * search.fits  # the gap was halved twice


def test_a_case_that_fails_is_taken_once_more_with_less_memory_or_without_our_kernels(monkeypatch, tmp_path):
    train_gpu = importlib.import_module("train_gpu")
    calls = []
    good = {
        "tokens_per_step": 8, "preset": {"depth": 2}, "runs": "ours", "policy": "none", "device": "NVIDIA H100",
        "tokens_per_second": {"median": 1.0}, "matmul_tflops": 1.0, "share_of_matmul": {"causal": {"median": 0.71}},
    }  # fmt: skip

    def pretend(script, arguments, *, limit):
        calls.append(arguments)
        if {"--share", "--xla"} & set(arguments):
            return good
        return {"problem": "RESOURCE_EXHAUSTED: 1 GiB" if "8B 4k" in arguments else "a kernel is wrong"}

    monkeypatch.setattr(train_gpu.measure, "in_subprocess", pretend)
    args = argparse.Namespace(seconds=None, rounds=3, xla=False)
    run = train_gpu.Run(args, results=None, folder=tmp_path, toy=False)
    row, (line,) = run.case("1.3B 4k")
    assert row["again"] == ["--xla"] and "a kernel is wrong" in line.runs and line.verdict == "met"
    assert run.case("8B 4k")[0]["again"] == ["--share", "0.85"]
    with pytest.raises(RuntimeError, match="a kernel is wrong"):
        run.case("1.3B 32k packed")
    assert len(calls) == 5


def _results(train_gpu, path, seconds=None):
    args = argparse.Namespace(
        seconds=seconds, rounds=3, xla=False, json=path, resume=False, only=None, start=None, longest_cap=2**18
    )
    return args, train_gpu.record.Results("train_gpu", "cpu", args)


@pytest.mark.parametrize(
    "problem", ("no memory policy fits 9 bytes", "RESOURCE_EXHAUSTED by arithmetic: nothing of it fits")
)
def test_what_was_planned_not_to_fit_is_not_tried_with_less_memory(monkeypatch, tmp_path, problem):
    train_gpu, calls = importlib.import_module("train_gpu"), []
    monkeypatch.setattr(
        train_gpu.measure, "in_subprocess", lambda *a, limit: calls.append(a) or {"problem": f"Error: {problem}"}
    )
    args, _ = _results(train_gpu, None)
    for name in ("1.3B 4k", "8B 4k"):
        with pytest.raises(RuntimeError, match=problem):
            train_gpu.Run(args, None, tmp_path, False).case(name)
    assert len(calls) == 2 and train_gpu.out_of_memory(problem)  # the search for the longest row ends there too


def test_a_row_that_breaks_its_gpu_stops_none_after_it_and_the_file_is_complete_at_the_end(monkeypatch, tmp_path):
    train_gpu, seen = importlib.import_module("train_gpu"), []
    path = tmp_path / "rows.json"

    def pretend(script, arguments, *, limit):
        seen.append(json.loads(path.read_text())["complete"])
        return {"problem": "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access"}

    monkeypatch.setattr(train_gpu.measure, "in_subprocess", pretend)
    args, results = _results(train_gpu, path)
    run = train_gpu.Run(args, results, tmp_path, False)
    names = ("8B 4k", "8B 32k packed", "1.3B 4k packed")
    run.each([(n, n) for n in names], run.row)
    run.longest()
    assert seen == [False] * 4 and not results.content["complete"]
    assert list(results.content["rows"]) == [*names, "8B longest 131072"]
    assert all("illegal" in row["problem"] for row in results.content["rows"].values())
    results.finish()
    assert json.loads(path.read_text())["complete"]


def test_no_process_goes_on_beyond_the_end_or_begins_shortly_before_it(monkeypatch, tmp_path):
    train_gpu, granted = importlib.import_module("train_gpu"), []
    now = [1000.0]
    monkeypatch.setattr(train_gpu.time, "monotonic", lambda: now[0])

    def hang(script, arguments, *, limit):
        granted.append(limit)
        now[0] += limit
        raise RuntimeError(f"was ended after {limit:.0f} seconds")

    monkeypatch.setattr(train_gpu.measure, "in_subprocess", hang)
    args, results = _results(train_gpu, None, seconds=520.0)
    run = train_gpu.Run(args, results, tmp_path, False)
    names = ("1.3B 4k", "8B 4k", "1.3B 4k none")
    run.each([(n, n) for n in names], run.row)
    # the first one, its second try, and no third process in what is left
    assert granted == [240.0, 240.0] and now[0] == 1480.0
    rows = results.content["rows"]
    assert "240 seconds" in rows["1.3B 4k"]["problem"]
    assert [rows[n]["problem"] for n in names[1:]] == [train_gpu.record.LATE] * 2
    now[0] = 1420.0
    run.each([("8B 4k", "8B 4k")], run.row)  # a row without time is taken again, and ends with the time
    assert granted[2:] == [100.0] and rows["8B 4k"]["problem"] == train_gpu.record.LATE


def test_a_search_for_the_longest_row_that_time_ends_says_what_fitted(monkeypatch, tmp_path):
    train_gpu, now = importlib.import_module("train_gpu"), [0.0]
    monkeypatch.setattr(train_gpu.time, "monotonic", lambda: now[0])
    good = {
        "preset": {"depth": 32}, "runs": "ours", "policy": "full", "tokens_per_second": 1.0,
        "step_seconds": [1.0], "compile_seconds": 1.0,
    }  # fmt: skip

    def pretend(script, arguments, *, limit):
        if arguments[1] == "131072":
            now[0] += 20.0
            return dict(good)
        now[0] += limit + 0.1
        raise RuntimeError("was ended")

    monkeypatch.setattr(train_gpu.measure, "in_subprocess", pretend)
    args, results = _results(train_gpu, None, seconds=100.0)
    train_gpu.Run(args, results, tmp_path, False).longest()
    rows = results.content["rows"]
    assert rows["8B longest 262144"]["problem"] == train_gpu.record.LATE
    assert (rows["8B longest"]["fits"], rows["8B longest"]["fails"]) == (131072, 0)
