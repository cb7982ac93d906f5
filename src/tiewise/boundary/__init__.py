"""The two ends of a model as a spec says: as a module of your own, or installed into a Hugging Face model.

- `boundary`: `Boundary`, tables and the two verbs that touch the vocabulary; `maps`: what stands between.
- `install`: `install(model, spec)` and its handle `Installed`. From the bottom: `locate` finds a model's ends,
  `structure` gives them tables and says so in the config, `link` swaps their classes, `deferred` is logits that are not
  computed, `verify` runs the result against the family's own classes, `saved` lets such models be saved and loaded.
- `vectors`: rows of pretrained word vectors.
"""
