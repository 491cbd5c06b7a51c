"""`task: segmentation`: masks of 3D medical images, with any network of MONAI.

task.py is the task; config.py its blocks; subjects.py finds the files, check.py checks them, volumes.py reads and caches them;
network.py builds the network; dice.py and overlays.py are what is measured and shown.
"""
