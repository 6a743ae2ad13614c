"""The command line: commands, their output, and one sentence for every mistake."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import signal
import sys
import time
import types
from pathlib import Path

import jax
import pytest
from rich.console import Console

import jaxscale as js
from jaxscale.cli import main
from jaxscale.nn import dot_product_attention
from jaxscale.nn.formats import Stored
from jaxscale.step.state import describe_model
from jaxscale.train import files
from jaxscale.train.goodput import Goodput
from jaxscale.train.loop import Loop
from jaxscale.train.report import Reporter
from jaxscale.units import human_bytes
from tests.truth.runs import BIGRAM, MESH, ROOT, STEPS, start, stop_after, write_gin

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def gin(tmp_path_factory):
    """A gin file of the smallest model."""
    return write_gin(tmp_path_factory.mktemp("bigram") / "small.gin", BIGRAM)


@pytest.fixture(scope="module")
def transformer_gin(tmp_path_factory):
    """The gin file of `finished_run`."""
    return write_gin(tmp_path_factory.mktemp("transformer") / "small.gin")


@pytest.fixture(scope="module")
def folder(gin, tmp_path_factory):
    """The folder of a finished run of `gin`."""
    path = tmp_path_factory.mktemp("folder") / "run"
    assert main(["train", str(gin), "--run", str(path), "--quiet"]) == 0
    return path


@pytest.fixture
def finished(folder, tmp_path):
    """A copy of that run, to modify."""
    return js.Run(shutil.copytree(folder, tmp_path / "copy"))


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def run(capfd):
    """Run a command in this process: its exit code, stdout and stderr."""

    def call(*argv):
        code = main([str(a) for a in argv])
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture
def refused(run):
    """Run a command that must fail with one sentence with these words, and write no files."""

    def call(*argv, words):
        code, out, err = run(*argv)
        assert code == 2, (out, err)
        assert re.fullmatch(r"jaxscale: [^\n]+\n", err), err
        missing = [w for w in words if w not in err]
        assert not missing, f"{err!r} does not say {missing}"
        assert not Path("runs").exists()

    return call


# --- train ------------------------------------------------------------------------------------------------------------


def test_train_leaves_a_finished_run_named_after_its_file(run, gin):
    code, _, err = run("train", gin, "--devices", "8")
    assert (code, err) == (0, "")
    assert js.load("runs/small-1").info["status"] == "finished"


def test_train_shows_the_tensors_the_steps_and_what_to_do_next(run, gin):
    _, out, _ = run("train", gin)
    for words in ("embed", f"step {STEPS}/{STEPS}", "held-out loss", "sample runs/small-1", "--resume runs/small-1"):
        assert words in out, words


def test_train_takes_bindings_mesh_and_folder(run, gin):
    code, _, _ = run(
        "train", gin, "--gin.train.steps=2", "--gin.train.eval_batches", "0", "--mesh", "data=2", "--run", "x"
    )
    config = js.load("x").config
    assert (code, config.steps, config.eval_batches, config.layout.mesh) == (0, 2, 0, "data=2")


def test_train_prints_a_sample_when_asked_for(run, gin):
    _, out, _ = run("train", gin, "--gin.train.prompt='def f'")
    assert "a sample, continuing 'def f':\n\ndef f" in out


def test_no_remaining_time_is_printed_before_a_step_without_compiling():
    seconds_left = []
    loop = Loop.__new__(Loop)
    loop.spent, loop.timed, loop.last, loop.peak = 1e-9, 0, 8, None
    loop.reporter = types.SimpleNamespace(step=lambda row, last, left, share, goodput: seconds_left.append(left))
    loop.goodput = Goodput()
    loop._write({"step": 1}, [])
    loop.spent, loop.timed = 6.0, 3
    loop._write({"step": 4}, [])
    assert seconds_left == [None, 8.0]
    out = io.StringIO()
    reporter = Reporter()
    reporter.console = Console(file=out, width=200)
    for left in seconds_left:
        reporter.step({"step": 8, "loss": 1, "tokens_per_second": 1, "model_flops_per_second": 1}, 8, left, None, 0.5)
    first, second = out.getvalue().splitlines()
    assert "left" not in first and second.endswith(" · 0:08 left")


def test_quiet_prints_nothing(run, gin):
    assert run("train", gin, "--quiet") == (0, "", "")


def test_train_writes_a_profile(run, gin):
    run("train", gin, "--profile", "2:3", "--run", "x", "--quiet")
    assert list(Path("x/profile").rglob("*.xplane.pb"))


def test_a_binding_that_nothing_reads_is_a_warning(run, gin):
    code, _, err = run("train", gin, "--gin.GELU.bias=True", "--quiet")
    assert code == 0
    assert err == "jaxscale: warning: the binding GELU.bias has no effect\n"


def test_a_layout_need_not_be_named_for_a_mesh(run, gin):
    run("train", gin, "--gin.train.layout=None", "--mesh", MESH, "--run", "x", "--quiet")
    assert js.load("x").config.layout == js.Layout(MESH)


# --- resume -----------------------------------------------------------------------------------------------------------


def test_resume_goes_on_with_the_runs_own_settings(run, finished):
    code, out, _ = run("train", "--resume", finished.path, "--gin.train.steps=6")
    assert code == 0 and "from step 4" in out
    assert [row["step"] for row in finished.metrics()] == [1, 2, 3, 4, 5, 6]


def test_resume_with_another_algorithm_names_the_setting(refused, finished):
    words = ("cannot continue with train.algorithm = @", "(it has @", "leave it as before, or start a new run")
    binding = "--gin.train.algorithm=@CompressedGradients()"
    refused("train", "--resume", finished.path, "--gin.train.steps=6", binding, words=words)


def test_resume_with_another_width_names_it_although_its_scope_is_left_out(run, refused, finished):
    words = ("cannot continue with model/TestBigram.width = 16 (it has 8); leave it as before", "For example, ")
    refused("train", "--resume", finished.path, "--gin.train.steps=6", "--gin.TestBigram.width=16", words=words)
    assert run("train", "--resume", finished.path, "--gin.train.steps=5", "--gin.TestBigram.width=8")[0] == 0


def test_a_run_without_replicas_on_its_mesh_says_that_nothing_is_sent(run, gin):
    code, out, _ = run("train", gin, "--gin.train.algorithm=@CompressedGradients()", "--gin.train.steps=1")
    assert code == 0 and "CompressedGradients sends nothing between devices for its replicas" in " ".join(out.split())


def test_resume_moves_to_another_mesh(run, finished):
    code, _, _ = run("train", "--resume", finished.path, "--gin.train.steps=5", "--mesh", "data=4", "--quiet")
    assert (code, finished.info["layout"]["mesh"]["data"], finished.info["step"]) == (0, 4, 5)


@pytest.mark.usefixtures("interruptible")
def test_continue_resumes_a_stopped_run_and_says_so(run, gin, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        code, out, _ = run("train", gin, "--continue")
        assert code == 143 and "stopped by SIGTERM after step 2 of 4; its checkpoint is written" in out
    assert "resuming runs/small-1" in run("train", gin, "--continue")[1]
    assert js.load("runs/small-1").info["step"] == STEPS


def test_continue_starts_anew_after_a_finished_run_and_says_so(run, gin):
    assert "starting runs/small-1" in run("train", gin, "--continue")[1]
    assert "starting runs/small-2" in run("train", gin, "--continue")[1]


@pytest.mark.long
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_leaves_a_checkpoint_and_resume_finishes(run, transformer_gin, tmp_path):
    argv = ["train", str(transformer_gin), "--devices", "8", "--run", "x", "--gin.train.steps=100000"]
    process = start("import sys; from jaxscale.cli import main; sys.exit(main())", argv, tmp_path)
    try:
        for _ in range(600):
            if Path("x/metrics.jsonl").exists() and Path("x/metrics.jsonl").read_text().count("\n") > 2:
                break
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    stopped = js.load("x")
    assert (process.returncode, err.count("\n")) == (130, 2) and "stopping after this step" in err
    assert re.search(r"stopped by SIGINT after step \d+ of \d+; its checkpoint is written", out)
    assert stopped.info["status"] == "stopped" and stopped.info["step"] == stopped.last_step() > 2
    steps = stopped.last_step() + 2
    assert run("train", "--resume", "x", f"--gin.train.steps={steps}", "--quiet")[0] == 0
    assert js.load("x").info["status"] == "finished"


# --- user-defined parts ---------------------------------------------------------------------------------------------

OWN = """
import dataclasses
import jaxscale as js

@js.config.register
@dataclasses.dataclass(frozen=True)
class OwnSchedule(js.optim.Constant):
    pass
"""


def test_a_run_with_user_defined_parts_names_what_to_import(run, refused, gin, tmp_path):
    (tmp_path / "own_parts.py").write_text(OWN)

    more = ["--gin.train.schedule=@OwnSchedule()", "--import", "own_parts", "--run", "x"]
    code, out, err = run("train", gin, *more)
    assert code == 0, err
    assert js.load("x").info["imports"] == ["own_parts", "tests.truth.runs"]
    commands = [line.strip() for line in out.splitlines() if line.startswith("  ") and " x" in line]
    assert len(commands) == 3 and all(c.endswith(" --import own_parts --import tests.truth.runs") for c in commands)
    for file in (Path("x/config.gin"), Path("own_parts.py")):  # as in a process that has not imported it
        file.write_text(file.read_text().replace("OwnSchedule", "UnknownSchedule"))
    sys.modules.pop("own_parts")
    run("checkpoint", "verify", "x", "--accept-edits")
    for name, *words in (
        ["sample"],
        ["eval"],
        ["export", "out"],
        ["replay", "--step", "1"],
        ["merge", "out"],
        ["explain"],
    ):
        refused(name, "x", *words, words=["'@UnknownSchedule'", "--import own_parts --import tests.truth.runs"])
    words = shlex.split(commands[-1])
    code, _, err = run(*words[words.index("explain") :])
    assert code == 0 and "own_parts" in sys.modules, err


def test_names_of_modules_in_a_damaged_run_are_not_repeated(refused, finished):
    (finished.path / "config.gin").write_text("train.schedule = @NotHere()\n")
    info = finished.info | {"imports": ["a; rm -rf /"]}
    (finished.path / "run.json").write_text(json.dumps(info))
    refused("explain", finished.path, words=["'@NotHere'", "--import ITS_MODULE"])


# --- sample and explain -----------------------------------------------------------------------------------------------


def test_sample_is_the_same_for_the_same_seed(run, finished_run):
    one = run("sample", finished_run.path, "--prompt", "def ", "--tokens", "8", "--seed", "1")
    two = run("sample", finished_run.path, "--prompt", "def ", "--tokens", "8", "--seed", "1")
    assert one[:2] == two[:2] and "tokens/s" in one[2]  # which is not the same
    assert one[0] == 0 and one[1].startswith("def ")


@pytest.mark.long
def test_sample_compares_a_weight_format_with_plain_arrays_in_one_process(run, finished_run):
    words = ("sample", finished_run.path, "--prompt", "def ", "--tokens", "8", "--compare")
    code, _, errors = run(*words, "--weights", "int8")
    lines = [line for line in errors.splitlines() if "tokens/s (8 tokens)" in line]
    assert code == 0 and [line.partition(": ")[2].partition(":")[0] for line in lines] == [
        "with --weights int8",
        "without",
    ]
    infos = [describe_model(finished_run.config.model)[1]]
    infos.insert(0, Stored("int8").infos(infos[0]))
    for line, tree in zip(lines, infos, strict=True):
        assert f"{human_bytes(sum(i.nbytes for i in jax.tree.leaves(tree)))} of parameters" in line
    code, _, errors = run(*words)
    assert code == 2 and "add --weights, such as --weights int8" in errors


@pytest.mark.long
def test_sample_without_temperature_is_the_runs_own(run, finished_run):
    _, out, _ = run("sample", finished_run.path, "--prompt", "def ", "--tokens", "8", "--temperature", "0")
    assert out == finished_run.sample("def ", 8, temperature=0) + "\n"


def test_sample_chooses_as_the_checkpoint_came_and_says_so(run, finished_run, monkeypatch):
    own = {"temperature": 0.0, "repetition_penalty": 1.5, "top_k": 3}
    monkeypatch.setattr(js.Run, "choice", lambda _, but: {k: v for k, v in own.items() if k not in but})
    words = ("sample", finished_run.path, "--prompt", "def ", "--tokens", "8")
    _, out, errors = run(*words)
    assert out[4:-1] == finished_run.generate("def ", max_tokens=8, temperature=0, repetition_penalty=1.5).text
    assert "jaxscale: using temperature 0, repetition penalty 1.5 from generation_config.json" in errors
    _, out, errors = run(*words, "--temperature", "2", "--repetition-penalty", "1", "--top-k", "0")
    assert out[4:-1] == finished_run.generate("def ", max_tokens=8, temperature=2).text
    assert "generation_config" not in errors


def test_explain_prints_the_tensor_table(run, transformer_gin):
    code, out, _ = run("explain", transformer_gin)
    assert code == 0
    assert "embed/weight" in out and "vocab→tensor" in out and "optimizer state:" in out


def test_explain_of_a_run_is_that_of_its_settings(run, transformer_gin, finished_run):
    assert run("explain", finished_run.path) == run("explain", transformer_gin)


def test_explain_prints_json(run, transformer_gin):
    _, out, _ = run("explain", transformer_gin, "--json")
    assert {r["path"] for r in json.loads(out)["params"]} >= {"embed/weight", "head/weight"}


def test_explain_needs_no_devices(run, transformer_gin):
    code, out, _ = run("explain", transformer_gin, "--mesh", "data=512,fsdp=16,tensor=2", "--json")
    assert code == 0 and json.loads(out)["layout"].startswith("data=512,fsdp=16,tensor=2")


def test_the_demo_can_be_explained(run):
    assert run("explain", ROOT / "experiments" / "demo.gin")[0] == 0


# --- help and mistakes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [[], ["train"], ["sample"], ["explain"]], ids=lambda c: " ".join(c) or "jaxscale")
def test_help_is_there(capfd, command):
    with pytest.raises(SystemExit) as done:
        main([*command, "--help"])
    assert done.value.code == 0
    assert capfd.readouterr().out.startswith(f"usage: {' '.join(['jaxscale', *command])}")


def test_no_command_shows_the_help(run):
    code, out, _ = run()
    assert code == 0 and out.startswith("usage: jaxscale")


def test_the_version_is_shown(capfd):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capfd.readouterr().out == f"jaxscale {js.__version__}\n"


@pytest.mark.parametrize(
    "argv, words",
    [
        (["trian"], ["no command 'trian'", "did you mean 'train'", "--help"]),
        (["train"], ["name a gin file", "--resume"]),
        (["train", "GIN", "more"], ["unrecognized arguments: more"]),
        (
            ["grow", "x", "--expert", "4", "--out", "y"],
            ["unrecognized arguments: --expert", "did you mean '--experts'"],
        ),
        (["prune", "x", "y", "--expert", "4"], ["unrecognized arguments: --expert", "did you mean '--experts'"]),
        (["plan", "GIN", "--topology", "v5p:2x2x2", "--load", "zipf:1"], ["did you mean '--loads'"]),
        (["train", "GIN", "--devises", "8"], ["unrecognized arguments: --devises", "did you mean '--devices'"]),
        (["train", "GIN", "--setps=3"], ["--setps=3"]),
        (["train", "smal.gin"], ["no config file 'smal.gin'", "did you mean 'small.gin'"]),
        (["train", "GIN", "--gin.train.step=3"], ["'train' has no parameter 'step'", "did you mean 'steps'"]),
        (["train", "GIN", "--gin.trian.steps=3"], ["'trian'", "did you mean 'train'"]),
        (["train", "GIN", "--gin.train.steps=many"], ["train.steps must be int", "'many'"]),
        (["train", "GIN", "--gin.train.steps=2.5"], ["train.steps must be int", "2.5"]),
        (["train", "GIN", "--gin.train.steps=1e3"], ["train.steps must be int, not 1000.0; write 1000"]),
        (["train", "GIN", "--gin.train.steps"], ["--gin.train.steps needs a value"]),
        (["train", "GIN", "--gin.train.steps=0"], ["train.steps = 0", "at least 1"]),
        (["train", "GIN", "--gin.train.batch_size=0"], ["train.batch_size = 0", "at least 1"]),
        (["train", "GIN", "--gin.train.lr=-1"], ["train.lr = -1", "above 0"]),
        (["train", "GIN", "--gin.train.seq_len=0"], ["train.seq_len = 0", "at least 2"]),
        (["train", "GIN", "--gin.train.optimizer=@Adam()"], ["'@Adam'", "did you mean 'AdamW'"]),
        (["train", "GIN", "--gin.train.data=@AdamW()"], ["train.data must be a corpus", "not AdamW("]),
        (["train", "GIN", "--gin.train.model=@Transformer"], ["train.model must be a model such as Transformer()"]),
        (
            ["train", "GIN", "--gin.Layout.sums=@StarSum"],
            ["Layout.sums = StarSum", "it is called as (term, tokens, over, dim)", "write StarSum()"],
        ),
        (["train", "GIN", "--gin.train.objective=@NextToken"], ["train.objective must be Objective, not @NextToken"]),
        (["train", "GIN", "--gin.Transformer.width=0"], ["Transformer.width = 0", "at least 1"]),
        (["train", "GIN", "--gin.Transformer.dtype=float8"], ["'float8'", "'bfloat16'"]),
        (["train", "GIN", "--gin.Transformer.memory=all"], ["'all'"]),
        (["train", "GIN", "--gin.Transformer.heads=3"], ["head", "nearest"]),
        (["train", "GIN", "--gin.Transformer.vocab=100"], ["256 token ids", "vocab to 256"]),
        (["train", "GIN", "--gin.Layout.rules=fsdp_tenser"], ["'fsdp_tenser'", "did you mean 'fsdp_tensor'"]),
        (["train", "GIN", "--gin.train.batch_size=6"], ["the batch", "4 does not divide 6", "4 or 8"]),
        (["train", "GIN", "--gin.train.accumulate=3"], ["train.accumulate = 3", "nearest"]),
        (["train", "GIN", "--gin.train.packing=streams"], ["'streams'", "did you mean 'stream'"]),
        (["train", "GIN", "--gin.train.seq_len=100000"], ["100000"]),
        (["train", "GIN", "--gin.text_files.glob=nowhere/*.txt"], ["'nowhere/*.txt'", "no folder nowhere"]),
        (["train", "GIN", "--gin.WSD.decay=0.9", "--gin.WSD.warmup=0.5", "--gin.train.schedule=@WSD()"], ["WSD"]),
        (["train", "GIN", "--mesh", "modle=2"], ["'modle'", "known"]),
        (["train", "GIN", "--mesh", "data"], ["axis=size"]),
        (["train", "GIN", "--mesh", "data=16"], ["needs 16 devices", "has 8", "--devices 16"]),
        (["train", "GIN", "--mesh", "data=3"], ["the batch", "3 does not divide 8"]),
        (["train", "GIN", "--mesh", "tensor=4"], ["shards 2 over 4 devices"]),
        (["train", "GIN", "--mesh", "data=2", "--pipeline", "1f1b:4"], ["--pipeline 1f1b:4", "--mesh pipeline=2"]),
        (["train", "GIN", "--devices", "0"], ["0 devices"]),
        (["train", "GIN", "--devices", "4"], ["already runs on 8 cpu", "simulate_devices(4)"]),
        (["train", "GIN", "--devices", "two"], ["--devices", "'two'"]),
        (["train", "GIN", "--distributed", "host:1,2"], ["--distributed host:1,2", "host:port,processes,process"]),
        (["train", "GIN", "--profile", "3"], ["--profile 3", "10:15"]),
        (["train", "GIN", "--profile", "3:2"], ["3:2", "may not exceed"]),
        (["train", "GIN", "--profile", "2:99"], ["2:99", "1 to 4"]),
        (["train", "GIN", "--dry-run", "--profile", "10-15"], ["--profile 10-15", "10:15"]),
        (["train", "GIN", "--dry-run", "--profile", "2:99"], ["2:99", "1 to 4"]),
        (["train", "GIN", "--dry-run", "--gin.train.packing=fitt"], ["'fitt'", "did you mean 'fit'"]),
        (["train", "GIN", "--dry-run", "--gin.Transformer.vocab=100"], ["256 token ids", "vocab to 256"]),
        (["train", "GIN", "--run", "text"], ["text already exists", "--resume text"]),
        (["train", "--resume", "nowhere"], ["nowhere is not a run folder"]),
        (["train", "--resume", "RUN"], ["already taken 4 of 4 steps", "raise train.steps"]),
        (["train", "--resume", "RUN", "--run", "x"], ["leave out", "--run"]),
        (["train", "GIN", "--resume", "RUN"], ["leave out CONFIG"]),
        (["sample"], ["RUN"]),
        (["sample", "nowhere"], ["nowhere is not a run folder"]),
        (["sample", "RUN", "--tokens", "0"], ["tokens = 0"]),
        (["sample", "RUN", "--temperature", "-1"], ["temperature = -1"]),
        (["sample", "RUN", "--top-k", "-1"], ["top_k = -1"]),
        (["sample", "RUN", "--seed", "-1"], ["seed = -1"]),
        (["sample", "RUN", "--gin.train.seed=3"], ["no settings to change", "--gin.train.seed"]),
        (["explain"], ["name a gin file"]),
        (["explain", "nowhere.gin"], ["no config file 'nowhere.gin'"]),
        (["explain", "GIN", "--mesh", "tensor=4"], ["shards 2 over 4 devices", "attn"]),
    ],
    ids=lambda v: " ".join(v) if v and v[0] in ("train", "sample", "explain", "trian") else "",
)
def test_a_mistake_is_one_sentence(refused, transformer_gin, finished_run, argv, words):
    Path("small.gin").write_text(transformer_gin.read_text())
    Path("text").mkdir()
    Path("text", "mine.txt").write_text("...")
    argv = [{"GIN": str(transformer_gin), "RUN": str(finished_run.path)}.get(a, a) for a in argv]
    refused(*argv, words=words)


def test_a_gin_file_of_a_run_may_not_import_code(refused, finished):
    path = finished.path / "config.gin"
    files.write_gin(path, "import antigravity\n" + files.read_gin(path))
    refused("train", "--resume", finished.path, words=["'import antigravity' is refused"])


def test_a_run_of_python_only_values_is_resumed_from_python(refused, finished):
    text = js.config.dumps("train", {"model": lambda: dot_product_attention})
    files.write_gin(finished.path / "config.gin", text)
    refused("train", "--resume", finished.path, words=["train.model", "came from Python", "jaxscale.fit("])


def test_a_damaged_run_is_one_sentence(refused, finished):
    shutil.rmtree(finished.path / "checkpoints" / str(STEPS) / "tensors")
    refused("sample", finished.path, words=[f"checkpoint {STEPS}", "is missing"])


def test_a_closed_pipe_is_no_traceback(run, gin, monkeypatch):
    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr("jaxscale.commands.explain.run", closed)
    assert run("explain", gin) == (1, "", "")


def test_a_second_interrupt_is_no_traceback(run, gin, monkeypatch):
    def impatient(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxscale.commands.train.run", impatient)
    assert run("train", gin) == (130, "", "jaxscale: interrupted\n")


# --- schedules


def test_a_schedule_is_drawn_with_what_it_costs(run, tmp_path):
    code, out, _ = run("schedule", "1f1b", "--stages", 2, "--microbatches", 4, "--csv", "t.csv", "--plot", "t.png")
    assert code == 0
    assert out.splitlines()[:2] == ["stage 0  F0 F1 .  B0 F2 B1 F3 B2 .  B3", "stage 1  .  F0 B0 F1 B1 F2 B2 F3 B3 ."]
    assert "bubble 0.200" in out and "bubble 0.478" in out and "by stage: 2, 1" in out
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert run("schedule", "t.csv")[1].splitlines()[:2] == out.splitlines()[:2]


@pytest.mark.parametrize(
    "argv,words",
    [
        (["1f1bb"], ["'1f1bb'", "did you mean '1f1b'"]),
        (["gpipe", "--stages", "0"], ["--stages 0", "at least 1"]),
        (["interleaved", "--microbatches", "6"], ["groups of 4", "the nearest is 8"]),
        (["gone.csv"], ["gone.csv", "cannot be read"]),
    ],
    ids=["name", "stages", "micro-batches", "file"],
)
def test_a_schedule_that_is_none_is_one_sentence(run, argv, words):
    code, _, err = run("schedule", *argv)
    assert code == 2 and err.count("\n") == 1 and all(w in err for w in words)


def test_the_command_line_sets_mesh_and_schedule(run, transformer_gin):
    flags = ["--mesh", "pipeline=2,data=2", "--pipeline", "gpipe:2", "--gin.Transformer.depth=2"]
    code, out, _ = run("explain", transformer_gin, *flags)
    assert code == 0
    assert "(fsdp_tensor, gpipe)" in out and "schedule gpipe, 2 stages, 2 micro-batches" in " ".join(out.split())
