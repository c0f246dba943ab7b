"""The recipe's `score` section: what is scored, how, and how times are measured."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ..data.settings import server_address
from ..specdec.accept_rules import RULES, RuleName, preferred_rules
from ..specdec.proposers.training_free import LOOKUP
from ..specdec.proposers.tree_settings import MOST_LEVELS, MeasuredTree, MergedTree, TreeSettings
from ..specdec.sampling_settings import SamplingSettings

Engine = Literal["vllm", "sglang", "llama.cpp", "draftforge"]
EngineRule = Literal["token", "block", "onehot", "match"]
SERVED_FAMILIES = ("small", "eagle", "eagle3", "medusa", "dflash", "dspark", LOOKUP)
"""Ways of drafting that vLLM serves, as `load.costs.draft_urls` names them."""
FEWEST_CLUSTERS = 3
"""Least number of clusters with an interval: two differ once, which does not tell how far clusters differ."""


class EngineCostSettings(BaseModel):
    """Round times of the operator's own engine instead of draftforge's decoder: of servers that are started here, one
    after another, or of running ones, which must serve nothing else meanwhile."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    engine: Literal["vllm"]
    """The engine, which is the load's: vLLM 0.23 or later."""
    start: bool = False
    """Start its servers on this machine: one without a draft, and one for each way of drafting at its least, middle and
    largest K."""
    venv: Path | None = None
    """With `start`: folder of the virtual environment that holds the engine; absent: this process's Python has it."""
    flags: list[str] = []
    """With `start`: options of every server, as in production, such as [--gpu-memory-utilization, "0.6"]: the target is
    loaded here, too."""
    start_seconds: float = Field(default=600.0, gt=0)
    """With `start`: longest wait for a server to answer."""
    plain_url: str | None = None
    """Without `start`: address of a server without a draft, such as http://localhost:8000."""
    draft_urls: dict[str, dict[int, str]] = {}
    """Without `start`: addresses of servers that draft, by family and K, which are of `score.draft_tokens`; each family
    has its least and largest K. `lookup`, prompt lookup, is scored beside every draft and is always needed."""
    hardware: str | None = Field(default=None, min_length=1, max_length=200)
    """Without `start`: what these servers run on, in words, as they do not tell."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Without `start`: environment variable that holds the servers' API key."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Longest wait for one answer."""

    @field_validator("plain_url")
    @classmethod
    def _is_an_address(cls, url: str | None) -> str | None:
        return None if url is None else server_address(url)

    @field_validator("draft_urls")
    @classmethod
    def _are_addresses(cls, urls: dict[str, dict[int, str]]) -> dict[str, dict[int, str]]:
        found: dict[str, dict[int, str]] = {}
        for family, by_K in urls.items():
            if family not in SERVED_FAMILIES:
                raise ValueError(f"{family}: must be one of {', '.join(SERVED_FAMILIES)}")
            if not by_K or not all(1 <= K <= MOST_LEVELS for K in by_K):
                raise ValueError(
                    f"{family}: K = {min(by_K, default='none')}: must be 1 to {MOST_LEVELS}, each its address"
                )
            for K, url in by_K.items():
                try:
                    found.setdefault(family, {})[K] = server_address(url)
                except ValueError as error:
                    raise ValueError(f"{family}.{K}: {error}") from None
        return found

    @model_validator(mode="after")
    def _started_or_running(self) -> "EngineCostSettings":
        running = {"plain_url": self.plain_url, "draft_urls": self.draft_urls, "hardware": self.hardware}
        why = {
            "plain_url": "rounds without a draft are timed on a server of their own",
            "draft_urls": "rounds of each family and K are timed on a server of their own",
            "hardware": "they do not tell it (such as 1x H200)",
        }
        if self.start:
            given = [name for name, value in {**running, "api_key_env": self.api_key_env}.items() if value]
            if given:
                raise ValueError(f"{given[0]}: is of running servers; leave it out, or start")
            return self
        if missing := [name for name, value in running.items() if not value]:
            raise ValueError(
                f"{missing[0]}: required where servers run already, as {why[missing[0]]}, or set start: true"
            )
        if self.venv is not None or self.flags:
            raise ValueError(
                f"{'flags' if self.flags else 'venv'}: is of servers that are started here; set start: true"
            )
        return self

    def check_draft_tokens(self, draft_tokens: Sequence[int]) -> None:
        """Raise ValueError where running servers lack a K that is timed, or draft one that is not scored."""
        least, most = min(draft_tokens), max(draft_tokens)
        for family in () if self.start else sorted({LOOKUP, *self.draft_urls}):
            field, there = f"load.costs.draft_urls.{family}", self.draft_urls.get(family, {})
            if lacking := sorted({least, most} - there.keys()):
                why = "; prompt lookup is scored beside every draft" if family == LOOKUP else ""
                raise ValueError(
                    f"{field}: has no server of K={lacking[0]}; must have the least and the largest of draft_tokens, "
                    f"K={least} and K={most}{why}"
                )
            if odd := sorted(there.keys() - set(draft_tokens)):
                raise ValueError(
                    f"{field}.{odd[0]}: must be among draft_tokens {list(draft_tokens)}: no draft has that K"
                )


class LoadSettings(BaseModel):
    """Serving load: engine, batch sizes, context and answer length. Drafts are picked by expected speed-up at it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    engine: Engine = "draftforge"
    """The serving engine. It fixes the accept rule above temperature 0, and how acceptance is counted in `as the engine
    counts`."""
    rule: EngineRule | None = None
    """The engine's rule where it is not its usual one (onehot; of draftforge: the first of score.rules)."""
    batch_sizes: dict[int, float] = Field(default={1: 1.0}, min_length=1)
    """Requests answered side by side, each with its share of the time in which any are. Shares need not add up to 1;
    with a share of 0 a batch size is measured and shown, and counts for nothing."""
    context_tokens: int = Field(ge=2)
    """Tokens that a round's attention reads of a request, on average: the prompt and half the answer."""
    answer_tokens: int = Field(ge=2)
    """Tokens of an answer, on average."""
    costs: EngineCostSettings | None = None
    """Times of rounds in the engine itself; absent: those of draftforge's own decoder, or of `score.costs.fit`."""

    @model_validator(mode="after")
    def _possible(self) -> "LoadSettings":
        # Batch sizes and shares, then lengths, then a rule that the engine has.
        for size, share in self.batch_sizes.items():
            if size < 1 or share < 0:
                raise ValueError(f"batch_sizes {size}: {share:g}: a batch size must be >= 1 and its share >= 0")
        if not sum(self.batch_sizes.values()) > 0:
            raise ValueError(f"batch_sizes {self.batch_sizes}: one share must be > 0")
        if self.prompt_tokens < 1:
            raise ValueError(
                f"context_tokens {self.context_tokens}: is the prompt and half of answer_tokens {self.answer_tokens}; "
                "that leaves no prompt"
            )
        if self.rule is not None and self.engine != "draftforge" and self.engine not in RULES[self.rule].engines:
            can = [name for name, rule in RULES.items() if self.engine in rule.engines and not rule.greedy_only]
            raise ValueError(f"rule {self.rule}: {self.engine} has {', '.join(can)}")
        if self.costs is not None and self.costs.engine != self.engine:
            raise ValueError(f"costs.engine {self.costs.engine}: must be the load's engine, which is {self.engine}")
        return self

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt, on average."""
        return self.context_tokens - self.answer_tokens // 2

    @property
    def shares(self) -> dict[int, float]:
        """Shares of time by batch size, in order; they add up to 1."""
        total = sum(self.batch_sizes.values())
        return {size: share / total for size, share in sorted(self.batch_sizes.items())}

    @property
    def largest(self) -> int:
        return max(self.batch_sizes)

    @property
    def main(self) -> int:
        """The batch size with the largest share; of equal ones the larger."""
        return max(self.batch_sizes, key=lambda size: (self.batch_sizes[size], size))

    @property
    def description(self) -> str:
        """Words on the load: engine, batch sizes with their shares, context and answer length."""
        sizes = ", ".join(f"{size} ({share:.0%})" for size, share in self.shares.items() if share)
        return f"{self.engine}, batch {sizes}, context {self.context_tokens:,}, answers of {self.answer_tokens:,}"


class RaceSettings(BaseModel):
    """Race between checkpoints: those that can no longer win are dropped before all conversations are scored."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    error: float = Field(default=0.05, gt=0, lt=0.5)
    """Probability, at most, that the checkpoint which scoring everything would choose is dropped."""
    blocks: int = Field(default=8, ge=2, le=64)
    """After so many parts of the conversations it is asked who can still win; each part loads every draft again."""


_TREE_NAME = r"^[a-z][a-z0-9_-]*$"
SELECTION_SPLIT: Final = "selection"  # checkpoints are scored and picked on this split
HOLDOUT_SPLIT: Final = "holdout"  # a candidate meets the champion on this one, and on no other


class CostSettings(BaseModel):
    """Measurement of draft and verify times: on real prompts, plain decoding and every K by turns, at batch 1 or,
    with `score.load`, over the load's batch sizes and contexts."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    prompts: int = Field(default=4, ge=1)
    """Prompts decoded for the measurement (per K, and once without a draft)."""
    rounds: int = Field(default=16, ge=4)
    """Rounds decoded per prompt."""
    warmup_rounds: int = Field(default=3, ge=0)
    """First rounds of each prompt that are not timed."""
    wait_seconds: float = Field(default=1800.0, ge=0)
    """Seconds to wait for another process that is measuring the same shape."""
    fit: Path | None = None
    """Times fitted on another machine (`times.json` of a score there): taken instead of measuring here. Needs
    `score.load`; every table names that machine."""

    @model_validator(mode="after")
    def _some_are_timed(self) -> "CostSettings":
        if self.warmup_rounds >= self.rounds:
            raise ValueError(f"warmup_rounds {self.warmup_rounds}: must be below rounds {self.rounds}")
        return self


class ScoreSettings(BaseModel):
    """Scores of every checkpoint: counts by replay on all samples, by real decoding on a part."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    sampling: list[SamplingSettings] = Field(default=[SamplingSettings()], min_length=1)
    """Sampling settings that are scored; the target answers selection and holdout once for each."""
    rules: list[RuleName] = Field(default=["greedy", "token"], min_length=1)
    """Accept rules. greedy is the rule at temperature 0 and only there; the first other one is the serving engine's,
    unless `load` names an engine. Each way of drafting is scored by those that take it: token and block chains,
    multiround, recursive and traversal sampled trees. typical is lossy. What is replayed is counted under every other
    lossless rule too; what is not, and the check by decoding, under these."""
    draft_tokens: list[int] = Field(default=[1, 2, 3, 4], min_length=1)
    """Every K that is scored as a chain; the best one is picked with the checkpoint."""
    trees: dict[Annotated[str, Field(pattern=_TREE_NAME, max_length=32)], TreeSettings] = {}
    """Trees that every trained draft is scored with beside the chains, by name."""
    max_conversations: int = Field(default=0, ge=0)
    """Score at most so many conversations of a split, spread over the domains; 0: all."""
    decode_conversations: int = Field(default=8, ge=0)
    """Conversations, of those scored, to decode for real, spread over the domains, and to compare with replay at
    temperature 0."""
    decode_draft_tokens: list[int] = []
    """K of that decoding; empty: the largest of draft_tokens."""
    batch_size: int = Field(default=4, ge=1)
    """Requests decoded at once where nothing is timed."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1.0)
    """Share of cases in which an interval holds the truth."""
    tie_share: float = Field(default=0.01, ge=0, lt=1)
    """Two K or trees of a checkpoint tie where expected speed-ups differ by less than this share: fewer tokens win."""
    tie_logits: float = Field(default=1e-3, ge=0)
    """Replay and decoding may part where the target's two tokens differ by less than this in logits (float32)."""
    tie_logits_half: float = Field(default=0.5, ge=0)
    """`tie_logits` for bfloat16 and float16, whose logits near 30 lie 0.1 apart."""
    mismatch_limit: int = Field(default=0, ge=0)
    """float32: conversations whose replayed and decoded counts may differ before the score is refused."""
    draft_device: str | None = None
    """Device of drafts, such as cpu or cuda:1; absent: the target's. Their precision is the target's; between a
    GPU and a CPU it is bfloat16 on the one and float32 on the other."""
    replay_tokens: int = Field(default=0, ge=0)
    """Tokens of recorded answers, prompts and padding included, that go through the target and the draft in one pass of
    replay; 0: 16,384 on a GPU, 2,048 on a CPU. Less takes less memory; counts are the same."""
    trace_bytes: int = Field(default=1 << 30, ge=0)
    """Memory for the target's states along the answers, kept from one checkpoint to the next (device memory)."""
    seed: int = Field(default=0, ge=0)
    """Seed of decoding at temperature > 0, and of the order of conversations in a race."""
    costs: CostSettings = CostSettings()
    """Measurement of draft and verify times."""
    load: LoadSettings | None = None
    """Serving load at which expected speed-ups are computed; absent: batch 1, prompts left out."""
    race: RaceSettings | None = None
    """Drops checkpoints that can no longer win before all conversations are scored; absent: all are scored on all."""

    @field_validator("draft_tokens", "decode_draft_tokens")
    @classmethod
    def _positive_and_sorted(cls, value: list[int]) -> list[int]:
        wrong = [k for k in value if not 1 <= k <= MOST_LEVELS]
        if wrong:
            raise ValueError(f"K = {wrong[0]}: every K must be at least 1 and at most {MOST_LEVELS}")
        return sorted(set(value))

    @model_validator(mode="after")
    def _consistent(self) -> "ScoreSettings":
        # 1) No setting or rule twice: counts are told apart by them.
        keys = [sampling.key for sampling in self.sampling]
        if len(set(keys)) < len(keys):
            raise ValueError(f"sampling {keys}: every setting may be named once")
        if len(set(self.rules)) < len(self.rules):
            raise ValueError(f"rules {self.rules}: every rule may be named once")
        # 2) Temperatures above 0 need a rule to be decided by, and a lossless one.
        sampled = [sampling.key for sampling in self.sampling if not sampling.greedy]
        if sampled and not self.sampled_rules:
            raise ValueError(f"rules {self.rules}: sampling {sampled[0]} needs a rule beside greedy")
        lossy = [rule for rule in self.sampled_rules[:1] if not RULES[rule].lossless]
        if lossy:
            raise ValueError(f"rules {self.rules}: {lossy[0]} is lossy: drafts are picked by a lossless rule")
        # 3) Settings that refer to others.
        unknown = sorted(set(self.decode_draft_tokens) - set(self.draft_tokens))
        if unknown:
            raise ValueError(f"decode_draft_tokens {unknown}: must be among draft_tokens {self.draft_tokens}")
        if self.costs.fit is not None and self.load is None:
            raise ValueError(f"costs.fit {self.costs.fit}: needs a load, whose batch sizes and lengths it is read at")
        if self.load is not None and self.load.costs is not None:
            self.load.costs.check_draft_tokens(self.draft_tokens)
            if self.costs.fit is not None:
                raise ValueError(
                    f"costs.fit {self.costs.fit}: load.costs measures in {self.load.engine}; give one of them"
                )
            if self.trees:
                raise ValueError(
                    f"trees {', '.join(self.trees)}: {self.load.engine} drafts chains only, so load.costs has no times "
                    "of trees; leave them out"
                )
        return self

    @property
    def sampled_rules(self) -> list[RuleName]:
        """Rules at temperature > 0, the serving engine's first; at 0 every rule is the greedy one."""
        load = self.load
        return preferred_rules(self.rules, *((load.engine, load.rule) if load is not None else ()))

    def drafts_beside(self, drafts: Collection[str]) -> list[str]:
        """Other drafts of the recipe that merged trees put beside these, each once."""
        merged = [tree.names for tree in self.trees.values() if isinstance(tree, MergedTree)]
        found = [name for names in merged if not set(names).isdisjoint(drafts) for name in names]
        return [name for name in dict.fromkeys(found) if name not in drafts]

    @property
    def trees_vary(self) -> bool:
        """Whether two checkpoints of one draft may be scored with trees of other shapes."""
        return any(isinstance(tree, MeasuredTree) for tree in self.trees.values())
