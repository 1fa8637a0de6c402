"""Cases, oracles, interpreters and processes that the tests share."""
