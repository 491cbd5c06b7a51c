"""A fire drill: a run of the user's own, with faults at random moments, and the proof that nothing was lost.

faults.py says what happens when, from a seed alone; inject.py does it, inside a rank; conduct.py trains with and without,
and measures; compare.py and report.py say what came of it. Nothing of training knows that it is being tried.
"""
