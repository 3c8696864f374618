"""Model folders: whole, sharded, incomplete, damaged and hostile."""

import json

import pytest
import torch
from gguf_samples import byte_alphabet
from safetensors.torch import save_file

from nanovllm.errors import ModelError
from nanovllm.weights.checkpoint import open_checkpoint

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8}
WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(1)}


def write(folder, name, value):
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, "config.json", CONFIG)
    return tmp_path


def shard(folder, files: dict[str, dict], weight_map=None):
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    if weight_map is None:
        weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    write(folder, "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def check_weights(checkpoint):
    assert sorted(checkpoint.names()) == ["a", "b", "c"]
    for name, tensor in WEIGHTS.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        read = checkpoint.read(name)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)


def test_single_file(folder):
    save_file(WEIGHTS, folder / "model.safetensors")
    write(folder, "generation_config.json", {"eos_token_id": [1, 2]})
    checkpoint = open_checkpoint(folder)
    check_weights(checkpoint)
    assert checkpoint.path == folder
    assert checkpoint.config == CONFIG
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    with pytest.raises(ModelError, match="has no tensor d"):
        checkpoint.read("d")
    kept = checkpoint.read("a")
    checkpoint.close()
    assert torch.equal(kept, WEIGHTS["a"])
    with pytest.raises(ModelError, match="has no tensor a"):
        checkpoint.read("a")


def test_shards_with_and_without_an_index(folder):
    files = {"m-1.safetensors": {"a": WEIGHTS["a"]}, "m-2.safetensors": {"b": WEIGHTS["b"], "c": WEIGHTS["c"]}}
    shard(folder, files)
    save_file({"a": torch.zeros(1)}, folder / "consolidated.safetensors")  # not in the index: not of the model
    check_weights(open_checkpoint(folder))
    (folder / "model.safetensors.index.json").unlink()
    (folder / "consolidated.safetensors").unlink()
    check_weights(open_checkpoint(folder))


def test_config_only(folder):
    checkpoint = open_checkpoint(folder)
    assert checkpoint.names() == []
    assert checkpoint.generation_config == {}
    with pytest.raises(ModelError, match="has no tokenizer"):
        checkpoint.load_tokenizer()


def test_missing_and_invalid_config(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json: missing"):
        open_checkpoint(tmp_path)
    (tmp_path / "x.gguf").touch()
    with pytest.raises(ModelError, match=r"Give one of its GGUF files instead: x\.gguf"):
        open_checkpoint(tmp_path)
    for text in ("{", "[1]", "[" * 100_000, '"x"', "null"):
        write(tmp_path, "config.json", text)
        with pytest.raises(ModelError, match=r"config\.json: "):
            open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ModelError, match="not valid JSON"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_with_a_remedy(folder, name):
    (folder / name).write_bytes(b"not even opened")
    with pytest.raises(ModelError, match=f"{name}.*convert them to safetensors"):
        open_checkpoint(folder)
    save_file(WEIGHTS, folder / "model.safetensors")
    check_weights(open_checkpoint(folder))


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "a\\b.safetensors", "x.bin", 7, None, ""])
def test_index_must_stay_in_the_folder(folder, name):
    save_file(WEIGHTS, folder.parent / "x.safetensors")
    shard(folder, {}, {"a": name})
    with pytest.raises(ModelError, match=r"index\.json: a -> "):
        open_checkpoint(folder)


def test_index_that_is_wrong(folder):
    shard(folder, {"m-1.safetensors": {"a": WEIGHTS["a"]}}, {"a": "m-1.safetensors", "b": "m-2.safetensors"})
    with pytest.raises(ModelError, match=r"1 of 2 shards are missing: m-2\.safetensors"):
        open_checkpoint(folder)
    shard(folder, {"m-2.safetensors": {"c": WEIGHTS["c"]}}, {"a": "m-1.safetensors", "b": "m-2.safetensors"})
    with pytest.raises(ModelError, match=r"lists b in m-2\.safetensors, where it is not"):
        open_checkpoint(folder)
    for weight_map in ([], {}, None):
        shard(folder, {}, {"x": "y"})
        write(folder, "model.safetensors.index.json", {"weight_map": weight_map})
        with pytest.raises(ModelError, match="weight_map must be"):
            open_checkpoint(folder)


def test_tensor_in_two_shards(folder):
    shard(folder, {"m-1.safetensors": WEIGHTS, "m-2.safetensors": {"a": WEIGHTS["a"], "d": WEIGHTS["c"]}})
    with pytest.raises(ModelError, match=r"tensor a is in two files, m-1\.safetensors and m-2\.safetensors"):
        open_checkpoint(folder)


def test_every_truncation(folder):
    path = folder / "model.safetensors"
    save_file(WEIGHTS, path)
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(ModelError, match=r"model\.safetensors: not a whole safetensors file"):
            open_checkpoint(folder)
    path.write_bytes((2**63 - 1).to_bytes(8, "little") + data[8:])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        open_checkpoint(folder)


def test_paths_that_are_no_model(tmp_path):
    with pytest.raises(ModelError, match="no such file or folder"):
        open_checkpoint(tmp_path / "no")
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        open_checkpoint(tmp_path / "model.safetensors")


def write_tokenizer(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(byte_alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("model_type", ["llama", "trap"])
@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "TrapTokenizer", None])
def test_code_in_the_folder_is_never_run(folder, model_type, tokenizer_class):
    marker = folder / "executed"
    trap = f"open({str(marker)!r}, 'w').close()\nclass Trap: pass\nTrapTokenizer = TrapConfig = Trap\n"
    for name in ("modeling_trap.py", "configuration_trap.py", "tokenization_trap.py", "__init__.py", "setup.py"):
        write(folder, name, trap)
    auto_map = {"AutoConfig": "configuration_trap.TrapConfig", "AutoModelForCausalLM": "modeling_trap.Trap"}
    write(folder, "config.json", {**CONFIG, "model_type": model_type, "auto_map": auto_map})
    tokenizer_map = {"AutoTokenizer": ["tokenization_trap.TrapTokenizer", "tokenization_trap.TrapTokenizer"]}
    config = {"tokenizer_class": tokenizer_class, "auto_map": tokenizer_map, "eos_token": "!"}
    write(folder, "tokenizer_config.json", {key: value for key, value in config.items() if value})
    write_tokenizer(folder)
    save_file(WEIGHTS, folder / "model.safetensors")

    checkpoint = open_checkpoint(folder)
    check_weights(checkpoint)
    tokenizer = checkpoint.load_tokenizer()
    assert tokenizer.decode(tokenizer.encode("hé 1", add_special_tokens=False)) == "hé 1"
    assert tokenizer.eos_token == "!"
    assert not marker.exists()


def test_damaged_tokenizer(folder):
    write(folder, "tokenizer.json", "{")
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded"):
        open_checkpoint(folder).load_tokenizer()


def test_transformers_is_not_imported_early():
    import subprocess
    import sys

    code = "import sys, nanovllm.weights.checkpoint, nanovllm.weights.resolve; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
