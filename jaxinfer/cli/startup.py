"""`Startup`: where the time from the command to the first token went."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Startup:
    """Seconds, by part.

    Attributes:
        import_s: of importing jax and the engine.
        load_s: of reading the checkpoint, or of making random weights.
        compile_s: until all `programs` were there, `cached_programs` of them from JAX's cache.
        first_token_s: from the first request until its first token.
    """

    import_s: float
    load_s: float
    compile_s: float
    programs: int
    cached_programs: int
    first_token_s: float | None

    @classmethod
    def of(
        cls,
        metrics: Mapping[str, Any],
        *,
        import_s: float,
        load_s: float,
        first_token_s: float | None,
    ) -> Startup:
        """That of an engine with these `metrics`."""
        names = ("compile_s", "programs", "cached_programs")
        counted = {name: metrics[name] for name in names}
        return cls(import_s=import_s, load_s=load_s, first_token_s=first_token_s, **counted)

    def __str__(self) -> str:
        first = "-" if self.first_token_s is None else f"{self.first_token_s:.2f} s"
        return (
            f"import {self.import_s:.2f} s, load {self.load_s:.2f} s, compile {self.compile_s:.2f} "
            f"s ({self.programs} programs, {self.cached_programs} of them from the cache), "
            f"first token {first}"
        )


def import_engine() -> float:
    """Seconds that importing jax and the engine takes, here and now."""
    start = time.perf_counter()
    import jaxinfer.engine.llm  # noqa: F401, PLC0415  (imports jax)

    return time.perf_counter() - start
