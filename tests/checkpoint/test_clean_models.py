"""Healthy models, as transformers saves them, pass without a finding above info: root and nested, tied and untied."""

import pytest
from saved_models import tiny

from tiewise.checkpoint.audit import check

# class, flags under which a healthy folder of it exists
CAUSAL = [
    *("LlamaForCausalLM", "GPT2LMHeadModel", "Gemma3ForCausalLM", "OPTForCausalLM", "PhiForCausalLM"),
    *("CohereForCausalLM", "GraniteForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GPTNeoXForCausalLM"),
    *("MambaForCausalLM", "FalconForCausalLM", "MistralForCausalLM", "BloomForCausalLM", "GPTJForCausalLM"),
    *("Olmo2ForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM"),
]
NESTED = [
    *("LlavaForConditionalGeneration", "Gemma3ForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    *("InternVLForConditionalGeneration", "Idefics3ForConditionalGeneration"),
    *("PaliGemmaForConditionalGeneration", "Llama4ForConditionalGeneration"),
]
OTHERS = [
    ("T5ForConditionalGeneration", True),
    ("BartForConditionalGeneration", True),
    ("BartForConditionalGeneration", False),
    ("MarianMTModel", True),
    ("MarianMTModel", False),
    ("WhisperForConditionalGeneration", True),
    ("BertForMaskedLM", True),
    ("BertForMaskedLM", False),
    ("RobertaForMaskedLM", True),
    ("ModernBertForMaskedLM", True),
    ("AlbertForMaskedLM", True),
    ("ElectraForMaskedLM", True),
    ("DistilBertForMaskedLM", True),
    ("DebertaV2ForMaskedLM", True),
    ("MBartForConditionalGeneration", True),
    ("PegasusForConditionalGeneration", True),
    ("FSMTForConditionalGeneration", True),  # saves its shared table under the head's name
    ("MllamaForConditionalGeneration", False),  # its class never ties
    ("Blip2ForConditionalGeneration", None),
    ("BertModel", None),
    ("LlamaModel", None),
    ("LlamaForSequenceClassification", None),
    ("ViTModel", None),
    ("CLIPModel", None),
]
QUICK = ("LlamaForCausalLM", "T5ForConditionalGeneration", "BertForMaskedLM", "Gemma3ForConditionalGeneration")


def everything():
    for name, flag in [(n, f) for n in (*CAUSAL, *NESTED) for f in (True, False)] + OTHERS:
        quick = name in QUICK and flag is True
        yield pytest.param(name, flag, marks=[] if quick else pytest.mark.slow, id=f"{name}-{flag}")


@pytest.mark.parametrize(("name", "flag"), everything())
def test_no_finding_above_info(tmp_path, name, flag):
    model = tiny(name, flag)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    for folder in ("one", "many"):
        audit = check(tmp_path / folder, deep=True)
        assert audit.at_least("warning") == ()
        stored = audit.roles.input is not None or audit.roles.output is not None
        assert stored is (name not in ("ViTModel", "CLIPModel"))
