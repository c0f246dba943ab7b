"""Recipe sections `mix` and `capture`: sources, shares and splits of conversations; how and by which engine the target
answers."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, JsonValue, PrivateAttr, field_validator, model_validator

from ..specdec.sampling_settings import SamplingSettings

Shape = Literal["messages", "sharegpt", "turns", "prompts"]
Key = Literal["domain", "sampling", "tools", "system", "turns", "prompt", "answer"]
LogKind = Literal["openai", "vllm", "sglang", "litellm", "langfuse"]
FileKind = Literal[Shape, LogKind]
Kind = Literal["key", "email", "card", "iban", "ip", "host", "phone"]
"""What is redacted. It stands here so that a recipe is read without the libraries that find it."""
ReservedArg = Literal[
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
]
"""Names of a chat template's arguments that have a place of their own, and that engines let a request set."""
RESERVED_ARGS: frozenset[str] = frozenset(
    (
        *get_args(ReservedArg),
        *("additional_special_tokens", "chat_template", "conversation", "conversations", "messages", "tokenize"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "processor_kwargs", "sanitize_control_tokens", "messages_api"),
    )
)
"""All names that no template argument may have: what renders the template sets them."""
LABEL = r"^[\w.-]{1,64}$"
Label = Annotated[str, Field(pattern=LABEL)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class DomainRule(_Section):
    """Domain of the conversations in which a pattern is found."""

    match: str
    """Regular expression, searched in what the system and the user say."""
    domain: Label
    """Domain of the conversations that match."""
    role: Literal["system", "user"] | None = None
    """Search only what this role says."""
    field: str | None = None
    """Search this field of the line (or of its `request`) instead, such as `model`."""

    @field_validator("match")
    @classmethod
    def _check_pattern(cls, match: str) -> str:
        try:
            re.compile(match)
        except re.error as error:
            raise ValueError(f"not a regular expression ({error})") from None
        return match

    @model_validator(mode="after")
    def _check_searched(self) -> "DomainRule":
        if self.role and self.field:
            raise ValueError(f"role {self.role} and field {self.field} are set; only one of them can be searched")
        return self


class DomainSettings(_Section):
    """Sources of domain names other than a source's `domain` and a line's `domain_field`."""

    rules: list[DomainRule] = []
    """Rules in order: the first that matches names the domain, whatever source and line say."""
    clusters: Annotated[int | None, Field(ge=2, le=256)] = None
    """Number of domains c00, c01, … into which text clustering deals conversations without a domain."""


class ReadLimits(_Section):
    """Sizes that no real log has: what is larger is refused, or counted and left out where a source skips what is
    invalid."""

    line_megabytes: float = Field(default=64.0, gt=0)
    """Longest line, JSON value or row of a table, 10^6 bytes each."""
    unpacked_gigabytes: float = Field(default=64.0, gt=0)
    """Largest content of one packed file (.gz, .bz2, .xz, .zst) or Parquet file, 10^9 bytes each."""


class _Source(_Section):
    _read_limits: ReadLimits = PrivateAttr(default=ReadLimits())
    _domains: DomainSettings = PrivateAttr(default=DomainSettings())
    _may_be_unanswered: frozenset[str] = PrivateAttr(default=frozenset())

    domain: Label | None = None
    """Domain of every conversation of this source; absent: each line's own `domain_field` names it."""
    domain_field: str = "domain"
    """Field of a line that names its domain."""
    group_field: str = "group"
    """Field of a line that names its template or thread; conversations of one group get the same split."""
    limit: int | None = Field(None, ge=1)
    """Most conversations to take, chosen by their hash; absent: all. Memory holds no more than these."""
    weight: float | None = Field(None, gt=0)
    """This source's share of the mix, relative to the other sources' weights."""
    only: Literal["train", "selection", "holdout"] | None = None
    """Split of all its conversations and of those near them in other sources; absent: by hash."""
    template_args: dict[str, JsonValue] = {}
    """Chat template arguments of its conversations, e.g. `enable_thinking: false`; a line's own ones win."""
    reserved_template_args: list[ReservedArg] = []
    """Reserved names that requests may set among their template arguments, where their engine lets them; requests with
    any other reserved name are left out."""
    engine: Literal["vllm", "sglang"] | None = None
    """Engine whose server made prompts of its requests; absent: `sglang` for SGLang's own log, else `vllm`."""

    @field_validator("template_args")
    @classmethod
    def _check_names(cls, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        reserved = sorted(arguments.keys() & RESERVED_ARGS)
        if reserved:
            raise ValueError(f"{', '.join(reserved)}: reserved; the template gets it from elsewhere")
        return arguments

    @property
    def domains(self) -> DomainSettings:
        """Domain settings of the mix that the source belongs to."""
        return self._domains

    @property
    def read_limits(self) -> ReadLimits:
        """Read limits of the mix that the source belongs to."""
        return self._read_limits

    @property
    def may_be_unanswered(self) -> frozenset[str]:
        """Names of domains and sources, as in the mix that the source belongs to."""
        return self._may_be_unanswered


class FileSource(_Source):
    """Local files, plain or packed (.gz, .bz2, .xz, .zst), read one line, JSON value or row at a time."""

    kind: FileKind
    """`messages` (OpenAI style), `sharegpt`, `turns` (user turns only): JSON, one value a line or in an array;
    `prompts`: text lines, or JSON; `openai`, `vllm`, `sglang`, `litellm`, `langfuse`: what that tool logs."""
    path: str
    """A file, a folder (all files in it and below) or a pattern such as `logs/*.jsonl.gz`, relative to the recipe."""
    follow_links: bool = False
    """Read files outside of the folder that links lead to, as in Kubernetes' log folders; else one is an error."""
    column: str | None = None
    """Field or table column that holds what `messages`, `sharegpt`, `turns` or `prompts` read; absent: the shape's own
    name (messages, conversations, turns, prompt)."""
    replica_field: str = "replica"
    """Field of a line that names the engine's copy that answered; without it, the tool's log decides."""
    year: int | None = Field(default=None, ge=1970, le=9999)
    """Year of the first line of a `vllm` log, whose lines name none; absent: its conversations have no date."""
    skip_invalid: bool = False
    """Count lines that break a rule and go on, instead of stopping at the first."""

    @model_validator(mode="after")
    def _check_column(self) -> "FileSource":
        if self.column is not None and self.kind not in get_args(Shape):
            raise ValueError(f"column {self.column!r} is set for kind {self.kind}; a tool's log has fields of its own")
        return self

    @model_validator(mode="after")
    def _check_year(self) -> "FileSource":
        if self.year is not None and self.kind != "vllm":
            raise ValueError(f"year {self.year} is set for kind {self.kind}; only the lines of vllm name no year")
        return self


class DatasetSource(_Source):
    """A Hugging Face dataset: a folder made by `save_to_disk`, a folder of data files, or a name on the hub."""

    kind: Literal["dataset"]
    name: str
    """Local folder relative to the recipe, or a hub name. The datasets library reads the files of one format, and where
    names tell of splits those alone; a line names the others."""
    config: str | None = None
    """Configuration of a hub dataset."""
    split: str = "train"
    """The dataset's own split to read; not the split of the mix."""
    revision: str | None = None
    """Commit of a hub dataset; without one, a change on the hub goes unnoticed."""
    shape: Shape = "messages"
    """Shape of what `column` holds; with `prompts` it is one text."""
    column: str | None = None
    """Column to read; absent: the shape's own name (messages, conversations, turns, prompt)."""
    rows: int | None = Field(None, ge=1)
    """Number of rows to read, from the first; absent: all."""
    skip_invalid: bool = False
    """Count rows that break a rule and go on, instead of stopping at the first."""


class TargetSource(_Source):
    """User prompts sampled from the target itself after its user-turn prefix, at temperature 1."""

    kind: Literal["target"]
    domain: Label = "self"
    """Domain of the prompts."""
    count: int = Field(ge=1)
    """Prompts to sample; empty and unfinished ones are left out."""
    seed: int = 0
    """Seed of the sampling."""
    max_tokens: int = Field(128, ge=1)
    """Most tokens of a prompt; longer ones are left out."""


Source = Annotated[FileSource | DatasetSource | TargetSource, Field(discriminator="kind")]


class SamplingChoice(SamplingSettings):
    """Sampling settings with a weight: drawn for conversations whose log names none."""

    weight: float = Field(1.0, gt=0)
    """Probability of being drawn, relative to the other choices."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Longest answer under this choice; absent: the capture's default."""

    @property
    def settings(self) -> SamplingSettings:
        """The sampling settings alone."""
        return SamplingSettings.model_validate(self.model_dump(include=set(SamplingSettings.model_fields)))


class MixSettings(_Section):
    """Which conversations the target answers, and which of them train, select and judge a draft."""

    sources: list[Source] = Field(min_length=1)
    """Sources of conversations."""
    domains: DomainSettings = DomainSettings()
    """Rules and clusters that name domains where sources and lines name none or too many."""
    limit: int | None = Field(None, ge=1)
    """Most conversations of the mix, with the shares of the whole; absent: as many as the shares allow."""
    weights: dict[Key, dict[str, float]] = {}
    """Shares of the mix by label, such as `domain: {code: 2, chat: 1}`, reached by leaving conversations out; what is
    not named keeps the log's shares. `draftforge inspect-mix` shows the labels."""
    half_life_days: float | None = Field(None, gt=0)
    """Half-life of a conversation's weight, in days before the newest one; absent: age does not count."""
    near_threshold: float = Field(0.8, gt=0.3, le=1)
    """Jaccard similarity (of word triples of the user turns) from which two conversations are near-copies."""
    contamination: list[str] = []
    """Evaluation sets, files as in `sources`: what is near them is kept out of train."""
    redact: list[Kind] = list(get_args(Kind))
    """Kinds of data that are replaced by a placeholder such as <email> before anything is stored."""
    phone_countries: list[Annotated[str, Field(pattern="^[A-Z]{2}$")]] = []
    """Countries (such as DE) whose phone numbers are found without a calling code however their digits are grouped;
    those of 19 countries are found anyway in their usual groups."""
    sampling: list[SamplingChoice] = []
    """Choices to draw from, by the conversation's hash, where the log names no sampling settings; empty: the
    capture's default."""
    logged_sampling: bool = True
    """Keep sampling settings and token limits that the log names."""
    salt: str = "draftforge"
    """Salt of the split's hash. Changing it deals the clusters anew."""
    selection_share: float = Field(0.15, gt=0, lt=1)
    """Share of the clusters that checkpoints are chosen on."""
    holdout_share: float = Field(0.15, gt=0, lt=1)
    """Share of the clusters that promotion is decided on."""
    read_limits: ReadLimits = ReadLimits()
    """Sizes over which nothing is read from a source."""
    may_be_unanswered: list[str] = []
    """Domains, and sources by their path, that may end without a turn for the target to answer, and may hold
    conversations without one. Any other ends the run with the reasons."""
    ancestors: list[str] = []
    """Earlier mix folders: what they placed in train or selection never enters this holdout."""

    @field_validator("phone_countries")
    @classmethod
    def _check_countries(cls, countries: list[str]) -> list[str]:
        if countries:
            from phonenumbers import SUPPORTED_REGIONS  # slow to import, and most recipes name no country

            unknown = sorted(set(countries) - SUPPORTED_REGIONS)
            if unknown:
                raise ValueError(f"{', '.join(unknown)}: not a country with phone numbers, by its two letters")
        return countries

    @field_validator("weights", mode="before")
    @classmethod
    def _labels_are_text(cls, weights: Any) -> Any:
        """Convert labels to text: YAML reads the label of a single turn as a number."""
        if not isinstance(weights, dict):
            return weights
        return {
            key: {str(label): share for label, share in shares.items()} if isinstance(shares, dict) else shares
            for key, shares in weights.items()
        }

    @model_validator(mode="after")
    def _hand_down_to_sources(self) -> "MixSettings":
        for source in self.sources:
            source._domains, source._may_be_unanswered = self.domains, frozenset(self.may_be_unanswered)
            source._read_limits = self.read_limits
        return self

    @model_validator(mode="after")
    def _check_shares(self) -> "MixSettings":
        if self.selection_share + self.holdout_share >= 1:
            raise ValueError(
                f"selection_share {self.selection_share} + holdout_share {self.holdout_share} must be below 1"
            )
        return self

    @model_validator(mode="after")
    def _check_weights(self) -> "MixSettings":
        weighted = sum(source.weight is not None for source in self.sources)
        if weighted not in (0, len(self.sources)):
            raise ValueError(f"{weighted} of {len(self.sources)} sources have a weight; give it to all or to none")
        # A share of 0 would mean to leave out a label, which raking cannot reach.
        for key, shares in self.weights.items():
            for label, share in shares.items():
                if not share > 0:
                    raise ValueError(f"weights.{key}.{label} is {share}; must be above 0")
        return self


def server_address(url: str) -> str:
    """Address of a server without its `/v1`, which each path has again. Raises ValueError, with the rule, for others.

    A password in it would end up in recipes and manifests.
    """
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ValueError("must hold no user name or password; name the key's variable in api_key_env")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("must be an address such as http://localhost:8000")
    return url.rstrip("/").removesuffix("/v1")


class TransformersBackend(_Section):
    """The target as it is loaded here, on our own cache: answers and signals in one pass."""

    kind: Literal["transformers"] = "transformers"


class VllmBackend(_Section):
    """vLLM, as a server or in this process. Prompts go as token ids: rendering and tokenizing stay here."""

    kind: Literal["vllm"]
    url: str | None = None
    """Address of a server, such as http://localhost:8000; absent: vLLM is started in this process."""
    model: str | None = None
    """The server's name of the target; absent: the only one that it serves."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that holds the server's API key."""
    signals: Literal["target", "engine"] = "target"
    """target: one pass of the target here over each answer gives all signals, and checks the engine's log-probs.
    engine: the engine's own top-k log-probs are kept, without tail samples; nothing is computed here."""
    tolerance: float = Field(default=0.25, gt=0)
    """With signals target: largest mean difference (nats) of the log-probs of a shard's answers, here and there."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Longest wait for one answer of a server."""
    retries: int = Field(default=6, ge=0)
    """How often a request is sent again after a lost connection, a timeout, a busy server or an unusable reply."""
    reply_megabytes: float = Field(default=256.0, gt=0)
    """Largest reply of a server, 10^6 bytes each: a larger one is unusable."""
    tensor_parallel: int | None = Field(default=None, ge=1)
    """In this process: GPUs that share the target; absent: one."""
    gpu_memory_share: float | None = Field(default=None, gt=0, le=1)
    """In this process: share of the GPU's memory that vLLM takes, as the target here needs room too; absent: half."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str | None) -> str | None:
        return None if url is None else server_address(url)

    @model_validator(mode="after")
    def _check_server_or_process(self) -> "VllmBackend":
        # Settings of a server need a url, and settings of an engine in this process exclude one.
        for name in ("model", "api_key_env"):
            if self.url is None and getattr(self, name) is not None:
                raise ValueError(f"{name} is the server's; give its url, or leave it out")
        for name in ("tensor_parallel", "gpu_memory_share"):
            if self.url is not None and getattr(self, name) is not None:
                raise ValueError(f"{name} is of a vLLM in this process; a server at url has its own settings")
        return self

    def identity(self) -> dict[str, Any]:
        """Settings of the engine that decide the content of a capture."""
        return {"kind": self.kind, "signals": self.signals}


Backend = Annotated[TransformersBackend | VllmBackend, Field(discriminator="kind")]


class BudgetSettings(_Section):
    """What a capture may cost. The first limit that is reached ends it: no further shard of the train split is begun,
    those that are begun are finished. Selection and holdout are answered before, and always whole."""

    tokens: int | None = Field(default=None, ge=1)
    """Answer tokens, of all splits."""
    hours: float | None = Field(default=None, gt=0)
    """Time of answering; what earlier runs into the same folder took counts."""
    gigabytes: float | None = Field(default=None, gt=0)
    """Size of the shards, 10^9 bytes each."""

    @model_validator(mode="after")
    def _limits_something(self) -> "BudgetSettings":
        if not self.limits:
            raise ValueError("must name tokens, hours or gigabytes; leave budget out for no limit")
        return self

    @property
    def limits(self) -> dict[str, float]:
        """Limits that are set, by name."""
        return {name: value for name, value in self if value is not None}

    def share(self, parts: int, tokens: int = 0, size: int = 0) -> "BudgetSettings":
        """Budget of one of `parts` machines or ranks: a share of what is left of tokens and size, and all of the time.

        `tokens` and `size` (bytes): already spent, and counted in full by every one of them.
        """
        # What is spent stays in the limit, as each of them counts it too.
        change: dict[str, float] = {}
        if self.tokens is not None:
            change["tokens"] = min(self.tokens, tokens) + -(-max(0, self.tokens - tokens) // parts)
        if self.gigabytes is not None:
            change["gigabytes"] = min(self.gigabytes, size / 1e9) + max(0.0, self.gigabytes - size / 1e9) / parts
        return self.model_copy(update=change)


class CaptureSettings(_Section):
    """How the target answers the mix. Train answers are drawn at each conversation's own sampling setting."""

    max_new_tokens: int = Field(default=256, ge=1)
    """Longest answer; a conversation's own smaller limit holds."""
    sampling: SamplingSettings = SamplingSettings()
    """Sampling settings of train conversations whose log names none."""
    batch_size: int = Field(default=32, ge=1)
    """Answers in flight at once. Changes speed and memory only, so it may change between a stop and a resume."""
    top_k: int = Field(default=64, ge=0)
    """Likeliest tokens stored exactly, at each answer token of the train split. 0: no signals at all, tail samples
    neither; drafts that train beside the target need none, and recorded answers then cost no pass of it."""
    tail_samples: int = Field(default=8, ge=1)
    """Tokens drawn from the rest of the distribution, which make expectations over all of it unbiased."""
    store_dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    """Type of the stored top-k and tail log-probs."""
    shard_samples: int = Field(default=256, ge=1)
    """Answers in a shard; answers of unfinished shards are lost when a run stops."""
    too_long: Literal["error", "skip"] = "error"
    """A prompt that leaves no room for an answer in the target's context: stop, or leave the turn out.
    A dialogue whose generated answers outgrow the context ends there; the manifest lists what was left out."""
    ask_unproven: bool = False
    """Ask also prompts that no log shows to be the served ones, where that is in doubt: vLLM has code in place of the
    target's chat template (gpt-oss, DeepSeek V3.2, Mistral's tokenizers, …), the log may lack the system prompt
    (LiteLLM's of `/v1/messages`), or a request can be read in several ways. Absent: they are left out."""
    answers: Path | None = None
    """Answers that this target gave before (`draftforge capture --answers-to`): they are not drawn anew."""
    backend: Backend = TransformersBackend()
    """Which engine gives the answers."""
    budget: BudgetSettings | None = None
    """When to stop before all train conversations are answered; a larger one goes on from there."""
    seed: int = 0
    """Seed of the answers drawn at a temperature, and of the tail samples."""

    @model_validator(mode="after")
    def _recorded_answers_need_the_target(self) -> "CaptureSettings":
        if self.answers is not None and self.engine is not None and self.engine.signals == "engine" and self.top_k:
            raise ValueError(
                "answers (recorded ones) get signals from the target; set backend.signals to target, or top_k to 0"
            )
        return self

    @property
    def engine(self) -> VllmBackend | None:
        """Engine that answers in the target's stead; None: the target answers."""
        return self.backend if isinstance(self.backend, VllmBackend) else None

    @property
    def reads_given(self) -> bool:
        """Whether the target runs over answers that it did not draw here: for signals, or to check an engine."""
        return bool(self.top_k) or (self.engine is not None and self.engine.signals == "target")

    def identity(self) -> dict[str, Any]:
        """Settings that decide the content: all but batch size, budget, and where recorded answers and servers are."""
        own = self.model_dump(mode="json", exclude={"batch_size", "answers", "backend", "budget"})
        if not self.ask_unproven:  # as in captures before there was a choice
            del own["ask_unproven"]
        return own if self.engine is None else own | {"backend": self.engine.identity()}
