"""What pyproject.toml cannot say: configs/ stands at the root and is installed as anyqlora.configs."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["anyqlora*"]), "anyqlora.configs"], py_modules=[])
