"""Python imports this module at its start, from PYTHONPATH: the process cannot import Pallas-Triton."""

import sys

sys.modules.update(dict.fromkeys(("jax.experimental.pallas.triton", "jax._src.pallas.triton")))  # type: ignore[arg-type]
