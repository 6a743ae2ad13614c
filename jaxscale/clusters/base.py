"""What a launcher gets, and what it has to offer."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml

from jaxscale.clusters.hosts import Hosts
from jaxscale.errors import ConfigError, near
from jaxscale.hardware import Topology

SCHEMES = ("s3://", "gs://")
"""How the address of a bucket begins."""

RESTARTS = 20
"""How often a cluster restarts a job after failures, by default."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A training run on a cluster.

    Args:
      name: the job's name: lower-case letters, digits and dashes.
      config: the gin file, as the user named it.
      text: all settings, as one gin file without includes.
      train: options of `jaxscale train` besides the gin file: bindings, `--mesh`, `--import`.
      hardware: the topology.
      hosts: its hosts.
      run: the run folder, as every host sees it.
      python: the Python that has jaxscale on the hosts, of a job without image.
      image: the container image, or `None`.
      setup: shell lines before training starts.
      env: environment variables by name.
      secrets: names of environment variables whose values no file may contain.
      minutes: the time limit, or `None`.
      restarts: how many times to restart after a failure; `None` if the user did not say.
      volumes: "CLAIM:/path" of shared storage, for Kubernetes.
      options: the system's own options by name.
    """

    name: str
    config: str
    text: str
    train: Sequence[str]
    hardware: Topology
    hosts: Hosts
    run: str
    python: str
    image: str | None = None
    setup: Sequence[str] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    secrets: Sequence[str] = ()
    minutes: int | None = None
    restarts: int | None = None
    volumes: Sequence[str] = ()
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def limit(self) -> int:
        """How many times to restart after a failure."""
        return RESTARTS if self.restarts is None else self.restarts

    @property
    def simulated(self) -> list[str]:
        """The option that simulates the devices of a CPU topology; empty for accelerators."""
        return ["--devices", str(self.hardware.devices)] if self.hardware.chip.platform == "cpu" else []

    def command(self, *, config: str, distributed: bool, bindings: bool = True, installed: bool = False) -> list[str]:
        """Return the command line of one process.

        Args:
          config: the gin file on the hosts.
          distributed: whether the process joins others.
          bindings: whether to repeat the `--gin.` options, which `text` has already.
          installed: whether `jaxscale` is on the PATH of hosts, as it is in an image.
        """
        program = ["jaxscale"] if installed or self.image is not None else [self.python, "-P", "-m", "jaxscale"]
        more = [word for word in self.train if bindings or not word.startswith("--gin.")]
        own = ["--distributed"] if distributed else []
        return [*program, "train", config, *more, *self.simulated, *own, "--run", self.run, "--continue"]


class Launcher(Protocol):
    """Writes the file with which a system starts a job.

    Args:
      name: the value of `--on`.
      suffix: end of the file's name.
      tool: the program that submits the file.
      environment: whether hosts get the environment variables of the shell that submits the file.
    """

    name: str
    suffix: str
    tool: str
    environment: bool

    def check(self, job: Job) -> None:
        """Raise `ConfigError` if the system cannot run the job.

        Args:
          job: the job.
        """

    def text(self, job: Job) -> str:
        """Return the content of the file.

        Args:
          job: a job that `check` accepts.
        """

    def submit(self, job: Job, file: Path) -> list[str]:
        """Return the command line that submits the file.

        Args:
          job: the job.
          file: the file that was written.
        """

    def shares(self, job: Job, path: str) -> bool | None:
        """Whether all hosts see a folder; `None` if that depends on the disk it is on.

        Args:
          job: the job.
          path: the folder; not in a bucket.
        """


def lines_of(words: Sequence[str]) -> str:
    """Join a command line's words for a shell, an option a line.

    Args:
      words: the command line.
    """
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return " \\\n    ".join(" ".join(line) for line in lines)


def check_options(job: Job, known: Collection[str], system: str) -> None:
    """Check the names of a system's own options.

    Args:
      job: the job.
      known: the valid names.
      system: the system, for the message.

    Raises:
      ConfigError: a name is unknown.
    """
    for name in job.options:
        if name not in known:
            raise ConfigError(f"--option {name}: {system} has no such option{near(name, known)}")


def dump(*parts: dict[str, Any]) -> str:
    """Write YAML documents; a text of several lines is written as such.

    Args:
      *parts: the documents.
    """
    return yaml.dump_all(parts, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    pass


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)
