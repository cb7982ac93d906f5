"""Test the written form of a boundary: parsing inverts printing, and every refusal has a remedy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiewise.core.errors import SpecError
from tiewise.core.spec import SCALES, BoundarySpec

sizes = st.integers(1, 10_000)
numbers = st.floats(1e-6, 1e6, allow_nan=False, allow_subnormal=False)
scales = st.none() | st.sampled_from(sorted(SCALES))
maps, switches = st.sampled_from([None, True, False]), st.booleans()
projected = {"width": st.none() | sizes, "in_map": maps, "out_map": maps, "two_tables": switches}
KINDS = {
    **{kind: [{}] for kind in ("untied", "spd")},
    "tied": [{"free": st.none() | sizes}],
    "factored": [{"width": sizes}],
    "factored-untied": [{"width": sizes, "out_width": st.none() | sizes}],
    "residual": [{"rank": sizes, "strength": numbers}],
    "projected": [
        {**projected, "penalty": numbers, "decay": numbers},
        {"out_map": st.sampled_from([None, True]), "out_bias": switches},
    ],
}
kinds = st.one_of(
    *(st.fixed_dictionaries({"kind": st.just(kind), **each}) for kind, of in KINDS.items() for each in of)
)
options = st.fixed_dictionaries(
    {
        "bias": st.booleans(),
        "input_scale": scales,
        "output_scale": scales,
        "softcap": st.none() | numbers,
        "alpha": numbers,
        "pad": st.none() | st.integers(0, 99),
        "init": st.none() | numbers,
        "vectors": st.none() | st.text(min_size=1, max_size=12),
    }
)


@given(kinds, options)
def test_boundary_spec_parse_reads_what_str_prints(kind, chosen):
    spec = BoundarySpec(**kind, **chosen)
    assert BoundarySpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("factored:128+bias", "factored:128+bias"),
        ("factored-untied:in=64,out=128", "factored-untied:in=64,out=128"),
        ("factored-untied:in=64,out=64", "factored-untied:64"),
        ("residual:32,s=0.03", "residual:32"),
        ("residual:8,s=0.1", "residual:8,s=0.1"),
        ("projected:300,in=none,untied,penalty=0.15", "projected:300,in=none,untied,penalty=0.15"),
        ("tied+softcap=30.0+input_scale=sqrt_d+pad=0", "tied+input_scale=sqrt_d+softcap=30+pad=0"),
        ("untied+tie_at=100", "untied+tie_at=100"),
    ],
)
def test_boundary_spec_prints_canonical_form(text, canonical):
    assert str(BoundarySpec.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tyed", "unknown boundary 'tyed'"),
        ("factored", "needs the table width"),
        ("factored:0", "must be 1 or more"),
        ("factored:many", "must be a number"),
        ("tied:4", "unknown argument of tied"),
        ("tied+bais", "unknown option 'bais'"),
        ("tied+bias=1", "takes no value"),
        ("tied+free=0", "must be a whole number, 1 or more"),
        ("tied+free=1e3", "must be a whole number, 1 or more"),
        ("spd+free=4", "only a tied table has rows to free"),
        ("tied+softcap", "must be a number"),
        ("tied+softcap=nan", "must be a positive number"),
        ("tied+pad=1+pad=2", "given twice"),
        ("tied+tie_at=5", "nothing to tie"),
        ("tied+freeze", "random table"),
        ("projected:64,in=maybe", "'linear' or 'none'"),
        ("", "unknown boundary ''"),
    ],
)
def test_boundary_spec_refuses_invalid_text_with_reason_and_remedy(text, says):
    with pytest.raises(SpecError, match=says) as caught:
        BoundarySpec.parse(text)
    assert caught.value.remedy


def test_maps_refuses_factor_wider_than_model():
    with pytest.raises(SpecError, match="k = 256 exceeds the model width 128"):
        BoundarySpec.parse("factored:256").maps(128)


def test_scales_are_computed_from_model_width():
    assert BoundarySpec.parse("tied+input_scale=sqrt_d+output_scale=1/sqrt_d").scales(64) == (8.0, 0.125)
    assert BoundarySpec.parse("tied+input_scale=2.5").scales(64) == (2.5, 1.0)


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("tied", {}),
        ("factored:8", {"in_map.weight": (32, 8), "out_map.weight": (8, 32)}),
        ("factored-untied:in=4,out=8", {"in_map.weight": (32, 4), "out_map.weight": (8, 32)}),
        ("projected", {"out_map.weight": (32, 32)}),
        ("projected:48", {"in_map.weight": (32, 48), "out_map.weight": (48, 32)}),
        ("residual:2", {"out_map.p": (32, 2), "out_map.q": (2, 32)}),
        ("spd", {"out_map.factor": (32, 32)}),
        ("tied+free=7", {"free.rows": (7, 32)}),
    ],
)
def test_map_shapes_returns_shapes_for_model_of_width_32(text, shapes):
    assert BoundarySpec.parse(text).map_shapes(32) == shapes
