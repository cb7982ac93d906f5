"""The two ends of a model as a spec says: as a module of your own, or installed into a Hugging Face model.

- `boundary`: `Boundary`, tables and the two verbs that touch the vocabulary; `maps` is what stands between them and a body.
- `install`: `install(model, spec)` and the handle `Installed`, from the bottom: `locate` finds a model's ends, `structure`
  gives them tables and says so in the config, `link` swaps their classes, `deferred` is the logits that are not computed,
  `verify` runs the result against the family's own classes, `saved` is how such models are saved and loaded.
- `vectors`: rows of pretrained word vectors.
"""
