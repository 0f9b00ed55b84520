"""One driver a file: how a peer saves and restores. They run in the peers' own Python and import nothing of kvstore."""
