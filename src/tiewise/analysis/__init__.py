"""What tables and texts show without running a model: numpy alone, no torch.

- `model_ends`, `token_table`: the two tables of a checkpoint, read in pieces.
- `open_path`, `path_matrix`, `path_tokens`: the direct path from the input table to the output table.
- `bigram_counts`, `bigram_paths`, `bigram_maps`: what a text's bigrams ask of such a path.
- `align_tables`: are two tables alike, after which map, and by chance; `estimates`: values with their intervals.
- `single_rows`, `row_directions`, `token_contexts`: rows, one by one and all together.
"""
