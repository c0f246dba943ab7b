"""Templates and regular expressions that come with a tokenizer or an adapter: bounded, or refused.

An adapter's are matched by RE2, in time linear in the module's name. A tokenizer's run inside of its library, on
Oniguruma, which gives up at a place after ten million steps; those whose steps may double with every character, a
repeat inside of a repeat, are refused. Those that try each place of a long text anew are found out by their time.
"""

import base64
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import DraftforgeError, FormatError, InputError, one_line
from ..storage import read_object

_LONGEST = 10_000  # characters
_LONGEST_NAME, _MOST_NAMES = 300, 64
_NAME = re.compile(r"(?:[\w.-]|\\\.){1,300}")
_SECONDS, _SECONDS_EACH, _SLICE_SECONDS = 30.0, 1e-4, 0.5
"""Time of tokenizing beside that for each character, a hundred times what it takes; how often it is looked at."""
_SHORT = 512  # characters
_MOST_GROWTH, _MOST_PARTS = 256, 100
_GROWTH = {"ByteLevel": 2, "NFKC": 12, "NFKD": 12, "BertNormalizer": 3}
"""Characters that a part of a tokenizer may make of one; a second such part makes as many of each."""
# Begins with one piece or more that take a character each: no match is empty, and no text is put in between characters.
_TAKES_A_CHARACTER = re.compile(
    r"(?:\\[sSdDwWnrt]|\\[pP]\{\^?\w+\}|\[\^?(?:\\[sSdDwWnrt]|[^\[\]\\])+\]|[^\\\[\](){}|.*+?^$])"
    r"(?:\+|\{[1-9]\d*,\d*\})?(?![*+?{])(?:[^|\\]|\\[^K])*",
    re.DOTALL,
)
# What an expression consists of: escapes and classes are single pieces.
_PIECES = re.compile(
    r"\\.|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*+\]|\((?:\?[^:=!<>)]*[:=!>]|\?<[=!]|\?<\w+>)?|\)|[*+?]|\{[\d,]*\}|.",
    re.DOTALL,
)


def repeats(expression: str) -> bool:
    """Whether a part of an expression that is repeated without a bound holds another one that is: `(a+)+`."""
    nested, opened = False, [False]  # for each open group, whether it holds such a part
    pieces = _PIECES.findall(expression)
    for piece, after in zip(pieces, [*pieces[1:], ""]):
        if piece.startswith("("):
            opened.append(False)
        elif piece == ")" and len(opened) > 1:
            holds = opened.pop()
            nested |= holds and _unbounded(after)
            opened[-1] |= holds
        elif _unbounded(piece):
            opened[-1] = True
    return nested


def _unbounded(piece: str) -> bool:
    if piece in ("*", "+"):
        return True
    bounds = re.fullmatch(r"\{(\d*)(,?)(\d*)\}", piece)
    return bounds is not None and bounds[2] == "," and not bounds[3]


_MOST_TOKENS = 64  # that a tokenizer puts around a text
_MOST_ENTRIES = {"vocab": 1 << 20, "merges": 1 << 20}  # of a tokenizer's model: 2,000,000 merges take 2 GB
_MOST_ADDED = 1 << 18
TOKENIZER_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def check_tokenizer_file(path: Path, where: str) -> None:
    """`check_tokenizer_expressions` of a tokenizer.json before its library reads it, and with it the tokens that it
    normalizes as it does. Raises InputError too for such tokens that are no short texts, and for a tokenizer with more
    entries than any has, or whose ids are a matter of chance."""
    stored = read_object(path)
    model, most = stored.get("model"), _MOST_ENTRIES | {"added_tokens": _MOST_ADDED}
    for name, value in (stored | (model if isinstance(model, dict) else {})).items():
        if name in most and isinstance(value, list | dict) and len(value) > most[name]:
            raise InputError(f"{where}: its tokenizer has {len(value):,} {name}; must be {most[name]:,} at most")
        if name == "dropout" and value:
            raise InputError(
                f"{where}: its tokenizer leaves out merges by chance (dropout {str(value)[:40]}); must be none"
            )
    _check_parts([stored.get(name) for name in TOKENIZER_PARTS], where)
    added = stored.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        content = token.get("content") if isinstance(token, dict) and token.get("normalized") else None
        if isinstance(content, str) and len(content) > _LONGEST_NAME:
            raise InputError(f"{where}: an added token of its tokenizer has {len(content):,} characters")
    _check_merges(model, where)


def _check_merges(model: Any, where: str) -> None:
    """Raise InputError for merges whose second part does not begin with the prefix that the library cuts off it: it
    aborts the process at one that is shorter."""
    if not isinstance(model, dict):
        return
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not isinstance(prefix, str) or not isinstance(merges, list):
        return
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        second = parts[1] if isinstance(parts, list) and len(parts) == 2 else None
        if not isinstance(second, str) or not second.startswith(prefix):
            raise InputError(
                f"{where}: a merge of its tokenizer does not go on with continuing_subword_prefix {prefix!r:.40}"
            )


def check_tokenizer_expressions(parts: Iterable[Any], where: str) -> None:
    """Raise InputError for a tokenizer with an expression that may take time without bound, or that makes long texts of
    short ones.

    `parts`: its normalizer, pre-tokenizer, post-processor and decoder, as the tokenizers library has them; None: it has
    none.
    """
    _check_parts([json.loads(part.__getstate__()) for part in parts if part is not None], where)


def _check_parts(parts: Sequence[Any], where: str) -> None:
    """`check_tokenizer_expressions` of parts as JSON has them."""
    pending, growth, number = list(parts), 1, 0
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            pending += value.values()
            expression = value.get("Regex")
            if isinstance(expression, str) and (len(expression) > _LONGEST or repeats(expression)):
                shown = expression if len(expression) <= 60 else f"{expression[:59]}…"
                raise InputError(f"{where}: its tokenizer's expression {shown!r} repeats a repeat, or is too long")
            # Some parts add a character to every text, and copy it.
            number += "type" in value
            if number > _MOST_PARTS:
                raise InputError(f"{where}: its tokenizer has more than {_MOST_PARTS} parts")
            # Each part may work on every character that an earlier one made.
            growth *= max(1, _growth(value))
            if growth > _MOST_GROWTH:
                raise InputError(f"{where}: its tokenizer makes {_MOST_GROWTH} characters or more of one")
        elif isinstance(value, list):
            pending += value


def _growth(part: Mapping[str, Any]) -> int:
    """How many characters, or tokens, a part of a tokenizer may make of one."""
    # 1) A replacement, or the longest one of a table: a trie, behind its size, then texts that end with a NUL.
    content, table = part.get("content"), part.get("precompiled_charsmap")
    if isinstance(content, str) and "pattern" in part:
        return len(content) + _matches_nothing(part["pattern"])
    if isinstance(begin := part.get("prepend"), str):
        return len(begin)
    if isinstance(table, str):
        raw = base64.b64decode(table)
        begin_of_texts = 4 + int.from_bytes(raw[:4], "little")
        if len(raw) < begin_of_texts:
            raise ValueError("precompiled_charsmap: its trie is longer than the table")
        texts = raw[begin_of_texts:].split(b"\0")
        return max(len(text.decode(errors="replace")) for text in texts)
    # 2) A template of tokens: how often it puts the text in, or how many tokens of its own.
    known = part.get("special_tokens")
    if part.get("type") == "TemplateProcessing" and isinstance(known, Mapping):
        counts = Counter[str]()
        for form in ("single", "pair"):
            for piece in part.get(form) or ():
                counts[f"{form} text {piece.get('Sequence')}"] += "Sequence" in piece
                name = (piece.get("SpecialToken") or {}).get("id")
                counts[f"{form} tokens"] += len((known.get(name) or {}).get("ids") or ()) if name is not None else 0
        tokens = max(counts["single tokens"], counts["pair tokens"])
        texts_of = [count for name, count in counts.items() if not name.endswith(" tokens")]
        return max(*texts_of, tokens if tokens > _MOST_TOKENS else 1, 1)
    return _GROWTH.get(str(part.get("type")), 1)


def _matches_nothing(pattern: Any) -> bool:
    """Whether a pattern may match between two characters, where its replacement is put in and takes none away."""
    text, expression = (pattern.get(kind) if isinstance(pattern, Mapping) else None for kind in ("String", "Regex"))
    return not text and not (isinstance(expression, str) and _TAKES_A_CHARACTER.fullmatch(expression))


def check_names(names: Sequence[str], where: str) -> None:
    """Raise InputError for what an adapter gives as modules' names, and PEFT matches as expressions, and is no name: a
    repeat or a choice, over and over, may take Python's matcher years."""
    if len(names) > _MOST_NAMES:
        raise InputError(f"{where}: {len(names):,} names: must be at most {_MOST_NAMES}")
    for one in names:
        if not _NAME.fullmatch(one):
            raise InputError(f"{where}: {one[:60]!r}: must be a name of 300 letters, digits, _, - and . at most")


def valued(values: Mapping[str, Any], names: Sequence[str], where: str) -> dict[str, Any]:
    """Values that an adapter gives by expressions, by the very names that these match as PEFT matches them: up to their
    ends, and the first expression counts. Raises InputError for one that RE2 does not know."""
    if len(values) > len(names):
        raise InputError(f"{where}: {len(values):,} expressions: must be {len(names):,} at most, one a module")
    found, left = {}, list(names)
    for expression, value in values.items():
        if mine := matching(rf"(?:.*\.)?(?:{expression})", left, where):
            taken = set(mine)
            left = [name for name in left if name not in taken]
            found[f"^(?:{'|'.join(map(re.escape, mine))})"] = value
    return found


def matching(expression: str, names: Sequence[str], where: str) -> list[str]:
    """Names that an expression matches as a whole. Raises InputError for one that RE2 does not know."""
    try:
        found = pc.match_substring_regex(pa.array(names, pa.string()), f"^(?:{expression})$")
    except pa.ArrowInvalid:
        raise InputError(f"{where}: {expression[:60]!r}: is no expression that can be matched in linear time") from None
    return [name for name, matched in zip(names, found.to_pylist()) if matched]


class _Tokenizing:
    """Characters that this process has tokenized, and the seconds that it waited for them."""

    characters = 0
    seconds = 0.0


def ids_of(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Ids of a text of strangers, which a tokenizer of strangers makes.

    Raises InputError where it gives up, FormatError for a tokenizer that takes a hundred times as long as others:
    that ends the work, as nothing but the end of the process stops it.
    """
    found: list[list[int]] = []
    errors: list[BaseException] = []

    # The library holds no lock of Python's meanwhile, so that another thread can watch.
    def work() -> None:
        try:
            found.append(list(tokenizer(text, **options)["input_ids"]))
        except BaseException as error:
            errors.append(error)

    # A short text takes seconds at the most, which are counted behind it.
    thread = threading.Thread(target=work, daemon=True)
    _Tokenizing.characters += len(text)
    before = time.monotonic()
    if len(text) > _SHORT:
        thread.start()
        thread.join(_SLICE_SECONDS)
    else:
        work()
    while True:
        # A process that was stopped meanwhile has not waited.
        _Tokenizing.seconds += min(time.monotonic() - before, _SLICE_SECONDS)
        if _Tokenizing.seconds > _SECONDS + _SECONDS_EACH * _Tokenizing.characters:
            raise FormatError(
                f"{tokenizer.name_or_path}: its tokenizer took {_Tokenizing.seconds:.0f} s for "
                f"{_Tokenizing.characters:,} characters: one of its expressions takes too long"
            )
        if not thread.is_alive():
            break
        before = time.monotonic()
        thread.join(_SLICE_SECONDS)
    for error in errors:
        # What an expression gives up at, the library tells by an exception of Rust's own.
        if type(error).__name__ == "PanicException":
            raise InputError(f"{tokenizer.name_or_path}: its tokenizer gives up: {one_line(error)}") from None
        # What its config says of it may be of no type that the library knows.
        if isinstance(error, Exception) and not isinstance(error, DraftforgeError | MemoryError):
            said = f"{type(error).__name__}: {one_line(error)}"
            raise FormatError(f"{tokenizer.name_or_path}: its tokenizer fails: {said}") from error
        raise error
    return found[0]
