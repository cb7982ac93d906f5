"""The verbs, one file each: the file's name is the verb's, and `tiewise.checkpoint.rewrite` offers its function."""
