"""Models that transformers lacks (`tiewise.training.models`)."""

from tiewise.training.models import RNNLM as RNNLM
from tiewise.training.models import OpenAlbertConfig as OpenAlbertConfig
from tiewise.training.models import OpenAlbertForPreTraining as OpenAlbertForPreTraining
from tiewise.training.models import OpenAlbertForSequenceClassification as OpenAlbertForSequenceClassification
from tiewise.training.models import OpenAlbertModel as OpenAlbertModel
from tiewise.training.models import OpenAlbertOutput as OpenAlbertOutput
from tiewise.training.models import RNNConfig as RNNConfig
from tiewise.training.models import RNNOutput as RNNOutput
from tiewise.training.models import State as State
from tiewise.training.models import detached as detached
from tiewise.training.models import from_hugging_face as from_hugging_face
from tiewise.training.models import preset as preset
from tiewise.training.models import to_hugging_face as to_hugging_face
