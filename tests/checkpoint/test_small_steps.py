"""Test single steps of a check, one branch at a time."""

from types import SimpleNamespace

import numpy as np
import pytest

from tiewise.checkpoint.audit import errors_of_result
from tiewise.checkpoint.composite_ends import _ties
from tiewise.checkpoint.family_record import ClassEnds
from tiewise.checkpoint.indexed_tensors import MTP_OUTPUT, PER_LAYER, role_of
from tiewise.checkpoint.rewrite.token_counts import _are_counts


@pytest.mark.parametrize(
    ("values", "are_counts"),
    [([], True), ([0, 3], True), ([1, np.inf], False), ([np.nan, 1], False), ([-1, 2], False), ([-np.inf], False)],
)
def test_are_counts_accepts_only_finite_non_negative_numbers(values, are_counts):
    assert _are_counts(np.array(values, np.float64)) is are_counts


def test_role_of_layer_tensor_depends_on_its_name_and_layer_number():
    assert role_of("model.layers.3.embed_tokens", "weight", 61) == PER_LAYER
    assert role_of("model.layers.3.shared_head.head", "weight", 61) is None
    assert role_of("model.layers.61.shared_head.head", "weight", 61) == MTP_OUTPUT


def test_ties_points_outer_head_to_new_table_of_part():
    ends = ClassEnds(("text.embed",), "head", tied={"head.weight": "text.embed.weight", "b.weight": "a.weight"})
    tied = _ties(ends, "text.", ClassEnds(("text.words",)))
    assert tied == {"b.weight": "a.weight", "head.weight": "text.words.weight"}
    assert _ties(ends, "text.", ClassEnds()) == {"b.weight": "a.weight"}


def test_errors_of_result_omits_b080_for_tiewise_model_type():
    findings = [SimpleNamespace(rule=rule) for rule in ("B080", "B012", "B030")]
    result = SimpleNamespace(at_least=lambda severity: findings)
    own = {"model_type": "tiewise"}
    assert [finding.rule for finding in errors_of_result(result, own)] == ["B012", "B030"]
    assert [finding.rule for finding in errors_of_result(result, {"model_type": "llama"})] == ["B080", "B012", "B030"]
