"""The synchronous algorithms, one per file. Each combines a schedule with a merge rule.

They import :mod:`jdaso.schedules` and :mod:`jdaso.core`. They do not depend on a network.
"""
