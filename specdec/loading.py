"""Loading of models and tokenizers by transformers: whole, or refused in one line that names their source.

transformers itself raises whatever its readers raise, prints a report of many lines, and leaves missing weights random.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from ..errors import DraftforgeError, FormatError, one_line
from ..progress import say
from ..storage import read_object
from .expressions import TOKENIZER_PARTS, check_tokenizer_expressions, check_tokenizer_file
from .gguf_header import read_header
from .model_folder import check_folder, check_size, check_tokenizer_names, of_gguf_size

_CLASS_FILES = ("tokenizer_config.json", "config.json")
_OF_BYTES = "_tokenizer_json_has_byte_level"
"""Method by which transformers 5.24 finds out that a tokenizer.json is no Llama tokenizer's."""
_KNOWN_EARLIER = ("deepseek_", "chameleon", "janus", "step3p")
"""Begins of model types of which earlier versions, or vLLM, know that the class is a wrong one, too."""
_PROBE = "Ask 12345  of it,\n\n\tor don't."
_OURS = (DraftforgeError, MemoryError, torch.OutOfMemoryError)


def load_model(source: str | Path, where: str, only_known: bool = False, **options: Any) -> PreTrainedModel:
    """Load a causal LM with every weight from the files, once it is seen to need no more memory than they suggest.

    `where` begins the error's line; `only_known`: also refuse files with tensors that the model does not read. Raises
    FormatError.
    """
    folder, gguf_file = Path(source), options.get("gguf_file")
    code = {"trust_remote_code": bool(options.get("trust_remote_code"))}
    with refused(where):
        if folder.is_dir():
            check_folder(folder, where, code["trust_remote_code"])
            check_size(folder, where, gguf_file, **code)
        # Mismatched shapes are let through here, to be refused below in one line.
        with nullcontext() if gguf_file is None else of_gguf_size(folder / gguf_file, where):
            model, info = AutoModelForCausalLM.from_pretrained(
                source, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
        # What is called here has names, whatever the config says.
        for config in (model.config, model.config.get_text_config()):
            config.return_dict = True
    _check_weights(where, info, ("missing", "mismatched", "unexpected") if only_known else ("missing", "mismatched"))
    if info["unexpected_keys"] and not only_known:
        unread = sorted(info["unexpected_keys"])
        say(f"{where}: {len(unread)} tensors of its files are not part of the model, {unread[0]} for one")
    return model


def checked_config(folder: Path, where: str, trust_remote_code: bool = False) -> Any:
    """Config of the model in a folder, of which no more is asked than its files hold. Raises FormatError."""
    with refused(where):
        check_folder(folder, where, trust_remote_code)
        check_size(folder, where, trust_remote_code=trust_remote_code)
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)


def load_tokenizer(source: str | Path, where: str, **options: Any) -> PreTrainedTokenizerBase:
    """Load a tokenizer, with the template of the processor beside it as `processor_template`; None: that is its own.

    Raises FormatError, its line beginning with `where`.
    """
    with refused(where):
        check_tokenizer_names(Path(source), where)
        if (file := Path(source) / "tokenizer.json").is_file():
            check_tokenizer_file(file, where)
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        fast = getattr(tokenizer, "backend_tokenizer", None)
        if fast is not None:
            check_tokenizer_expressions(tuple(getattr(fast, part) for part in TOKENIZER_PARTS), where)
        found = processor_template(Path(source))
        tokenizer.processor_template = None if found == tokenizer.chat_template else found
        return tokenizer


def earlier_ids_differ(folder: Path, where: str, **options: Any) -> bool:
    """Whether versions of transformers that engines are bound to (vLLM 0.33 to those below 5.21) make other ids of a
    text: they take the class `LlamaTokenizer` at its word where tokenizer.json is one of bytes."""
    named = (read_object(path).get("tokenizer_class") for name in _CLASS_FILES if (path := folder / name).is_file())
    declared = next((name for name in named if isinstance(name, str)), "").removesuffix("Fast")
    model = str(read_object(folder / "config.json").get("model_type"))
    if declared != "LlamaTokenizer" or model.startswith(_KNOWN_EARLIER) or not hasattr(TokenizersBackend, _OF_BYTES):
        return False
    found, rule = load_tokenizer(folder, where, **options), getattr(TokenizersBackend, _OF_BYTES)
    setattr(TokenizersBackend, _OF_BYTES, lambda *args, **options: False)
    try:
        earlier = load_tokenizer(folder, where, **options)
    finally:
        setattr(TokenizersBackend, _OF_BYTES, rule)
    return bool(earlier(_PROBE)["input_ids"] != found(_PROBE)["input_ids"])


def processor_template(folder: Path) -> str | None:
    """Chat template that a model's folder has for its processor alone; None: it has none.

    transformers takes the one of processor_config.json, then chat_template.json, whether or not there is a
    `chat_template.jinja` too, which is that of both; it loads no processor with the second beside further templates.
    """
    processor, legacy = folder / "processor_config.json", folder / "chat_template.json"
    further = legacy.is_file() and any(folder.glob("additional_chat_templates/*.jinja"))
    if further or not (processor.is_file() or (folder / "preprocessor_config.json").is_file()):
        return None
    found = (read_object(path).get("chat_template") for path in (processor, legacy) if path.is_file())
    return next((template for template in found if isinstance(template, str)), None)


@contextmanager
def refused(where: str) -> Iterator[None]:
    """Turn whatever a reader raises inside into one FormatError, its line beginning with `where`."""
    try:
        yield
    except _OURS:
        raise
    except Exception as error:
        raise FormatError(f"{where}: cannot be loaded: {type(error).__name__}: {one_line(error)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of the tokenizers library, in Rust
            raise
        raise FormatError(f"{where}: cannot be loaded: its library gives up: {one_line(error)}") from None


def _check_weights(where: str, info: dict[str, Any], kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        if info[f"{kind}_keys"]:
            # The first key stands for all; a mismatched one comes with both shapes.
            first = sorted(info[f"{kind}_keys"], key=str)[0]
            name, *shapes = first if isinstance(first, tuple) else (first,)
            sizes = f" (shape {tuple(shapes[0])}, must be {tuple(shapes[1])})" if len(shapes) == 2 else ""
            raise FormatError(f"{where}: the weights do not fit config.json: {kind} keys: {name}{sizes}")


_KINDS = {"llama": "BPE", "gpt2": "BPE", "t5": "Unigram", "bert": "WordPiece"}
_RIGHT_FOR_GEMMA = "5.24"
_START = "tokenizer.ggml."


def as_the_file_says(tokenizer: PreTrainedTokenizerBase, path: Path, where: str) -> PreTrainedTokenizerBase:
    """Correct a tokenizer by its GGUF file: begin-of-text is added where the file says so.

    Raises FormatError where transformers made a tokenizer of another kind than the file's.
    """
    # 1) The tokenizer's keys of the file.
    stored = read_header(path).keys
    keys = {name.removeprefix(_START): value for name, value in stored.items() if name.startswith(_START)}
    # 2) A tokenizer of another kind would give wrong tokens without an error.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    kind, found = keys.get("model"), None if backend is None else type(backend.model).__name__
    if kind in _KINDS and found not in (None, _KINDS[kind]):
        raise FormatError(
            f"{where}: transformers {transformers.__version__} reads its tokenizer ({kind}) as {found}, must be "
            f"{_KINDS[kind]}: its tokens would be wrong; give the model's folder, or transformers "
            f"{_RIGHT_FOR_GEMMA} or later"
        )
    # 3) The begin-of-text token, which transformers may leave out.
    if keys.get("add_bos_token") and not adds_bos(tokenizer):
        tokenizer.add_bos_token = True
    return tokenizer


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts its begin-of-text token before a text."""
    return tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
