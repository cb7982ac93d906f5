"""From text to the tokens that models are trained on, in a folder that is there whole or not at all.

- `corpus`: `prepare`, by `sources` (files, folders, rows of tables), `documents` and `tokenizer`, and what it made.
- `word_corpus`: word-level corpora of three files, as the papers on recurrent models use them.
- `training_rows`: the rows of an ALBERT over `sentence_pairs`.
"""
