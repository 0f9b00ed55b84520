"""Layouts: what they can express, refuse, and how they are named."""
