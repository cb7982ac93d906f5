"""Tiny models of composite and non-decoder classes, with 24 tokens and width 16."""

import transformers as tr

ROWS, WIDTH = 24, 16
BODY = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
STACKS = {f"{side}_{key}": 2 for side in ("encoder", "decoder") for key in ("layers", "attention_heads")}
STACKS |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "d_model": WIDTH, "max_position_embeddings": 40}
T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": ROWS}
T5 |= {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
IMAGE = BODY | {"image_size": 32, "patch_size": 16}
SOUND = BODY | {"conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_feat_extract_layers": 2}
SOUND |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}

TEXT_CONFIGS = {
    "bert": lambda **flag: tr.BertConfig(**BODY, vocab_size=ROWS, **IDS, **flag),
    "roberta": lambda **flag: tr.RobertaConfig(**BODY, vocab_size=ROWS, **IDS, **flag),
    "electra": lambda **flag: tr.ElectraConfig(**BODY, embedding_size=WIDTH, vocab_size=ROWS, **IDS, **flag),
    "gpt2": lambda **flag: tr.GPT2Config(n_embd=WIDTH, n_layer=2, n_head=2, vocab_size=ROWS, **IDS, **flag),
    "trocr": lambda **flag: tr.TrOCRConfig(
        d_model=WIDTH, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=24, vocab_size=ROWS, **IDS, **flag
    ),
    "mbart": lambda **flag: tr.MBartConfig(**STACKS, vocab_size=ROWS, **IDS, **flag),
    "rembert": lambda **flag: tr.RemBertConfig(**BODY, vocab_size=ROWS, **IDS, **flag),
    "opt": lambda **flag: tr.OPTConfig(
        hidden_size=WIDTH, word_embed_proj_dim=WIDTH, num_hidden_layers=2, num_attention_heads=2, ffn_dim=24,
        vocab_size=ROWS, **IDS, **flag
    ),
    "llama": lambda **flag: tr.LlamaConfig(**BODY, vocab_size=ROWS, **IDS, **flag),
    "mistral": lambda **flag: tr.MistralConfig(**BODY, num_key_value_heads=2, vocab_size=ROWS, **IDS, **flag),
    "t5": lambda **flag: tr.T5Config(**T5, **flag),
}  # fmt: skip


def image_to_text(decoder, **flag):
    """Return a VisionEncoderDecoder with this family's decoder."""
    vision, text = tr.ViTConfig(**IMAGE), TEXT_CONFIGS[decoder](**flag)
    return tr.VisionEncoderDecoderModel(tr.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text))


def sound_to_text(decoder, **flag):
    """Return a SpeechEncoderDecoder with this family's decoder."""
    sound, text = tr.Wav2Vec2Config(**SOUND, vocab_size=ROWS), TEXT_CONFIGS[decoder](**flag)
    return tr.SpeechEncoderDecoderModel(tr.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(sound, text))


def text_to_text(encoder, decoder, **flag):
    """Return an EncoderDecoder of two families."""
    parts = TEXT_CONFIGS[encoder](), TEXT_CONFIGS[decoder](**flag)
    return tr.EncoderDecoderModel(tr.EncoderDecoderConfig.from_encoder_decoder_configs(*parts))


def blip(name, text, **flag):
    """Return a BLIP-2 or InstructBLIP with this family's language model."""
    queries = BODY | {"encoder_hidden_size": WIDTH, "vocab_size": 30}
    record = {"vision_config": IMAGE, "qformer_config": queries, "text_config": TEXT_CONFIGS[text](**flag)}
    model_class = getattr(tr, f"{name}ForConditionalGeneration")
    return model_class(model_class.config_class(**record, num_query_tokens=4, image_token_id=3))


def recogniser(name):
    """Return a speech recogniser, which has a head over letters and no input embedding."""
    model_class = getattr(tr, name)
    return model_class(model_class.config_class(**SOUND, vocab_size=ROWS))


def reformer(name):
    """Return a Reformer, whose head reads two streams and is twice as wide as the model."""
    settings = {"hidden_size": WIDTH, "attention_head_size": 8, "num_attention_heads": 2, "feed_forward_size": 24}
    settings |= {"axial_pos_embds_dim": (8, 8), "axial_pos_shape": (4, 4), "attn_layers": ["local", "local"]}
    config = tr.ReformerConfig(**settings, vocab_size=ROWS, is_decoder=name.endswith("LMHead"), **IDS)
    return getattr(tr, name)(config)


def t5_like(name):
    """Return a T5, mT5, UMT5 or Pop2Piano, with or without a head."""
    model_class = getattr(tr, name)
    return model_class(model_class.config_class(**T5))


def t5gemma(**flag):
    """Return a T5Gemma, whose encoder and decoder have separate tables."""
    stack = BODY | IDS | {"head_dim": 8, "num_key_value_heads": 2, "vocab_size": ROWS}
    config = tr.T5GemmaConfig(encoder=stack, decoder=stack, vocab_size=ROWS, **flag)
    return tr.T5GemmaForConditionalGeneration(config)


def musicgen(name):
    """Return a Musicgen, which reads text and writes audio codes in two separate vocabularies."""
    codes = BODY | {"ffn_dim": 24, "vocab_size": 16, "num_codebooks": 2, "pad_token_id": 16, "bos_token_id": 16}
    sound = {"model_type": "encodec", "codebook_size": 16, "hidden_size": 8, "num_filters": 2, "codebook_dim": 8}
    model_class = getattr(tr, f"{name}ForConditionalGeneration")
    parts = {"text_encoder": T5 | {"model_type": "t5"}, "audio_encoder": sound, "decoder": codes}
    return model_class(model_class.config_class(**parts))


def bark(name):
    """Return a part of Bark, which reads one vocabulary and writes another."""
    model_class = getattr(tr, name)
    sizes = {"input_vocab_size": 32, "output_vocab_size": ROWS, "block_size": 32}
    return model_class(model_class.config_class(hidden_size=WIDTH, num_layers=2, num_heads=2, **sizes))


BERT_HEAD = [f"cls.predictions.transform.{name}" for name in
             ("dense.weight", "dense.bias", "LayerNorm.weight", "LayerNorm.bias")]  # fmt: skip


def masked(family, **settings):
    """Return a masked language model, with a dense layer and a norm between body and table."""
    if family == "distilbert":
        config = tr.DistilBertConfig(dim=WIDTH, n_layers=2, n_heads=2, hidden_dim=24, vocab_size=ROWS, **settings)
        return tr.DistilBertForMaskedLM(config)
    config_class = {"bert": tr.BertConfig, "deberta": tr.DebertaConfig}[family]
    model_class = {"bert": tr.BertForMaskedLM, "deberta": tr.DebertaForMaskedLM}[family]
    return model_class(config_class(**BODY, vocab_size=ROWS, pad_token_id=0, **settings))


def modernbert(**settings):
    """Return a ModernBERT, whose config decides whether its head has a bias."""
    ids = IDS | {"cls_token_id": 1, "sep_token_id": 2}
    return tr.ModernBertForMaskedLM(tr.ModernBertConfig(**BODY, vocab_size=ROWS, **ids, **settings))


def phi(**flag):
    """Return a Phi, whose head has a bias."""
    return tr.PhiForCausalLM(tr.PhiConfig(**BODY, vocab_size=ROWS, **IDS, **flag))
