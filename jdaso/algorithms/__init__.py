"""The synchronous algorithms, one per file. Each combines a schedule with a merge rule.

They do not depend on a network. ``defaults`` has what several of them share.
"""
