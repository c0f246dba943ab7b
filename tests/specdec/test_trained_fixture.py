"""The trained fixture is worth comparing engines on: drafts are right often, not always, and no weight is at chance."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trained as fixture
from trained import DRAFTS, PROMPTS, Trained

from draftforge.specdec.decoder import Request, generate
from draftforge.specdec.proposers.factory import make_proposer
from draftforge.specdec.sampling_settings import SamplingSettings


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DRAFTS))
def test_each_draft_is_right_often_and_not_always(trained_drafts: Trained, name: str) -> None:
    target = trained_drafts.target()
    requests = [Request(target.tokenizer(text).input_ids, SamplingSettings(), 0, 60) for text in PROMPTS]
    proposer = make_proposer(trained_drafts.draft(name), target)
    rounds = [r for _, answer in generate(target, proposer, requests, draft_tokens=4) for r in answer.rounds]
    assert 0.2 < sum(r.accepted for r in rounds) / sum(r.drafted for r in rounds) < 0.95


@pytest.mark.slow
def test_the_reduced_vocabulary_lacks_tokens_that_the_target_emits(trained_drafts: Trained) -> None:
    target = trained_drafts.target()
    draft_ids = trained_drafts.draft("eagle3-reduced").draft_ids.tolist()
    assert len(draft_ids) == fixture.REDUCED and draft_ids != list(range(fixture.REDUCED))
    assert set(target.tokenizer(fixture.sentences(200, 0)).input_ids) - set(draft_ids)


def test_training_happens_once_and_an_interrupted_one_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def train_all(folder: Path) -> None:
        calls.append(folder)
        (folder / "target").mkdir()
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(fixture, "_train_all", train_all)
    with pytest.raises(KeyboardInterrupt):
        fixture.trained(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    first, second = fixture.trained(tmp_path), fixture.trained(tmp_path)
    assert first == second and len(calls) == 2 and first.target_folder.is_dir()


@pytest.mark.parametrize(
    ("fixtures", "only_collect", "calls"),
    [([["tmp_path"], ["trained_drafts"]], False, 1), ([["tmp_path"]], False, 0), ([["trained_drafts"]], True, 0)],
)
def test_training_comes_before_the_first_test(
    fixtures: list[list[str]],
    only_collect: bool,
    calls: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And only where a test will want it."""
    conftest = request.config.pluginmanager.get_plugin(str(fixture.ROOT / "tests" / "conftest.py"))
    trained: list[None] = []
    monkeypatch.setattr(conftest, "trained", lambda: trained.append(None))
    config = SimpleNamespace(
        option=SimpleNamespace(collectonly=only_collect), pluginmanager=request.config.pluginmanager
    )
    items = [SimpleNamespace(fixturenames=names) for names in fixtures]
    conftest.pytest_collection_finish(SimpleNamespace(items=items, config=config))  # type: ignore[union-attr]
    assert len(trained) == calls


def test_training_is_reproducible() -> None:
    def weights() -> torch.Tensor:
        torch.manual_seed(0)
        model = fixture._llama(layers=1)
        ids = torch.arange(2000) % fixture.VOCABULARY
        fixture._fit([model], lambda ids_BT: model(ids_BT, use_cache=False).logits.logsumexp(-1).mean(), ids, steps=2)
        return torch.cat([p.flatten() for p in model.parameters()])

    assert torch.equal(weights(), weights())
