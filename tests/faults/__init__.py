"""Faults of files, made by a library that is loaded in front of the system's into a child process."""
