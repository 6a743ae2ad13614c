"""An attribute by its old name is answered with the new one."""

import dataclasses
import pickle

import pytest

import jaxscale as js
from jaxscale.renamed import renamed


def test_an_old_name_is_answered_with_the_new_one():
    with pytest.raises(AttributeError, match="'TransformerConfig' object has no attribute 'kept_width'.*'cache_width'"):
        _ = js.models.TransformerConfig().kept_width
    assert not hasattr(js.models.TransformerConfig(), "for_texts_of")


def test_other_names_keep_their_message_and_pickling_works():
    config = js.models.TransformerConfig()
    with pytest.raises(AttributeError, match="no attribute 'nothing'$"):
        _ = config.nothing
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, depth=3).depth == 3


def test_a_name_that_still_exists_cannot_be_renamed():
    class Old:
        size = 1

    with pytest.raises(TypeError, match="still has the attribute 'size'"):
        renamed(size="bytes")(Old)
