"""Names of `tiewise.lab` by module: type checkers and `core/lazy_names.py` read them here."""

from tiewise.core.errors import DataError as DataError
from tiewise.core.errors import PlanError as PlanError
from tiewise.core.errors import RunError as RunError
from tiewise.inspection.inspection import Inspection as Inspection
from tiewise.inspection.running.passages import Healed as Healed
from tiewise.lab.catalogue import public_models as public_models
from tiewise.lab.exercises.reading import CheckedAnswer as CheckedAnswer
from tiewise.lab.exercises.reading import Exercises as Exercises
from tiewise.lab.exercises.reading import exercise as exercise
from tiewise.lab.runs import compare as compare
from tiewise.lab.runs import heal as heal
from tiewise.lab.runs import train as train
from tiewise.lab.studies import sweep as sweep
from tiewise.lab.vocabulary import hot_vocabulary as hot_vocabulary
from tiewise.planning.read_config import Sizes as Sizes
from tiewise.report.explorer.page import Explorer as Explorer
from tiewise.report.explorer.page import explore as explore
from tiewise.report.views import inspect as inspect
from tiewise.training.data.hot_tokens import HotTokens as HotTokens
from tiewise.training.results import Comparison as Comparison
from tiewise.training.results import SingleRun as SingleRun
from tiewise.training.study.study import Study as Study
