"""Trackers (`train.trackers`), a file each; see `jaxscale.step.trackers` for the interface."""

from jaxscale.train.trackers.mlflow import MLflow
from jaxscale.train.trackers.tensorboard import TensorBoard
from jaxscale.train.trackers.trackio import Trackio
from jaxscale.train.trackers.wandb import Wandb

__all__ = ["MLflow", "TensorBoard", "Trackio", "Wandb"]
