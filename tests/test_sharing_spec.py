"""The written form of sharing across depth: parse and print are inverse, and every refusal says the way out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiewise.errors import SpecError
from tiewise.sharing_spec import SharingSpec


@given(st.sampled_from(["attention", "ffn", "all"]), st.integers(1, 10_000))
def test_parse_reads_what_str_prints(kind, groups):
    spec = SharingSpec(kind, groups)
    assert SharingSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "canonical"),
    [("none", "none"), (" all ", "all"), ("all:groups=1", "all"), ("ffn:groups=3", "ffn:groups=3")],
)
def test_canonical_form(text, canonical):
    assert str(SharingSpec.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("everything", "unknown sharing 'everything'"),
        ("all:2", "unknown argument '2'"),
        ("all:groups=", "groups=(nothing)"),
        ("all:groups=0", "groups=0"),
        ("all:groups=two", "whole number"),
        ("all:groups=2.5", "whole number"),
        ("none:groups=2", "nothing is shared"),
        ("all:groups=2,groups=3", "whole number"),
    ],
)
def test_refusals_say_the_way_out(text, says):
    with pytest.raises(SpecError, match=says.replace("(", r"\(").replace(")", r"\)")) as caught:
        SharingSpec.parse(text)
    assert caught.value.fix


@given(st.integers(1, 60), st.integers(1, 60))
def test_groups_are_consecutive_and_even(groups, layers):
    spec = SharingSpec("all", groups)
    if groups > layers:
        with pytest.raises(SpecError, match="groups of"):
            spec.group_of(0, layers)
        return
    of = [spec.group_of(i, layers) for i in range(layers)]
    sizes = [of.count(g) for g in range(groups)]
    assert of == sorted(of)
    assert max(sizes) - min(sizes) <= 1
