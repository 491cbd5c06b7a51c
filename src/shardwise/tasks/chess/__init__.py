"""`task: chess`: next-move prediction with any Hugging Face causal language model.

task.py is the task; config.py its blocks; games.py, tokens.py and layout.py make batches of games; model.py builds the model.
"""
