import zipfile

import pytest
import torch
from safetensors.torch import save_file

from kvstitch.scorers import TriAttentionStatistics
from kvstitch.scorers.tri_attention_files import read_authors_file
from kvstitch.views import Rotary

ROTARY = Rotary(torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64))


def entry(**changes):
    """A head as the authors write it; a part given as None is left out."""
    parts = {
        "q_mean_real": torch.tensor([0.3, 0.0, -0.4]),
        "q_mean_imag": torch.tensor([0.4, 0.5, 0.3]),
        "q_abs_mean": torch.tensor([0.6, 0.7, 0.8]),
    }
    return {name: part for name, part in (parts | changes).items() if part is not None}


@pytest.fixture
def write(tmp_path):
    """`write(content)` -> path of what torch.save makes of it."""

    def make(content):
        torch.save(content, tmp_path / "file.pt")
        return tmp_path / "file.pt"

    return make


def test_heads_are_read_in_the_order_of_the_file(write):
    half = {name: part.half() for name, part in entry().items()}
    path = write({"stats": {"layer11_head02": entry(), "layer00_head00": half}, "metadata": {"model_name": "a/b"}})
    content = read_authors_file(path)
    assert (content.layout, content.model) == ("half", "a/b")
    assert [(head.key, head.layer_idx, head.head_idx) for head in content.heads] == [
        ("layer11_head02", 11, 2),
        ("layer00_head00", 0, 0),
    ]
    torch.testing.assert_close(content.heads[0].mean, torch.tensor([0.3 + 0.4j, 0.5j, -0.4 + 0.3j]))
    assert content.heads[1].modulus.dtype == torch.float32


def test_the_least_that_a_file_may_hold(write):
    content = read_authors_file(write({"stats": {"layer0_head0": entry()}}))
    assert (content.layout, content.model, len(content.heads)) == ("half", "", 1)


@pytest.mark.parametrize("content", [[1, 2], {"other": 1}, {"stats": {}}, {"stats": [1]}])
def test_other_files_of_torch(write, content):
    with pytest.raises(ValueError, match="no TriAttention statistics file: it has no entry 'stats' with heads"):
        read_authors_file(write(content))


@pytest.mark.parametrize("key", ["l0h0", 3, "layer00_head00_old"])
def test_misnamed_heads(write, key):
    path = write({"stats": {"layer00_head00": entry(), key: entry()}})
    with pytest.raises(ValueError, match=f"entry {key!r} is not named layerNN_headNN"):
        read_authors_file(path)


@pytest.mark.parametrize(
    "broken, message",
    [
        (entry(q_mean_real=None), "layer01_head02 must hold one number a frequency under each of q_mean_real"),
        (entry(q_abs_mean=[0.6, 0.7, 0.8]), "must hold one number a frequency"),
        (entry(q_mean_imag=torch.zeros(3, 1)), "must hold one number a frequency"),
        ([1, 2, 3], "must hold one number a frequency"),
        (
            entry(q_mean_real=torch.zeros(2)),
            "different numbers of frequencies: q_mean_real 2, q_mean_imag 3, q_abs_mean 3",
        ),
    ],
)
def test_heads_of_another_structure(write, broken, message):
    with pytest.raises(ValueError, match=message):
        read_authors_file(write({"stats": {"layer01_head02": broken}}))


def test_metadata_of_another_structure(write):
    with pytest.raises(ValueError, match="its 'metadata' is a list"):
        read_authors_file(write({"stats": {"layer00_head00": entry()}, "metadata": ["half"]}))


def test_files_that_torch_did_not_write(tmp_path):
    text, tensors = tmp_path / "text.pt", tmp_path / "weights.pt"
    text.write_text("hello")
    save_file({"a": torch.ones(1)}, tensors)
    for path in (text, tensors):
        with pytest.raises(ValueError, match="was not written by torch.save"):
            read_authors_file(path)
    with pytest.raises(FileNotFoundError, match="no TriAttention statistics at"):
        read_authors_file(tmp_path / "none.pt")


class Code:
    """Runs something when it is unpickled."""

    def __reduce__(self):
        return print, ("never",)


def test_code_in_a_file_is_not_run(write, capsys):
    path = write({"stats": {"layer00_head00": entry()}, "metadata": Code()})
    with pytest.raises(ValueError, match="holds more than tensors, or is damaged"):
        read_authors_file(path)
    assert "never" not in capsys.readouterr().out


def test_means_that_no_queries_can_have(write):
    path = write({"stats": {"layer00_head00": entry(q_abs_mean=torch.zeros(3))}})
    with pytest.raises(ValueError, match="a mean longer than the mean modulus"):
        TriAttentionStatistics.from_authors_file(path, ROTARY, num_layers=1, num_query_heads=1, head_dim=6)


@pytest.mark.parametrize("pickled", [b"", b"\x80\x02}q\x00(", b"\x80\x02cnowhere\nThing\n."])
def test_a_damaged_pickle_is_named(tmp_path, pickled):
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as archive:
        archive.writestr("file/data.pkl", pickled)
        archive.writestr("file/version", "3")
    with pytest.raises(ValueError, match=r"file\.pt holds more than tensors, or is damaged"):
        read_authors_file(tmp_path / "file.pt")
