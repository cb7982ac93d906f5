"""Input embedding and output head of a model, built as a spec says.

They are a module (`Boundary`) or are installed into a Hugging Face model.

- `boundary`: `Boundary`, the tables with the maps between tables and body.
- `installation`: `install(model, spec)` and its handle `Installed`. It works in these steps: `locate` finds the input
  embedding and the output head, `restructure` sets their tables, `declare_tying` declares them in the config, `link`
  swaps their classes, `verify` compares the result with the family's plain classes. `saved` saves and loads such
  models.
- `deferred`: logits that are only computed when they are needed; `recorded_logits`, `logit_answers` and
  `logit_gradients` are its parts.
- `vectors`: rows of pretrained word vectors.
"""

from tiewise.core.lazy_names import LazyNames

_names = LazyNames(__name__)
__getattr__, __dir__ = _names.get, _names.list
