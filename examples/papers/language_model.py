"""Trains a language model on several nodes with DiLoCo or another algorithm of jdaso.

    mpiexec -n 2 python examples/papers/language_model.py --sync streaming_diloco --devices 2
    srun -K python examples/papers/language_model.py \\
        --config examples/papers/configs/text_150m_streaming.py \\
        --data /data/text --out runs/text --resume

A node trains a transformer with AdamW on its own part of the text. --sync selects how parameters
are averaged between nodes. Without --data, the text is the source of Python's standard library. The
training loop, the algorithms and most options are those of train.py.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import final_model
import jax
import jax.numpy as jnp
import loop
import numpy as np
import optax
from config import DECAY, DELAYED, OPTIMIZERS, OUTER, SYNC, Config, key, parse
from flax import nnx
from language import text, transformer
from steps import Task

#: The algorithms and their defaults, where they differ from those of images.
SYNC_OF_TEXT = {
    "diloco": {"period": 30, "delay": 0, "own_weight": 0.0, **OUTER, **DELAYED},
    "streaming_diloco": {
        **{"period": 30, "delay": 5, "own_weight": 0.5, **OUTER, **DELAYED},
        **{"outer_rate": 0.4, "fragments": 2, "wire": "float4"},
    },
    "daso": {**SYNC["daso"], "period": 2, "delay": 1, "cooldown_epochs": 1},
    "dasgd": {**SYNC["dasgd"], "period": 2, "delay": 1},
    "local_sgd": {**SYNC["local_sgd"], "period": 30},
    "post_local_sgd": {**SYNC["post_local_sgd"], "period": 30},
    "delta_rule": {**SYNC["delta_rule"], "period": 2, "delay": 1},
    "easgd": {**SYNC["easgd"], "period": 30},
    "allreduce_gradients": SYNC["allreduce_gradients"],
    "none": SYNC["none"],
}


@dataclass(frozen=True)
class Language(Config):
    """The keys of language_model.py. An epoch is what lies between two evaluations."""

    CHOOSERS: ClassVar[dict[str, dict[str, dict[str, Any]]]] = {
        "sync": SYNC_OF_TEXT,
        "optimizer": OPTIMIZERS,
        "decay": {**DECAY, "cosine": {"decay_floor": 0.05}},
    }

    sync: str = key("diloco", "algorithm between nodes", tuple(SYNC_OF_TEXT))
    data: str = key("python", "python (its standard library), or a folder of text files")
    tokenizer: str = key("bytes", "bytes, or a JSON file of the package tokenizers")
    context: int = key(128, "tokens of a sequence", "[2, inf)")
    epoch_tokens: int = key(2**17, "tokens of all nodes between two evaluations", "[1, inf)")
    test_tokens: int = key(2**15, "most tokens of an evaluation", "[1, inf)")
    layers: int = key(6, "blocks of the transformer", "[1, inf)")
    width: int = key(128, "length of the vectors between blocks", "[2, inf)")
    heads: int = key(4, "attention heads", "[1, inf)")
    hidden: int = key(344, "length of the vectors in a SwiGLU", "[1, inf)")
    remat: bool = key(False, "compute activations again in the backward pass")


def create_model(config: Language, vocabulary: int) -> transformer.Transformer:
    """Creates the model of a configuration with its initial parameters."""
    shape = (vocabulary, config.layers, config.width, config.heads, config.hidden)
    rngs = nnx.Rngs(jax.random.key(config.seed, impl="rbg"))  # compiles fast, see models.py
    dtype = jnp.dtype(config.compute_dtype)
    return transformer.Transformer(transformer.Shape(*shape), rngs, dtype, config.remat)


def task(config: Language) -> Task:
    """Creates text, model and loss of a configuration."""
    if (config.fragments or 1) > config.layers:
        raise SystemExit(
            f"--fragments must not exceed --layers {config.layers}, got {config.fragments}."
        )
    tokenizer = text.tokenizer(config.tokenizer)
    loaded = text.load(config.data, tokenizer)
    sequences = text.dataset(loaded, config.context, config.epoch_tokens, config.test_tokens)
    model = create_model(config, tokenizer.vocabulary)

    def losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))

    def counts(logits: jax.Array, labels: jax.Array) -> jax.Array:
        known = labels >= 0
        return jnp.stack([jnp.sum(losses(logits, labels) * known), known.sum()])

    def score(counts: np.ndarray) -> dict[str, float]:
        nats = float(counts[0] / counts[1])
        bits = nats / math.log(2) / loaded.bytes_per_token
        return {"test_loss": nats, "test_bits_per_byte": bits}

    return Task(
        sequences,
        model,
        loss=lambda logits, labels: losses(logits, labels).mean(),
        counts=counts,
        score=score,
        tokens=config.context,
        cut=transformer.strided_fragments,
    )


def load(out: str) -> tuple[nnx.Module, text.Tokenizer]:
    """The model that a training in this folder ended with, and its tokenizer."""
    keys = parse(["--config", f"{out}/config.json"], defaults=DEFAULTS)
    tokenizer = text.tokenizer(keys.tokenizer)
    return final_model.load(out, create_model(keys, tokenizer.vocabulary)), tokenizer


DEFAULTS = Language(
    epochs=10,
    batch_size=8,
    optimizer="adamw",
    learning_rate=3e-3,
    warmup_epochs=1,
    weight_decay=0.1,
    clip=1.0,
    out="runs/language_model",
)

if __name__ == "__main__":
    sys.exit(loop.run(parse(description=__doc__, defaults=DEFAULTS), task))
