"""Text for a language model: the source of Python's standard library, or a folder of files."""

from __future__ import annotations

import functools
import itertools
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from data import Dataset, Split

from jdaso.core.command_line import local_path

HELD_OUT = 20  # one part of so many is never trained on
NOT_IN_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
BINARY_WITHIN = 8192  # bytes at the start of a file; a zero among them marks a binary file


class Tokenizer(NamedTuple):
    """Converts between bytes and tokens.

    Attributes:
        vocabulary: Number of different tokens.
        encode: ``bytes -> array of unsigned integers``.
        decode: ``array -> bytes``.
    """

    vocabulary: int
    encode: Callable[[bytes], np.ndarray]
    decode: Callable[[np.ndarray], bytes]


class Text(NamedTuple):
    """The tokens for training, the tokens held out, and the bytes held out per token."""

    train: np.ndarray
    test: np.ndarray
    bytes_per_token: float
    fingerprint: int


def byte_tokenizer() -> Tokenizer:
    """Each byte is a token.

    >>> byte_tokenizer().encode(b"def").tolist()
    [100, 101, 102]
    """

    def encode(text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8)

    def decode(tokens: np.ndarray) -> bytes:
        return np.asarray(tokens, np.uint8).tobytes()

    return Tokenizer(256, encode, decode)


def tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a configuration.

    Special tokens, truncation and padding of a file are not used: tokens stand for text only, and
    for all of it.

    Args:
        name: ``"bytes"``, or a JSON file of the package tokenizers.

    Raises:
        ValueError: If the file cannot be read.
        ImportError: If tokenizers is not installed.
    """
    if name == "bytes":
        return byte_tokenizer()
    path = str(local_path(name, "tokenizer"))
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(f"--tokenizer {name} needs: pip install tokenizers") from error
    try:
        loaded = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the package raises nothing more specific
        raise ValueError(f"tokenizer: {name} cannot be read: {error}") from error
    loaded.no_truncation()
    loaded.no_padding()

    def encode(text: bytes) -> np.ndarray:
        encoded = loaded.encode(text.decode(), add_special_tokens=False)
        return np.array(encoded.ids, np.uint32)

    def decode(tokens: np.ndarray) -> bytes:
        return loaded.decode(np.asarray(tokens).tolist(), skip_special_tokens=False).encode()

    # The numbers of the tokens may have gaps.
    return Tokenizer(1 + max(loaded.get_vocab().values(), default=-1), encode, decode)


def load(source: str, tokenizer: Tokenizer) -> Text:
    """Reads all files and cuts the last part off, which is held out.

    Files are in a random order, the same everywhere, so that both parts have text of all kinds.

    Args:
        source: ``"python"``, or a folder of text files, or one file.
        tokenizer: Makes the tokens.

    Raises:
        ValueError: If there is no text, if the tokenizer needs UTF-8 and a file is not UTF-8, or if
            the tokens do not stand for all of the text held out. Bits per byte would then be those
            of another text.
    """
    files = sorted(_library() if source == "python" else _files(local_path(source, "data")))
    texts = [text for text in map(_read, files) if text]
    if not texts:
        raise ValueError(f"data: {source} has no text file; give a folder with some.")
    order = np.random.default_rng(0).permutation(len(texts))
    joined = b"\n".join(texts[i] for i in order)
    end = len(joined) - len(joined) // HELD_OUT
    while end < len(joined) and joined[end] & 0xC0 == 0x80:  # within a character of UTF-8
        end += 1
    held_out = joined[end:]
    try:
        train, test = tokenizer.encode(joined[:end]), tokenizer.encode(held_out)
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(files)) from error
    _check_decoded(held_out, tokenizer.decode(test))
    return Text(train, test, len(held_out) / max(1, len(test)), zlib.crc32(joined) >> 1)


def _not_utf8(files: list[Path]) -> str:
    """Names the first file that is not UTF-8."""
    for path in files:
        try:
            _read(path).decode()
        except UnicodeDecodeError as error:
            return (
                f"data: {path} is not UTF-8 at byte {error.start}, so the tokenizer cannot encode "
                "it. Convert the file, remove it, or use --tokenizer bytes."
            )
    return "data: a file has changed while it was read."


def _check_decoded(text: bytes, decoded: bytes) -> None:
    """Raises ValueError if decoding does not give the text back."""
    if decoded == text:
        return
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, decoded, strict=False))
    place = sum(1 for _ in same)
    around = slice(max(0, place - 10), place + 20)
    raise ValueError(
        f"tokenizer: its tokens of the text held out, {len(text)} bytes, decode to another text of "
        f"{len(decoded)} bytes, so bits per byte would be wrong. At byte {place} "
        f"{text[around]!r} became {decoded[around]!r}. Give a tokenizer that loses nothing, such "
        "as a BPE of bytes (ByteLevel), or use --tokenizer bytes."
    )


def dataset(text: Text, context: int, epoch_tokens: int, test_tokens: int) -> Dataset:
    """Sequences of tokens with those that follow them, as images and labels.

    The training text is cut into as many stretches as an epoch has sequences. An epoch takes one
    sequence from each, at a random place, and each process has stretches of its own. An evaluation
    takes sequences at equal distances.

    Args:
        text: The tokens.
        context: Tokens of a sequence.
        epoch_tokens: Tokens of all processes between two evaluations.
        test_tokens: Most tokens of an evaluation.

    Raises:
        ValueError: If the text is too short, or if an epoch or evaluation has no sequence.
    """
    splits = []
    for name, tokens, wanted in (
        ("epoch_tokens", text.train, epoch_tokens),
        ("test_tokens", text.test, test_tokens),
    ):
        count = wanted // context
        if name == "test_tokens":
            count = min(count, (len(tokens) - 1) // context)
        if count < 1 or len(tokens) // count <= context:
            part = "training" if name == "epoch_tokens" else "held-out"
            raise ValueError(
                f"{name}: {wanted} tokens in sequences of {context} do not fit the {part} text of "
                f"{len(tokens)} tokens; choose fewer --{name.replace('_', '-')}, a shorter "
                "--context, or more text."
            )
        load = functools.partial(_sequence, tokens, context, len(tokens) // count)
        splits.append(Split(count, load, own_parts=True))
    return Dataset(*splits, num_classes=0, channels=0, fingerprint=text.fingerprint)


def _sequence(
    tokens: np.ndarray, context: int, stretch: int, index: int, rng: np.random.Generator | None
) -> tuple[np.ndarray, np.ndarray]:
    begin = index * stretch + (0 if rng is None else int(rng.integers(stretch - context)))
    window = tokens[begin : begin + context + 1].astype(np.int32)
    return window[:-1], window[1:]


def _library() -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in root.rglob("*.py"):
        if NOT_IN_LIBRARY.isdisjoint(path.relative_to(root).parts):
            yield path


def _files(root: Path) -> Iterator[Path]:
    if not root.exists():
        raise ValueError(f"data: {root} does not exist; give a folder of text files.")
    if root.is_file():
        yield root
    for path in root.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        if path.is_file() and not hidden:
            yield path


def _read(path: Path) -> bytes:
    """The bytes of a file, or nothing if it is binary."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"data: {path} cannot be read ({error.strerror}).") from error
    return b"" if 0 in text[:BINARY_WITHIN] else text
