"""One strategy, one file (or folder): all of it is in there, and no other file knows its name.

Who adds one: CONTRIBUTING.md, "How to add a strategy".
"""
