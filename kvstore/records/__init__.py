"""Bytes to records and back, purely: nothing here touches a file. Specified in docs/format.md."""
