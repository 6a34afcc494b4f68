"""Asynchronous workers around a centre: see ``jdaso.mpi_center``, and in turns, here."""

from jdaso._center import Rule as Rule
from jdaso.center._turns import Cluster as Cluster
from jdaso.center._turns import gather as gather
from jdaso.center._turns import random_order as random_order
from jdaso.center._turns import read as read
from jdaso.center._turns import round_robin as round_robin
from jdaso.center._turns import take_turns as take_turns

__all__ = ["Cluster", "Rule", "gather", "random_order", "read", "round_robin", "take_turns"]
