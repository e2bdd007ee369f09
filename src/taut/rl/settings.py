"""Keys of rollouts: sampling, environments, forks, shaping of rewards, the critic, monitors. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from taut.config import Code, TakesCode, configclass
from taut.conflicts import conflict
from taut.inference.settings import ConversationConfig, Sampling, ServerConfig
from taut.io.console import counted
from taut.io.user_code import added_files, named_files
from taut.models.settings import CRITIC
from taut.train.settings import DefaultRates, OptimConfig, Pace

MCP = "mcp:"
"""Before the command or URL of an MCP server."""
TOOL_ENTRY_POINTS = "taut.tools"
"""Entry points of packages that add functions, each a tool by its name."""
ServiceName = Literal["piston", "e2b", "morph"]


@configclass
class Remote:
    """A service that runs programs on its machines. Programs, standard inputs, call arguments and asserts are sent to
    it; expected outputs and values are not."""

    service: ServiceName | None = None
    """The service: piston (a server of your own), e2b or morph. By default programs run on this machine. Programs and
    tests are sent to the service."""
    addresses: tuple[str, ...] = ()
    """URLs of the service's API. By default PISTON_ENDPOINTS (several, separated by commas), E2B_API_URL or
    https://api.e2b.app, MORPH_BASE_URL or https://cloud.morph.so/api. Several Piston servers take turns."""
    machines: str | None = None
    """E2B: URL at which machines are reached. By default E2B_SANDBOX_URL, or the address that E2B gives each one."""
    api_key_env: str | None = None
    """Environment variable with the key. By default E2B_API_KEY or MORPH_API_KEY, and none for Piston."""
    image: str | None = None
    """Piston: version of its Python package, * by default. E2B: template, code-interpreter-v1 by default. Morph:
    snapshot with python3, required."""
    concurrency: Annotated[int, Field(gt=0)] = 16
    """Programs that one process of taut runs at the service at a time. A reward worker is a process and runs one; calls
    of the tool python beyond this number wait for one another within their step's timeout."""
    wait_seconds: Annotated[float, Field(gt=0, le=1e6)] = 60.0
    """Seconds that the service may take for a program in addition to limits.total_seconds: starting machines, queues,
    retries."""

    rules: ClassVar[str] = """
        addresses machines api_key_env image concurrency wait_seconds needs service=piston|e2b|morph
        addresses=URL,URL[are_several] excludes service=e2b|morph: several URLs are for piston; expected one
        machines needs service=e2b
        service=morph needs image: a machine starts from a snapshot; expected the id of a snapshot that has python3;
            set `image`
    """

    @property
    def are_several(self) -> bool:
        """Whether there is more than one address."""
        return len(self.addresses) > 1


HERE = Remote()
"""No service: programs run on this machine."""
PROGRAM_SECONDS = 8.0
"""Time limit of a program of the tool ``python``, in seconds."""


@configclass
class AgentConfig:
    """Agents that are commands: how they get their keys, and whose requests are theirs."""

    key: Literal["environment", "descriptor"] = "environment"
    """The way in which an agent gets its key. environment: in OPENAI_API_KEY, where OpenAI's clients look for it.
    descriptor: in an open file whose number is in OPENAI_API_KEY_FD, which keeps it out of /proc."""
    callers: Literal["own", "any"] = "own"
    """Processes from which a key is accepted, functions' too: own, those that the agent started; any, for an agent that
    asks from a container or from a service that it did not start."""


def is_function(spec: str) -> bool:
    """Whether it names a function of a file, not a command."""
    file, _, name = spec.rpartition(":")
    return file.endswith(".py") and name.isidentifier() and not set(spec) & set(" \t\"'")


ENVIRONMENT_ENTRY_POINTS = "taut.environments"
"""Entry points of packages that add classes, each an environment by its name."""
GYM = "gym:"
"""Before the id of an environment of Gymnasium."""
AGENT = "agent:"
"""Before the command or function of an agent."""
VERIFIERS = "verifiers:"
"""Before the id of an environment of verifiers, which is an agent."""
ENVIRONMENT_COLUMN = "environment"
"""The column with the name of a row's environment."""


@configclass
class EnvironmentConfig:
    """The environment that answers the policy between its turns."""

    name: Annotated[str, TakesCode(AGENT)] | None = None
    """tools: the tools named below. FILE.py:Class: your own environment. gym:ENV_ID: one of Gymnasium's. agent:COMMAND
    or agent:FILE.py:function: an agent that asks the policy by itself. verifiers:ENV_ID: one of the library verifiers,
    which does so too. None: each completion is judged as it is."""
    by_row: dict[str, Annotated[str, TakesCode(AGENT)]] = field(default_factory=dict)
    """Several environments in place of name: by the name that a row has in its column environment, what name would be.
    They share the other keys."""
    tools: list[Code] = field(default_factory=list)
    """With name=tools: calculator, python, FILE.py:function with type hints and a docstring, or mcp:COMMAND or mcp:URL,
    the tools of an MCP server."""
    options: dict[str, Any] = field(default_factory=dict)
    """With name=gym:ENV_ID: the keywords of gymnasium.make. With name=verifiers:ENV_ID: those of its load_environment,
    or from verifiers 0.4 on its configuration."""
    max_turns: Annotated[int, Field(ge=1)] = 8
    """Maximum number of turns of the policy; then the trajectory is cut. Of an agent: of answers that it gets."""
    max_tokens: Annotated[int, Field(ge=1)] = 4096
    """Maximum number of tokens after the prompt; then the trajectory is cut. Of an agent: of each conversation after
    its first request; what is longer is refused."""
    timeout: Annotated[float, Field(gt=0)] = 30.0
    """Time limit of reset and of each step, in seconds. Of an agent: of its own time, all that it takes between answers
    and requests together."""
    workers: Annotated[int, Field(ge=1)] = 16
    """Number of steps that run in parallel."""
    remote: Remote = field(default_factory=Remote)
    """A service that runs the programs of the tool python instead of this machine."""
    agent: AgentConfig = field(default_factory=AgentConfig)

    rules: ClassVar[str] = """
        at most one of by_row name: a row has one environment
        tools needs name=tools by_row=tools: another environment has tools of its own
        name=tools by_row=tools needs tools=calculator[tools]: there is nothing to call
        options needs name=gym:ENV_ID|verifiers:ENV_ID[takes_options]
        max_turns max_tokens timeout workers needs name[is_on]
        remote needs tools=python: no other tool runs programs there
        agent.key agent.callers needs name=agent:COMMAND[agents]
    """

    def __post_init__(self) -> None:
        # a program that begins after half of the time must end within the rest
        program = PROGRAM_SECONDS
        program += 0.0 if self.remote.service is None else self.remote.wait_seconds
        least = 2 * program + 1
        if "python" in self.tools and self.timeout < least:
            why = f"a program may begin after half of the time and take {program:g} s"
            raise conflict(
                self, "timeout tools", why, f"expected {least:g} or more; raise `timeout`"
            )

    @property
    def names(self) -> list[str]:
        """The environments."""
        return [*self.by_row.values()] if self.name is None else [self.name]

    @property
    def is_on(self) -> bool:
        return bool(self.names)

    @property
    def takes_options(self) -> bool:
        return any(name.startswith((GYM, VERIFIERS)) for name in self.names)

    @property
    def asks(self) -> bool:
        """Whether prompts may be other than the rows': an environment may begin by itself, and an agent does."""
        return bool({*self.names} - {"tools"})

    @property
    def code(self) -> list[Path]:
        """The files of the user's own: FILE.py:NAME, and what installed packages add."""
        agents = [name.removeprefix(AGENT) for name in self.agents]
        kinds = (AGENT, GYM, MCP, VERIFIERS)
        own = [name for name in (*self.names, *self.tools) if not name.startswith(kinds)]
        own = [*filter(is_function, agents), *own]
        return [
            *named_files(own),
            *added_files(self.names, ENVIRONMENT_ENTRY_POINTS, "rollout.environment"),
            *added_files(self.tools, TOOL_ENTRY_POINTS, "rollout.environment"),
        ]

    @property
    def agents(self) -> list[str]:
        """The environments that ask the policy by themselves."""
        return [*filter(is_agent, self.names)]

    def is_agent(self, columns: Mapping[str, Any]) -> bool:
        """Whether an agent asks for a row with these columns."""
        name = (
            self.by_row.get(columns.get(ENVIRONMENT_COLUMN, ""), "")
            if self.name is None
            else self.name
        )
        return is_agent(name)


def is_agent(name: str) -> bool:
    """Whether the environment of this name asks the policy by itself."""
    return name.startswith((AGENT, VERIFIERS))


@configclass
class ForkConfig:
    """Paths that go on as several at the end of stated turns."""

    turns: list[Annotated[int, Field(ge=1)]] = field(default_factory=list)
    """Turns, from 1, at whose end a path goes on as n paths, after the environment has answered. Requires
    rollout.environment and grpo.advantage=tree. Empty: no path forks."""
    n: Annotated[int, Field(ge=2)] = 2
    """Paths that a path goes on as. rollout.n counts those at the end: it is a multiple of n to the number of turns."""
    state: Literal["copy", "replay"] = "copy"
    """How each of them gets an environment in the same state. copy: copy.deepcopy of the path's environment; replay: a
    new one, which is reset with the row and answers the same turns again, and has to answer the same."""

    rules: ClassVar[str] = """
        n state needs turns
    """

    def __post_init__(self) -> None:
        in_order = sorted(set(self.turns))
        if self.turns != in_order:
            why = "a turn is repeated, or not in its order"
            raise conflict(self, "turns", why, f"expected each once; set `turns`={in_order}")

    @property
    def is_on(self) -> bool:
        return bool(self.turns)

    @property
    def leaves(self) -> int:
        """Paths that one path has become after the last fork."""
        return int(self.n ** len(self.turns))


@configclass
class RolloutConfig:
    """Sampling of completions, and the number of steps that train on a rollout."""

    n: Annotated[int, Field(ge=1)] = 8
    """Completions per prompt: the size of a group."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    """Maximum number of tokens of a completion; then it is cut. With an environment: of each turn."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Sampling temperature. The logprobs that are trained on are at the same temperature. Tokens are sampled from the
    whole distribution: a truncated distribution (top-p, top-k, min-p) would bias the ratios."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a completion, in addition to the model's stop set."""
    minibatches: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps per pass over a rollout, which has batch.samples_per_step prompts for each of them. If fewer
    groups than that remain, some are trained on more than once."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over a rollout."""
    dynamic_sampling_rounds: Annotated[int, Field(ge=0)] = 0
    """Dynamic sampling (DAPO): number of rounds in which groups whose rewards are all equal are replaced by other
    prompts. Groups that are still without a signal are then left out, unless all are. Rewards are compared before
    shaping."""
    replay_groups: Annotated[int, Field(ge=0)] = 0
    """Number of groups of earlier rollouts that are trained on again with each new rollout, newest first. Only groups
    with a signal are kept."""
    lag: Annotated[int, Field(ge=0)] = 0
    """Generate while training: groups are taken as they finish, at most this many updates after their oldest token was
    sampled. 0: each rollout is generated with the weights that begin to train on it. Above 0 requires engine=server;
    which groups are taken then depends on what is fast, and a resume is not bit for bit."""
    oversample: Annotated[int, Field(ge=0)] = 0
    """Number of further prompts that are asked with each rollout: the first groups that finish are taken, the others
    cancelled. Favors short answers: how long those are that it drops is in the event rollout. Requires engine=server
    and lag=0, as with a lag the first groups that finish are taken anyway."""
    difficulty_filter: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Difficulty filtering: the probability that another prompt is asked in place of one whose last group taught
    nothing, all of its answers being right or all wrong (equal rewards). 0: prompts are asked alike."""
    max_staleness: Annotated[int, Field(ge=1)] | None = None
    """With replay_groups: maximum number of updates between the weights that sampled a group and those that are
    trained; older groups are not trained on again. None: no limit."""
    replay_from: str | None = None
    """The out directory of a run whose recorded rollouts are trained on instead of new ones: no engine is opened and
    nothing judged, and the keys for that, rewards among them, are not read. Advantages are computed anew."""
    reference: str | None = None
    """The column with the right answer. None: answers, answer, ..., or the last assistant message."""
    engine: Literal["local", "server"] = "local"
    """local: in this process, on the weights that train. server: at urls; the weights are sent to them."""
    urls: str | list[str] | None = None
    """URL of the server, as in http://127.0.0.1:8000/v1, or a list of URLs: requests are divided among the servers."""
    dtype: Literal["bfloat16"] | None = None
    """Compute dtype of the engine in this process, for a run with dtype=float32: rollouts in bfloat16 are faster on
    hardware that has its arithmetic. They are another model's than is trained, so the method has to correct for
    it (rollout_correction). None: the run's."""
    local: ConversationConfig = field(default_factory=ConversationConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    fork: ForkConfig = field(default_factory=ForkConfig)

    rules: ClassVar[str] = """
        urls needs engine=server: urls are where servers answer
        engine=server needs urls=http://HOST:PORT/v1[urls]: urls are where servers answer
        local needs engine=local
        server needs engine=server
        local.prefix_cache_gib needs environment.name[is_on]: answers of one turn keep nothing for a next one
        max_staleness needs replay_groups: only kept groups grow older, and `lag` says how old a group is at first
        dtype excludes engine=server: a server has a precision of its own
        lag excludes engine=local: the engine in this process cannot generate while its weights train
        lag excludes server.sync.sleep=true: servers that generate while the model trains cannot sleep meanwhile
        oversample excludes engine=local: the engine in this process computes all completions as one batch
        oversample excludes lag: with a lag the first groups that finish are taken anyway
        oversample excludes environment.name=agent:COMMAND[agents]: a cancelled trajectory does not end its agent
        difficulty_filter excludes n=1: a single answer has none that its reward could differ from; expected `n` of 2 or
            more; raise it, or leave `difficulty_filter` out
        fork.turns needs environment.name[is_on]: paths fork at the end of an environment's turns
        fork.turns excludes environment.name=agent:COMMAND[agents]: an agent branches by itself; expected another
            environment; name one, or leave `fork.turns` out
    """

    def __post_init__(self) -> None:
        updates, fork = self.updates, self.fork
        if self.lag % updates:
            raise conflict(
                self,
                "lag minibatches epochs",
                f"weights are sent every {updates} updates, so answers are 0, {updates}, {2 * updates}, ... old",
                f"expected a multiple of {updates}; set `lag`={-(-self.lag // updates) * updates}",
            )
        stalest = self.lag + updates - 1
        if self.max_staleness is not None and self.max_staleness < stalest:
            raise conflict(
                self,
                "max_staleness lag minibatches epochs",
                f"the last of {updates} updates on a rollout is {stalest} behind",
                f"expected {stalest} or more; raise `max_staleness`, or lower `lag`, `minibatches` or `epochs`",
            )
        if fork.is_on and fork.turns[-1] >= self.environment.max_turns:
            raise conflict(
                self,
                "fork.turns environment.max_turns",
                f"no turn comes after turn {fork.turns[-1]}",
                "expected turns before the last; lower `fork.turns`, or raise `environment.max_turns`",
            )
        if fork.is_on and self.n % fork.leaves:
            raise conflict(
                self,
                "n fork.n fork.turns",
                f"`n` counts paths at their end, and one that begins becomes {fork.leaves}",
                f"expected a multiple; set `n`={-(-self.n // fork.leaves) * fork.leaves}",
            )

    @property
    def grows(self) -> int:
        """Maximum number of tokens of a trajectory after its prompt."""
        return self.environment.max_tokens if self.environment.is_on else self.max_new_tokens

    @property
    def updates(self) -> int:
        """Optimizer steps per rollout."""
        return self.minibatches * self.epochs

    def sampling(self, seed: int) -> Sampling:
        """Return how the engine samples. ``seed``: of the phase."""
        return Sampling(
            n=self.n,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            stop=self.stop,
            seed=seed,
        )

    def describe(self, num_steps: int, samples_per_step: int) -> str:
        """Return the plan of a run in a sentence."""
        num_prompts = counted(samples_per_step * self.minibatches, "prompts")
        plan = (
            f"{counted(num_steps, 'steps')}, {self.updates} on each rollout: {num_prompts}, "
            f"{counted(self.n, 'completions')} each, of at most {counted(self.grows, 'tokens')}"
        )
        if self.fork.is_on:
            turns = ", ".join(map(str, self.fork.turns))
            plan += f"; a path goes on as {self.fork.n} at the end of turn {turns}"
        return plan if self.replay_from is None else f"{plan}; recorded by {self.replay_from}"


@configclass
class ShapingConfig:
    """Shaping of rewards before they are compared, in this order."""

    missing_eos_penalty: Annotated[float, Field(ge=0)] = 0.0
    """Penalty for a completion that was cut before its end."""
    soft_overlong: Annotated[int, Field(ge=1)] | None = None
    """Soft overlong punishment (DAPO): a penalty that begins this many tokens before the limit and falls to -1 at the
    limit, rollout.max_new_tokens or, with an environment, rollout.environment.max_tokens. None: no penalty."""
    length_penalty: Annotated[float, Field(ge=0)] = 0.0
    """Penalty for a completion as long as that limit; in proportion for shorter ones."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Clip range: rewards are clipped to [-clip, clip]. None: no clipping."""
    scale: Literal["none", "batch", "running"] = "none"
    """Divide rewards by their standard deviation: of the rollout (batch), or of all rollouts so far (running)."""
    overlong: Literal["keep", "drop"] = "keep"
    """drop: completions that were cut are compared with the others, but not trained on (DAPO's overlong filter)."""


CRITIC_RATES = DefaultRates(1e-5, 1e-4, "verl 1e-5; OpenRLHF 9e-6")
"""Taken where neither ``critic.learning_rate`` nor ``optim.learning_rate`` is set."""


@configclass
class CriticConfig:
    """The critic of PPO: it predicts the return of a state."""

    kind: Literal["own", "shared"] = "own"
    """own: a separate model; shared: a head on the policy's hidden states, which costs almost nothing."""
    model: str | None = None
    """For kind=own: directory (or hub name) of a reward model, whose head is kept, or of a language model, with the
    policy's tokenizer. None: the model that the policy starts from."""
    head: Literal["zero", "normal"] | None = None
    """Initialization of the head: 0, or N(0, 1 / (D + 1)). None: the reward model's head, else 0."""
    lora_rank: Annotated[int, Field(ge=0)] = 0
    """For kind=own: rank of the critic's adapters, which train with the head. 0: all weights train."""
    detach: bool = False
    """For kind=shared: do not train the policy's weights with the critic's loss."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """The highest learning rate of the critic, on the policy's schedule. None: optim.learning_rate if that is set, else
    1e-5, or 1e-4 with lora_rank (docs/models.md)."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of first steps in which only the critic learns: the policy's learning rate is 0."""

    rules: ClassVar[str] = """
        detach needs kind=shared: a model of its own shares no weights with the policy
        model lora_rank needs kind=own: a head on the policy has no other weights
    """

    def rate(self, optim: OptimConfig) -> float:
        """The highest learning rate of the critic."""
        default = CRITIC_RATES.lora if self.lora_rank else CRITIC_RATES.full
        return self.learning_rate or optim.learning_rate or default

    def pace(self, optim: OptimConfig, policy_rate: float) -> Pace:
        """The critic's learning rate, given the highest one of the policy, ``policy_rate``."""
        return Pace(CRITIC, self.rate(optim) / policy_rate, self.warmup_steps)


@configclass
class RolloutMonitorConfig:
    """When a run that generates warns or stops."""

    max_errors: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Stop when a larger share of a rollout's completions has no reward because of an error."""
    warn_unrewarded: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Warn when a larger share of a rollout's completions has no reward, for any reason."""
    max_unrewarded: Annotated[int, Field(ge=1)] = 3
    """Stop after this many rollouts in a row without a single reward. The updates of those before are skipped."""
    warn_logprob_difference: Annotated[float, Field(gt=0)] = 0.1
    """Warn when the engine's logprobs differ from the trainer's by more: mean absolute difference, in nats a token."""
    max_logprob_difference: Annotated[float, Field(gt=0)] = 0.5
    """Stop before the update when they differ by more: the engine runs another model."""
    warn_effective_size: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Warn before the update when the weights of tokens by trainer over engine have a lower mean, or a lower effective
    sample size as a share of the tokens. Both are 1 if engine and trainer agree."""
    warn_stop_drop: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Warn when the share of completions that end by themselves falls by more below that of the first rollouts."""
    max_without_signal: Annotated[int, Field(ge=0)] = 20
    """Stop after this many rollouts in a row without any signal. 0 disables the stop."""
    warn_kl: Annotated[float, Field(gt=0)] = 0.5
    """Warn when KL(old || policy) is larger, old being the policy at the start of the rollout: nats a token, mean of
    the last 5 updates."""
    warn_clipped: Annotated[float, Field(ge=0, le=1)] = 0.4
    """Warn when a larger share of the tokens has a ratio outside the clip range, mean of the last 5 updates."""
    warn_entropy: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Warn when the entropy of the last 5 updates is below this share of that of the first 3, and the mean reward is
    not yet near the best that answers get. 0 disables the warning."""
    warn_dropped: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Warn when shaping.overlong=drop leaves a larger share of a rollout's answers out of training."""
    warn_values: Annotated[float, Field(gt=0)] = 0.5
    """Warn when the critic's values (their 5% and 95% quantiles) leave the range of the returns of the last 5 rollouts
    by more than this times its width. The range includes 0, the values of a new critic."""


OwnCode: TypeAlias = Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$"), TakesCode()]
"""``FILE.py:name``."""


def is_own(name: str) -> bool:
    """Whether a key names code of the user's."""
    return ":" in name
