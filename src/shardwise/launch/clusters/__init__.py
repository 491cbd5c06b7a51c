"""What starts ranks besides shardwise itself: one file each. cluster.py says what each must tell; other packages add theirs."""
