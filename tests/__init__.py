"""The tests of kvstore. One package, so that modules of the same name in its parts don't clash."""
