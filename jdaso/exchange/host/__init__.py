"""Moves arrays between the devices of a process and host memory. Imports no other exchange code."""
