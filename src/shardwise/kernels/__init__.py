"""What makes one device fast: attention choice, cross entropy in chunks, float8, compile regions, weights cast once.

Nothing here knows of ranks, of the loop or of a task.
"""
