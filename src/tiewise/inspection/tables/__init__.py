"""Measures of tables and texts that run no model: numpy alone, no torch.

- `model_tables`: the tables of a checkpoint at both ends, read in pieces, and pairs of their rows.
- `open_path`, `path_matrix`: the direct path from the input table to the output table.
- `bigram_counts`, `bigram_paths`: the loss of such a path on a text's bigrams.
- `table_maps`, `align_tables`: the similarity of two tables, after different maps, and by chance.
- `token_rows`, `token_texts`: the rows of a table, and the texts of tokens.
"""
