"""Write the demo mix: configs/demo/{support,code,math,writing}.jsonl from demo_templates.yaml, beside this file.

Usage: python scripts/make_demo_mix.py [FOLDER]

Slots are filled by hashes of the template's name, so that another template changes no line but its own.
"""

import argparse
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
DEMO = HERE.parent / "configs" / "demo"
Line = dict[str, Any]


def number(*parts: object) -> int:
    """A large number that depends on the parts alone."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:8], "big")


def fill(texts: list[str], slots: dict[str, list[Any]], name: str, variant: int) -> list[str]:
    """The texts with every {slot} filled. Variants of a template walk through a slot's values from a hashed start."""
    values: dict[str, Any] = {"order": f"BW-{10000 + number('order', name, variant) % 90000}"}
    for slot, choices in slots.items():
        start = number(name, slot) % len(choices)
        values[slot] = choices[(start + variant) % len(choices)]
        values[f"{slot}2"] = choices[(start + variant + 1) % len(choices)]
    return [text.format(**values) for text in texts]


def support_lines(section: dict[str, Any]) -> Iterator[Line]:
    """Conversations in the messages shape, all under the same system prompt."""
    system = {"role": "system", "content": section["system"]}
    for name, template in section["templates"].items():
        texts = [template] if isinstance(template, str) else template
        slots = {slot for text in texts for slot in re.findall(r"{(\w+?)2?}", text)}
        assert slots <= {*section["slots"], "order"}, f"{name}: {slots}"
        variants = section["variants"] if slots - {"order"} else 1  # another order number alone makes a near-copy
        for variant in range(variants):
            turns = fill(texts, section["slots"], name, variant)
            messages = [system, *({"role": "user", "content": turn} for turn in turns)]
            yield {"id": f"support/{name}/{variant}", "domain": "support", "group": name, "messages": messages}


def turn_lines(domain: str, section: dict[str, Any]) -> Iterator[Line]:
    """Conversations in the turns shape: one user turn each, from a text and the lists that fill it."""
    for name, (text, fills) in section["templates"].items():
        for variant, values in enumerate(fills):
            turn = text.format(*(values if isinstance(values, list) else [values]))
            yield {"id": f"{domain}/{name}/{variant}", "domain": domain, "group": name, "turns": [turn]}


def main(folder: Path) -> None:
    """Write one file a domain."""
    templates = yaml.safe_load((HERE / "demo_templates.yaml").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    for domain, section in templates.items():
        lines = support_lines(section) if domain == "support" else turn_lines(domain, section)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / f"{domain}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the demo mix.")
    parser.add_argument("folder", type=Path, nargs="?", default=DEMO, help="where; default: configs/demo")
    main(parser.parse_args().folder)
