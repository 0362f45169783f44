"""The pure parts: pytrees in, pytrees out; no state, nothing of the host."""

from jaxinfer.compute.cache import init_cache
from jaxinfer.compute.decoder import Decoder, stack_layers
from jaxinfer.compute.generate import generate
from jaxinfer.compute.prefill_batch import make_prefill_batch
from jaxinfer.compute.sampling_state import make_sampling_state
from jaxinfer.compute.steps import (
    decode_step,
    decode_window,
    prefill_step,
    start_decode,
)
from jaxinfer.compute.types import (
    DecodeState,
    KVCache,
    Logprobs,
    PrefillBatch,
    SamplingState,
    StepOutput,
)

__all__ = [
    "DecodeState",
    "Decoder",
    "KVCache",
    "Logprobs",
    "PrefillBatch",
    "SamplingState",
    "StepOutput",
    "decode_step",
    "decode_window",
    "generate",
    "init_cache",
    "make_prefill_batch",
    "make_sampling_state",
    "prefill_step",
    "stack_layers",
    "start_decode",
]
