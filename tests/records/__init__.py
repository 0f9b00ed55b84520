"""Records: bytes to values and back, pinned byte for byte."""
