"""`untie` on tiny models of a quarter of the classes that transformers can tie: whatever they look for is stored."""

import pytest
import torch
import transformers as tr
from rewrite_models import tensors
from tests.checkpoint import saved_models as sm

from tiewise.core.errors import CheckpointError
from tiewise.rewrite import dedupe, untie

EVERY = 4  # one class of four: the whole sweep takes minutes
UNKNOWN = {"T5Gemma2ForConditionalGeneration"}  # ties a parameter beside its table, which the data does not know


def _tied(name):
    """A tiny model of the class with its ends tied; None where it cannot be built, has no head, or never ties."""
    try:
        model = sm.tiny(name, True).eval()
    except Exception:  # some configs cannot be shrunk; those classes are not what is tested
        return None
    tables, head = sm.ends(model)
    return model if head is not None and any(table.weight is head.weight for table in tables) else None


@pytest.mark.slow
def test_untied_it_loads_whole_and_deduped_it_is_what_it_was(tmp_path):
    refused, done = {}, 0
    for name in sm.classes()[::EVERY]:
        model = None if name in UNKNOWN else _tied(name)
        if model is None:
            continue
        source, apart, back = (tmp_path / name / folder for folder in ("a", "b", "c"))
        model.save_pretrained(source)
        try:
            untie(source, apart)
        except CheckpointError as error:
            refused[name] = str(error)
            continue
        made, info = getattr(tr, name).from_pretrained(apart, output_loading_info=True)
        assert not any(info.values()), (name, info)
        tables, head = sm.ends(made)
        assert not any(table.weight is head.weight for table in tables), name
        new, old = made.state_dict(), model.state_dict()
        assert all(torch.equal(new[key], old[key]) for key in old if key in new), name
        dedupe(apart, back)
        first, last = tensors(source), tensors(back)
        assert first.keys() == last.keys(), name
        assert all(torch.equal(first[key], last[key]) for key in first), name
        done += 1
    assert done > 40
    assert all("always ties" in why for why in refused.values()), refused
