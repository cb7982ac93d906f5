import shutil

import pytest

from tiewise.boundary.ops import compiled_kernels as compiled


@pytest.fixture(scope="session")
def kernel_library(tmp_path_factory):
    """Return a cache folder that has a compiled library: the user's, or one made for the session."""
    if compiled._unsupported_reason() or shutil.which("g++") is None:
        pytest.skip(compiled._unsupported_reason() or "no g++")
    with pytest.MonkeyPatch.context() as patch:
        if not list((compiled.cache_folder() / "kernels").glob(f"{compiled._key()}-*.so")):
            patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("built")))
            compiled.build()
        return compiled.cache_folder().parent
