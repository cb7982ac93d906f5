"""Every causal, masked and sequence-to-sequence model class of transformers that a generic script can build tiny.

Each class takes boundaries of every layout, or refuses them for the reason listed here and stays unchanged. If the
boundary starts as the same function, loss and gradients equal those of the plain model. Otherwise install verifies the
model, and training is fused. Saving and loading gives the same model. Classes that the script cannot build are listed
by name with their error, so that none is skipped silently.

The code of a class sees two properties of a boundary: whether both ends have one table, and whether the input table is
as wide as the model. Each class takes one boundary of each of the four layouts, and one of the others in turn.
"""

import copy
from collections import Counter

import pytest
import torch
import transformers as tr
from fingerprint import left_alone
from shrink import VOCABULARY, parameters_on_meta, shrink
from tiny_models import assert_same_gradients, step
from transformers.models.auto import modeling_auto as auto

import tiewise.hf
from tiewise.boundary.installation import install
from tiewise.core.errors import InstallError
from tiewise.core.spec import BoundarySpec

pytestmark = pytest.mark.slow
_MAPPINGS = (
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
CLASSES = sorted({name for mapping in _MAPPINGS for name in mapping.values()})
REFUSED = {
    "FSMTForConditionalGeneration": "its output head is an Embedding",
    "IBertForMaskedLM": "is a QuantEmbedding",
    "MobileBertForMaskedLM": "computes its loss past its output head",
    "ProphetNetForCausalLM": "something else to its logits before the loss: transpose",
    "ProphetNetForConditionalGeneration": "something else to its logits before the loss",
}
NEEDS_BATCH = ("ReformerForMaskedLM", "ReformerModelWithLMHead")  # trains at one sequence length only
NOT_BUILT = {  # name -> pattern of the error
    "CohereCompassForCausalLM": "full_attention",  # its rotary settings are per kind of layer
    "DbrxForCausalLM": "has no attribute 'rope_theta'",
    "Dots3NoteForCausalLM": "too big",  # its audio and vision towers
    "EncoderDecoderModel": "set the pad_token_id",  # it is made of two given models
    "GitForCausalLM": r"batch_size \(0\)",  # it needs an image
    "Gemma3nForConditionalGeneration": "timm",
    "Gemma4AssistantForCausalLM": "hidden_size_per_layer_input must be 0",  # its default config does not validate
    "Gemma4UnifiedAssistantForCausalLM": "layer types producing a cache",
    "MiMoV2FlashForCausalLM": r"tensor a \(4\) must match .* tensor b \(0\)",  # two kinds of attention, two head counts
    "MusicgenForCausalLM": r"shape '\[-1, 4, 12\]'",  # it reads several codebooks at a time
    "MusicgenMelodyForCausalLM": r"shape '\[-1, 4, 12\]'",
    "Nemotron3_5TranscribeForConditionalGeneration": r"\(512\) must match `audio_config.hidden_size`",
    "NeoMMEForMaskedLM": "head_dim=8 dims",  # its rotary settings need a wider head
    "PerceiverForMaskedLM": "too big",  # its latents
    "Qwen4ExpForCausalLM": "'NoneType' and 'NoneType'",  # its n-gram tables have separate sizes
    "VibeVoiceAsrForConditionalGeneration": "too big",  # its audio tower
    "VoxtralRealtimeForConditionalGeneration": "input_features",  # it needs audio
    "ZambaForCausalLM": "tie_weights_keys",  # its shared layers are tied by patterns over the original depth
}
ALWAYS = ("tied", "untied", "factored:8")  # three of the four layouts
NARROW_UNTIED = ("factored-untied:in=8,out=12", "projected:12,untied,out=none")  # the fourth layout
OTHERS = ("projected:12", "projected:untied", "residual:3", "spd")
SPECS = ALWAYS + NARROW_UNTIED + OTHERS
REFUSED_SPECS = {
    (name, spec): "needs one vocabulary"
    for name in ("CpmAntForCausalLM", "MllamaForCausalLM", "MoshiForCausalLM")
    for spec in SPECS
    if BoundarySpec.parse(spec).tables == 1
}
# its head has the outputs of two streams
REFUSED_SPECS |= {
    (name, spec): "32 wide, the output table 64" for name in NEEDS_BATCH for spec in ("tied", "residual:3", "spd")
}
REFUSED_SPECS |= {  # it reads the width of its table
    ("Gemma4ForConditionalGeneration", spec): "does not run on a random batch: The size of tensor"
    for spec in SPECS
    if BoundarySpec.parse(spec).table_widths(32)[0] != 32
}
_TOO_BIG = 5_000_000


def _build(name):
    model_class = getattr(tr, name)
    config = shrink(model_class)
    if parameters_on_meta(model_class, config) > _TOO_BIG:
        raise ValueError("too big")
    torch.manual_seed(0)
    model = model_class(config)
    inputs = _inputs(model)
    with torch.no_grad():
        model.eval()(**inputs)  # some families change their kind of attention in the first forward
    return model, inputs


def _inputs(model):
    tables = [x for x in (model.get_input_embeddings(), model.get_output_embeddings()) if hasattr(x, "weight")]
    vocabulary = min([VOCABULARY, *(table.weight.shape[0] for table in tables)])
    source = torch.Generator().manual_seed(1)
    draw = [torch.randint(3, vocabulary, (2, 12), generator=source) for _ in range(2)]
    return {"input_ids": draw[0], "labels": draw[1]}


def _specs_of(name):
    place = CLASSES.index(name)
    return *ALWAYS, NARROW_UNTIED[place % 2], OTHERS[place // 2 % 4]


def _refuses(model, spec, reason):
    with left_alone(model), pytest.raises(InstallError, match=reason):
        install(model, spec)


def _state(model, inputs):
    with torch.no_grad():
        torch.manual_seed(0)
        return model.eval()(**inputs).logits + 0, model.state_dict()


def _check_loaded(model, loaded, inputs):
    (logits, state), (loaded_logits, loaded_state) = _state(model, inputs), _state(loaded, inputs)
    torch.testing.assert_close(dict(loaded_state), dict(state), rtol=0, atol=0)
    torch.testing.assert_close(loaded_logits, logits, rtol=1e-6, atol=1e-6)


def _check_trained(model, installed, inputs, plain_loss, plain_gradients):
    """Check that the loss is fused and every table and map learns; compare with a given plain model."""
    spec, tables = installed.spec, installed.tables()
    loss, got = step(model, inputs)
    assert installed.counts.fused >= 1
    assert installed.counts.materialised == 0
    names = {name: p for name, p in model.named_parameters() if any(p is table for table in tables)}
    assert {*names, *(n for n, _ in model.named_parameters() if "in_map." in n or "out_map." in n)} <= got.keys()
    if plain_loss is None:
        assert loss.isfinite()
        return
    torch.testing.assert_close(loss, plain_loss, rtol=1e-5, atol=0)
    parted = names.keys() - plain_gradients.keys()  # untied copies: the gradient of the tied table is the sum of both
    for name in parted:
        (other,) = names.keys() - parted
        got[other] = got[other] + got.pop(name)
    if spec.kind in ("residual", "spd"):
        got = {name: gradient for name, gradient in got.items() if name in plain_gradients}
    assert_same_gradients(got, plain_gradients, 2e-4)


@pytest.mark.parametrize("name", CLASSES)
def test_every_model_class_takes_each_spec_exactly_or_refuses_it(name, tmp_path):
    if name in NOT_BUILT:
        with pytest.raises(Exception, match=NOT_BUILT[name]):  # families raise different errors
            _build(name)
        return
    plain, inputs = _build(name)
    if name in REFUSED:
        _refuses(plain, None, REFUSED[name])
        return
    tied = plain.get_input_embeddings().weight is plain.get_output_embeddings().weight
    reference = step(copy.deepcopy(plain), inputs)
    for spec in (None, *_specs_of(name)):
        print(spec)
        model = copy.deepcopy(plain)
        if (name, spec) in REFUSED_SPECS:
            _refuses(model, spec, REFUSED_SPECS[name, spec])
            continue
        installed = install(model, spec, batch=inputs if name in NEEDS_BATCH else None)
        same = spec in (None, "untied") or (tied and spec in ("tied", "residual:3", "spd"))
        _check_trained(model, installed, inputs, *(reference if same else (None, None)))
        if spec is None or name in NEEDS_BATCH:
            continue
        folder = tmp_path / spec
        model.save_pretrained(folder)
        if spec in ALWAYS:
            _check_loaded(model, tiewise.hf.load(folder), inputs)
        if spec != "factored:8":  # the class with a boundary, or the plain class
            _check_loaded(model, type(model).from_pretrained(folder), inputs)


def test_sweep_covers_at_least_240_model_classes():
    exact = set(CLASSES) - set(REFUSED) - set(NOT_BUILT)
    assert len(exact) >= 240, f"{len(exact)} of {len(CLASSES)}"
    assert set(NOT_BUILT) <= set(CLASSES)
    assert set(REFUSED) <= set(CLASSES)


def test_sweep_gives_each_spec_to_at_least_50_classes_that_take_it():
    taken = [
        (name, spec)
        for name in set(CLASSES) - set(REFUSED) - set(NOT_BUILT)
        for spec in _specs_of(name)
        if (name, spec) not in REFUSED_SPECS
    ]
    counts = Counter(spec for _, spec in taken)
    assert counts.keys() == set(SPECS)
    assert min(counts.values()) >= 50, counts


def test_sweep_gives_each_class_every_layout():
    layouts = {(tables, full) for tables in (1, 2) for full in (True, False)}
    for name in CLASSES:
        specs = [BoundarySpec.parse(spec) for spec in _specs_of(name)]
        assert {(spec.tables, spec.table_widths(32)[0] == 32) for spec in specs} == layouts
