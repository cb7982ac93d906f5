"""What tables and texts show without running a model: numpy alone, no torch.

- `model_tables`: the tables of a checkpoint, found at both ends and read in pieces; which rows belong together.
- `open_path`, `path_matrix`: the direct path from the input table to the output table.
- `bigram_counts`, `bigram_paths`: what a text's bigrams ask of such a path.
- `table_maps`, `align_tables`: are two tables alike, after which map, and by chance.
- `token_rows`, `token_texts`: a table's rows, what tokens read as.
"""
