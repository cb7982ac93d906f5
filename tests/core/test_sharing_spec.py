"""Test the written form of sharing across depth: parsing inverts printing, and every refusal has a remedy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiewise.core.errors import SpecError
from tiewise.core.sharing_spec import SharingSpec

sizes = st.integers(0, 10_000)


@given(st.sampled_from(["attention", "ffn", "all"]), st.booleans(), st.integers(1, 10_000), sizes, sizes)
def test_sharing_spec_parse_reads_what_str_prints(kind, in_turn, distinct, ends, rank):
    spec = SharingSpec(kind, **{"cycle" if in_turn else "groups": distinct}, ends=ends, rank=rank)
    assert SharingSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("none", "none"),
        (" all ", "all"),
        ("all:groups=1", "all"),
        ("ffn:groups=3", "ffn:groups=3"),
        ("all:cycle=1", "all"),
        ("sandwich", "all:ends=1"),
        ("ffn:ends=2,cycle=3+rank=4", "ffn:cycle=3,ends=2+rank=4"),
    ],
)
def test_sharing_spec_prints_canonical_form(text, canonical):
    assert str(SharingSpec.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("everything", "unknown sharing 'everything'"),
        ("all:2", "unknown argument '2'"),
        ("all:groups=", "groups=(nothing)"),
        ("all:groups=0", "groups=0"),
        ("all:groups=two", "whole number"),
        ("none:groups=2", "nothing is shared"),
        ("all:groups=2,groups=3", "whole number"),
        ("all:cycle=2,groups=2", "at once"),
        ("none:ends=1", "nothing is shared"),
        ("all+rank=0", "whole number"),
        ("all+groups=2", "unknown option 'groups'"),
    ],
)
def test_sharing_spec_refuses_invalid_text_with_remedy(text, says):
    with pytest.raises(SpecError, match=says.replace("(", r"\(").replace(")", r"\)")) as caught:
        SharingSpec.parse(text)
    assert caught.value.remedy


@given(st.integers(1, 60), st.integers(1, 60))
def test_sharing_groups_are_consecutive_and_even(groups, layers):
    spec = SharingSpec("all", groups)
    if groups > layers:
        with pytest.raises(SpecError, match="groups of"):
            spec.group_of(0, layers)
        return
    of = [spec.group_of(i, layers) for i in range(layers)]
    sizes = [of.count(g) for g in range(groups)]
    assert of == sorted(of)
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(2, 12), st.integers(0, 4), st.integers(1, 30))
def test_sharing_cycle_repeats_block_between_unshared_end_layers(cycle, ends, layers):
    spec = SharingSpec("all", cycle=cycle, ends=ends)
    if layers - 2 * ends < cycle:
        with pytest.raises(SpecError):
            spec.group_of(0, layers)
        return
    of = [spec.group_of(i, layers) for i in range(layers)]
    middle = of[ends : layers - ends]
    assert all(group == middle[i % cycle] for i, group in enumerate(middle))
    assert len(set(of)) == cycle + 2 * ends


def test_group_of_refuses_ends_that_leave_no_middle_layer():
    with pytest.raises(SpecError, match="two ends of 2 in 4 layers"):
        SharingSpec.parse("all:ends=2").group_of(0, 4)
