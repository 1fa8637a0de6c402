"""Cases that several tests share."""
