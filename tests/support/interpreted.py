"""Triton's interpreter, without what it does over and over."""

import sys
from functools import cache
from typing import Any


def quick_interpreter() -> None:
    """Let each launch of a kernel replace Triton's language once, where a test has imported Triton.

    The interpreter looks all functions of the language up for each call inside a kernel, too, such as that of a sum: a
    third of its time.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    replace, replaced = interpreter._patch_lang, set[str]()
    languages = {"tl": interpreter.tl, "core": interpreter.tl.core}

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
        def restore(self) -> None:
            super().restore()
            replaced.clear()

    @cache
    def languages_of(function: Any) -> set[str]:
        seen = [value for value in function.__globals__.values() if type(value) is type(sys)]
        return {name for name, language in languages.items() if language in seen}

    def replace_once(function: Any) -> Any:
        if languages_of(function) <= replaced:
            return Scope()
        replaced.update(languages_of(function))
        return replace(function)

    interpreter._LangPatchScope, interpreter._patch_lang = Scope, replace_once
