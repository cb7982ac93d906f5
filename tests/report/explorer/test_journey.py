"""Test the picture of the first step: every number of the moving word against numpy, in motion and at rest."""

import numpy as np
from tests.report.explorer.test_symmetry import SETTINGS, WORDS, assert_rounded, random_matrices, settings_from

STAGES = ("word", "lookup", "body", "logits")
# script that reads the picture at a stage, for each setting: visible texts, the sentence, marked rows, the token
READ = """([settings, stage]) => settings.map(setting => {
  keep({ ...setting, stage });
  document.querySelector(`.journey [value=${stage}]`).click();
  const picture = document.querySelector(".journey-picture");
  const texts = [...picture.querySelectorAll("text")].filter(t => !t.closest(".absent") && t.textContent);
  return {
    texts: texts.filter(t => !t.closest(".token")).map(t => t.textContent),
    token: texts.filter(t => t.closest(".token")).map(t => t.textContent),
    marked: [...picture.querySelectorAll(".table-row")].map(r => r.classList.contains("marked")),
    sentence: document.querySelector(".stage").textContent, label: picture.getAttribute("aria-label"),
  };
})"""
# script that opens the picture, which then plays, and reads every frame: numbers of the token, count of finished logits
OPEN = """() => new Promise(done => {
  const frames = [], picture = () => document.querySelector(".journey-picture"), start = performance.now();
  const shown = (what) => [...picture().querySelectorAll(what)].filter(t => !t.closest(".absent") && t.textContent);
  const read = () => {
    const token = picture().querySelector(".token"), place = token.getAttribute("transform");
    frames.push({ y: Number(/ ([\\d.-]+)\\)/.exec(place)[1]), moves: !token.classList.contains("absent"),
      texts: shown(".token text").map(t => t.textContent),
      scores: picture().querySelectorAll(".score:not(.absent)").length,
      button: document.querySelector(".play").textContent });
    if (!frames[0].moves) frames.pop();  // it does not play yet
    const continues = frames.length < 5 || frames.at(-1).button === "Pause";
    if (performance.now() - start < 30000 && continues) requestAnimationFrame(read);
    else done(frames);
  };
  document.querySelector("#tab-symmetry").click();
  requestAnimationFrame(read);
})"""


def numbers_of(texts):
    """Return the texts of a picture that are numbers."""
    return [text for text in texts if text.removeprefix("−").replace(".", "").isdigit()]


def test_every_stage_shows_the_numbers_of_numpy(visit):
    tables, words = random_matrices(21), np.random.default_rng(22).integers(0, 3, SETTINGS)
    named = zip(settings_from(W_E=tables), words, strict=True)
    settings = [{**setting, "word": WORDS[word]} for setting, word in named]
    page = visit("at=symmetry").page
    shown = {stage: page.evaluate(READ, [settings, stage]) for stage in STAGES}
    for i, (table, word) in enumerate(zip(tables, words, strict=True)):
        row, logits = table[word], table @ table[word]
        slots = {"word": [], "lookup": [*row], "body": [*row, *row], "logits": [*row, *row]}
        scores = {"word": [], "lookup": [], "body": [], "logits": [*logits]}
        said = {"lookup": [*row], "body": [*row], "logits": [*logits]}
        for stage in STAGES:
            one = shown[stage][i]
            drawn = [*table.ravel(), *slots[stage], *table.ravel(), *scores[stage]]  # from top to bottom
            assert_rounded(numbers_of(one["texts"]), np.array(drawn))
            assert one["marked"][:3] == [k == word for k in range(3)]
            sentence = one["sentence"].replace(",", " ").rstrip(".").split()
            if stage == "word":
                assert sentence == [WORDS[word], "goes", "in"]
            else:
                assert_rounded(numbers_of(sentence), np.array(said[stage]))
            if stage in ("lookup", "body"):
                assert_rounded(one["token"], row)
        assert shown["word"][i]["token"] == [WORDS[word]]
        assert shown["logits"][i]["token"] == []


def test_picture_stands_still_at_its_end_if_the_reader_prefers_reduced_motion(visit):
    page = visit("at=symmetry").page  # `visit` asks for reduced motion
    assert not page.locator(".play").is_visible()
    before = page.locator(".journey-picture").inner_html()
    page.wait_for_timeout(900)
    assert page.locator(".journey-picture").inner_html() == before
    assert page.locator(".token.absent").count() == 1
    texts = page.locator(".journey-picture text").all_text_contents()
    assert {"1.25", "1.45", "1.32"} <= set(texts)
    assert page.locator(".journey").get_by_role("button", name="Logits").get_attribute("aria-pressed") == "true"


def test_word_moves_down_once_with_the_numbers_of_its_row_and_then_rests(visit):
    page = visit("at=budget").page
    page.emulate_media(reduced_motion="no-preference")
    frames = page.evaluate(OPEN)
    assert frames  # it starts without a click
    heights = [frame["y"] for frame in frames if frame["moves"]]
    assert len(set(heights)) > 20
    assert heights == sorted(heights)  # from the word down to the last row of the head
    for frame in frames:
        assert frame["texts"] in (["York"], ["0.80", "0.90"], [])
    scores = [frame["scores"] for frame in frames]
    assert scores == sorted(scores)
    assert (scores[0], scores[-1]) == (0, 3)
    assert frames[-1]["button"] == "Play"
    assert not frames[-1]["moves"]
    page.locator(".play").click()
    page.locator(".token:not(.absent)").wait_for(state="attached")  # a click plays it again


def test_keyboard_plays_pauses_and_selects_a_stage(visit):
    page = visit("at=symmetry&stage=lookup").page
    assert page.locator(".stage").inner_text().startswith("Lookup: ")
    page.emulate_media(reduced_motion="no-preference")
    play = page.locator(".play")
    play.focus()
    page.keyboard.press("Enter")
    assert play.inner_text() == "Pause"
    page.keyboard.press("Enter")
    assert play.inner_text() == "Play"
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert page.locator(".stage").inner_text() == "York goes in."
    page.wait_for_url("**stage=word**")
