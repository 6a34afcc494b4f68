"""``python -m jdaso`` with the arguments given, as a child program."""

from jdaso.__main__ import main

main()
