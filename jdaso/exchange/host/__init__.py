"""Moves arrays between the devices of a process and host memory. Imports no other exchange code.

All exchange code, and the entries that may import :mod:`jdaso.exchange`, may import it.
"""
