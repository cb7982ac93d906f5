"""Models that transformers does not have; importing this package teaches its auto classes to build and load them.

    import tiewise.models
    model = AutoModelForCausalLM.from_config(tiewise.models.RNNConfig(cell="lstm", hidden_size=200))
    installed = tiewise.install(model, "tied")

Explicit, as `import tiewise.hf` is: importing `tiewise` alone registers nothing.

- `rnn`: the recurrent language model, its layers and what they drop.
- `open_albert`: ALBERT with every choice open; weights from transformers'.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
)

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

AutoConfig.register(RNNConfig.model_type, RNNConfig, exist_ok=True)
AutoModelForCausalLM.register(RNNConfig, RNNLM, exist_ok=True)

AutoConfig.register(OpenAlbertConfig.model_type, OpenAlbertConfig, exist_ok=True)
AutoModel.register(OpenAlbertConfig, OpenAlbertModel, exist_ok=True)
AutoModelForPreTraining.register(OpenAlbertConfig, OpenAlbertForPreTraining, exist_ok=True)
AutoModelForMaskedLM.register(OpenAlbertConfig, OpenAlbertForPreTraining, exist_ok=True)
AutoModelForSequenceClassification.register(OpenAlbertConfig, OpenAlbertForSequenceClassification, exist_ok=True)

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
