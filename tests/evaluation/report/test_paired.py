"""Differences sample by sample: against a hand-computed case, and only between runs that share all the rest."""

import json
import math

import pytest

from kvstitch.evaluation.records import RunError, write_text
from kvstitch.evaluation.report import find_runs
from kvstitch.evaluation.report.choices import named
from kvstitch.evaluation.report.paired import compare, left_out

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
    assert named({"_target_": "nowhere.Thing", "x": 1}) == "nowhere.Thing(x=1)"


def test_a_base_that_no_run_has_is_named_with_the_nearest(leave):
    runs, _ = find_runs([leave("SegmentQuota", {"a": 0.2})])
    with pytest.raises(RunError, match="no run has the allocator 'SegmentQota'.*did you mean 'SegmentQuota'"):
        compare(runs, "SegmentQota")
    with pytest.raises(RunError, match="did you mean 'SegmentQuota'"):
        compare(runs, "segment_quota")
    with pytest.raises(RunError, match="no run has the allocator 'tova'; .*'tova' is a choice of --part scorer"):
        compare(runs, "tova")
    with pytest.raises(
        RunError, match="nothing to compare: 'SegmentQuota' shares no sample or compared token with another allocator"
    ):
        compare(runs, "SegmentQuota")


AMS, TOPK = "EvictionPress + TOVA + SegmentQuota(credit=False)", "EvictionPress + TOVA + GlobalTopK"
SNAP = "KVPressBaseline(name=SnapKVPress)"


@pytest.fixture
def methods(make_run):
    """`methods(changes)` -> folder of two evicting methods, one of kvpress's, and the dense model, each of two samples.

    `changes` is taken into the metrics of one method, by its press: `{"topk": {"b": {...}}}`.
    """

    def method(press, target, options, metrics, parts, budget):
        folder = make_run(press=press, budget=budget, samples=len(metrics), arrays=False)
        config = json.loads((folder / "config.yaml").read_text())
        own = {"_target_": target, "budget": budget} | options
        config |= {"press": own | parts} | parts
        for name in {"scorer", "allocator"} - parts.keys():
            del config[name]
        write_text(folder / "config.yaml", json.dumps(config))
        records = [{"id": name, "metrics": values, "answers": []} for name, values in metrics.items()]
        write_text(folder / "predictions.jsonl", "".join(json.dumps(record) + "\n" for record in records))
        return folder.parent

    def both(accuracy, dense, **others):
        names = {"a": 0, "b": 1}
        return {
            name: {"accuracy": accuracy[at], "dense_accuracy": dense[at]} | {key: v[at] for key, v in others.items()}
            for name, at in names.items()
        }

    def make(changes=None, budget=256):
        parts = lambda allocator: {
            "scorer": {"_target_": "kvstitch.scorers.TOVA"},
            "allocator": {"_target_": f"{ALLOCATORS}.{allocator}"}
            | ({"credit": False} if "Quota" in allocator else {}),
        }
        figures = {
            "ams": both((0.5, 0.25), (1, 0.5), kl=(0.1, 0.2), nll=(2.5, 3.0), dense_nll=(2.0, 2.9)),
            "topk": both((0.75, 0.25), (1, 0.5), kl=(0.3, 0.1), nll=(2.5, 3.5), dense_nll=(2.0, 2.9)),
            "kvpress": both((0.0, 0.5), (1, 0.5)),
            # Run alone, it has no other side.
            "dense": both((None, None), (1, 0.5), kl=(None, None), dense_nll=(2.0, 2.9)),
        }
        for press, samples in (changes or {}).items():
            for name, values in samples.items():
                figures[press][name] |= values
        presses = "kvstitch.presses.EvictionPress"
        interval = {"interval": 512, "compress_prompt": False}
        method("ams", presses, interval, figures["ams"], parts("SegmentQuota"), budget)
        method("topk", presses, interval, figures["topk"], parts("GlobalTopK"), budget)
        bridge = "kvstitch.evaluation.kvpress_rows.KVPressBaseline"
        method("kvpress", bridge, {"name": "SnapKVPress", "options": {}}, figures["kvpress"], {}, budget)
        return method("dense", "kvstitch.evaluation.runner.no_press", {}, figures["dense"], {}, 10 * budget)

    return make


def differences(runs, base, metric, part="method"):
    rows = compare(runs, base, part, metric)
    assert len({(row.others, row.choice) for row in rows}) == len(rows)
    return {row.choice: round(row.difference, 6) for row in rows}


def test_whole_methods_are_compared_and_the_dense_model_with_every_budget(methods):
    methods(budget=128)
    runs, _ = find_runs([methods(budget=256)])
    rows = compare(runs, "dense", "method", "accuracy")
    assert [(row.others.partition(",")[0], row.choice) for row in rows] == [
        (f"budget {budget}", name) for budget in (128, 256) for name in (TOPK, AMS, SNAP)
    ]
    assert [row.difference for row in rows[:3]] == [-0.25, -0.375, -0.5] and {row.base for row in rows} == {0.75}


def test_a_method_is_compared_with_others_presses_and_the_dense_model(methods):
    runs, _ = find_runs([methods()])
    assert differences(runs, TOPK, "accuracy") == {AMS: -0.125, SNAP: -0.25, "dense": 0.25}
    assert differences(runs, TOPK, "nll") == {AMS: -0.25, "dense": -0.55}
    assert differences(runs, "dense", "nll") == {AMS: 0.3, TOPK: 0.55}


def test_methods_without_the_metric_are_named(methods):
    runs, _ = find_runs([methods()])
    rows = compare(runs, TOPK, "method", "kl")
    assert [row.choice for row in rows] == [AMS]
    assert left_out(runs, rows, TOPK, "method", "kl") == [("no sample has 'kl'", [SNAP, "dense"])]
    with pytest.raises(RunError, match="no sample of 'dense' has 'kl'; it has accuracy, nll$"):
        compare(runs, "dense", "method", "kl")


def test_means_over_other_tokens_are_not_compared(methods):
    """A press that is watched over less of a text has another NLL; what it has in common are the answers."""
    changes = {
        press: {name: {"compared_tokens": count} for name in "ab"} for press, count in (("ams", 30), ("topk", 90))
    }
    runs, _ = find_runs([methods(changes)])
    # The dense model is looked at over the same tokens as whoever stands beside it.
    rows = compare(runs, TOPK, "method", "nll")
    assert [row.choice for row in rows] == ["dense"]
    assert (f"no sample or compared token in common with {TOPK}", [AMS]) in left_out(runs, rows, TOPK, "method", "nll")
    assert differences(runs, "dense", "nll") == {AMS: 0.3, TOPK: 0.55}
    assert differences(runs, TOPK, "accuracy")[AMS] == -0.125


def test_presses_are_compared_with_the_same_parts(leave):
    def compressing(folder):
        (made,) = [path for path in folder.iterdir() if '"credit": true' in (path / "config.yaml").read_text()]
        config = json.loads((made / "config.yaml").read_text())
        config["press"] |= {"compress_prompt": True}
        del config["allocator"]["credit"]
        write_text(made / "config.yaml", json.dumps(config))

    compressing(leave("SegmentQuota", {"a": 0.2}, leaves={"credit": True}))
    leave("SegmentQuota", {"a": 0.3})
    runs, _ = find_runs([leave("GlobalTopK", {"a": 0.1})])
    (row,) = compare(runs, "ams", "press")
    assert (row.choice, round(row.difference, 6)) == (
        "ams(compress_prompt=True)",
        -0.1,
    ) and "SegmentQuota" in row.others


def test_a_name_of_another_part_and_a_choice_elsewhere_are_pointed_out(methods):
    runs, _ = find_runs([methods()])
    for part in ("press", "allocator"):
        with pytest.raises(RunError, match=f"no run has the {part} '.*'; .* is a choice of --part method"):
            compare(runs, SNAP, part, "accuracy")
    with pytest.raises(RunError, match="did you mean 'KVPressBaseline"):
        compare(runs, "KVPressBaseline", "method", "accuracy")
    both, _ = find_runs([methods(budget=64)])
    apart = [run for run in both if (run.labels["press"], run.config["budget"]) in (("ams", 256), ("topk", 64))]
    with pytest.raises(
        RunError,
        match="shares no sample with another allocator; .* with TOVA, budget 64, .*; others with TOVA, budget 256",
    ):
        compare(apart, "GlobalTopK", "allocator", "accuracy")


def test_parts_inside_parts_and_empty_options_are_named_by_what_differs():
    pyramid = {"_target_": f"{ALLOCATORS}.Pyramid", "beta": 20}
    inner = {"_target_": f"{ALLOCATORS}.GlobalTopK", "num_sinks": 4}
    assert named(pyramid | {"allocator": inner}) == "Pyramid"
    assert named(pyramid | {"allocator": inner | {"num_sinks": 8}}) == "Pyramid(allocator=GlobalTopK(num_sinks=8))"
    bridge = {"_target_": "kvstitch.evaluation.kvpress_rows.KVPressBaseline", "name": "SnapKVPress"}
    assert named(bridge | {"options": {}}) == SNAP
    assert "window_size" in named(bridge | {"options": {"window_size": 32}})


def test_seeds_that_change_nothing_count_once(leave):
    """Both runs of a second seed repeat the first's; where one of them differs, there is something new."""
    for seed in (1, 2):
        leave("GlobalTopK", {"a": 0.1, "b": 0.3}, press="ams", seed=seed)
        folder = leave("SegmentQuota", {"a": 0.2, "b": 0.6}, seed=seed)
    (row,) = compare(find_runs([folder])[0], "GlobalTopK")
    assert row.n == 2 and math.isclose(row.error, 0.1)
    leave("GlobalTopK", {"a": 0.1, "b": 0.4}, press="ams", seed=3)
    (row,) = compare(find_runs([leave("SegmentQuota", {"a": 0.2, "b": 0.6}, seed=3)])[0], "GlobalTopK")
    assert row.n == 4


def test_mass_recall_is_compared_over_the_same_tokens_only(make_run):
    figures = lambda compared: {"mass_recall": 0.5, "compared_tokens": compared}
    make_run(press="ams", allocator=f"{ALLOCATORS}.GlobalTopK", metrics=figures(63))
    folder = make_run(allocator=f"{ALLOCATORS}.SegmentQuota", metrics=figures(511)).parent
    with pytest.raises(RunError, match="shares no sample or compared token"):
        compare(find_runs([folder])[0], "GlobalTopK", metric="mass_recall")
