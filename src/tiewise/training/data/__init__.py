"""From text to tokens for training, in a folder that is complete or absent.

- `corpus`: `prepare` and its result, made by `sources` (files, folders, rows of tables), `documents` and `tokenizer`.
- `word_corpus`: word-level corpora of three files, as in the papers on recurrent models.
- `training_rows`: the rows of an ALBERT, made of `sentence_pairs`.
"""
