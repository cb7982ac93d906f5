"""Every public name, given something else than its main argument: a reason of ours, or Python's that names the type."""

import pytest
import torch
from torch import nn

import tiewise
from tiewise.core.errors import InstallError, PlanError, SpecError, TiewiseError, UnsupportedError
from tiewise.ops.path_gradient import PathRecord

TABLE, IDS = nn.Parameter(torch.zeros(4, 3)), torch.zeros(2, dtype=torch.long)
PATH = "expected str, bytes or os.PathLike object, not"  # what Python says of no path, and it says it well
CALLS = {
    "Boundary": (lambda x: tiewise.Boundary(x, 10, 4), SpecError),
    "BoundarySpec": (tiewise.BoundarySpec.parse, SpecError),
    "Vocabularies": (lambda x: tiewise.Vocabularies(x, 4), SpecError),
    "check": (tiewise.check, PATH),
    **{name: (lambda x, name=name: getattr(tiewise, name)(x, "to"), PATH) for name in ("dedupe", "densify", "repair")},
    **{name: (lambda x, name=name: getattr(tiewise, name)(x, "to"), PATH) for name in ("tie", "untie")},
    "factor": (lambda x: tiewise.factor(x, "to", rank=8), PATH),
    "resize": (lambda x: tiewise.resize(x, "to", vocab=8), PATH),
    "tied_lookup": (lambda x: tiewise.tied_lookup(x, IDS), UnsupportedError),
    "inspect": (tiewise.inspect, PATH),
    "install": (tiewise.install, InstallError),
    "linear_cross_entropy": (lambda x: tiewise.linear_cross_entropy(x, TABLE, IDS), "features must be a tensor"),
    "load": (tiewise.load, PATH),
    "path_norms": (lambda x: tiewise.path_norms(x, PathRecord()), UnsupportedError),
    "plan": (tiewise.plan, PlanError),
    "share_layers": (lambda x: tiewise.share_layers(x, "ffn"), InstallError),
    "tie_at": (tiewise.tie_at, SpecError),
    "untie_at": (tiewise.untie_at, SpecError),
}


def test_every_public_name_is_asked():
    assert set(CALLS) | {"__version__"} == set(tiewise.__all__)


@pytest.mark.parametrize("wrong", [None, ["tied"], 1.5, nn.Linear(3, 4)], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_main_argument_is_said_to_be_none(name, wrong):
    call, said = CALLS[name]
    with pytest.raises(
        TypeError if isinstance(said, str) else said, match=said if isinstance(said, str) else None
    ) as e:
        call(wrong)
    if issubclass(e.type, TiewiseError):
        assert e.value.fix
        assert "\n" not in str(e.value)


OTHERS = {
    "a boundary's vocabulary": (lambda: tiewise.Boundary("tied", "10", 4), "vocabulary of '10'"),
    "a boundary's width": (lambda: tiewise.Boundary("tied", 10, "4"), "width of '4'"),
    "the path of a model": (lambda: tiewise.install("runs/final"), r"a str is no model.*tiewise\.load"),
    "a spec for install": (lambda: tiewise.install(nn.Linear(2, 2), 8), "a int is no boundary"),
    "a record that is off": (lambda: tiewise.path_norms(TABLE.detach(), None), "track"),
    "a lookup for its table": (lambda: tiewise.tied_lookup(nn.Embedding(4, 3), IDS), "module's weight"),
    "a step as a text": (lambda: tiewise.tie_at("100"), "number of steps"),
    "an unknown end": (lambda: tiewise.tie_at(100, "both"), "input, output, mean"),
    "an unknown state": (lambda: tiewise.untie_at(100, "mean"), "copy, split, reset"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_arguments(case):
    call, said = OTHERS[case]
    with pytest.raises(TiewiseError, match=said):
        call()


def test_a_boundary_takes_numpy_s_whole_numbers():
    assert tiewise.Boundary("tied", torch.tensor(10).numpy()[()], 4).table_in.shape == (10, 4)
