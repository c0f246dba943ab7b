"""Targets: loading a model in the form in which it is served, its device and context, and its fingerprint."""

import math
import os
import re
import shutil
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import ValidationError
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from .. import fingerprint
from ..errors import DraftforgeError, FormatError, HubError, InputError, MissingFileError, one_line
from ..progress import say
from ..storage import check_hub_name, expanded, read_object
from .expressions import check_names, matching, valued
from .kernels.fused import can_fuse, fuse
from .loading import (
    as_the_file_says,
    earlier_ids_differ,
    load_model,
    load_tokenizer,
    processor_template,
    refused,
)
from .model_folder import (
    ADAPTER_FILE,
    ADAPTER_WEIGHTS,
    INDEX_FILE,
    TOKENIZER_FILES,
    check_adapter,
    check_folder,
    check_size,
    check_tokenizer_names,
    indexed_files,
)
from .models import CausalModel
from .sampling_settings import SamplingSettings
from .served_context import longest_context, served_context
from .sharding import (
    FileWeights,
    Weights,
    fill_unsharded,
    layer_weights,
    load_skeleton,
    refuse_pass,
    shard_layers,
    unsharded,
)
from .target_settings import TargetSettings

_CONFIG_NOISE = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"}
_SNAPSHOT_FILES = ("*.safetensors", "*.json", "*.gguf", "*.txt", "*.py", *TOKENIZER_FILES)
CONFIG_FILES = ("config.json", "generation_config.json")
_MOST_ROUNDS, _MOST_LAYERS = 64, 1024
_FIRST_COVERED = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")
"""What fingerprints of earlier versions covered of them; a target with no others keeps its fingerprint."""
_RENDERED_BY_VLLM = (
    *("GptOssForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"),
    *("DeepseekV41ForCausalLM", "KimiK3ForConditionalGeneration", "InklingForCausalLM"),
    "InklingForConditionalGeneration",
)
"""Architectures of which vLLM (0.32) makes prompts by code of its own."""
_MISTRAL_TOKENIZERS = ("tekken.json", "tokenizer.model.v*")
_WEIGHTS, _ADAPTER = "weights", "adapter/"
_OWN_TEMPLATE, _PROCESSOR = "chat_template.jinja", "processor's chat template"
_ADAPTER_FILES = (ADAPTER_FILE, ADAPTER_WEIGHTS)


class Target(CausalModel):
    """Target model, whose distribution speculative decoding reproduces, with its tokenizer and fingerprint."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: TargetSettings,
        target_fingerprint: str,
        weights: Weights | None = None,
    ) -> None:
        """`weights`: source of the layers' weights, for layers without memory, which `running` shards; else None."""
        config = model.config.get_text_config().to_dict()
        context, longest = settings.context or served_context(config), longest_context(config)
        if context is not None and longest is not None and context > longest:
            say(f"target.context: {context} is more than the {longest} tokens that the model's config allows")
        super().__init__(model.requires_grad_(False).eval(), context, loaded=weights is None)
        # A sharded target refuses passes until `running`; a whole one takes fused kernels at once.
        self._weights, self._sharded = weights, False
        if weights is not None:
            self._closed = self._decoder.register_forward_pre_hook(refuse_pass, prepend=True)
        elif can_fuse(self.device):
            fuse(model)
        self.tokenizer = tokenizer
        self.settings = settings
        self.fingerprint = target_fingerprint
        self.tokenizer_digest = tokenizer_digest(tokenizer)
        self.stop_ids = _stop_ids(model, tokenizer)

    @cached_property
    def sampling_defaults(self) -> dict[str, float]:
        """Sampling settings that a server takes where a request names none; see `sampling_defaults`."""
        return sampling_defaults(self.settings)

    @classmethod
    def load(cls, settings: TargetSettings, digests: fingerprint.FileDigests | None = None) -> Self:
        """Load a target from safetensors or GGUF, merge its adapter, and fingerprint the files they came from.

        Raises MissingFileError, InputError or FormatError where there is no such model or it cannot be served.
        """
        # 1) Files, device and tokenizer.
        source = locate(settings)
        device, dtype = resolve_device(settings.device, settings.dtype)
        common: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
        if source.gguf_file is not None:
            common["gguf_file"] = source.gguf_file
        where = f"target.model: {settings.model}"
        tokenizer = _tokenizer_of(settings, source, where, common)
        # 2) A sharded target: no layer's weights are read before the ranks take their shares.
        if settings.shard:
            files, model = FileWeights(source.folder, where), load_skeleton(source.folder, where, dtype, **common)
            with refused(where):
                fill_unsharded(model, model.get_decoder().layers, files, device)
                return cls(model, tokenizer, settings, target_fingerprint(settings, digests), files)
        # 3) A whole one, from safetensors or GGUF, with its adapter merged.
        if source.gguf_file is not None:
            tokenizer = as_the_file_says(tokenizer, source.folder / source.gguf_file, where)
        weights: dict[str, Any] = {"dtype": dtype, "use_safetensors": True, **common}
        if source.gguf_file is not None:
            weights["quantization_config"] = GgufConfig(dequantize=True)
            del weights["use_safetensors"]
        model = load_model(source.folder, where, **weights)
        if settings.adapter is not None:
            model = _merge_adapter(model, settings.adapter)
        identity = target_fingerprint(settings, digests)
        with refused(where):
            return cls(model.to(device), tokenizer, settings, identity)

    @cached_property
    def prompts_in_doubt(self) -> str | None:
        """A sentence where vLLM may make other prompts, as the function of this name finds out; None: the same."""
        return prompts_in_doubt(self.settings)

    @property
    def collective(self) -> bool:
        """Whether its layers are sharded over ranks: a pass is then one of all of them together."""
        return self._weights is not None

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Inside, passes of a sharded target run, on all ranks together and equally often; elsewhere they are refused.

        The first time, each rank takes its share of the layers, which it keeps.
        """
        if self._weights is None:
            yield self
            return
        # The hook that refuses passes is gone inside, and put back whatever happens.
        self._closed.remove()
        try:
            if not self._sharded:
                self._shard(self._weights)
            yield self
        finally:
            self._closed = self._decoder.register_forward_pre_hook(refuse_pass, prepend=True)

    @torch.no_grad()
    def _shard(self, weights: Weights) -> None:
        # The check against transformers runs once the layers have weights.
        shard_layers(self.model, self._decoder, weights, self.device)
        self.check()
        self._sharded = True
        # Fusing tries a layer's own numbers, so its weights are gathered; merged products need weights that stay.
        if can_fuse(self.device):
            for layer in self._decoder.layers:  # type: ignore[union-attr]
                with unsharded(layer):
                    fuse(layer, share=False)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise InputError for a prompt with an id that the embeddings have no row for."""
        largest = max(ids, default=0)
        if largest >= self.embedding_rows:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            raise InputError(
                f"target.model: {self.settings.model}: the prompt has token {largest} ({token!r}), the embeddings have "
                f"{self.embedding_rows} rows; its tokenizer does not fit its weights"
            )

    def layer_weights(self, layer: int) -> Mapping[str, Tensor]:
        """All weights of one decoder layer by their names in it; a sharded target's are read from its files."""
        if self._weights is None:
            return super().layer_weights(layer)
        return layer_weights(self.model, self._decoder, self._weights, layer)


class Source:
    """Folder of a target's files on this machine, and the name of the GGUF file in it, if any."""

    def __init__(self, folder: Path, gguf_file: str | None) -> None:
        self.folder = folder
        self.gguf_file = gguf_file


def locate(settings: TargetSettings) -> Source:
    """Find the local files of a target; hub ids are downloaded (or found in the hub's cache).

    Raises MissingFileError, or FormatError where more than those files would be loaded, or a GGUF file's lengths are
    not those of the file.
    """
    source, where = _find(settings), f"target.model: {settings.model}"
    with refused(where):
        check_folder(source.folder, where, settings.trust_remote_code)
        if source.gguf_file is not None:
            check_size(source.folder, where, source.gguf_file)
    return source


def _find(settings: TargetSettings) -> Source:
    path = expanded(settings.model)
    # A GGUF file, a folder of either kind, or a hub id.
    if path.suffix == ".gguf":
        if not path.is_file():
            raise MissingFileError(f"target.model: {path}: no such GGUF file")
        return Source(path.parent, path.name)
    if path.is_dir():
        if settings.gguf_file is None and not (path / "config.json").is_file():
            raise MissingFileError(f"target.model: {path}: has no config.json; not a model folder")
        if settings.gguf_file is not None and not (path / settings.gguf_file).is_file():
            raise MissingFileError(f"target.gguf_file: {path / settings.gguf_file}: no such file")
        return Source(path, settings.gguf_file)
    return Source(snapshot(settings.model, settings.revision, "target.model"), settings.gguf_file)


def resolve_device(device: str, dtype: str, field: str = "target.device") -> tuple[torch.device, torch.dtype]:
    """Resolve `auto`: this process's CUDA device in bfloat16 where there is one, else the CPU in float32; and `native`.

    `field`: whose device it is, for errors.
    """
    # Each process of a training has a GPU of its own, by LOCAL_RANK.
    if device == "auto":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    elif dtype == "native":
        dtype = "bfloat16" if multiplies_bfloat16(device) else "float32"
    # A device must exist, and torch must compute on it.
    try:
        found = torch.device(device)
    except RuntimeError:
        raise InputError(f"{field}: {device}: must be auto, cpu or a device of torch such as cuda:0") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise InputError(f"{field}: {device}: there are {torch.cuda.device_count()} CUDA devices here")
    if found.type not in ("cpu", "cuda") and not _computes(found):
        raise InputError(f"{field}: {device}: torch computes nothing there; must be auto, cpu or such as cuda:0")
    return found, getattr(torch, dtype)


def multiplies_bfloat16(device: str) -> bool:
    """Whether the hardware multiplies bfloat16: CUDA devices, and CPUs with AVX512_BF16 or AMX."""
    if device.startswith("cuda"):
        return True
    # torch tells a CPU's instruction sets, in versions that have `get_capabilities`.
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _computes(device: torch.device) -> bool:
    try:
        return bool(torch.ones(1, device=device).item())
    except (RuntimeError, AssertionError, ImportError):  # torch's ways of saying so
        return False


def context_length(settings: TargetSettings) -> int | None:
    """Context length of a target in tokens: as stated, or as a server derives it from the config; None: it is unknown.

    The config of a hub id is downloaded. Raises MissingFileError where there is none.
    """
    if settings.context is not None:
        return settings.context
    # Multimodal configs have the language model's own inside.
    source = locate(settings)
    known = {} if source.gguf_file is not None else read_object(source.folder / "config.json")
    inner = known.get("text_config")
    longest = served_context(inner if isinstance(inner, dict) else known)
    if longest is None:  # a GGUF file, or the architecture's default
        options: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code, "gguf_file": source.gguf_file}
        with refused(f"target.model: {settings.model}"):
            config = AutoConfig.from_pretrained(source.folder, **options).get_text_config()
            longest = served_context(config.to_dict())
    return longest


def sampling_defaults(settings: TargetSettings) -> dict[str, float]:
    """Sampling settings of a target's generation_config.json, which vLLM and SGLang take where a request names none.

    Raises InputError for one that cannot be.
    """
    path = locate(settings).folder / "generation_config.json"
    known = read_object(path) if path.is_file() else {}
    found = {name: known[name] for name in SamplingSettings.model_fields if known.get(name) is not None}
    if found.get("top_k") == -1:  # every token
        found["top_k"] = 0
    try:
        SamplingSettings.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{path}: {first['loc'][0]}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None
    return found


def target_fingerprint(settings: TargetSettings, digests: fingerprint.FileDigests | None = None) -> str:
    """Fingerprint of a target, 64 hex digits: everything that changes its weights, ids or text, and its context."""
    return fingerprint_of(target_files(settings, digests), settings.context)


def target_files(settings: TargetSettings, digests: fingerprint.FileDigests | None = None) -> dict[str, str]:
    """Digests, 64 hex digits, of what makes up a target, by the names of its files: weights (all as one entry), configs
    without fields that change nothing, tokenizer, chat templates, an adapter's own files under `adapter/`, and its code
    where that may run."""
    source = locate(settings)
    found = {_WEIGHTS: fingerprint.of_files(source.folder, _weight_files(source), digests)}
    for name in CONFIG_FILES:
        digest = _config_digest(source.folder / name)
        found |= {} if digest is None else {name: digest}
    # An index counts where it picks some of the weight files; all of them are hashed.
    named = None if source.gguf_file is not None else indexed_files(source.folder, f"target.model: {settings.model}")
    if named is not None and named != sorted(_weight_files(source)):
        found[INDEX_FILE] = fingerprint.of_json(named)
    code = ("**/*.py",) if settings.trust_remote_code else ()
    found |= {name: fingerprint.of_file(source.folder / name) for name in _present(source.folder, code)}
    found |= {name: fingerprint.of_file(source.folder / name) for name in tokenizer_files(source.folder)}
    if (template := processor_template(source.folder)) is not None:
        found[_PROCESSOR] = fingerprint.of_bytes(template.encode())
    if settings.adapter is not None:
        folder = _adapter_folder(settings.adapter)
        hash_one = digests.of_file if digests else fingerprint.of_file
        found |= {_ADAPTER + name: hash_one(folder / name) for name in (*_ADAPTER_FILES, *tokenizer_files(folder))}
    return found


def fingerprint_of(files: Mapping[str, str], context: int | None, earlier: bool = False) -> str:
    """Fingerprint of a target by its `target_files`; `earlier`: the one that versions before these files gave it."""

    def under(prefix: str, names: Iterable[str]) -> dict[str, str]:
        return {name: files[prefix + name] for name in names if prefix + name in files}

    adapter = under(_ADAPTER, _ADAPTER_FILES)
    parts: dict[str, Any] = {
        "weights": files[_WEIGHTS],
        "config": files.get("config.json"),
        "tokenizer": fingerprint.of_json(under("", _FIRST_COVERED)),
        "generation": files.get("generation_config.json"),
        "adapter": fingerprint.of_json(adapter) if adapter else None,
    }
    if context is not None:  # it may choose the rotary frequencies
        parts["context"] = context
    rest = {name: files[name] for name in covered_since(files)}
    return fingerprint.of_json(parts if earlier or not rest else parts | {"files": rest})


def covered_since(files: Mapping[str, str]) -> list[str]:
    """Files of a target that fingerprints of earlier versions did not cover, sorted."""
    first = {
        _WEIGHTS,
        "config.json",
        "generation_config.json",
        *_FIRST_COVERED,
        *(_ADAPTER + n for n in _ADAPTER_FILES),
    }
    return sorted(files.keys() - first)


def tokenizer_files(folder: Path) -> list[str]:
    """Names, relative to a model's folder, of the files of its tokenizer and chat templates, sorted."""
    return _present(folder, TOKENIZER_FILES)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of a tokenizer's vocabulary, 64 hex digits: two models with the same digest read the same ids."""
    return fingerprint.of_json(tokenizer.get_vocab())


def _weight_files(source: Source) -> list[str]:
    if source.gguf_file is not None:
        return [source.gguf_file]
    names = [path.name for path in source.folder.glob("*.safetensors")]
    if not names:
        raise MissingFileError(f"target.model: {source.folder}: has no *.safetensors (pickled weights are not loaded)")
    return names


def _present(folder: Path, patterns: Iterable[str]) -> list[str]:
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _config_digest(path: Path) -> str | None:
    if not path.is_file():
        return None
    config = {key: value for key, value in read_object(path).items() if key not in _CONFIG_NOISE}
    try:
        return fingerprint.of_json(config)
    except ValueError as error:
        raise FormatError(f"{path}: holds a number or text that has no JSON ({error})") from None


def prompts_in_doubt(settings: TargetSettings) -> str | None:
    """A sentence for a target whose prompts vLLM makes by code of its own, or with other ids; None: the same."""
    source = locate(settings)
    known = {} if source.gguf_file is not None else read_object(source.folder / "config.json")
    names = known.get("architectures")
    found = next((name for name in _RENDERED_BY_VLLM if isinstance(names, list) and name in names), None)
    if found is None and any(_present(source.folder, _MISTRAL_TOKENIZERS)):
        found = "models with Mistral's own tokenizer"
    why = found and f"vLLM makes prompts of {found} by code of its own, and not by the chat template"
    unless = "where its server took the chat template, say"
    where, code = f"target.model: {settings.model}", settings.trust_remote_code
    if why is None and source.gguf_file is None and earlier_ids_differ(source.folder, where, trust_remote_code=code):
        why = (
            "its tokenizer_config.json names LlamaTokenizer beside a tokenizer.json of another kind, of which vLLM's "
            "transformers (before 5.21) makes other ids; with tokenizer_class TokenizersBackend there it makes the same"
        )
        unless = "where its server had another version"
    return why and (
        f"target.model: {why}: turns of which no log shows the same prompt, by its text or the number of its tokens, "
        f"are left out, unless capture.ask_unproven is true ({unless})"
    )


def load_target_tokenizer(settings: TargetSettings) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a target, as `Target.load` does, and no weights."""
    source = locate(settings)
    options: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    if source.gguf_file is not None:
        options["gguf_file"] = source.gguf_file
    return _tokenizer_of(settings, source, f"target.model: {settings.model}", options)


def _tokenizer_of(
    settings: TargetSettings, source: Source, where: str, options: Mapping[str, Any]
) -> PreTrainedTokenizerBase:
    """Tokenizer of a target: its adapter's own, where that has one; else the model's, with the adapter's template.

    `template_limits` of the settings goes along.
    """
    tokenizer = _own_tokenizer(settings, source, where, options)
    if tokenizer.processor_template is not None:
        say(f"{where}: requests without tools are shown the chat template of its processor, as vLLM does it")
    with refused(where):  # its class takes no such attribute where its config has a special token of that name
        tokenizer.template_limits = settings.template_limits
    return tokenizer


def _own_tokenizer(
    settings: TargetSettings, source: Source, where: str, options: Mapping[str, Any]
) -> PreTrainedTokenizerBase:
    # What the adapter has of its own; a copy of the model's is no news.
    folder = None if settings.adapter is None else _adapter_folder(settings.adapter)
    own = [] if folder is None else tokenizer_files(folder)
    if folder is None or not own or source.gguf_file is not None:
        return load_tokenizer(source.folder, where, **options)
    its, theirs = f"target.adapter: {settings.adapter}", source.folder
    changed = [name for name in own if not _same(folder / name, theirs / name)]
    if changed:
        say(f"{its}: its own {', '.join(own)} used, not the model's")
    if set(own) - {_OWN_TEMPLATE, "special_tokens_map.json", "added_tokens.json"} > {"tokenizer_config.json"}:
        return load_tokenizer(folder, its, **options)
    if rest := [name for name in changed if name != _OWN_TEMPLATE]:
        raise FormatError(f"{its}: {', '.join(rest)}: must stand beside the rest of its tokenizer, or not be there")
    tokenizer = load_tokenizer(source.folder, where, **options)
    if _OWN_TEMPLATE in own:
        tokenizer.chat_template = (folder / _OWN_TEMPLATE).read_text(encoding="utf-8")
        tokenizer.processor_template = None
    return tokenizer


def _same(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()


def _adapter_folder(adapter: str) -> Path:
    path = expanded(adapter)
    folder = path if path.is_dir() else None
    if folder is None:
        folder = snapshot(adapter, None, "target.adapter")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise MissingFileError(f"target.adapter: {adapter}: no folder with adapter_model.safetensors")
    check_tokenizer_names(folder, f"target.adapter: {adapter}")
    return folder


def snapshot(name: str, revision: str | None, field: str, patterns: Sequence[str] = _SNAPSHOT_FILES) -> Path:
    """Folder of a hub repository's files, those of `patterns` downloaded or found in the hub's cache.

    Raises MissingFileError where there is none, HubError where the hub cannot be asked; InputError for what is no
    revision.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    check_hub_name(name, revision, field)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except LocalEntryNotFoundError as error:  # neither there nor here
        raise HubError(f"{field}: {name}: not a local folder, and the hub cannot be asked: {one_line(error)}") from None
    except Exception as error:
        raise MissingFileError(f"{field}: {name}: not a local folder, and the hub said: {one_line(error)}") from None


def _merge_adapter(model: PreTrainedModel, adapter: str) -> PreTrainedModel:
    from peft import PeftModel, get_peft_model_state_dict

    folder, where = _adapter_folder(adapter), f"target.adapter: {adapter}"
    with refused(where):
        check_adapter(folder, where)
    try:
        config = _plain_adapter_config(model, folder, where)
        # What no tensor of the file fills would be merged as it was made: by chance.
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*missing adapter keys")
            merged = PeftModel.from_pretrained(model, str(folder), config=config, use_safetensors=True)
        with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
            unread = sorted(set(file.keys()) - set(get_peft_model_state_dict(merged, save_embedding_layers=False)))
        if unread:
            say(f"{where}: {len(unread)} of its tensors are for none of its target_modules, {unread[0]} for one")
        # Not PEFT's safe merge: it rounds the adapter's part before it is added.
        plain: PreTrainedModel = merged.merge_and_unload()
        wide = ((name, weight) for name, weight in plain.named_parameters() if weight.element_size() > 1)
        odd = next((name for name, weight in wide if not bool(weight.isfinite().all())), None)
        if odd is not None:
            raise InputError(f"{where}: merged into the model, {odd} is not finite; see its lora_alpha and weights")
        return plain
    except DraftforgeError:
        raise
    except Exception as error:  # PEFT's checks raise all kinds
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{where}: does not fit the model: {reason}") from None


def _plain_adapter_config(model: PreTrainedModel, folder: Path, where: str) -> Any:
    """An adapter's config with the names of modules in place of its expressions, which PEFT would match in any time."""
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(str(folder))
    names = [name for name, _ in model.named_modules()]
    for field in ("target_modules", "exclude_modules", "target_parameters", "layers_to_transform"):
        value = getattr(config, field, None)
        # PEFT compares each of a list with each module.
        if not isinstance(value, str) and isinstance(value, Collection) and len(value) > len(names):
            raise InputError(f"{where}: {field}: {len(value):,} names: must be {len(names):,} at most, one a module")
        if isinstance(value, str) and value != "all-linear":
            setattr(config, field, matching(value, names, f"{where}: {field}"))
    # Layers that stand there again and again, a scale that is none, and a start that is computed for so many rounds.
    ranges = getattr(config, "layer_replication", None) or ()
    if len(ranges) > _MOST_LAYERS or sum(abs(end - start) for start, end in ranges) > _MOST_LAYERS:
        raise InputError(f"{where}: layer_replication: must make at most {_MOST_LAYERS} layers")
    if not math.isfinite(scale := getattr(config, "lora_alpha", None) or 0):
        raise InputError(f"{where}: lora_alpha {scale}: must be finite")
    rounds = re.fullmatch(r"pissa_niter_(\d+)", str(getattr(config, "init_lora_weights", "")))
    if rounds is not None and int(rounds[1][:9]) > _MOST_ROUNDS:
        raise InputError(f"{where}: init_lora_weights {rounds[0][:40]}: must have at most {_MOST_ROUNDS} rounds")
    # What the layers and parameters are called that a rank or a scale of its own is for.
    parts = [*names, *(name for name, _ in model.named_parameters())]
    for field in ("rank_pattern", "alpha_pattern"):
        setattr(config, field, valued(getattr(config, field, None) or {}, parts, f"{where}: {field}"))
    # These are matched by PEFT itself.
    for field in ("modules_to_save", "layers_pattern"):
        value = getattr(config, field, None) or ()
        check_names([value] if isinstance(value, str) else value, f"{where}: {field}")
    return config


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    found: set[int] = set()
    # Generation config and tokenizer may each name several, and not the same.
    for value in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        found.update([value] if isinstance(value, int) else value or [])
    return frozenset(found)


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copy the files that make up a tokenizer and its chat templates."""
    for name in tokenizer_files(source):
        (destination / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, destination / name)


def copy_tokenizer_of(settings: TargetSettings, destination: Path) -> None:
    """Copy the files of a target's tokenizer: the model's, then those of an adapter, which hold."""
    copy_tokenizer(locate(settings).folder, destination)
    if settings.adapter is not None:
        copy_tokenizer(_adapter_folder(settings.adapter), destination)
