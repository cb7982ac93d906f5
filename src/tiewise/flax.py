"""Public names of the boundary in JAX (`tiewise.boundary.flax`)."""

from tiewise.boundary.flax.boundary import LinenBoundary as LinenBoundary
from tiewise.boundary.flax.boundary import NNXBoundary as NNXBoundary
from tiewise.boundary.flax.boundary import PureBoundary as PureBoundary
from tiewise.boundary.flax.find_tables import check_ends as check_ends
from tiewise.boundary.flax.find_tables import find_tables as find_tables
from tiewise.boundary.flax.loss import linear_cross_entropy as linear_cross_entropy
from tiewise.boundary.flax.models import tied_io_embed as tied_io_embed
from tiewise.boundary.flax.parameter_files import load as load
from tiewise.boundary.flax.parameter_files import save as save
from tiewise.boundary.flax.paths import enter as enter
from tiewise.boundary.flax.paths import path_norms as path_norms
from tiewise.boundary.flax.paths import probe as probe
