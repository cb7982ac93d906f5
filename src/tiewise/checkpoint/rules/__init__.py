"""The rules: every file here is found by itself. Ids never change their meaning, and are never used again."""
