"""One small reader per model type: a config to an `Architecture`.

A reader knows what transformers' class of that type builds, to the parameter, and nothing of budgets.
"""
