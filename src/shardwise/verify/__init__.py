"""After the run, or before it: proof that N ranks compute what one process would, and that nothing is lost.

Everything here watches `Session` from outside. Nothing but the command line imports it.
"""
