"""Python imports this at its start. The import of JAX takes a fifth less time with it."""

import gc

gc.set_threshold(100_000, 50, 100)
