"""From text to the tokens that models are trained on, in a folder that is there whole or not at all.

- `corpus`: `prepare`, by `sources` (files, folders, rows of tables), `split`, `tokenizer`; `prepared` reads it again.
- `word_corpus`: word-level corpora of three files, as the papers on recurrent models use them.
- `training_rows`: blocks of tokens, and the rows of an ALBERT with `sentence_pairs` and `masking`.
- `windows`, `frequency`: what an inspection reads of a text.
"""
