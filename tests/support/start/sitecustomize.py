"""Makes the import of JAX a fifth faster, by fewer searches for cyclic garbage.

Python imports this module when it starts.
"""

import gc

gc.set_threshold(100_000, 50, 100)
