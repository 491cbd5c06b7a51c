"""`task: cells`: masked-gene pretraining of a transformer on single-cell data.

task.py is the task; config.py its blocks; corpus.py opens the data, from h5ad files or a sharded copy; tokens.py makes batches of
it; model.py and export.py are the encoder and what is written of it.
"""
