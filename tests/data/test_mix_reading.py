"""Readings of the sample logs: a change of what is made of a log makes mixes again, if `READING` counts up with it."""

from pathlib import Path

import pytest
from pydantic import TypeAdapter

from draftforge import fingerprint
from draftforge.data import mix
from draftforge.data.settings import Source
from draftforge.data.sources import read

SAMPLES = Path(__file__).parent / "samples"
READ = {
    4: {
        "langfuse.csv": "58da504f9a43e22e",
        "langfuse.jsonl": "58da504f9a43e22e",
        "langfuse_api.json": "1c7bc5d4b1f59f0c",
        "litellm.jsonl": "8a4ebae7f8719eec",
        "openai.jsonl": "f8f17916d4afa15b",
        "sglang.jsonl": "79ce3f1c4b2af3df",
        "sglang.log": "52a68e8df69bc681",
        "sglang_served.log": "a0618e314ddb5292",
        "sharegpt.json": "4d8ac1d1b02c98a1",
        "vllm.log": "2661997e3fa38456",
        "vllm_json.log": "8839b6e10cad52a6",
    }
}
"""By `READING`, digests of what was read of each sample."""


@pytest.mark.parametrize("name", sorted(path.name for path in SAMPLES.iterdir()))
def test_what_is_read_of_a_sample_changes_with_the_version_of_reading(name: str) -> None:
    kind = name.partition(".")[0].partition("_")[0]
    source = TypeAdapter[Source](Source).validate_python({"kind": kind, "path": name, "domain": "d"})
    records, counts = read(source, SAMPLES, 0)
    found = fingerprint.of_json([[[record.key, record.prompt_tokens] for record in records], counts.left_out])[:16]
    assert READ[mix.READING].get(name) == found, (
        "something else is read of this sample: count mix.READING up, so that mixes are made again, and put the new "
        f"digest {found} here (a new sample needs its digest alone)"
    )
