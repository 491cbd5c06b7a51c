"""`task: chess`: next-move prediction with any Hugging Face causal language model.

task.py is the task; config.py its blocks; model.py builds the model. Games on their way to a batch: files.py reads files,
movetext.py texts, moveword.py their words, examine.py checks them, kept.py keeps what was checked, games.py divides them into
training and validation; tokens.py makes tokens of them, cuts.py tells what that loses, and layout.py makes batches.
"""
