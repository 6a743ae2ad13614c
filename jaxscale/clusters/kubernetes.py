"""Kubernetes: an Indexed Job, or a JobSet for several TPU slices (https://jobset.sigs.k8s.io)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxscale.clusters.base import Job, check_options, dump, lines_of
from jaxscale.errors import MISTAKE, ConfigError, near

PORT = 8476
"""Port of process 0, at which the others join."""

OPTIONS = ("namespace", "service-account", "queue")
"""Names of `--option`: the namespace, a service account (for buckets), a queue of Kueue."""

SECRETS = "jaxscale-secrets"
"""The Secret that has the values of `--secret`."""

TPUS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
"""GKE's names (https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus)."""

GRACE = 300
"""Seconds from SIGTERM to SIGKILL, in which a run saves a checkpoint."""

_FOLDER = "/etc/jaxscale"

Tree = dict[str, Any]


class Kubernetes:
    """Writes the manifest of an Indexed Job with a pod for each host, its Service, and the settings as a ConfigMap."""

    name = "kubernetes"
    suffix = ".yaml"
    tool = "kubectl"
    environment = False

    def check(self, job: Job) -> None:
        """Refuse a job without image, and options and volumes that are malformed.

        Args:
          job: the job.

        Raises:
          ConfigError: the job has one of them.
        """
        if job.image is None:
            raise ConfigError("--on kubernetes: pods run an image; name one that has jaxscale installed with --image")
        chip = job.hardware.chip
        if chip.platform == "tpu" and chip.name not in TPUS:
            raise ConfigError(f"--on kubernetes has no name for {chip.name}{near(chip.name, TPUS)}")
        check_options(job, OPTIONS, self.name)
        for volume in job.volumes:
            claim, _, path = volume.partition(":")
            if not claim or not path.startswith("/"):
                raise ConfigError(f"--volume {volume} is not of the form CLAIM:/path, such as shared:/mnt/shared")

    def text(self, job: Job) -> str:
        """Return the manifest.

        Args:
          job: the job.
        """
        config = self._object(job, "v1", "ConfigMap") | {"data": {"config.gin": job.text}}
        if job.hosts.slices > 1:
            parts = [config, self._job_set(job)]
        else:
            service = self._object(job, "v1", "Service")
            service["spec"] = {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {"job-name": job.name},
            }
            indexed = self._object(job, "batch/v1", "Job") | {"spec": self._job(job)}
            parts = [config, *([service] if job.hosts.count > 1 else []), indexed]
        head = f"# {job.hardware.name}: {job.hosts.count} pods. Start it with: kubectl apply -f FILE\n"
        if job.secrets:
            values = " ".join(f'--from-literal={name}="${name}"' for name in job.secrets)
            space = f" --namespace {job.options['namespace']}" if "namespace" in job.options else ""
            head += f"# First store the secrets: kubectl create secret generic {SECRETS}{space} {values}\n"
        return head + dump(*parts)

    def _object(self, job: Job, version: str, kind: str) -> Tree:
        metadata: Tree = {"name": job.name}
        if "namespace" in job.options:
            metadata["namespace"] = job.options["namespace"]
        if "queue" in job.options and kind in ("Job", "JobSet"):
            metadata["labels"] = {"kueue.x-k8s.io/queue-name": job.options["queue"]}
        return {"apiVersion": version, "kind": kind, "metadata": metadata}

    def _job_set(self, job: Job) -> Tree:
        """A Job for each slice; if one fails, all are started again."""
        one = {"name": "slice", "replicas": job.hosts.slices, "template": {"spec": self._job(job)}}
        mistakes = {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        whole = self._object(job, "jobset.x-k8s.io/v1alpha2", "JobSet")
        whole["metadata"]["annotations"] = {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        }
        failures = {"maxRestarts": job.limit, "rules": [mistakes]}
        return whole | {"spec": {"failurePolicy": failures, "replicatedJobs": [one]}}

    def _job(self, job: Job) -> Tree:
        pods, together = job.hosts.per_slice, job.hosts.slices > 1
        spec: Tree = {
            "completionMode": "Indexed",
            "completions": pods,
            "parallelism": pods,
            # Every pod ends when one is lost; a JobSet counts restarts itself.
            "backoffLimit": 0 if together else job.limit * pods,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",  # a mistake in the settings, which a restart would repeat
                        "onExitCodes": {"containerName": "train", "operator": "In", "values": [MISTAKE]},
                    },
                    *(
                        []
                        if together
                        else [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
                    ),
                ]
            },
        }
        if job.minutes is not None:
            spec["activeDeadlineSeconds"] = job.minutes * 60
        return spec | {"template": {"spec": self._pod(job)}}

    def _pod(self, job: Job) -> Tree:
        tpu = job.hardware.chip.platform == "tpu"
        pod: Tree = {"restartPolicy": "Never", "terminationGracePeriodSeconds": GRACE}
        if job.hosts.count > 1 and job.hosts.slices == 1:
            pod["subdomain"] = job.name
        if "service-account" in job.options:
            pod["serviceAccountName"] = job.options["service-account"]
        if tpu:
            pod["nodeSelector"] = {
                "cloud.google.com/gke-tpu-accelerator": TPUS[job.hardware.chip.name],
                "cloud.google.com/gke-tpu-topology": "x".join(map(str, job.hardware.shape)),
            }
        claims = dict(volume.split(":", 1) for volume in job.volumes)
        mounts = [{"name": claim, "mountPath": path} for claim, path in claims.items()]
        shared = [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in claims]
        # NCCL needs more shared memory than the 64 MB of a container.
        memory = {"name": "shm", "emptyDir": {"medium": "Memory"}}
        pod["containers"] = [
            self._container(job)
            | {
                "volumeMounts": [
                    {"name": "config", "mountPath": _FOLDER},
                    {"name": "shm", "mountPath": "/dev/shm"},
                    *mounts,
                ]
            }
        ]
        pod["volumes"] = [{"name": "config", "configMap": {"name": job.name}}, memory, *shared]
        return pod

    def _container(self, job: Job) -> Tree:
        several, tpu = job.hosts.count > 1, job.hardware.chip.platform == "tpu"
        train = lines_of(job.command(config=f"{_FOLDER}/config.gin", distributed=several, bindings=False))
        env: list[Tree] = [{"name": name, "value": value} for name, value in job.env.items()]
        env += [{"name": name, "valueFrom": {"secretKeyRef": {"name": SECRETS, "key": name}}} for name in job.secrets]
        if several and not tpu:  # GKE sets what JAX reads on TPUs
            index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
            env += [
                {"name": "JAXSCALE_COORDINATOR", "value": f"{job.name}-0.{job.name}:{PORT}"},
                {"name": "JAXSCALE_PROCESSES", "value": str(job.hosts.count)},
                {"name": "JAXSCALE_PROCESS", "valueFrom": index},
            ]
        container: Tree = {
            "name": "train",
            "image": job.image,
            "command": ["bash", "-c"],
            "args": ["\n".join([*job.setup, f"exec {train}"]) + "\n"],
        }
        if env:
            container["env"] = env
        if job.hosts.chips:
            kind = "google.com/tpu" if tpu else f"{_vendor(job.hardware.chip.kinds)}.com/gpu"
            container["resources"] = {"limits": {kind: job.hosts.chips}}
        if several:
            container["ports"] = [{"containerPort": PORT}]
        return container

    def submit(self, job: Job, file: Path) -> list[str]:
        """Return the kubectl command.

        Args:
          job: the job.
          file: the manifest.
        """
        return ["kubectl", "apply", "-f", str(file)]

    def shares(self, job: Job, path: str) -> bool | None:
        """Whether a folder is on one of the volumes; a pod's other folders end with it.

        Args:
          job: the job.
          path: the folder.
        """
        return any(Path(path).is_relative_to(volume.split(":", 1)[1]) for volume in job.volumes)


def _vendor(kinds: tuple[str, ...]) -> str:
    return "amd" if any(kind.startswith(("AMD", "gfx")) for kind in kinds) else "nvidia"
