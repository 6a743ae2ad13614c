"""Run folders that earlier versions wrote."""

import pytest

import jaxscale as js
from jaxscale.seals import open_text
from jaxscale.step import CutLoss, NextToken, TrainConfig
from jaxscale.train import TensorBoard, read_config
from jaxscale.train.files import CONFIG
from jaxscale.train.run import write_config


def test_a_run_folder_from_before_objectives_is_read_as_it_was(tmp_path):
    objective = NextToken(CutLoss(filter=0.5), z_loss=1e-4)
    config = TrainConfig(layout=js.Layout("data=2"), objective=objective, lr=1e-3)
    write_config(tmp_path, config, 0)
    text, _ = open_text((tmp_path / CONFIG).read_bytes())
    old = [line for line in text.splitlines() if "objective" not in line]
    old += ["train.loss = @loss/CutLoss()", "loss/CutLoss.filter = 0.5", "train.z_loss = 0.0001"]
    (tmp_path / CONFIG).write_text("\n".join(old))
    assert read_config(tmp_path) == config


@pytest.mark.parametrize("value, trackers", [("True", (TensorBoard(),)), ("False", ()), ("None", ())])
def test_a_run_folder_from_before_trackers_is_read(value, trackers, tmp_path):
    write_config(tmp_path, TrainConfig(), 0)
    text, _ = open_text((tmp_path / CONFIG).read_bytes())
    (tmp_path / CONFIG).write_text(text.replace("train.trackers = ()", f"train.tensorboard = {value}"))
    assert read_config(tmp_path) == TrainConfig(trackers=trackers)
