"""Cases, oracles, interpreters and processes that the tests share."""

from tests.support.processes import without_triton

without_triton.block()
