"""`share_layers`: layers of a Hugging Face model that use the same parameters, by Parameter identity.

    shared = share_layers(model, "ffn")          # one ffn for all; "attention", "all", "all:groups=3", "sandwich"
    model.save_pretrained(path)                  # each shared tensor once; AutoModel loads it after `import tiewise.hf`
    shared.separate()                            # every layer has separate parameters, with the current values

No module is replaced: every layer keeps its object, index, caches and hooks, and refers to the Parameters of the first
layer that it shares with. An optimizer over `model.parameters()` gets each Parameter once, and gradients of all
applications add up in it. See docs/factoring.md.

With a rank, each layer adds a low-rank difference to the shared matrix: y = x (W + B_l A_l)ᵀ + b, with W shared and
A_l, B_l separate for each layer. This is the relaxed sharing of Bae et al. 2024 (arXiv:2410.20672, §2.3). A trained
model is converted by the truncated SVD of the layers' differences, W_l − W ≈ U_r S_r V_rᵀ: B_l = U_r S_r, A_l = V_rᵀ.
At full rank nothing is lost. If W_l = W, B_l is zero and A_l is not, so that gradients flow.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tiewise.boundary.declare_tying import copy_config
from tiewise.boundary.journal import Journal
from tiewise.boundary.saved import ENTRIES, Entry, declare_family, remove_entry, swapped
from tiewise.boundary.sharing.layout import ENTRY, Layout, groups_of, make_layout
from tiewise.boundary.sharing.stacks import find_stacks
from tiewise.core.errors import InstallError, SpecError
from tiewise.core.sharing_spec import SharingSpec

VALUES = ("first", "mean")


class Shared:
    """Handle of a model's shared layers, as `share_layers` returns it.

    It reads the model's config, so every handle of one model is equivalent.

    >>> import tiewise
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 4}
    >>> shared = tiewise.share_layers(LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)), "all:groups=2")
    >>> str(shared.spec)
    'all:groups=2'
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def layout(self) -> Layout | None:
        """Return which layers share which parameters, by the config; None if none do."""
        entry = getattr(self.model.config, ENTRY, None)
        if entry is None:
            return None
        return Layout.read(entry)

    @property
    def spec(self) -> SharingSpec:
        """Return the spec by which layers share."""
        layout = self.layout
        if layout is None:
            return SharingSpec()
        return layout.spec

    @property
    def parameters(self) -> int:
        """Return the number of unique parameters of the full model, with low-rank differences."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def differences(self) -> int:
        """Return the number of parameters in low-rank differences."""
        count = 0
        for module in self.model.modules():
            if is_relaxed(module):
                count += module.delta_in.numel() + module.delta_out.numel()
        return count

    @torch.no_grad()
    def separate(self) -> None:
        """Give every layer separate parameters of the same values, and restore the model's type."""
        layout = self.layout
        if layout is None:
            return
        for stack, shared in layout.stacks.items():
            layers = _find_layers(self.model, stack, shared)
            for name, sources in shared.items():
                for group in groups_of(sources):
                    _separate_group(name, [layers[layer] for layer in group])
            del layers._tied_weights_keys
        remove_entry(self.model, ENTRY)
        _refresh_keys(self.model, Journal())


def _separate_group(name: str, layers: list[nn.Module]) -> None:
    """Give the layers of one group a separate parameter each.

    The first layer keeps the shared one if it has no low-rank difference.
    """
    path, _, leaf = name.rpartition(".")
    for index, layer in enumerate(layers):
        owner: Any = layer.get_submodule(path)
        shared = getattr(owner, leaf)
        if index == 0 and not is_relaxed(owner):
            continue
        values = shared.clone()
        if is_relaxed(owner):
            values += _orient(owner, owner.delta_out @ owner.delta_in)
            del owner.delta_in, owner.delta_out
            owner.__class__ = owner.plain_class
        setattr(owner, leaf, nn.Parameter(values, requires_grad=shared.requires_grad))


def share_layers(model: Any, spec: SharingSpec | str | None = None, *, values: str | None = None) -> Shared:
    """Make layers of a Hugging Face model share parameters, in place.

    >>> from transformers import BertConfig, BertModel
    >>> sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 32}
    >>> model = BertModel(BertConfig(num_hidden_layers=2, **sizes))
    >>> print(share_layers(model, "ffn").spec)
    ffn
    >>> first, second = model.encoder.layer
    >>> first.output.dense.weight is second.output.dense.weight
    True

    Args:
        model: any encoder, decoder or encoder-decoder of transformers that runs on token ids.
        spec: the layers and parts to share, in the written form of `SharingSpec`; None changes nothing, "none"
            separates all layers.
        values: start of a shared parameter: the "first" layer's values, or the "mean" over the layers that share it.
            None: the mean if there are low-rank differences, which it makes smallest; otherwise the first.

    Returns:
        The handle of the shared layers.

    Raises:
        SpecError: the spec does not fit a model of so many layers, or `values` is unknown.
        InstallError: the model has no layers that can share. The model is then unchanged.
    """
    if not isinstance(model, PreTrainedModel):
        fix = "share the layers of a model of transformers, loaded and before it is wrapped or compiled"
        raise InstallError(f"a {type(model).__name__} is no model whose layers are known", fix)
    if values not in (None, *VALUES):
        raise SpecError(f"unknown values {values!r}", f"choose one of {', '.join(VALUES)}")
    shared = Shared(model)
    old = shared.spec
    if spec is None:
        return shared
    new = SharingSpec.parse(spec)
    if new == old:
        return shared
    if new.kind == "none":
        shared.separate()
        return shared
    layout = make_layout(find_stacks(model), new)
    if values is None:
        values = "mean" if new.rank else "first"
    shared.separate()
    journal = Journal()
    try:
        _install_layout(model, layout, values, journal)
    except BaseException:
        journal.undo()
        share_layers(model, old)
        raise
    return shared


def _install_layout(model: PreTrainedModel, layout: Layout, values: str, journal: Journal) -> None:
    """Share layers as a layout says, and record it in the model's config and family."""
    _apply_layout(model, layout, journal, values)
    config = copy_config(model, journal)
    journal.set(config, ENTRY, layout.record())
    declare_family(model, config, journal)
    _refresh_keys(model, journal)


def build_shared(model: Any, record: Any) -> None:
    """Make a loaded model share layers as its config's `record` says."""
    journal = Journal()
    _apply_layout(model, Layout.read(record), journal, values=None)
    _refresh_keys(model, journal)


ENTRIES[ENTRY] = Entry(build_shared)


def _refresh_keys(model: Any, journal: Journal) -> None:
    """Make transformers compute the model's tied keys again."""
    journal.set(model, "all_tied_weights_keys", model.get_expanded_tied_weights_keys(all_submodels=True))


@torch.no_grad()
def _apply_layout(model: Any, layout: Layout, journal: Journal, values: str | None) -> None:
    """Share layers as a layout says.

    `values` is None while a checkpoint is being loaded: the checkpoint has the values.
    """
    for stack, shared in layout.stacks.items():
        layers = _find_layers(model, stack, shared)
        keys: dict[str, str] = {}
        for name, sources in shared.items():
            for group in groups_of(sources):
                _share_group(name, [layers[layer] for layer in group], layout.spec.rank, values, journal)
                first, *others = group
                keys |= {f"{layer}.{name}": f"{first}.{name}" for layer in others}
        journal.set(layers, "_tied_weights_keys", keys)


def _share_group(name: str, layers: list[nn.Module], rank: int, values: str | None, journal: Journal) -> None:
    """Make the layers of one group share a parameter.

    With a rank, each layer gets a low-rank difference.
    """
    path, _, leaf = name.rpartition(".")
    owners = [layer.get_submodule(path) for layer in layers]
    if rank:
        _require_linear(name, owners)
    parameters = [getattr(owner, leaf) for owner in owners]
    shared = parameters[0]
    if values == "mean":
        shared = _mean_parameter(parameters)
    for owner, before in zip(owners, parameters, strict=True):
        journal.set(owner, leaf, shared)
        if rank:
            _relax(owner, rank, None if values is None else before - shared, journal)


def _require_linear(name: str, owners: list[nn.Module]) -> None:
    """Raise an InstallError if a parameter is not a linear map's matrix in each module."""
    others = [owner for owner in owners if not isinstance(owner, nn.Linear | Conv1D)]
    if others or name.rpartition(".")[2] != "weight":
        raise InstallError(f"config.json: {ENTRY}: {name[:80]} is of no linear map", "save it again")


def _mean_parameter(parameters: list[nn.Parameter]) -> nn.Parameter:
    """Return the mean of parameters as a new one, summed in fp32 or wider.

    Raises:
        InstallError: the parameters are not floating point.
    """
    first = parameters[0]
    if not first.is_floating_point():
        raise InstallError(f"parameters of type {first.dtype} have no mean", 'choose values="first"')
    wide = torch.promote_types(first.dtype, torch.float32)
    total = first.to(wide)
    for parameter in parameters[1:]:
        total = total + parameter.to(wide)
    mean = total / len(parameters)
    return nn.Parameter(mean.to(first.dtype), requires_grad=first.requires_grad)


def _find_layers(model: nn.Module, stack: str, shared: dict[str, tuple[int, ...]]) -> Any:
    """Return the list of layers that a layout calls `stack`, in a model or its part.

    Raises:
        InstallError: the model has no such list, or its layers lack a parameter that the layout shares.
    """
    layers = _find_list(model, stack)
    if not _have_parameters(layers, shared):
        what = f"{type(model).__name__}: its layers are not those of {stack!r} that its config says are shared"
        raise InstallError(what, "load it with the class it was saved from")
    return layers


def _find_list(model: nn.Module, stack: str) -> nn.ModuleList:
    """Return the list of this name, or the only one whose name ends with it.

    If there is none, the result is an empty list.
    """
    similar = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        if name == stack:
            return module
        if name.endswith(f".{stack}") or stack.endswith(f".{name}"):
            similar.append(module)
    if len(similar) == 1:
        return similar[0]
    return nn.ModuleList()


def _have_parameters(layers: nn.ModuleList, shared: dict[str, tuple[int, ...]]) -> bool:
    """Return whether layers have every parameter that the layout shares."""
    if not len(layers):
        return False
    names_of = [dict(layer.named_parameters(remove_duplicate=False)).keys() for layer in layers]
    for name, sources in shared.items():
        if len(sources) != len(layers):
            return False
        for layer in chain.from_iterable(groups_of(sources)):
            if name not in names_of[layer]:
                return False
    return True


# differences of low rank


class _Relaxed:
    """Linear map [..., in] → [..., out]: a shared matrix plus the layer's low-rank difference."""

    delta_in: Tensor
    delta_out: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the output [..., out] of hidden states [..., in]."""
        shared: Tensor = super().forward(hidden)  # type: ignore[misc]
        return shared + F.linear(F.linear(hidden, self.delta_in), self.delta_out)


class RelaxedLinear(_Relaxed, nn.Linear):
    """Relaxed linear map with weight [out, in]."""


class RelaxedConv1D(_Relaxed, Conv1D):  # type: ignore[misc, unused-ignore]  # no types
    """GPT-2's linear map with weight [in, out], relaxed."""


def _relax(module: Any, rank: int, difference: Tensor | None, journal: Journal) -> None:
    """Give an nn.Linear or Conv1D a low-rank difference, of rank at most `rank`.

    `difference` is the layer's former weight minus the shared one, in the weight's orientation. It is None while a
    checkpoint is being loaded: the checkpoint has the values.
    """
    weight = _orient(module, module.weight)
    outputs, inputs = weight.shape
    rank = min(rank, inputs, outputs)
    delta_in, delta_out = weight.new_zeros(rank, inputs), weight.new_zeros(outputs, rank)
    if difference is not None:
        wide = difference.to(torch.promote_types(difference.dtype, torch.float32))
        left, size, right = torch.linalg.svd(_orient(module, wide), full_matrices=False)
        delta_in.copy_(right[:rank])
        delta_out.copy_(left[:, :rank] * size[:rank])
    elif not weight.is_meta:
        nn.init.normal_(delta_in, std=inputs**-0.5)
    for name, value in (("delta_in", delta_in), ("delta_out", delta_out)):
        journal.set(module, name, nn.Parameter(value, requires_grad=module.weight.requires_grad))
    relaxed_class = RelaxedConv1D if isinstance(module, Conv1D) else RelaxedLinear
    journal.set(module, "__class__", swapped(module.__class__, relaxed_class))


def _orient(module: nn.Module, matrix: Tensor) -> Tensor:
    """Return a linear map's matrix with axes [out, in], or turn it back.

    Conv1D has it as [in, out].
    """
    if isinstance(module, Conv1D):
        return matrix.T
    return matrix


def is_relaxed(module: nn.Module) -> bool:
    """Return whether a module has a low-rank difference."""
    return isinstance(module, _Relaxed)
