"""Every private name of PyTorch that shardwise uses, and the range of versions that it is tested on.

A private name may change or go with any version of PyTorch. Each is imported or wrapped here, with a sentence on what it is
for and the versions it was seen on; the rest of shardwise uses the public names of this room. A test holds that.
"""
