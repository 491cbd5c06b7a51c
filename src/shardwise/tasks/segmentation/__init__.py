"""`task: segmentation`: masks of 3D medical images, with any network of MONAI.

task.py is the task; config.py its blocks. subjects.py finds the files, nifti.py reads them, facts.py remembers what is in
them, check.py refuses what cannot be trained on, cautions.py warns of the rest; sides.py tells left from right. volumes.py
makes tensors and caches them. network.py builds the network; dice.py and overlays.py are what is measured and shown.
"""
