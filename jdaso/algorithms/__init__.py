"""The synchronous algorithms, one per file. Each combines a schedule with a merge rule.

They import :mod:`jdaso.schedules` and :mod:`jdaso.core`. The entries :mod:`jdaso.center` and
:mod:`jdaso.perf` may import them. They do not depend on a network.
"""
