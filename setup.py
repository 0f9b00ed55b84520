"""Builds the native kernel; everything else about the package stands in ``pyproject.toml``."""

from setuptools import setup

setup(cffi_modules=["native/build_kernel.py:ffibuilder"])
