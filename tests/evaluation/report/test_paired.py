"""Differences sample by sample: against a hand-computed case, and only between runs that share all the rest."""

import json
import math

import pytest

from kvstitch.evaluation.records import RunError, write_text
from kvstitch.evaluation.report import find_runs
from kvstitch.evaluation.report.paired import compare, named

ALLOCATORS = "kvstitch.allocators"


@pytest.fixture
def leave(make_run):
    """`leave(allocator, {sample: kl}, …)` -> a finished run with these figures."""

    def leave(allocator, values, *, leaves=None, **names):
        folder = make_run(allocator=f"{ALLOCATORS}.{allocator}", leaves=leaves, samples=len(values), **names)
        records = [{"id": name, "metrics": {"kl": value}, "answers": []} for name, value in values.items()]
        write_text(folder / "predictions.jsonl", "".join(json.dumps(record) + "\n" for record in records))
        return folder.parent

    return leave


def test_a_hand_computed_case(leave):
    leave("GlobalTopK", {"a": 0.1, "b": 0.2, "c": 0.3}, press="ams")
    runs, _ = find_runs([leave("SegmentQuota", {"a": 0.2, "b": 0.1, "c": 0.6, "d": 9.0})])
    (row,) = compare(runs, "GlobalTopK")
    assert row.choice == "SegmentQuota" and "budget 256" in row.others
    assert row.n == 3 and row.lower == 1
    assert math.isclose(row.base, 0.2) and math.isclose(row.mean, 0.3) and math.isclose(row.difference, 0.1)
    # Differences .1, -.1, .3: standard deviation .2, over the root of 3.
    assert math.isclose(row.error, 0.2 / math.sqrt(3))


def test_only_what_shares_the_rest_is_compared(leave):
    leave("GlobalTopK", {"a": 0.1}, press="ams", budget=128)
    leave("GlobalTopK", {"a": 0.5}, press="ams", scorer="keydiff")
    leave("GlobalTopK", {"a": 0.7}, press="ams", length=999)
    leave("SegmentQuota", {"a": 0.4}, scorer="keydiff")
    runs, _ = find_runs([leave("SegmentQuota", {"a": 0.2})])
    (row,) = compare(runs, "GlobalTopK")
    assert "keydiff" in row.others and math.isclose(row.difference, -0.1) and row.error is None


def test_whatever_else_differs_keeps_runs_apart(leave, make_run):
    def changed(folder, **options):
        config = json.loads((folder / "config.yaml").read_text())
        config["press"] |= options.pop("press", {})
        write_text(folder / "config.yaml", json.dumps(config | options))

    folder = leave("SegmentQuota", {"a": 0.3})
    leave("GlobalTopK", {"a": 0.1}, press="ams")
    for number, options in enumerate(
        (dict(press={"compress_prompt": True}), dict(model={"dtype": "bfloat16"}), dict(decode_tokens=8)), 1
    ):
        leave("GlobalTopK", {"a": 9.0}, press="ams", length=2048, leaves={"copy": number})
        (made,) = [path for path in folder.iterdir() if f'"copy": {number}' in (path / "config.yaml").read_text()]
        changed(made, **options)
        text = json.loads((made / "config.yaml").read_text())
        del text["allocator"]["copy"]
        write_text(made / "config.yaml", json.dumps(text))
    (row,) = compare(find_runs([folder])[0], "GlobalTopK")
    assert math.isclose(row.base, 0.1) and math.isclose(row.difference, 0.2)


def test_a_sample_that_comes_twice_is_refused(leave):
    runs, _ = find_runs([leave("GlobalTopK", {"a": 0.1})])
    with pytest.raises(RunError, match="holds samples that another run of GlobalTopK holds, too"):
        compare(runs + runs, "GlobalTopK")


def test_a_metric_that_no_record_has_is_named_with_the_nearest(leave):
    leave("GlobalTopK", {"a": 0.1}, press="ams")
    runs, _ = find_runs([leave("SegmentQuota", {"a": 0.3})])
    with pytest.raises(RunError, match="no sample has 'kll'; did you mean 'kl'"):
        compare(runs, "GlobalTopK", metric="kll")


def test_tasks_and_seeds_count_alike_and_their_samples_stay_apart(leave):
    for seed, base, other in ((1, 0.1, 0.3), (2, 0.5, 0.6)):
        leave("GlobalTopK", {"a": base}, press="ams", seed=seed)
        folder = leave("SegmentQuota", {"a": other}, seed=seed)
    (row,) = compare(find_runs([folder])[0], "GlobalTopK")
    assert row.n == 2 and math.isclose(row.difference, 0.15)


def test_variants_are_named_by_what_differs_from_the_class(leave):
    leave("SegmentQuota", {"a": 0.3}, leaves={"credit": False, "window_tokens": 128})
    runs, _ = find_runs([leave("SegmentQuota", {"a": 0.2})])
    (row,) = compare(runs, "SegmentQuota")
    assert row.choice == "SegmentQuota(credit=False)"
    assert named({"_target_": "nowhere.Thing", "x": 1}) == "Thing(x=1)"


def test_a_base_that_no_run_has_is_named_with_the_nearest(leave):
    runs, _ = find_runs([leave("SegmentQuota", {"a": 0.2})])
    with pytest.raises(RunError, match="no run has the allocator 'SegmentQota'.*did you mean 'SegmentQuota'"):
        compare(runs, "SegmentQota")
    with pytest.raises(RunError, match="did you mean 'SegmentQuota'"):
        compare(runs, "segment_quota")
    with pytest.raises(RunError, match="no run has the allocator 'tova'; .*'tova' is a choice of --part scorer"):
        compare(runs, "tova")
    with pytest.raises(RunError, match="nothing to compare: 'SegmentQuota' shares no sample"):
        compare(runs, "SegmentQuota")
