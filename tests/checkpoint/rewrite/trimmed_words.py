"""Tokenizers of each kind, trained or random, and helpers that compare how they split words."""

import itertools
import json
import random
import re

from tests.checkpoint.tiny_checkpoints import llama
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tiewise.training.data.sources import builtin_texts

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
LLAMA3 += r"|\s+(?!\S)|\s+"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


_SOURCE, _READ = builtin_texts(), []


def prose(letters, skip=0):
    """Return `letters` characters of Python's bundled documentation after the first `skip`."""
    while sum(map(len, _READ)) < skip + letters:
        _READ.append(next(_SOURCE)[1] + "\n\n")
    return "".join(_READ)[skip : skip + letters]


def train_on(made, text, trainer, **options):
    """Train a tokenizer on a text and return it."""
    made.train_from_iterator([text], trainer(show_progress=False, **options))
    return made


def gpt2(text, size=700):
    """Return a byte-level BPE with the end token in its vocabulary."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": size, "special_tokens": ["<|endoftext|>"], "initial_alphabet": alphabet}
    return train_on(made, text, trainers.BpeTrainer, **options)


def tiktoken_like(text, size, normalizer=None):
    """Return a record as converted from tiktoken, where every pair of tokens that forms a token is a merge."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizer
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    record = json.loads(train_on(made, text, trainers.BpeTrainer, vocab_size=size, initial_alphabet=alphabet).to_str())
    ids = record["model"]["vocab"]
    cuts = [(token[:i], token[i:]) for token in ids for i in range(1, len(token))]
    merges = ([a, b] for a, b in cuts if a in ids and b in ids)
    record["model"]["merges"] = sorted(merges, key=lambda merge: ids["".join(merge)])
    return record


def llama3(text, size=700):
    """Return a Llama 3 tokenizer: whole-word tokens first, special tokens last, a begin token before every text."""
    record = tiktoken_like(text, size)
    record["model"]["ignore_merges"] = True
    ids = record["model"]["vocab"]
    for word in ("Ġzyzzyva", "Ġqopxkj"):  # tokens that no merge produces
        ids[word] = len(ids)
    made = Tokenizer.from_str(json.dumps(record))
    made.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    begin = ("<|begin_of_text|>", made.token_to_id("<|begin_of_text|>"))
    template = processors.TemplateProcessing(f"{begin[0]} $A", f"{begin[0]} $A {begin[0]}:1 $B:1", [begin])
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return made


def qwen(text, size=700):
    """Return a Qwen tokenizer, with NFC and with added tokens that are not special."""
    made = Tokenizer.from_str(json.dumps(tiktoken_like(text, size, normalizers.NFC())))
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    made.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)])
    return made


def sentencepiece_bpe(text, size=900):
    """Return a SentencePiece BPE with byte fallback and without a split into words."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # training would not end without it
    options = {"vocab_size": size, "special_tokens": ["<unk>", "<s>", "</s>", *BYTES], "limit_alphabet": 70}
    record = json.loads(train_on(made, text, trainers.BpeTrainer, **options).to_str())
    record["pre_tokenizer"] = None
    record["added_tokens"] = record["added_tokens"][:3]
    made = Tokenizer.from_str(json.dumps(record))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def unigram(text, size=700):
    """Return a Unigram tokenizer as of T5, with an end token after every text."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " ")])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    options = {"vocab_size": size, "special_tokens": ["<pad>", "</s>", "<unk>"], "unk_token": "<unk>"}
    train_on(made, text, trainers.UnigramTrainer, **options)
    end = ("</s>", made.token_to_id("</s>"))
    made.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [end])
    return made


def wordpiece(text, size=700):
    """Return BERT's WordPiece tokenizer."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    train_on(made, text, trainers.WordPieceTrainer, vocab_size=size, special_tokens=special)
    ends = [(token, made.token_to_id(token)) for token in ("[SEP]", "[CLS]")]
    made.post_processor = processors.BertProcessing(*ends)
    return made


KINDS = {"gpt2": gpt2, "llama3": llama3, "qwen": qwen, "sentencepiece": sentencepiece_bpe}
KINDS |= {"unigram": unigram, "wordpiece": wordpiece}


def write_llama(path, tokenizer, rows=None, **written):
    """Write a tiny Llama with this tokenizer and return its path."""
    rows = tokenizer.get_vocab_size() if rows is None else rows
    return llama(path, rows=rows, tokenizer=json.loads(tokenizer.to_str()), **written)


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def words_of(text):
    """Split a text into words with their leading space, spaces and punctuation, which no pre-tokenizer here joins."""
    return re.findall(r" ?\w+|\s+| ?[^\w\s]+", text)


def assert_same_split(old, new, words):
    """Assert that words of kept tokens split as before; return the numbers of such words and of the others.

    Every word must decode to the same text as before.
    """
    names, left = old.get_vocab(), new.get_vocab()
    to = {number: left[token] for token, number in names.items() if token in left}
    kept = gone = 0
    for word in words:
        before, after = ids_of(old, word), ids_of(new, word)
        if all(number in to for number in before):
            kept += 1
            assert after == [to[number] for number in before], word
        else:
            gone += 1
        assert new.decode(after) == old.decode(before), word
    return kept, gone


def random_bpe(seed, letters="abcd", size=40, **settings):
    """Return a BPE with random merges, where several merges or none may form a token, without pre-tokenizer."""
    rng = random.Random(seed)
    tokens, merges = list(letters), []
    while len(tokens) < size:
        a, b = rng.choice(tokens), rng.choice(tokens)
        if len(a + b) < 9 and (a, b) not in merges:
            merges.append((a, b))
            tokens += [a + b] if a + b not in tokens else []
    rng.shuffle(merges)  # a merge may precede those that form its parts
    tokens += [word for word in ("acbd", "ddca", "cacab") if word not in tokens]
    order = tokens[:]
    rng.shuffle(order)
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(order)}, merges, **settings))
    made.decoder = decoders.Fuse()
    return made


def random_unigram(seed, letters="abcd", size=30):
    """Return a Unigram with few distinct scores, so that many paths tie."""
    rng = random.Random(seed)
    texts = {"".join(rng.choices(letters, k=rng.randint(2, 5))) for _ in range(size)}
    pieces = [("<unk>", 0.0), *((text, -rng.randint(1, 6) / 2) for text in [*letters, *sorted(texts)])]
    made = Tokenizer(models.Unigram(pieces, unk_id=0))
    made.decoder = decoders.Fuse()
    return made


def short_texts(letters="abcd", most=6):
    """Yield every text of up to `most` letters."""
    for length in range(1, most + 1):
        yield from map("".join, itertools.product(letters, repeat=length))
