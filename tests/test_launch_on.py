"""`jaxscale launch --on`: the files that clusters read."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import types

import pytest
import yaml

from jaxscale.cli import main
from jaxscale.clusters import SYSTEMS, Hosts, hosts_of, xpk
from jaxscale.commands import launch_on
from jaxscale.errors import ConfigError
from jaxscale.hardware import topology
from tests.truth.runs import ROOT

DEMO = str(ROOT / "experiments/demo.gin")
HOSTS = ["--topology", "h100:16", "--mesh", "data=-1", "--run", "s3://bucket/run-1"]
ON_PODS = ["--image", "me/jax:1"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(*words, config=DEMO):
    """The text that the command writes."""
    assert main(["launch", "--on", words[0], config, *words[1:], "-o", "file"]) == 0
    with open("file") as file:
        return file.read()


def manifests(*words):
    return {one["kind"]: one for one in yaml.safe_load_all(write("kubernetes", *words, *ON_PODS))}


@pytest.mark.parametrize(
    "name, hosts",
    {
        "h100:1": Hosts(1, 1),
        "h100:8": Hosts(1, 8),
        "h100:8x4": Hosts(4, 8),
        "gb200:72": Hosts(1, 72),
        "cpu:8": Hosts(1, 0),
        "v4:2x2x1": Hosts(1, 4),
        "v5p:4x4x4": Hosts(16, 4),  # Google's machine ct5p-hightpu-4t
        "v5e:1x1": Hosts(1, 1),  # ct5lp-hightpu-1t, -4t, -8t, and -4t for several hosts
        "v5e:2x2": Hosts(1, 4),
        "v5e:2x4": Hosts(1, 8),
        "v6e:16x16*2": Hosts(64, 4, 2),
    }.items(),
)
def test_hosts_and_chips_are_those_of_the_machines(name, hosts):
    assert hosts_of(topology(name)) == hosts


# --- SLURM ------------------------------------------------------------------------------------------------------------


def sbatch_options(text):
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_an_sbatch_file_has_a_task_for_each_gpu(capsys):
    text = write("slurm", *HOSTS, "--time", "25h", "--option", "partition=gpu", "--gin.train.lr=1e-4")
    options = sbatch_options(text)
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == ("2", "8", "8")
    assert (options["time"], options["partition"], options["requeue"]) == ("1-01:00:00", "gpu", "")
    for word in ("--distributed", "--run s3://bucket/run-1", "--continue", "--gin.train.lr=1e-4", f"train {DEMO}"):
        assert word in text
    assert "sbatch file" in capsys.readouterr().out


def test_a_single_host_has_one_task_that_joins_no_others():
    text = write("slurm", "--topology", "h100:8", "--run", "s3://bucket/run")
    assert sbatch_options(text)["ntasks-per-node"] == "1"
    assert "--distributed" not in text


def ran(tmp_path, text, code, **env):
    """What a batch file asked of SLURM when its step ended with an exit code; the tools are scripts that log."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    log = tmp_path / "log"
    log.write_text("")
    step, at_limit = tmp_path / "step", isinstance(code, str)
    last = code.removeprefix("at limit: ") if at_limit else code
    stop = f"trap 'exit {last}' TERM; echo $$ > {step}; kill -USR1 $PPID; while :; do sleep 0.01; done"
    for tool, line in {
        "srun": stop if at_limit else f"exit {code}",
        "scontrol": f'echo "$@" >> {log}',
        # The step has ended, and bash has seen it, when the trap that calls scancel returns.
        "scancel": f"kill -TERM $(cat {step}); while kill -0 $(cat {step}) 2>/dev/null; do sleep 0.01; done",
    }.items():
        (tools / tool).write_text(f"#!/bin/bash\n{line}\n")
        (tools / tool).chmod(0o755)
    (tmp_path / "job.sh").write_text(text)
    done = subprocess.run(
        ["bash", "job.sh"],
        env={"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, log.read_text().strip(), done.stderr


def test_a_batch_file_asks_for_a_restart_where_one_helps(folder):
    text = write("slurm", *HOSTS, "--time", "1h", "--restarts", "2")
    again = "requeue 7"
    assert ran(folder, text, 0) == (0, "", "")
    assert ran(folder, text, 2) == (2, "", "")  # a mistake in the settings
    assert ran(folder, text, 143) == (143, "", "")  # scancel
    assert ran(folder, text, 70) == (70, again, "")  # another process was lost
    assert ran(folder, text, 137, SLURM_RESTART_COUNT="1") == (137, again, "")
    assert ran(folder, text, 137, SLURM_RESTART_COUNT="2") == (137, "", "")
    assert ran(folder, text, "at limit: 143") == (143, again, "")
    assert ran(folder, text, "at limit: 143", SLURM_RESTART_COUNT="2") == (143, again, "")


@pytest.mark.parametrize("code", [0, 2])
def test_a_step_that_ends_by_itself_at_the_time_limit_is_not_repeated(code, folder):
    text = write("slurm", *HOSTS, "--time", "1h")
    assert ran(folder, text, f"at limit: {code}") == (code, "", "")


def test_a_secret_is_read_from_the_environment_and_in_no_file(folder, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "abc123")
    text = write("slurm", *HOSTS, "--secret", "WANDB_API_KEY")
    code, _, errors = ran(folder, text, 0)
    assert code != 0 and "WANDB_API_KEY: export it before sbatch" in errors
    assert ran(folder, text, 0, WANDB_API_KEY="abc123")[0] == 0
    os.remove("file")
    [container] = manifests(*HOSTS, "--secret", "WANDB_API_KEY")["Job"]["spec"]["template"]["spec"]["containers"]
    [entry] = [one for one in container["env"] if one["name"] == "WANDB_API_KEY"]
    assert entry["valueFrom"]["secretKeyRef"] == {"name": "jaxscale-secrets", "key": "WANDB_API_KEY"}
    assert "abc123" not in text + (folder / "file").read_text()


# --- Kubernetes -------------------------------------------------------------------------------------------------------


def test_an_indexed_job_has_a_pod_for_each_host():
    parts = manifests(*HOSTS, "--gin.train.steps=7", "--time", "2h", "--restarts", "3")
    job = parts["Job"]["spec"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    assert (job["backoffLimit"], job["activeDeadlineSeconds"], pod["restartPolicy"]) == (6, 7200, "Never")
    first = job["podFailurePolicy"]["rules"][0]
    assert (first["action"], first["onExitCodes"]["values"]) == ("FailJob", [2])
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    env = {one["name"]: one.get("value") for one in container["env"]}
    service = parts["Service"]
    assert env["JAXSCALE_COORDINATOR"] == f"demo-0.{pod['subdomain']}:8476"
    assert (env["JAXSCALE_PROCESSES"], service["metadata"]["name"]) == ("2", pod["subdomain"])
    assert service["spec"]["selector"] == {"job-name": parts["Job"]["metadata"]["name"]}
    assert "train.steps = 7" in parts["ConfigMap"]["data"]["config.gin"]
    assert "--distributed" in container["args"][0] and "--gin." not in container["args"][0]


def test_tpu_pods_select_their_slice_and_several_slices_are_a_job_set():
    pod = manifests("--topology", "v5p:2x2x4", "--mesh", "fsdp=-1", "--run", "gs://b/r")["Job"]["spec"]["template"]
    assert pod["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "2x2x4"
    assert pod["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == "tpu-v5p-slice"
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    os.remove("file")
    two = ["--topology", "v5e:4x4*2", "--mesh", "data=2,fsdp=-1", "--run", "gs://b/r", "--gin.train.batch_size=32"]
    parts = manifests(*two, "--gin.Layout.across=data", "--restarts", "5")
    [slices] = parts["JobSet"]["spec"]["replicatedJobs"]
    assert (slices["replicas"], slices["template"]["spec"]["completions"]) == (2, 4)
    assert parts["JobSet"]["spec"]["failurePolicy"]["maxRestarts"] == 5


def is_in(part, whole):
    """Whether all fields of a tree are in another, which may have more fields."""
    if isinstance(part, dict):
        return all(key in whole and is_in(value, whole[key]) for key, value in part.items())
    if isinstance(part, list):
        return len(part) == len(whole) and all(map(is_in, part, whole))
    return part == whole


def test_the_job_set_is_what_its_own_python_api_reads():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    more = ["--restarts", "5", "--time", "2h", "--option", "queue=q", "--env", "A=b", "--volume", "disk:/mnt"]
    written = manifests(*SLICES[:-2], *more, "--secret", "KEY")["JobSet"]
    parsed = models.JobsetV1alpha2JobSet.from_dict(written)
    assert is_in(written, parsed.to_dict())  # types are strict, and fields that the API does not have are dropped
    assert not is_in(written | {"spec": written["spec"] | {"restarts": 5}}, parsed.to_dict())
    [rule] = parsed.spec.failure_policy.rules
    actions = type(rule).model_fields["action"].description.partition("Valid values are ")[2].rstrip(".").split(", ")
    assert rule.action in actions


@pytest.mark.long
@pytest.mark.parametrize("where", [["h100:16"], ["v5p:2x2x4"], ["cpu:8"], ["mi300x:8"]])
def test_kubernetes_own_schema_accepts_the_manifest(where):
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    more = ["--time", "2h", "--secret", "KEY", "--env", "A=b", "--volume", "disk:/mnt", "--option", "queue=q"]
    for part in manifests("--topology", *where, "--mesh", "data=-1", "--run", "/mnt/r", *more).values():
        validate.validate(part, "1.31", strict=True)


# --- xpk and SkyPilot -------------------------------------------------------------------------------------------------

SLICES = ["--topology", "v5e:4x4*2", "--mesh", "data=2,fsdp=-1", "--run", "gs://b/r", "--gin.train.batch_size=32"]
SLICES += ["--gin.Layout.across=data", *ON_PODS]


ONE_SLICE = ["--mesh", "fsdp=-1", "--run", "gs://b/r", *ON_PODS, "--option", "cluster=c"]


def words_of(folder, text, **env):
    """The arguments that a script passes to xpk, and the content of its file of environment variables."""
    print_words = "import json, sys\nfile = [w[11:] for w in sys.argv if w.startswith('--env-file=')]\n"
    print_words += "print(json.dumps([sys.argv[1:], open(file[0]).read() if file else '']))"
    (folder / "xpk").write_text(f"#!{sys.executable} -IS\n{print_words}\n")
    (folder / "xpk").chmod(0o755)
    (folder / "job.sh").write_text(text)
    path = {"PATH": f"{folder}:{os.environ['PATH']}", **env}
    done = subprocess.run(["bash", "job.sh"], env=path, capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


def test_an_xpk_script_passes_slices_restarts_and_the_command(folder):
    options = ["--option", "cluster=c", "--env", "A=b c", "--secret", "WANDB_API_KEY", "--restarts", "4"]
    text = write("xpk", *SLICES, *options)
    assert "export it first" in words_of(folder, text)
    words, env = words_of(folder, text, WANDB_API_KEY="abc")
    for word in ("--tpu-type=v5litepod-4x4", "--num-slices=2", "--max-restarts=4", "--cluster=c", "--workload=demo"):
        assert word in words
    assert env == "A=b c\nWANDB_API_KEY\n"
    [command] = [word for word in words if word.startswith("--command=")]
    assert command.startswith(f"--command=jaxscale train {DEMO} --gin.train.batch_size=32 --gin.Layout.across=data")
    assert command.endswith("--mesh data=2,fsdp=-1 --distributed --run gs://b/r --continue")
    os.remove("file")
    cube = ["--topology", "v5p:2x2x4", "--mesh", "fsdp=-1", "--run", "gs://b/r", *ON_PODS, *options]
    assert "--tpu-type=v5p-2x2x4" in write("xpk", *cube)


def test_xpk_itself_has_the_shapes_that_are_accepted():
    sizes = pytest.importorskip("xpk.core.system_characteristics", reason="pip install --no-deps xpk")
    names = sizes.UserFacingNameToSystemCharacteristics
    for kind, prefix in xpk.TYPES.items():
        smallest = topology(kind).chip.smallest
        for shape in itertools.product((1, 2, 3, 4, 6, 8, 12, 16, 24, 44, 64), repeat=len(smallest)):
            hardware = dataclasses.replace(topology(kind), shape=shape)
            try:
                xpk.check_shape(hardware)
                accepted = True
            except ConfigError:
                accepted = False
            assert accepted == (f"{prefix}-{'x'.join(map(str, shape))}" in names), hardware


def test_a_skypilot_task_has_a_node_for_each_host(folder):
    (folder / "my.gin").write_text(f"include '{DEMO}'")
    more = ["--setup", "pip install x", "--secret", "WANDB_API_KEY", "--env", "A=1", "--option", "use_spot=true"]
    task = yaml.safe_load(write("skypilot", *HOSTS, *more, config="my.gin"))
    assert (task["num_nodes"], task["workdir"], task["setup"]) == (2, ".", "pip install x\n")
    assert (task["secrets"], task["envs"]) == ({"WANDB_API_KEY": None}, {"A": "1"})
    assert task["resources"] == {
        "accelerators": "H100:8",
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [70]},
        "use_spot": True,
    }
    env = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    shell = task["run"].partition("jaxscale train")[0] + "env"
    done = subprocess.run(
        ["bash", "-c", shell], env={"PATH": os.environ["PATH"], **env}, capture_output=True, text=True
    )
    for line in ("JAXSCALE_COORDINATOR=10.0.0.1:8476", "JAXSCALE_PROCESSES=2", "JAXSCALE_PROCESS=1"):
        assert line in done.stdout.splitlines()
    os.remove("file")
    pod = ["--topology", "v5p:2x2x4", "--mesh", "fsdp=-1", "--run", "gs://b/r", *ON_PODS]
    task = yaml.safe_load(write("skypilot", *pod, config="my.gin"))
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (1, "tpu-v5p-32")  # 16 chips of 2 cores
    assert "JAXSCALE" not in task["run"] and "--distributed" in task["run"]
    os.remove("file")
    assert "recover" not in write("skypilot", *pod, "--restarts", "0", config="my.gin")


@pytest.mark.parametrize("code, last", [(0, 0), (1, 1), (2, 2), (70, 70), (137, 70), (139, 70), (143, 143)])
def test_a_skypilot_job_is_restarted_after_a_kill_and_not_after_a_mistake(code, last, folder):
    (folder / "my.gin").write_text(f"include '{DEMO}'")
    (folder / "jaxscale").write_text(f"#!/bin/bash\nexit {code}\n")
    (folder / "jaxscale").chmod(0o755)
    task = yaml.safe_load(write("skypilot", *HOSTS, *ON_PODS, config="my.gin"))
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "code": "5"}
    assert subprocess.run(["bash", "-c", task["run"]], env=path).returncode == last


@pytest.mark.long
@pytest.mark.parametrize("name", ["h100:16", "v5p:2x2x4", "v5e:4x4", "v6e:4x4", "cpu:8", "a100:8", "mi300x:8"])
def test_skypilot_itself_reads_the_task(name, folder):
    sky = pytest.importorskip("sky", reason="pip install skypilot")
    from sky.jobs.recovery_strategy import StrategyExecutor

    (folder / "my.gin").write_text(f"include '{DEMO}'")
    write("skypilot", "--topology", name, "--mesh", "data=-1", "--run", "s3://b/r", *ON_PODS, config="my.gin")
    os.rename("file", "task.yaml")  # SkyPilot refuses a task that its schema does not have
    task = sky.Task.from_yaml("task.yaml")
    assert task.num_nodes == (2 if name == "h100:16" else 1)
    [resources] = task.resources
    job = types.SimpleNamespace(restart_cnt_on_failure=0, **resources.job_recovery)
    restarts = functools.partial(StrategyExecutor.should_restart_on_failure, job)
    assert restarts([70, 137]) and not restarts([2, 137])  # SkyPilot kills the processes of the other hosts: 137


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, message",
    {
        "system": (["slrum", *HOSTS], "--on slrum: jaxscale launch writes no file for it; did you mean 'slurm'?"),
        "tpu": (["slurm", "--topology", "v5p:4x4x4", "--mesh", "data=-1", "--run", "r"], "which SLURM does not start"),
        "chip": (["slurm", "--topology", "h10:8", "--run", "r"], "there is no hardware 'h10'"),
        "no-run": (["slurm", *HOSTS[:4]], "--run s3://bucket/run-1"),
        "no-topology": (["slurm", "--run", "r"], "--topology h100:16"),
        "mesh": (["slurm", "--topology", "h100:16", "--run", "r"], "does not fit h100:16, which has 16 devices"),
        "rows": (["slurm", *HOSTS, "--gin.train.batch_size=10"], "10"),
        "slices": (
            ["kubernetes", "--topology", "v5e:4x4*2", "--mesh", "data=-1", "--run", "gs://b/r", *ON_PODS],
            "set Layout.across = 'data'",
        ),
        "hosts": (["kubernetes", "--topology", "v5p:4x3x4", "--mesh", "data=-1", "--run", "gs://b/r"], "must be even"),
        "image": (["kubernetes", *HOSTS], "--image"),
        "key": (["slurm", *HOSTS, "--env", "WANDB_API_KEY=abc"], "pass it with --secret WANDB_API_KEY"),
        "value": (["slurm", *HOSTS, "--secret", "WANDB_API_KEY=abc"], "write --secret WANDB_API_KEY"),
        "time": (["slurm", *HOSTS, "--time", "1w"], "write 90m, 24h or 7d"),
        "option": (["kubernetes", *HOSTS, *ON_PODS, "--option", "namspace=x"], "did you mean 'namespace'?"),
        "ours": (["slurm", *HOSTS, "--option", "nodes=3"], "writes #SBATCH --nodes itself"),
        "other-name": (["k8s", *HOSTS], "did you mean 'kubernetes'?"),
        "empty": (["kubernetes", *HOSTS, "--image", ""], "--image is empty"),
        "short": (["slurm", *HOSTS, "--time", "10m"], "at least 11m"),
        "gpus": (["xpk", *HOSTS], "--on xpk is for TPUs"),
        "cluster": (["xpk", *SLICES], "--option cluster=NAME"),
        "install": (["skypilot", *HOSTS], "--setup"),
        "outside": (["skypilot", *HOSTS, *ON_PODS], "copies the current folder"),
        "one-slice": (["skypilot", *SLICES], "one slice"),
        "unnamed": (["skypilot", "--topology", "mi355x:8", "--run", "s3://b/r"], "did you mean 'mi300x'?"),
        "uncounted": (["skypilot", *HOSTS, *ON_PODS, "--restarts", "3"], "write --restarts 0 for none"),
        "shape": (["xpk", *ONE_SLICE, "--topology", "v5e:2x2"], "it has 2x4, 4x4, 4x8, 8x8, 8x16, 16x16; take one"),
        "order": (["xpk", *ONE_SLICE, "--topology", "v5p:8x4x4"], "must ascend: --topology v5p:4x4x8"),
        "restarts": (["slurm", *HOSTS, "--restarts", "-1"], "must be at least 0"),
        "tool": (["slurm", *HOSTS, "--submit"], "--submit needs sbatch"),
        "name": (["slurm", *HOSTS, "--name", "My_Run"], "choose one with --name"),
        "nproc": (["slurm", *HOSTS, "--nproc", "2"], "--nproc"),
        "misspelt": (["slurm", *HOSTS, "--imgae", "x"], "--imgae"),
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_one_sentence_and_nothing_is_written(words, message, folder, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    words, message = message
    assert main(["launch", "--on", words[0], DEMO, *words[1:]]) == 2
    errors = capsys.readouterr().err
    assert message in errors and "abc" not in errors
    assert not list(folder.iterdir())


def test_an_existing_file_is_not_overwritten(folder, capsys):
    (folder / "demo.sbatch").write_text("mine")
    assert main(["launch", "--on", "slurm", DEMO, *HOSTS]) == 2
    assert "demo.sbatch exists already" in capsys.readouterr().err
    assert (folder / "demo.sbatch").read_text() == "mine"


def test_options_of_a_cluster_need_on(capsys):
    assert main(["launch", "--nproc", "2", "--topology", "h100:8", "--", "train", DEMO]) == 2
    assert "--topology is an option of --on" in capsys.readouterr().err
    assert main(["launch"]) == 2
    assert "--nproc 2 -- train CONFIG" in capsys.readouterr().err


@pytest.mark.parametrize("kind, warned", [("ext4", True), ("lustre", False), ("fuse.s3fs", False)])
def test_a_warning_names_a_run_folder_on_a_local_disk(kind, warned, monkeypatch, capsys):
    monkeypatch.setattr(launch_on, "_file_system", lambda path: kind)
    write("slurm", *HOSTS[:4], "--run", "runs/one")
    assert ("is on a disk of this machine" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(
    "tracker, words, line",
    [
        ("@Wandb()", [], "Wandb(), and the hosts do not have WANDB_API_KEY or WANDB_MODE of your shell"),
        ("@MLflow()", [], "--secret MLFLOW_TRACKING_URI"),
        ("@Wandb()", ["--secret", "WANDB_API_KEY"], None),
        ("@MLflow()", ["--env", "MLFLOW_TRACKING_URI=http://host"], None),
        ("@Wandb()", ["--gin.Wandb.mode=offline"], None),
        ("@Wandb()", ["--env", "WANDB_MODE=offline"], None),
        ("@MLflow()", ["--gin.MLflow.uri=http://host"], None),
        ("@TensorBoard()", [], None),
    ],
)
def test_a_warning_names_the_variables_of_trackers_that_hosts_do_not_have(tracker, words, line, capsys):
    write("kubernetes", *HOSTS, *ON_PODS, f"--gin.train.trackers=({tracker},)", *words)
    errors = capsys.readouterr().err
    assert line in errors if line else "train.trackers" not in errors
    os.remove("file")
    write("slurm", *HOSTS, f"--gin.train.trackers=({tracker},)")  # sbatch passes the environment on
    assert "train.trackers" not in capsys.readouterr().err


def test_submit_calls_the_tool_and_returns_its_exit_code(folder, monkeypatch):
    for launcher in SYSTEMS.values():
        (folder / launcher.tool).write_text(f'#!/bin/sh\necho "$@" > {folder}/called\nexit 3\n')
        (folder / launcher.tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    assert main(["launch", "--on", "slurm", DEMO, *HOSTS, "--submit"]) == 3
    assert (folder / "called").read_text() == "demo.sbatch\n"
    assert main(["launch", "--on", "kubernetes", DEMO, *HOSTS, *ON_PODS, "--submit"]) == 3
    assert (folder / "called").read_text() == "apply -f demo.yaml\n"
