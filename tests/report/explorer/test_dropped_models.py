"""Test the word scores of dropped and embedded transformers models against torch in fp64."""

import ast
import contextlib
import io
import json
import shlex

import numpy as np
import pytest
import torch
import transformers as tr
from safetensors.torch import load_file, save_file
from tests.report.explorer.dropping import drop

from tiewise.report.explorer.page import explore
from tiewise.training.data.tokenizer import make_tokenizer

V, D = 257, 24
SMALL = {"hidden_size": D, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 2, "head_dim": 12}
WORDS = "a, b, #200"


def make_llama(**more):
    return tr.LlamaForCausalLM(tr.LlamaConfig(vocab_size=V, **SMALL, **more))


MODELS = {
    "llama, untied": lambda: make_llama(tie_word_embeddings=False),
    "llama, tied": lambda: make_llama(tie_word_embeddings=True),
    "gpt2": lambda: tr.GPT2LMHeadModel(tr.GPT2Config(vocab_size=V, n_embd=D, n_layer=1, n_head=2, n_positions=16)),
    "gemma": lambda: tr.GemmaForCausalLM(tr.GemmaConfig(vocab_size=V, **SMALL)),
    "t5": lambda: tr.T5ForConditionalGeneration(
        tr.T5Config(vocab_size=V, d_model=D, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    ),
    "bert": lambda: tr.BertForMaskedLM(tr.BertConfig(vocab_size=V, **SMALL, max_position_embeddings=16)),
    "opt": lambda: tr.OPTForCausalLM(
        tr.OPTConfig(vocab_size=V, hidden_size=D, word_embed_proj_dim=D, ffn_dim=32, num_hidden_layers=1,
                     num_attention_heads=2, max_position_embeddings=16)
    ),
}  # fmt: skip


def logits_without_layers(model, ids):
    """Return the logits after each token without any layer, by the model's own modules.

    Return None for classes whose direct path is unknown.
    """
    rows, head = model.get_input_embeddings()(ids), model.get_output_embeddings()
    if isinstance(model, tr.LlamaForCausalLM):
        return head(model.model.norm(rows))
    if isinstance(model, tr.GemmaForCausalLM):  # the lookup or the model scales, depending on the version
        scaled = rows if hasattr(model.get_input_embeddings(), "embed_scale") else rows * D**0.5
        return head(model.model.norm(scaled))
    if isinstance(model, tr.GPT2LMHeadModel):
        return head(model.transformer.ln_f(rows))
    if isinstance(model, tr.OPTForCausalLM):
        return head(model.model.decoder.final_layer_norm(rows))
    return None


def run_commands(page, path):
    """Run the Python commands under every figure next to the checkpoint; return {title: [printed values]}."""
    outputs = {}
    for panel in page.locator("#answer figure").all():
        lines = panel.locator(".command pre").all_text_contents()
        outputs[panel.locator("h2").inner_text()] = panel_outputs = []
        for line in (line for line in lines if line.startswith("python -c")):
            stdout = io.StringIO()
            with contextlib.chdir(path.parent), contextlib.redirect_stdout(stdout):
                exec(shlex.split(line)[2], {})
            panel_outputs.append(ast.literal_eval(stdout.getvalue()))
    return outputs


def assert_commands_repeat_numbers(page, path, within=1e-9):
    """Compare the page's results with the output of its own commands."""
    result, outputs = page.evaluate("dropped.result"), run_commands(page, path)

    def assert_near(a, b):
        np.testing.assert_allclose(np.array(a, float), np.array(b, float), rtol=0, atol=within)

    (stored,) = outputs["Scores both ways"]
    assert_near(stored, [(way["score"], way["rank"]) for way in result["ways"]])
    tied = result["near"]["output"] is None
    titles = {"input": "Nearest rows, at both ends" if tied else "Nearest rows at the input"}
    titles |= {} if tied else {"output": "Nearest rows at the output"}
    for end, title in titles.items():
        ((values, ids),) = outputs[title][0]
        assert_near(values, [[one["value"] for one in row] for row in result["near"][end]])
        assert ids == [[one["id"] for one in row] for row in result["near"][end]]
    ((values, ids),) = outputs["Highest scores after each word"][0]
    assert_near(values, [[one["value"] for one in row] for row in result["after"]])
    if len(result["ids"]) > 2:
        assert_near(outputs["Direct path of all words"][0], result["plain"])
    for i, end in enumerate(titles):
        lengths, bands = outputs["Lengths of rows"][2 * i : 2 * i + 2]
        assert_near(lengths, result["lengths"][end])
        assert_near(bands, [[band[of] for of in ("token", "low", "middle", "high")] for band in result["bands"][end]])


def save_model(folder, name, dtype):
    """Save a model with random norms and biases; return (path, fp64 copy of the model)."""
    torch.manual_seed(1)
    model = MODELS[name]().to(dtype)
    with torch.no_grad():
        for part in model.parameters():  # fresh norms and biases would be identities
            part.copy_(torch.randn_like(part))
    path = folder / "model"
    model.save_pretrained(path, max_shard_size="20kB")
    make_tokenizer("bytes").save_pretrained(path)
    return path, model.double()


def score_words(page):
    """Score the words on the page; return (the page's result, ids of the words)."""
    ids = torch.tensor([make_tokenizer("bytes").convert_tokens_to_ids(one) for one in "ab"] + [200])
    page.locator("#words").fill(WORDS)
    page.evaluate("dropped.result = null; document.getElementById('copy-issue').remove()")
    page.get_by_role("button", name="Score them").click()
    page.locator("#copy-issue").wait_for()
    return page.evaluate("dropped.result"), ids


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, kind, marks=[] if kind == torch.bfloat16 else [pytest.mark.slow])
        for name in MODELS
        for kind in (torch.bfloat16, torch.float32, torch.float16)
    ],
)
def test_scores_ranks_and_neighbours_equal_those_of_torch(dropper, tmp_path, name, dtype):
    path, model = save_model(tmp_path, name, dtype)
    first, second = (w.weight.double().detach() for w in (model.get_input_embeddings(), model.get_output_embeddings()))
    page = drop(dropper, path)
    result, ids = score_words(page)

    scores = first[ids] @ second.T
    assert result["ids"] == ids.tolist()
    np.testing.assert_allclose(result["plain"], scores[:, ids].numpy(), atol=1e-4, rtol=0)
    for way, (i, j) in zip(result["ways"], ((0, 1), (1, 0)), strict=True):
        assert (way["from"], way["to"]) == (ids[i], ids[j])
        assert way["score"] == pytest.approx(scores[i, ids[j]].item(), abs=1e-4)
        assert way["rank"] == 1 + (scores[i] > scores[i, ids[j]] + 1e-9).sum().item()
        assert "logit" not in way  # the page cannot know the layers between the tables
    for end, table in (("input", first), ("output", second)):
        if result["near"][end] is not None:
            angles = torch.nn.functional.cosine_similarity(table[ids[0]], table, dim=1)
            angles[ids[0]] = -2
            nearest = [[one["id"], one["value"]] for one in result["near"][end][0]]
            np.testing.assert_allclose(nearest, torch.stack(angles.topk(8)[::-1], 1), atol=1e-6)
            np.testing.assert_allclose(result["lengths"][end], table[ids].norm(dim=1), atol=1e-6)
    assert (result["near"]["output"] is None) == torch.equal(first, second)
    assert_commands_repeat_numbers(page, path)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, kind, marks=[] if kind == torch.bfloat16 else [pytest.mark.slow])
        for name in ("llama, untied", "gpt2", "gemma", "opt", "bert")
        for kind in (torch.bfloat16, torch.float32)
    ],
)
def test_embedded_checkpoint_shows_the_logits_of_torch(visit, tmp_path, name, dtype):
    path, model = save_model(tmp_path, name, dtype)
    page = visit(path=explore(path).write(tmp_path / "page.html")).page
    page.locator("#copy-issue").wait_for()
    result, ids = score_words(page)
    logits = logits_without_layers(model, ids)
    for way, (i, j) in zip(result["ways"], ((0, 1), (1, 0)), strict=True):
        assert ("logit" in way) == (logits is not None)
        if logits is not None:
            assert way["logit"] == pytest.approx(logits[i, ids[j]].item(), abs=1e-4)
            assert way["modelRank"] == 1 + (logits[i] > logits[i, ids[j]] + 1e-9).sum().item()
            assert way["log"] == pytest.approx(logits[i].log_softmax(0)[ids[j]].item(), abs=1e-4)
    page.get_by_label("Output head").select_option("")  # the embedded path applies only to the embedded tables
    page.get_by_text("No output head").wait_for()
    page.locator("#copy-issue").wait_for()
    assert page.evaluate("dropped.opened.path") is None
    assert page.get_by_role("heading", name="As the model applies it").count() == 0


def save_quantised(path, scale_name, blocks, dtype):
    """Save a Llama whose two tables are codes with scales; return the dequantised tables."""
    model = make_llama(tie_word_embeddings=False)
    model.save_pretrained(path)
    tensors, dequantised = load_file(path / "model.safetensors"), []
    for name in ("model.embed_tokens", "lm_head"):
        values, (down, along) = torch.randn(V, D), blocks
        whole = torch.nn.functional.pad(values, (0, -D % along, 0, -V % down))
        parts = whole.reshape(len(whole) // down, down, -1, along).abs().amax((1, 3))
        top = 127.0 if dtype == torch.int8 else 448.0
        scale = parts / top
        spread = scale.repeat_interleave(down, 0).repeat_interleave(along, 1)[:V, :D]
        codes = (values / spread).round().to(torch.int8) if dtype == torch.int8 else (values / spread).to(dtype)
        stored = scale.squeeze(1) * 127 if scale_name == "SCB" else scale
        tensors |= {f"{name}.weight": codes, f"{name}.{scale_name}": stored.contiguous()}
        dequantised.append(codes.float() * spread)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    if blocks != (1, D):
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(blocks)}
    (path / "config.json").write_text(json.dumps(config))
    return dequantised


@pytest.mark.parametrize(
    ("scale", "blocks", "dtype"),
    [
        ("SCB", (1, D), torch.int8),  # bitsandbytes
        ("weight_scale", (1, D), torch.int8),  # compressed-tensors
        ("weight_scale", (1, D), torch.float8_e4m3fn),
        ("weight_scale_inv", (128, 16), torch.float8_e4m3fn),  # DeepSeek's blocks, truncated at the edges
    ],
)
def test_page_reads_quantised_tables_with_their_scales(dropper, tmp_path, scale, blocks, dtype):
    torch.manual_seed(2)
    first, second = save_quantised(tmp_path / "q", scale, blocks, dtype)
    page = drop(dropper, tmp_path / "q")
    result = page.evaluate("dropped.result")
    a, b = result["ids"]
    np.testing.assert_allclose(result["plain"], (first[[a, b]] @ second[[a, b]].T).numpy(), atol=1e-4)
    assert_commands_repeat_numbers(page, tmp_path / "q", 1e-6)  # the page multiplies codes by scales in 32 bits


def test_page_names_packed_tables_without_reading_them(dropper, tmp_path):
    save_quantised(tmp_path / "q", "weight_zero_point", (1, D), torch.int8)
    page = drop(dropper, tmp_path / "q", answered=False)
    page.get_by_text("is packed (I8 beside weight_zero_point) in a way that this page does not read").wait_for()


def test_page_counts_equal_tables_as_one_and_names_the_first_different_row(dropper, tmp_path):
    path = tmp_path / "twice"
    make_llama(tie_word_embeddings=True).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    page = drop(dropper, path)
    assert page.locator("#tables").inner_text() == "The two tensors are equal, byte for byte: one table, stored twice."
    assert page.evaluate("dropped.result.near.output") is None
    report = page.locator("#issue").input_value()
    assert "tiewise check twice" in report
    tensors["lm_head.weight"][200, 3] += 1
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    page = drop(dropper, path)
    assert page.locator("#tables").inner_text() == "Two tensors that differ, first in row 200: untied."


def test_reader_can_choose_other_tables_than_the_names_suggest(dropper, tmp_path):
    path = tmp_path / "odd"
    path.mkdir()
    tensors = {"words": torch.randn(40, 6), "lm_head.weight": torch.randn(40, 6), "wide": torch.randn(40, 8)}
    tensors |= {"layers.0.embed_tokens.weight": torch.randn(50, 6), "norm.weight": torch.ones(6)}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    page = drop(dropper, path)
    first, second = (page.get_by_label(label) for label in ("Input embedding", "Output head"))
    assert (first.input_value(), second.input_value()) == ("words", "lm_head.weight")
    page.get_by_text("Two tensors that differ, first in row 0").wait_for()
    page.locator("#words").fill("#3, #5")
    page.evaluate("document.getElementById('copy-issue').remove()")
    page.locator("#words").press("Enter")
    page.locator("#copy-issue").wait_for()
    ways = page.evaluate("dropped.result.ways")
    assert ways[0]["score"] == pytest.approx((tensors["words"][3] @ tensors["lm_head.weight"][5]).item(), abs=1e-5)
    assert ways[1]["score"] != ways[0]["score"]
    second.select_option("words")
    page.get_by_text("One tensor at both ends: tied.").wait_for()
    page.get_by_text("One table: two of its rows have one product, whichever comes first.").wait_for()
    page.locator("#copy-issue").wait_for()
    ways = page.evaluate("dropped.result.ways")
    assert ways[0]["score"] == ways[1]["score"]
    assert "output-table=words" in page.url
    second.select_option("wide")
    page.get_by_text("These two cannot be multiplied: they are 6 and 8 wide.").wait_for()
    assert page.get_by_role("heading", name="Scores both ways").count() == 0
    second.select_option("")
    page.get_by_text("No output head: only rows are shown.").wait_for()
    page.get_by_role("heading", name="Nearest rows at the input").wait_for()
    assert page.evaluate("dropped.result.ways") == []
    options = first.locator("option").evaluate_all("all => all.map(one => one.value)")
    assert options[-1] == "layers.0.embed_tokens.weight"  # tensors in layers come last
    assert "norm.weight" not in options
