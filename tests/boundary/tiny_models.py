"""Tiny random models of each named family, with settings that use its particular head or lookup."""

import copy
import random

import numpy as np
import torch
import transformers as tr
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tiewise.boundary.installation import install

V = 61


def sizes(text):
    """Parse settings written as `name=number`, separated by blanks."""
    return {name: int(number) for name, number in (setting.split("=") for setting in text.split())}


_LLAMA = sizes("num_hidden_layers=2 num_attention_heads=2 num_key_value_heads=1 hidden_size=16 intermediate_size=24")
_LLAMA |= sizes(f"vocab_size={V} pad_token_id=0 bos_token_id=1 eos_token_id=2")
_BERT = {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"} | {"max_position_embeddings": 40}
_GEMMA = _LLAMA | {"head_dim": 8, "query_pre_attn_scalar": 8}
_GPT2 = sizes(f"vocab_size={V} n_embd=16 n_layer=2 n_head=2 n_positions=40 bos_token_id=1 eos_token_id=2")
_OPT = sizes(f"vocab_size={V} hidden_size=16 word_embed_proj_dim=16 ffn_dim=24 max_position_embeddings=40")
_OPT |= sizes("num_hidden_layers=2 num_attention_heads=2")
_T5 = sizes(f"vocab_size={V} d_model=16 d_kv=8 d_ff=24 num_layers=2 num_heads=2")
_T5 |= sizes("decoder_start_token_id=0 pad_token_id=0 eos_token_id=1")
_BART = sizes(f"vocab_size={V} d_model=16 encoder_layers=1 decoder_layers=1 max_position_embeddings=40")
_BART |= sizes("encoder_attention_heads=2 decoder_attention_heads=2 encoder_ffn_dim=24 decoder_ffn_dim=24")
_BART |= sizes("pad_token_id=1 bos_token_id=0 eos_token_id=2 decoder_start_token_id=2") | {"forced_eos_token_id": None}

_T5_V11 = _T5 | {"feed_forward_proj": "gated-gelu", "scale_decoder_outputs": False}
_GRANITE = _LLAMA | {"logits_scaling": 3.0, "embedding_multiplier": 5.0}

# name -> (model class, config class, settings)
FAMILIES = {
    "gpt2": (tr.GPT2LMHeadModel, tr.GPT2Config, _GPT2),
    "llama": (tr.LlamaForCausalLM, tr.LlamaConfig, _LLAMA),
    "qwen2": (tr.Qwen2ForCausalLM, tr.Qwen2Config, _LLAMA),
    "qwen3": (tr.Qwen3ForCausalLM, tr.Qwen3Config, _LLAMA | {"head_dim": 8}),
    "gemma": (tr.GemmaForCausalLM, tr.GemmaConfig, _LLAMA | {"head_dim": 8}),
    # caps low enough to change the logits of a random model
    "gemma2": (tr.Gemma2ForCausalLM, tr.Gemma2Config, _GEMMA | {"final_logit_softcapping": 0.5}),
    "gemma3": (tr.Gemma3ForCausalLM, tr.Gemma3TextConfig, _GEMMA | {"final_logit_softcapping": 0.7}),
    "gpt_neox": (tr.GPTNeoXForCausalLM, tr.GPTNeoXConfig, _BERT),
    "opt": (tr.OPTForCausalLM, tr.OPTConfig, _OPT),
    "opt_350m": (tr.OPTForCausalLM, tr.OPTConfig, _OPT | {"word_embed_proj_dim": 12, "do_layer_norm_before": False}),
    "phi": (tr.PhiForCausalLM, tr.PhiConfig, _LLAMA),
    "cohere": (tr.CohereForCausalLM, tr.CohereConfig, _LLAMA | {"logit_scale": 0.3}),
    "granite": (tr.GraniteForCausalLM, tr.GraniteConfig, _GRANITE),
    "t5": (tr.T5ForConditionalGeneration, tr.T5Config, _T5),
    "t5_v11": (tr.T5ForConditionalGeneration, tr.T5Config, _T5_V11),
    "bart": (tr.BartForConditionalGeneration, tr.BartConfig, _BART | {"scale_embedding": True}),
    "marian": (tr.MarianMTModel, tr.MarianConfig, _BART),
    "bert": (tr.BertForMaskedLM, tr.BertConfig, _BERT),
    "roberta": (tr.RobertaForMaskedLM, tr.RobertaConfig, _BERT),
}


def build(name, tied=True, seed=0, **settings):
    """Build a model of a family with random biases and norms and weights large enough for attention to matter."""
    model_class, config_class, given = FAMILIES[name]
    config = config_class(**(given | settings))
    config.tie_word_embeddings = tied
    config.initializer_range = config.init_std = 0.15
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    return model


def variant(name, model_class, **settings):
    """Build another class on a family's tiny configuration, as its own initialisation leaves it."""
    _, config_class, given = FAMILIES[name]
    torch.manual_seed(0)
    return model_class(config_class(**(given | settings)))


def without_dropout(model):
    """Turn every dropout off."""
    for module in model.modules():
        for attribute in ("p", "dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    return model


def pair(name, spec=None, **settings):
    """Return (a model with a boundary, the same without one, the handle)."""
    plain = build(name, **settings)
    model = copy.deepcopy(plain)
    return model, plain, install(model, spec)


def batch(model, rows=3, length=10, seed=1):
    """Return random token ids and labels, some of them ignored."""
    source = torch.Generator().manual_seed(seed)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    ids = torch.randint(3, vocabulary, (rows, length), generator=source)
    labels = torch.randint(3, vocabulary, (rows, length), generator=source)
    labels[0, -3:] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model):
    """Return {name: a copy of its gradient}."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def step(model, inputs, seed=5):
    """Return the loss and gradients {name: tensor} of one training step with fixed dropout."""
    model.train()
    model.zero_grad()
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), gradients(model)


def assert_same_gradients(got, wanted, tolerance):
    """Compare two {name: gradient}.

    Some true gradients are 0, because softmax ignores a bias that is equal for all keys. If both gradients are below a
    millionth of the largest one, they are rounding of such a zero and are not compared.
    """
    assert got.keys() == wanted.keys()
    rounding = 1e-6 * max(gradient.norm() for gradient in wanted.values())
    for name, gradient in wanted.items():
        if max(gradient.norm(), got[name].norm()) > rounding:
            distance = (got[name] - gradient).norm() / gradient.norm()
            assert distance <= tolerance, f"{name}: {distance:.2e}"


def assert_same_step(model, plain, inputs, tolerance=1e-5, rtol=1e-6):
    """Take one training step with each model, compare losses and gradients, and return those of `model`."""
    (loss, got), (wanted_loss, wanted) = step(model, inputs), step(plain, inputs)
    torch.testing.assert_close(loss, wanted_loss, rtol=rtol, atol=0)
    assert_same_gradients(got, wanted, tolerance)
    return loss, got


def assert_identical_steps(one, other, inputs):
    """Check that one training step of each model gives bit-identical losses and gradients."""
    torch.testing.assert_close(step(one, inputs), step(other, inputs), rtol=0, atol=0)


class Allocations(TorchDispatchMode):
    """Record of the operations that allocate tensors of `size` elements, and of the largest tensor."""

    def __init__(self, size=0):
        super().__init__()
        self.size, self.made, self.largest = size, [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operation and record its new tensors."""
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in _here((args, kwargs))} if self.size else ()
        for x in _here(out):
            self.largest = max(self.largest, x.numel())
            if x.numel() == self.size and x.untyped_storage().data_ptr() not in given:
                self.made.append(str(func))
        return out


def _here(tree):
    """Return the tensors of a tree; of DTensors, the local parts."""
    return [getattr(x, "_local_tensor", x) for x in tree_leaves(tree) if torch.is_tensor(x)]


def trainer(model, folder, rows, callbacks=(), optimizers=(None, None), **settings):
    """Return a quiet Trainer on the CPU without gradient clipping, which saves nothing unless `settings` do."""
    settings = {"save_strategy": "no", "max_grad_norm": 0, "report_to": []} | settings
    arguments = tr.TrainingArguments(str(folder), use_cpu=True, disable_tqdm=True, **settings)
    return tr.Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=list(callbacks), optimizers=optimizers
    )


class Gradients(tr.TrainerCallback):
    """A callback that keeps the gradients of the last step."""

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        """Keep the gradients."""
        self.of = gradients(model)
