import pytest

from kvstitch.kernels.common.spelling import did_you_mean


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("lyer", "; did you mean 'layer'?"),
        ("LAYER", "; did you mean 'layer'?"),
        ("Max_Logits", "; did you mean 'MAX_LOGIT'?"),
        ("zzz", ""),
        (5, ""),
        (None, ""),
    ],
)
def test_the_nearest_name_whatever_its_capitals(wrong, hint):
    assert did_you_mean(wrong, ("layer", "group", "MAX_LOGIT")) == hint
