"""Frozen configurations: what a model is, how its cache is cut, how the engine runs.

Fields and validation only; nothing here imports jax. Dtypes are names, one of `DTYPES`.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPES = tuple(DTYPE_BYTES)

# Every step finds that many of the most likely tokens for every row when one asks for any.
MAX_LOGPROBS = 128


def require(condition: bool, message: str) -> None:
    """Raises ValueError with `message` unless `condition` holds; a NaN comparison does not."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of one kind, by its published formula.

    Attributes:
        kind: "default", "linear" (positions divided by `factor`), "llama3", "yarn" or "longrope".
        theta: base of the geometric frequencies.
        dim: how many of a head's leading dimensions rotate (even).
        original_max_position: the context length the model was first trained for.
        attention_factor: what sin and cos are multiplied with; None takes the formula's own value.
        short_factor, long_factor: per-frequency divisors of "longrope", `dim / 2` of each.
    """

    kind: str = "default"
    theta: float = 10000.0
    dim: int = 64
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    attention_factor: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    KINDS = ("default", "linear", "llama3", "yarn", "longrope")

    def __post_init__(self):
        require(
            self.kind in self.KINDS,
            f"RopeConfig.kind={self.kind!r} is unknown. Known: {', '.join(self.KINDS)}.",
        )
        require(
            self.dim > 0 and self.dim % 2 == 0,
            f"RopeConfig.dim={self.dim} must be positive and even.",
        )
        for name in ("theta", "factor"):
            value = getattr(self, name)
            require(value > 0, f"RopeConfig.{name}={value} must be positive.")
        require(
            self.kind != "llama3" or self.low_freq_factor < self.high_freq_factor,
            f"RopeConfig.low_freq_factor={self.low_freq_factor} must be less than "
            f"high_freq_factor={self.high_freq_factor}.",
        )
        if self.kind == "longrope":
            for name in ("short_factor", "long_factor"):
                count = len(getattr(self, name))
                require(
                    count == self.dim // 2,
                    f"RopeConfig.{name} has {count} values; longrope of dim={self.dim} needs "
                    f"{self.dim // 2}.",
                )


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What may differ from layer to layer.

    Attributes:
        window: keys that a query sees, itself included; None: all.
        rope: the rotary embedding; None: the model's.
        use_rope: whether queries and keys rotate at all.
    """

    window: int | None = None
    rope: RopeConfig | None = None
    use_rope: bool = True

    def __post_init__(self):
        require(
            self.window is None or self.window >= 1,
            f"LayerKind.window={self.window} must be at least 1, or None.",
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a decoder is: static, hashable, the same whatever file it came from.

    Attributes:
        family: the row of `jaxinfer.models.FAMILIES` that reads its weights.
        num_kv_heads: divides `num_heads`; query head n reads kv head n // group_size.
        norm: "rms", or "layer" (mean subtracted, with a bias).
        norm_offset: norms multiply by this plus their weight.
        pre_norm, post_norm: whether attention and MLP have a norm before them, and one behind.
        parallel_residual: attention and MLP read the same residual stream, and both are added.
        shared_norm: of parallel ones the MLP reads what the attention's norm gave.
        qk_norm: "head": RMS norms over each query and key head; "projection": over all heads of a
            token together; None: none.
        gated_mlp: `down(act(gate(x)) * up(x))`, else `down(act(up(x)))`.
        rope: the rotary embedding of layers whose kind has none of its own.
        pattern: the kinds of the first layers, which repeat: layer i is of `kind(i)`.
        attention_scale: of the scores; None: 1 / sqrt(head_dim).
        attention_soft_cap, logits_soft_cap: `cap * tanh(x / cap)` of scores and of logits.
        embedding_scale, residual_scale, logits_scale: what embeddings, the outputs of attention and
            MLP, and logits are multiplied by.
        max_position: the longest context that is to be used, at most what the model was made for.
            LongRoPE's factors follow from it; an engine sets it to its max_model_len.
        bos_id: what begins a text, if anything; eos_ids: the ids that end one.
    """

    family: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: str = "rms"
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    pre_norm: bool = True
    post_norm: bool = False
    parallel_residual: bool = False
    shared_norm: bool = False
    qk_norm: str | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True
    activation: str = "silu"
    rope: RopeConfig = RopeConfig()
    pattern: tuple[LayerKind, ...] = (LayerKind(),)
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    tie_embeddings: bool = False
    max_position: int = 2048
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    NORMS = ("rms", "layer")
    QK_NORMS = (None, "head", "projection")

    def __post_init__(self):
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position",
        ):
            value = getattr(self, name)
            require(value >= 1, f"ModelConfig.{name}={value} must be at least 1.")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"ModelConfig.num_heads={self.num_heads} is not a multiple of "
            f"num_kv_heads={self.num_kv_heads}.",
        )
        for name, known in (("norm", self.NORMS), ("qk_norm", self.QK_NORMS)):
            value = getattr(self, name)
            require(
                value in known,
                f"ModelConfig.{name}={value!r} is unknown. Known: {', '.join(map(str, known))}.",
            )
        require(len(self.pattern) > 0, "ModelConfig.pattern is empty. Give it one LayerKind.")
        require(
            self.pre_norm or not self.shared_norm,
            "ModelConfig.shared_norm=True has no norm to share without pre_norm.",
        )
        dims = {rope.dim for rope in self.ropes if rope is not None}
        require(
            max(dims, default=0) <= self.head_dim,
            f"RopeConfig.dim={max(dims, default=0)} exceeds ModelConfig.head_dim={self.head_dim}.",
        )
        require(
            len(dims) <= 1, f"Rotary embeddings of one model must rotate as many dims, not {dims}."
        )

    @property
    def group_size(self) -> int:
        """Query heads per kv head, G."""
        return self.num_heads // self.num_kv_heads

    def kind(self, layer: int) -> LayerKind:
        """What distinguishes that layer."""
        return self.pattern[layer % len(self.pattern)]

    def rope_of(self, layer: int) -> RopeConfig | None:
        """The rotary embedding of that layer; None if it has none."""
        kind = self.kind(layer)
        return (kind.rope or self.rope) if kind.use_rope else None

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """The rotary embeddings of all layers, each once."""
        return tuple(dict.fromkeys(map(self.rope_of, range(self.num_layers))))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return tuple(self.kind(i).window for i in range(self.num_layers))

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes that one token's K and V take over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How the KV cache is cut into pages; `dtype` is that of the values it holds."""

    num_pages: int
    page_size: int = 32
    dtype: str = "bfloat16"

    def __post_init__(self):
        require(self.num_pages >= 1, f"CacheConfig.num_pages={self.num_pages} must be at least 1.")
        require(self.page_size >= 1, f"CacheConfig.page_size={self.page_size} must be at least 1.")
        require(
            self.dtype in DTYPES,
            f"CacheConfig.dtype={self.dtype!r} is not supported. "
            f"Choose one of {', '.join(DTYPES)}.",
        )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How many devices a model is spread over: `data * model`.

    Attributes:
        data: shards of requests; each has rows and pages of its own, and all of the weights.
        model: shards of heads, feed-forward columns and vocabulary.
    """

    data: int = 1
    model: int = 1

    def __post_init__(self):
        for name in ("data", "model"):
            value = getattr(self, name)
            require(
                isinstance(value, int) and value >= 1,
                f"ParallelConfig.{name}={value!r} must be an integer of at least 1.",
            )

    @property
    def num_devices(self) -> int:
        """Devices that it takes."""
        return self.data * self.model


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine runs.

    Attributes:
        max_model_len: most tokens (prompt and output) that one request may hold.
        max_num_seqs: rows of the decode batch.
        page_size: slots of a page; divides max_model_len.
        num_pages: pages of the pool; None: enough for every row at max_model_len.
        prefill_chunk: most prompt tokens that one prefill call computes.
        max_window: most decode steps in one dispatch.
        max_logprobs: most likely tokens whose log-probabilities a request may ask for.
        kv_dtype: of the cached keys and values; None: that of the params.
        prefix_cache: whether requests share the pages of equal beginnings.
        token_budget: most tokens of one step, one for each row that decodes and the rest for
            prefill; None: a whole chunk beside all rows.
        policy: "fcfs": first come, first served; "priority": requests of lower priority first.
        max_overtakes: later requests that may get their row before a waiting one, by priority.
        batch_invariant: give a request bitwise the same tokens and log-probabilities whatever else
            is computed and in whatever chunks; on CPU, and slower.
    """

    max_model_len: int = 2048
    max_num_seqs: int = 32
    page_size: int = 32
    num_pages: int | None = None
    prefill_chunk: int = 512
    max_window: int = 8
    max_logprobs: int = 20
    kv_dtype: str | None = None
    prefix_cache: bool = True
    token_budget: int | None = None
    policy: str = "fcfs"
    max_overtakes: int = 100
    batch_invariant: bool = False

    POLICIES = ("fcfs", "priority")

    def __post_init__(self):
        for name in (
            "max_model_len",
            "max_num_seqs",
            "page_size",
            "prefill_chunk",
            "max_window",
            "max_overtakes",
        ):
            value = getattr(self, name)
            require(
                isinstance(value, int) and value >= 1,
                f"EngineConfig.{name}={value!r} must be an integer of at least 1.",
            )
        require(
            isinstance(self.max_logprobs, int) and 0 <= self.max_logprobs <= MAX_LOGPROBS,
            f"EngineConfig.max_logprobs={self.max_logprobs!r} must be an integer in "
            f"0 .. {MAX_LOGPROBS}.",
        )
        require(
            self.max_model_len % self.page_size == 0,
            f"EngineConfig.page_size={self.page_size} does not divide "
            f"max_model_len={self.max_model_len}. Choose 16 or 32, "
            "or a max_model_len that is a multiple of it.",
        )
        require(
            self.num_pages is None or self.num_pages >= 1,
            f"EngineConfig.num_pages={self.num_pages} must be at least 1, or None.",
        )
        require(
            self.token_budget is None or self.token_budget > self.max_num_seqs,
            f"EngineConfig.token_budget={self.token_budget} must exceed "
            f"max_num_seqs={self.max_num_seqs}, so that prompts go on beside rows that decode.",
        )
        require(
            self.policy in self.POLICIES,
            f"EngineConfig.policy={self.policy!r} is unknown. Known: {', '.join(self.POLICIES)}.",
        )
        require(
            self.kv_dtype is None or self.kv_dtype in DTYPES,
            f"EngineConfig.kv_dtype={self.kv_dtype!r} is not supported. "
            f"Choose one of {', '.join(DTYPES)}.",
        )

    @property
    def pages_per_seq(self) -> int:
        """Width of a page table, M."""
        return self.max_model_len // self.page_size

    @property
    def cache(self) -> CacheConfig:
        """The cache that this engine needs."""
        return CacheConfig(
            num_pages=self.num_pages or self.max_num_seqs * self.pages_per_seq,
            page_size=self.page_size,
            dtype=self.kv_dtype or "bfloat16",
        )
