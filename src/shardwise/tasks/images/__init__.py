"""`task: images`: image classification with any Hugging Face model for it.

task.py is the task; config.py its blocks; sources.py opens a folder, a data set of the hub or made-up shapes; views.py makes of
them what the model sees; model.py builds the model.
"""
