"""Parameters that the processes of one node share in memory: the third meeting place."""
