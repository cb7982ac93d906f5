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

from tiewise.models.albert import (
    OpenAlbertForPreTraining,
    OpenAlbertForSequenceClassification,
    OpenAlbertModel,
    OpenAlbertOutput,
)
from tiewise.models.albert_config import OpenAlbertConfig, preset
from tiewise.models.recurrent import State, detached
from tiewise.models.rnn import RNNLM, RNNOutput
from tiewise.models.rnn_config import RNNConfig

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
    "preset",
]
