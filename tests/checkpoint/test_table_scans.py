"""Test comparisons of stored tensors in a loaded type against `torch.equal`."""

import itertools

import pytest
import torch
from safetensors.torch import save_file

from tiewise.checkpoint.stored import TORCH_TYPES, read_header
from tiewise.checkpoint.table_scans import equal_in

VALUES = {
    "plain": [1.0, -2.5, 3.25],
    "signs of zero": [0.0, -2.5, 3.25],
    "near": [1.0 + 2**-12, -2.5, 3.25],  # 1.0 in bfloat16
    "nearer": [1.0 + 2**-30, -2.5, 3.25],  # 1.0 in all but float64
    "beyond float16": [70_000.0, -2.5, 3.25],
    "farther beyond": [80_000.0, -2.5, 3.25],
    "nan": [float("nan"), -2.5, 3.25],
}
OTHERS = VALUES | {"signs of zero": [-0.0, -2.5, 3.25]}


@pytest.mark.parametrize("stored", list(itertools.product(TORCH_TYPES, repeat=2)))
def test_equal_in_is_torch_equal_after_loading(tmp_path, stored):
    for one, other in itertools.product(VALUES, OTHERS):
        tensors = {"a": torch.tensor([VALUES[one]] * 2, dtype=getattr(torch, stored[0]))}
        tensors["b"] = torch.tensor([OTHERS[other]] * 2, dtype=getattr(torch, stored[1]))
        save_file(tensors, tmp_path / "m.safetensors")
        found = read_header(tmp_path / "m.safetensors").tensors
        for name, dtype in TORCH_TYPES.items():
            loaded = [tensor.to(getattr(torch, name)) for tensor in tensors.values()]
            assert equal_in(found["a"], found["b"], dtype) == torch.equal(*loaded), (one, other, name)


def test_tensors_of_different_shapes_are_not_equal(tmp_path):
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(3, 2), "c": torch.zeros(6)}, tmp_path / "m.safetensors")
    found = read_header(tmp_path / "m.safetensors").tensors
    assert not equal_in(found["a"], found["b"], "F32")
    assert not equal_in(found["a"], found["c"], "F32")
    assert equal_in(found["c"], found["c"], "F32")
