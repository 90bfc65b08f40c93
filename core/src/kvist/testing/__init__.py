"""The conformance kit: what an author of a plugin runs against it, and what the parts of the kit are made of.

``pip install 'kvist[testing]'``. Nothing outside this package imports it, and it imports itself on demand only: pytest
loads :mod:`kvist.testing.plugin` in every run of an environment.
"""
