"""Keys of engines: sampling, servers, weight sync, and what commands that generate share. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from taut.config import ComputeDtype, NotNegative, configclass
from taut.conflicts import conflict
from taut.data.settings import ReadAs
from taut.models.settings import CpuMatmulSetting
from taut.vision.settings import ImagesConfig

COLDEST = 1e-6
"""The lowest temperature but 0: logits divided by less may not fit into float32."""


@configclass
class Sampling:
    """Sampling of completions."""

    n: Annotated[int, Field(ge=1)] = 1
    """Completions of each prompt."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    """Maximum tokens of a completion; a longer one is cut."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Divides the logits; 0: always the most likely token."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep the k most likely tokens; 0: all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the fewest tokens that together have this probability."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Keep tokens at least this many times as likely as the most likely one."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Divides positive and multiplies negative logits of tokens that are in the prompt or the completion."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a completion, in addition to the model's own stop set."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the random streams; each prompt and sample has its own, whatever else is in the batch."""

    rules: ClassVar[str] = """
        temperature=0 excludes n>1: the same completion comes each time
    """

    def __post_init__(self) -> None:
        if 0 < self.temperature < COLDEST:
            remedy = f"expected at least {COLDEST:g}, or 0 for the most likely token; set one"
            raise conflict(self, "temperature", "it is too low to divide by", remedy)
        if any(not text for text in self.stop):
            raise conflict(self, "stop", "an empty text would stop at once", "leave it out")

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn from the model's own distribution."""
        return self.temperature == 1 and self.is_untruncated and self.repetition_penalty == 1

    @property
    def is_untruncated(self) -> bool:
        """Whether every token can be drawn."""
        return self.top_k == 0 and self.top_p == 1 and self.min_p == 0


Seconds: TypeAlias = Annotated[float, Field(gt=0, le=86400)]
HOST_NAME = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+)(?::\d{1,5})?")


@configclass
class HttpLimits:
    """Limits on what one client may use."""

    hosts: tuple[str, ...] = ()
    """Additional names of the server in the Host header. The loopback's names, host, and the address of the connection
    are always accepted. Other names are refused, since a web page can choose them."""
    max_connections: Annotated[int, Field(ge=1, le=10_000)] = 256
    """Maximum concurrent requests; at this number only GET /health is answered (others: 503). 32 more connections may
    be open; a further one replaces the one that has waited longest without a request."""
    max_url_bytes: Annotated[int, Field(ge=16)] = 2048
    """Maximum length of the request target (414)."""
    max_header_bytes: Annotated[int, Field(ge=256)] = 2**14
    """Maximum size of request line and headers (431)."""
    max_request_bytes: Annotated[int, Field(ge=1)] = 2**24
    """Maximum size of a request body (413). It needs a Content-Length: chunked bodies are refused (411)."""
    max_bytes_in_flight: Annotated[int, Field(ge=1)] = 2**26
    """Maximum size of all request bodies in memory; more are refused (503)."""
    header_seconds: Seconds = 10.0
    """Seconds to send a request's headers; then the connection is closed (408)."""
    body_seconds: Seconds = 30.0
    """Seconds to send a request's body (408)."""
    send_seconds: Seconds = 30.0
    """Seconds to read an answer; then the connection is closed."""
    idle_seconds: Seconds = 5.0
    """Seconds for which a connection stays open after an answer."""

    def __post_init__(self) -> None:
        if self.max_bytes_in_flight < self.max_request_bytes:
            remedy = "expected at least `max_request_bytes`; raise `max_bytes_in_flight`"
            why = "there is no room for one request"
            raise conflict(self, "max_bytes_in_flight max_request_bytes", why, remedy)
        for name in self.hosts:
            if not HOST_NAME.fullmatch(name):
                remedy = "expected names without scheme and path; correct it"
                raise conflict(self, "hosts", f"{name!r} is no host name", remedy)


@configclass
class LocalConfig:
    """The engine in this process."""

    sequences: Annotated[int, Field(ge=1)] = 64
    """Completions decoded at a time."""
    prefill_tokens: Annotated[int, Field(ge=1)] = 4096
    """Prompt tokens computed at a time; a longer prompt is computed alone."""
    packed_gib: NotNegative = 2.0
    """Memory in GiB for copies of weights that make decoding faster on a CPU, while a call generates; weights that are
    beyond it are used as they are. 0: no copies."""


@configclass
class ConversationConfig(LocalConfig):
    """The engine in this process, for conversations of several turns."""

    prefix_cache_gib: NotNegative = 2.0
    """Memory in GiB for the keys and values that are kept from turn to turn of a conversation, so that a turn computes
    only its new tokens; conversations that no turn reads are dropped first. 0: a turn computes its whole prompt."""


@configclass
class EndpointConfig:
    """Requests to an OpenAI-compatible endpoint."""

    name: str | None = None
    """Name of the model on the server; by default the only one that it serves."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key; none is sent by default."""
    timeout: Annotated[float, Field(gt=0)] = 120.0
    """Seconds a request may take."""
    retries: Annotated[int, Field(ge=0)] = 5
    """Maximum repetitions of a request that failed in transit, or that met a busy server."""
    backoff: Annotated[float, Field(ge=0)] = 0.5
    """Seconds before the first repetition; they double each time."""
    concurrency: Annotated[int, Field(ge=1)] = 32
    """Requests under way at a time, at each server."""


Transport = Literal["auto", "files", "nccl", "ipc"]


@configclass
class SyncConfig:
    """Transfer of the weights in training to the servers."""

    mode: Literal["auto", "full", "adapter"] = "auto"
    """Weights that are pushed. full: every weight, adapters merged. adapter: only the LoRA adapter. auto: the adapter
    where one is trained and the server can load it, else every weight."""
    folder: str | None = None
    """A folder with room for the weights that this process and the servers all see. By default one in /dev/shm that
    only the user who trains can read. Users who can read a folder named here can read the weights, unless every user
    can write in it."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds in which a server must load the weights."""
    sleep: bool = False
    """Whether the servers sleep while the model trains, for servers on the GPUs that train: their weights are then in
    the host's memory, and keys and values nowhere. Requires vLLM with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1,
    and rollout.lag=0."""
    transport: Transport = "auto"
    """Way of all weights to vLLM. files: through ``folder``. nccl, ipc: by vLLM's own transfer, with which the
    server was started: to other GPUs, or to a server on this process's GPU. auto: the server's own where it can be
    used, else files."""

    rules: ClassVar[str] = """
        transport=nccl|ipc excludes mode=adapter: it sends every weight
    """


@configclass
class ServerConfig(EndpointConfig):
    """OpenAI-compatible endpoints that take token ids (vLLM)."""

    sync: SyncConfig = field(default_factory=SyncConfig)


@configclass
class ModelUse:
    """The model, and the engine that runs it."""

    model: str
    """Directory of the model, or its hub name (owner/name, or owner/name@revision): weights for the local engine,
    tokenizer and template for both."""
    engine: Literal["local", "server"] = "local"
    """local: in this process. server: the endpoint at urls, which must serve this model."""
    urls: str | list[str] | None = None
    """Address of the server, as in http://127.0.0.1:8000/v1, or a list: requests are divided among the servers."""
    adapter: str | None = None
    """Directory of a LoRA adapter to put on the model, for the local engine; its tokenizer is used if it has one."""
    template: str | None = None
    """File with a chat template, in place of the tokenizer's own; or hermes, which comes with taut."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Values of the chat template's own variables, as in { enable_thinking = false }."""
    control_tokens: ReadAs = "as_control"
    """Reading of control tokens in the words of a row: as_control, or as_text."""
    dtype: ComputeDtype | None = None
    """The local engine's dtype; by default bfloat16 on a GPU that has it, else float32."""
    device: str = "auto"
    """The local engine's device: auto, cpu, cuda or cuda:N."""
    attention: str = "auto"
    """The local engine's attention: auto, reference, varlen or flex."""
    cpu_matmul: CpuMatmulSetting = "auto"
    """The local engine's library of float32 matrix products on a CPU: auto (measured), mkl or onednn."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    images: ImagesConfig = field(default_factory=ImagesConfig)
    """Pictures in prompts."""
    local: LocalConfig = field(default_factory=LocalConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    rules: ClassVar[str] = """
        server.sync unread: nothing is trained here, and the server keeps its weights
        engine=server needs urls=http://HOST:PORT/v1[urls]: urls are where servers answer
        adapter excludes engine=server: the server has to serve the adapter, named with `server.name`
        local dtype device attention cpu_matmul needs engine=local
        urls server needs engine=server
    """


@configclass
class JudgeUse:
    """The reward model, and how it runs."""

    model: str
    """Directory (or hub name) of the reward model."""
    template: str | None = None
    """File with a chat template, in place of the tokenizer's own."""
    dtype: ComputeDtype | None = None
    """Dtype of the computation; by default bfloat16 on a GPU that has it, else float32."""
    device: str = "auto"
    """Device: auto, cpu, cuda or cuda:N."""
    attention: str = "auto"
    """Attention backend: auto, reference, varlen or flex."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    images: ImagesConfig = field(default_factory=ImagesConfig)
    """Pictures in what is scored."""
    tokens_per_batch: Annotated[int, Field(ge=1)] = 16384
    """Tokens computed at a time; a longer sample is computed alone."""
