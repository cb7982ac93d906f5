"""Models that transformers does not have; importing this package teaches its auto classes to build and load them.

    import tiewise.models
    model = AutoModelForCausalLM.from_config(tiewise.models.RNNConfig(cell="lstm", hidden_size=200))
    installed = tiewise.install(model, "tied")

Explicit, as `import tiewise.hf` is: importing `tiewise` alone registers nothing.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
)

from tiewise.models.albert import AlbertForPreTraining, AlbertForSequenceClassification, AlbertModel, AlbertOutput
from tiewise.models.albert_config import AlbertConfig, preset
from tiewise.models.recurrent import State, detached
from tiewise.models.rnn import RNNLM, RNNOutput
from tiewise.models.rnn_config import RNNConfig

AutoConfig.register(RNNConfig.model_type, RNNConfig, exist_ok=True)
AutoModelForCausalLM.register(RNNConfig, RNNLM, exist_ok=True)

AutoConfig.register(AlbertConfig.model_type, AlbertConfig, exist_ok=True)
AutoModel.register(AlbertConfig, AlbertModel, exist_ok=True)
AutoModelForPreTraining.register(AlbertConfig, AlbertForPreTraining, exist_ok=True)
AutoModelForMaskedLM.register(AlbertConfig, AlbertForPreTraining, exist_ok=True)
AutoModelForSequenceClassification.register(AlbertConfig, AlbertForSequenceClassification, exist_ok=True)

__all__ = [
    "RNNLM",
    "AlbertConfig",
    "AlbertForPreTraining",
    "AlbertForSequenceClassification",
    "AlbertModel",
    "AlbertOutput",
    "RNNConfig",
    "RNNOutput",
    "State",
    "detached",
    "preset",
]
