from pathlib import Path
from draftforge.pipeline import verbs
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import load_recipe
from draftforge.pipeline.bench import bench
from draftforge.pipeline.bench_settings import BenchSettings


def test_it(write_recipe, tmp_path):
    recipe = load_recipe(write_recipe(), ['score.trees={"wide":{"kind":"static","widths":[2,2]}}'])
    verbs.train(recipe, None)
    report = bench(
        Workspace(recipe),
        BenchSettings(
            [tmp_path / "support.jsonl", tmp_path / "code.jsonl"],
            draft_tokens=[2, 4],
            batch_sizes=[1, 4],
            max_new_tokens=24,
            max_prompts=12,
            repeats=2,
        ),
    )
    import shutil

    shutil.copytree(tmp_path / "work", "/tmp/w/benchtry/work", dirs_exist_ok=True)
