"""The two ends of a model as a spec says: as a module of your own, or installed into a Hugging Face model.

- `boundary`: `Boundary`, tables and the two verbs that touch the vocabulary; `maps`: what stands between.
- `install`: `install(model, spec)` and its handle `Installed`. It works in these steps: `locate` finds the input
  embedding and the output head, `restructure` gives them tables and declares them in the config, `link` swaps their
  classes, `verify` compares the result with the family's own classes. `saved` saves and loads such models.
- `deferred`: logits that are not computed until they are needed; `recorded_logits`, `logit_answers` and
  `logit_gradients` are its parts.
- `vectors`: rows of pretrained word vectors.
"""
