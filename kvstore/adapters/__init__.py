"""Adapters: one package for each inference engine. Importing this one imports none of them."""
