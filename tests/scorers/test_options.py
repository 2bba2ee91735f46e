import pytest

from kvstitch.scorers.options import check_choice, check_count, check_interval, check_switch


def test_good_values_pass():
    check_choice("gqa", "max", ("max", "mean"))
    check_count("window_size", 3, 1, odd=True)
    check_interval("mix_lambda", 1, 0, 1)
    check_switch("debias", False)


@pytest.mark.parametrize(
    "check, arguments, message",
    [
        (
            check_choice,
            ("gqa", "meen", ("max", "mean")),
            "gqa must be one of 'max', 'mean', got 'meen'; did you mean 'mean'",
        ),
        (check_choice, ("gqa", 7, ("max", "mean")), "got 7$"),
        (check_count, ("window_size", 0, 1), "window_size must be at least 1, got 0; the nearest valid value is 1"),
        (check_count, ("kernel_size", 6, 1, True), "kernel_size must be odd, got 6; the nearest valid value is 7"),
        (
            check_interval,
            ("mix_lambda", 1.5, 0, 1),
            r"mix_lambda must be in \[0, 1\], got 1.5; the nearest valid value is 1",
        ),
        (check_interval, ("mix_lambda", -1, 0, 1), "the nearest valid value is 0"),
        (
            check_interval,
            ("threshold", 1, 0, 1, False),
            r"must be in \[0, 1\), got 1; the nearest valid value is just below 1",
        ),
        (check_interval, ("epsilon", float("nan"), 0, 1), "got nan"),
    ],
)
def test_bad_values_are_named(check, arguments, message):
    with pytest.raises(ValueError, match=message):
        check(*arguments)


@pytest.mark.parametrize(
    "check, arguments",
    [
        (check_count, ("n", 1.0, 1)),
        (check_count, ("n", True, 1)),
        (check_interval, ("x", "1", 0, 2)),
        (check_switch, ("s", 1)),
    ],
)
def test_bad_types_are_named(check, arguments):
    with pytest.raises(TypeError, match=rf"{arguments[0]} must be .*, got {arguments[1]!r}"):
        check(*arguments)
