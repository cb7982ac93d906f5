"""Models that transformers does not have; importing this package teaches its auto classes to build and load them.

    import tiewise.models
    model = AutoModelForCausalLM.from_config(tiewise.models.RNNConfig(cell="lstm", hidden_size=200))
    installed = tiewise.install(model, "tied")

Explicit, as `import tiewise.hf` is: importing `tiewise` alone registers nothing.

- `rnn`: the recurrent language model, its layers and what they drop.
- `open_albert`: ALBERT with every choice open; weights from transformers'.
"""

from typing import Any

import transformers

from tiewise.models.open_albert import (
    OpenAlbertConfig,
    OpenAlbertForPreTraining,
    OpenAlbertForSequenceClassification,
    OpenAlbertModel,
    OpenAlbertOutput,
    from_hugging_face,
    preset,
    to_hugging_face,
)
from tiewise.models.rnn import RNNLM, RNNConfig, RNNOutput, State, detached

_MODELS: dict[str, Any] = {
    "AutoModelForCausalLM": RNNLM,
    "AutoModel": OpenAlbertModel,
    "AutoModelForPreTraining": OpenAlbertForPreTraining,
    "AutoModelForMaskedLM": OpenAlbertForPreTraining,
    "AutoModelForSequenceClassification": OpenAlbertForSequenceClassification,
}
for _auto, _model in _MODELS.items():
    _config = _model.config_class
    transformers.AutoConfig.register(_config.model_type, _config, exist_ok=True)
    getattr(transformers, _auto).register(_config, _model, exist_ok=True)

__all__ = [
    "RNNLM",
    "OpenAlbertConfig",
    "OpenAlbertForPreTraining",
    "OpenAlbertForSequenceClassification",
    "OpenAlbertModel",
    "OpenAlbertOutput",
    "RNNConfig",
    "RNNOutput",
    "State",
    "detached",
    "from_hugging_face",
    "preset",
    "to_hugging_face",
]
