"""`train_tokens`: less text to train on, everything else the same."""

import numpy as np
import pytest

from tiewise.core.errors import DataError
from tiewise.data.corpus import prepare


@pytest.fixture
def prepared(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(f"{i} is no {i * i} but {i % 7}" for i in range(400)))
    return lambda tokens: prepare(
        [str(tmp_path / "text.txt")], "bpe:300", tmp_path / "d", length=8, train_tokens=tokens
    )


def test_less_text_is_whole_blocks_spread_evenly_and_the_rest_stays(prepared):
    whole = prepared(None)
    train, heldout, words = (np.array(whole.split("train")), np.array(whole.split("heldout")), whole.tokenizer())
    less = prepared(100)
    kept = np.array(less.split("train")).reshape(-1, 8)
    blocks = train[: len(train) // 8 * 8].reshape(-1, 8)
    places = [next(i for i, block in enumerate(blocks) if (block == own).all()) for own in kept]
    assert len(kept) == 12
    assert less.facts["splits"]["train"]["tokens"] == 96
    assert set(np.diff(places)) <= {len(blocks) // 12, len(blocks) // 12 + 1}
    assert (np.array(less.split("heldout")) == heldout).all()
    assert less.tokenizer().get_vocab() == words.get_vocab()
    assert less.counts.sum() == 96


def test_another_amount_is_another_text(prepared):
    assert len(prepared(100).split("train")) == 96
    assert len(prepared(200).split("train")) == 200
    assert len(prepared(None).split("train")) > 200


def test_more_than_there_is_is_refused(prepared):
    with pytest.raises(DataError, match=r"training tokens, 999,999 are asked for; give more text, or a smaller"):
        prepared(999_999)


def test_so_little_that_no_two_blocks_are_left_is_refused(prepared):
    with pytest.raises(DataError, match="8 of them for train"):
        prepared(15)
