"""Checks the tokenizers against reference data: prints a table, exits with 1 on a mismatch.

FOLDER holds `tokenizers/goldens.json` ({"inputs": [...], "ids": {file: [[...], ...]}}) beside the
tokenizer files that it names, `tokenizers/ggml/*.gguf` with `.inp` and `.out`, and
`tokenizers/mistral/` (models and chats). `--gguf MODEL` also checks a model's GGUF file against
`refs/tok_shared.json` and `refs/shared.json`.

    python scripts/check_tokenizers.py FOLDER [--gguf MODEL.gguf]
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from base64 import b64decode
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from unicodedata import is_normalized

from gguf import GGUFReader

from jaxinfer.text import (
    IncrementalDetokenizer,
    Tokenizer,
    encode_chat,
    load_tokenizer,
    tokenizer_from_gguf,
    tokenizer_from_json,
    tokenizer_from_sentencepiece,
)
from jaxinfer.text.byte_level import BYTE_OF_CHARACTER

# (what was checked, how many were equal, of how many)
Row = tuple[str, int, int]
SEPARATOR = "\n__ggml_vocab_test__\n"


def main() -> int:
    """0 if everything is equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, help="the model that refs/ was made with")
    arguments = parser.parse_args()
    folder = arguments.folder / "tokenizers"
    rows = [*goldens(folder), *ggml(folder), *mistral(folder / "mistral")]
    if arguments.gguf:
        rows += model(arguments.folder / "refs", arguments.gguf)
    for name, equal, total in rows:
        print(f"{'ok  ' if equal == total else 'FAIL'}  {equal:4d} / {total:<4d}  {name}")
    return int(any(equal != total for _, equal, total in rows) or not rows)


def goldens(folder: Path) -> Iterator[Row]:
    """The ids of each golden whose tokenizer file is there."""
    data = json.loads((folder / "goldens.json").read_text(encoding="utf-8"))
    for name, expected in data["ids"].items():
        if not (folder / name).is_file():
            continue
        tokenizer = _open(folder / name)
        # Qwen's tokenizer composes characters; the ranks alone, which made the goldens, do not.
        pairs = [
            (text, ids)
            for text, ids in zip(data["inputs"], expected, strict=True)
            if not name.endswith(".tiktoken") or is_normalized("NFC", text)
        ]
        plain = [tokenizer.encode(text, add_special=False) == ids for text, ids in pairs]
        yield f"goldens.json  {name}", sum(plain), len(plain)
        yield (
            f"streamed == decoded  {name}",
            sum(_streams(tokenizer, i) for _, i in pairs),
            len(pairs),
        )


def ggml(folder: Path) -> Iterator[Row]:
    """The ids of the .inp/.out pairs, from the vocabulary of the same name."""
    for file in sorted((folder / "ggml").glob("*.inp")):
        vocabulary = file.with_suffix("")
        if not vocabulary.is_file():
            continue
        tokenizer = tokenizer_from_gguf(_metadata(vocabulary))
        texts = file.read_text(encoding="utf-8").split(SEPARATOR)
        lines = file.with_suffix(".out").read_text(encoding="utf-8").splitlines()
        equal = [
            tokenizer.encode(text, add_special=False) == list(map(int, line.split()))
            for text, line in zip(texts, lines, strict=False)
        ]
        yield f"ggml  {file.stem}", sum(equal), len(equal)


def mistral(folder: Path) -> Iterator[Row]:
    """The ids of rendered chats, control tokens parsed, no second BOS."""
    for version in ("v1", "v2", "v3"):
        data = (folder / f"tokenizer.model.{version}").read_bytes()
        tokenizer = tokenizer_from_sentencepiece(data, {"legacy": False})
        equal = []
        for file in sorted(folder.glob(f"samples/*/text_{version}.txt")):
            text = file.read_text(encoding="utf-8").rstrip("\n")
            text = text.replace("▁", " ").replace("<0x0A>", "\n")
            expected = json.loads(
                file.with_name(f"tokens_{version}.json").read_text(encoding="utf-8")
            )
            equal.append(tokenizer.encode_rendered(text) == expected["tokens"])
        yield f"mistral samples  {version}", sum(equal), len(equal)


def model(folder: Path, file: Path) -> Iterator[Row]:
    """Ids, text, streamed pieces and chats of one model."""
    tokenizer = tokenizer_from_gguf(_metadata(file))
    items = json.loads((folder / "tok_shared.json").read_text(encoding="utf-8"))["items"]
    count = len(items)
    yield (
        "tok_shared.json  ids",
        sum(tokenizer.encode_rendered(i["text"]) == i["ids"] for i in items),
        count,
    )
    for key, skip in (("decoded", False), ("decoded_skip_special", True)):
        equal = [tokenizer.decode(i["ids"], skip_special=skip) == i[key] for i in items]
        yield f"tok_shared.json  {key}", sum(equal), count
    streamed = [_never_later(tokenizer, i["ids"], i["stream_pieces"]) for i in items]
    yield "tok_shared.json  stream_pieces, never later", sum(streamed), count

    prompts = json.loads((folder / "shared.json").read_text(encoding="utf-8"))["prompts"]
    chats = [p for p in prompts if p["kind"] == "chat"]
    equal = [encode_chat(tokenizer, p["messages"]) == p["prompt_ids"] for p in chats]
    yield "shared.json  chats", sum(equal), len(chats)
    equal = [tokenizer.encode_rendered(p["rendered"]) == p["prompt_ids"] for p in chats]
    yield "shared.json  rendered", sum(equal), len(chats)


def _open(file: Path) -> Tokenizer:
    """The tokenizer in `file`, by the kind of its name."""
    if file.name.endswith(".gz"):
        return tokenizer_from_json(gzip.decompress(file.read_bytes()).decode("utf-8"), {})
    if file.suffix == ".json":
        return load_tokenizer(file.parent)
    if file.suffix == ".tiktoken":
        return tokenizer_from_gguf(_from_ranks(file))
    return tokenizer_from_sentencepiece(file.read_bytes(), {})


def _metadata(file: Path) -> dict:
    return {key: field.contents() for key, field in GGUFReader(file).fields.items()}


def _from_ranks(file: Path) -> dict:
    """GGUF metadata for a file of (token, rank) lines."""
    ranks = {b64decode(a): int(b) for a, b in map(str.split, file.read_text().splitlines())}
    character = {byte: c for c, byte in BYTE_OF_CHARACTER.items()}
    tokens = ["".join(character[byte] for byte in token) for token in ranks]
    merges = [_merge(token, ranks) for token in ranks if len(token) > 1]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [
            " ".join("".join(character[b] for b in half) for half in merge) for merge in merges
        ],
    }


def _merge(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two parts that `token` is merged from."""
    parts = [token[n : n + 1] for n in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        n = joined.index(min(joined))
        parts[n : n + 2] = [parts[n] + parts[n + 1]]
    return parts


def _never_later(tokenizer: Tokenizer, ids: list[int], pieces: list[str | None]) -> bool:
    """Whether after each token at least the text of `pieces` is out, and all in all just that."""
    stream = IncrementalDetokenizer(tokenizer, skip_special=False)
    ours = list(accumulate(map(stream.add, ids)))
    theirs = list(accumulate(piece or "" for piece in pieces))
    early = all(a.startswith(b) for a, b in zip(ours, theirs, strict=True))
    return early and "".join([*ours[-1:], stream.finish()]) == "".join(theirs[-1:])


def _streams(tokenizer: Tokenizer, ids: list[int]) -> bool:
    """Whether the joined deltas are the decoded text."""
    stream = IncrementalDetokenizer(tokenizer)
    return "".join([*map(stream.add, ids), stream.finish()]) == tokenizer.decode(ids)


if __name__ == "__main__":
    sys.exit(main())
