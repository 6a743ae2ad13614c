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


def test_the_error_inside_a_property_is_not_hidden():
    @renamed(old="new")
    class Part:
        @property
        def size(self):
            return self.missing

    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = Part().size


def test_a_class_that_defines_a_method_by_its_old_name_is_refused():
    class Scaling:
        def for_texts_of(self, length):
            return self

    with pytest.raises(js.errors.ConfigError, match="Scaling defines 'for_texts_of', which is now called 'for_length'"):
        js.config.register(Scaling)
