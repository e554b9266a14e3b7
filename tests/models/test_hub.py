"""hf: names against a hub on the loopback interface."""

import json
import subprocess
import sys

import pytest
import tiny
import tiny_models
from hub_server import COMMIT, Hub, describe_file

from pagedkv.models import catalogue, hub
from pagedkv.models.catalogue import pull, resolve
from pagedkv.models.errors import ModelError
from pagedkv.models.loader import load_model

FILE = bytes(range(256)) * 4000


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDKV_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("TQDM_POSITION", "-1")  # the client's bars show themselves without a terminal
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 50_000)
    return tmp_path / "home"


@pytest.fixture
def served(home, monkeypatch):
    """A function that starts a hub with the given repositories."""
    hubs = []

    def start(**repos):
        hubs.append(Hub({f"owner/{name}": files for name, files in repos.items()}).__enter__())
        monkeypatch.setenv("HF_ENDPOINT", hubs[-1].url)
        return hubs[-1]

    yield start
    for one in hubs:
        one.__exit__()


def refused(name):
    with pytest.raises(ModelError) as caught:
        pull(name, progress=False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def files_under(home):
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


class TestFiles:
    def test_the_only_model(self, served, home):
        server = served(one={"README.md": b"hello", "m.gguf": FILE, "mmproj-m.gguf": FILE})
        path = pull("hf:owner/one", progress=False)
        assert path == home / "hub/owner--one/files/m.gguf" and path.read_bytes() == FILE
        kept = ["hub/owner--one/.lock", "hub/owner--one/chosen", "hub/owner--one/files/m.gguf"]
        assert files_under(home) == [*kept, "hub/owner--one/pulled.json"]
        downloads = [request for request in server.requests if "resolve" in request[1]]
        assert downloads == [("GET", f"owner/one/resolve/{COMMIT}/m.gguf", None)]
        n = len(server.requests)
        assert pull("hf:owner/one", progress=False) == resolve("hf:owner/one/m.gguf", progress=False) == path
        assert len(server.requests) == n, "what is there is not asked for again"

    def test_several_models(self, served, home):
        names = ["a.gguf", "sub/b-00001-of-00002.gguf"]
        server = served(many={"a.gguf": FILE, **{f"sub/b-0000{i}-of-00002.gguf": FILE[i:] for i in (1, 2)}})
        message = refused("hf:owner/many")
        assert message == f"hf:owner/many: holds several models; add one after a slash: {', '.join(names)}"
        path = pull("hf:owner/many/sub/b-00001-of-00002.gguf", progress=False)
        assert path.read_bytes() == FILE[1:]
        assert path.with_name("b-00002-of-00002.gguf").read_bytes() == FILE[2:]
        assert "one part of several; give the first one" in refused("hf:owner/many/sub/b-00002-of-00002.gguf")
        assert refused("hf:owner/many") == message, "one that was pulled before is not thereby meant"
        del server.repos["owner/many"]["sub/b-00002-of-00002.gguf"]
        assert "no file sub/b-00002-of-00002.gguf" in refused("hf:owner/many@v2/sub/b-00001-of-00002.gguf")

    def test_a_split_model_is_there_whole_or_not(self, served, home, monkeypatch):
        """Whichever part cannot be put in its place, the first one is not there yet, and the next pull ends it."""
        names = [f"b-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
        served(one={name: FILE[i:] for i, name in enumerate(names)})
        replace = hub.Path.replace
        for bad in names:

            def refuse(path, target, bad=bad):
                if target.name == bad:
                    raise OSError(5, "Input/output error")
                return replace(path, target)

            monkeypatch.setattr(hub.Path, "replace", refuse)
            assert refused("hf:owner/one").endswith("Input/output error")
            assert not list(home.rglob(names[0]))
        monkeypatch.setattr(hub.Path, "replace", replace)
        path = pull("hf:owner/one", progress=False)
        assert [path.with_name(name).read_bytes() for name in names] == [FILE[i:] for i in range(3)]

    def test_many_choices_are_cut(self, served):
        served(many={f"{i:02}.gguf": FILE for i in range(40)})
        assert refused("hf:owner/many").endswith("10.gguf, 11.gguf and 28 more")

    def test_revisions_are_kept_apart(self, served):
        server = served(one={"m.gguf": FILE})
        first = pull("hf:owner/one/m.gguf", progress=False)
        server.repos["owner/one"]["m.gguf"] = FILE[::-1]
        second = pull("hf:owner/one@v2/m.gguf", progress=False)
        assert (first.read_bytes(), second.read_bytes()) == (FILE, FILE[::-1])
        assert refused("hf:owner/one@v3/m.gguf") == "hf:owner/one@v3/m.gguf: no such revision"

    def test_small_files_have_gits_hash(self, served):
        assert served(one={"m.gguf": b"small"}) and pull("hf:owner/one", progress=False).read_bytes() == b"small"


class TestInterruptions:
    def test_the_connection_breaks_once(self, served):
        server = served(one={"m.gguf": FILE})
        server.cut["m.gguf"] = 300_000
        assert pull("hf:owner/one", progress=False).read_bytes() == FILE
        assert [request[2] for request in server.requests if "resolve" in request[1]] == [None, "bytes=300000-"]

    def test_a_later_pull_goes_on(self, served, home):
        server = served(one={"m.gguf": FILE})
        server.cut["m.gguf"], server.refuse["m.gguf"] = 300_000, 1
        assert refused("hf:owner/one").startswith("hf:owner/one: ")
        parts = [name for name in files_under(home) if name.endswith(".part")]
        assert len(parts) == 1 and (home / parts[0]).read_bytes() == FILE[:300_000]
        assert not list(home.rglob("*.gguf"))
        del server.requests[:]
        assert pull("hf:owner/one", progress=False).read_bytes() == FILE
        assert [request[2] for request in server.requests if "resolve" in request[1]] == ["bytes=300000-"]
        assert not (home / "hub/owner--one/.partial").exists()

    def test_a_killed_process(self, served, home):
        """The same with a process that dies in the middle of a download."""
        server = served(one={"m.gguf": FILE})
        code = (
            "import os\nfrom huggingface_hub import constants\nfrom huggingface_hub.utils import tqdm\n"
            "constants.DOWNLOAD_CHUNK_SIZE, seen = 50_000, []\n"
            "def stop(self, n=1):\n    seen.append(n)\n    len(seen) < 4 or os._exit(9)\n"
            "tqdm.update = stop\n"
            "from pagedkv.models.catalogue import pull\npull('hf:owner/one')\n"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert result.returncode == 9, result.stderr
        assert not list(home.rglob("*.gguf"))
        assert pull("hf:owner/one", progress=False).read_bytes() == FILE
        started = [request[2] for request in server.requests if "resolve" in request[1]]
        assert started[0] is None and int(started[1].removeprefix("bytes=").rstrip("-")) in range(100_000, 200_000)

    def test_wrong_bytes(self, served, home):
        server = served(one={"m.gguf": FILE})
        server.wrong.add("m.gguf")
        assert "m.gguf does not have the hash" in refused("hf:owner/one")
        assert not list(home.rglob("*.gguf")) and not list(home.rglob("*.part"))
        server.wrong.clear()
        assert pull("hf:owner/one", progress=False).read_bytes() == FILE

    def test_a_part_longer_than_the_file(self, served, home):
        server = served(one={"m.gguf": FILE})
        server.cut["m.gguf"], server.refuse["m.gguf"] = 300_000, 1
        refused("hf:owner/one")
        part = next(home.rglob("*.part"))
        part.write_bytes(FILE + b"more")
        assert pull("hf:owner/one", progress=False).read_bytes() == FILE

    def test_a_full_disk(self, served, home, monkeypatch):
        served(one={"m.gguf": FILE})

        def full(number):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(hub.os, "fsync", full)
        assert refused("hf:owner/one") == "hf:owner/one: No space left on device"
        assert not list(home.rglob("*.gguf"))


class TestPresentFiles:
    """What pull does with files that are there: the size at every load, every byte where it is asked to look."""

    def check(self, name="hf:owner/one"):
        return pull(name, progress=False, verify=True)

    def test_whole_ones_need_no_hub(self, served, home, capsys):
        server = served(one={"m.gguf": FILE}, small={"m.gguf": b"small"})
        paths = [pull(f"hf:owner/{name}", progress=False) for name in ("one", "small")]
        del server.requests[:]
        assert [self.check(f"hf:owner/{name}") for name in ("one", "small")] == paths
        assert server.requests == [] and capsys.readouterr() == ("", "")

    @pytest.mark.parametrize("content", [FILE, b"small"], ids=["sha256", "git"])
    def test_a_damaged_byte(self, served, home, capsys, content):
        server = served(one={"m.gguf": content})
        path = pull("hf:owner/one", progress=False)
        server.repos["owner/one"]["n.gguf"] = FILE  # what the name meant is kept
        for at in (0, len(content) // 2, len(content) - 1):
            damaged = bytearray(content)
            damaged[at] ^= 1
            path.write_bytes(damaged)
            assert pull("hf:owner/one", progress=False) == path and path.read_bytes() == damaged  # not looked at
            assert self.check() == path and path.read_bytes() == content
            assert capsys.readouterr() == ("", f"{path} was damaged and has been downloaded again\n")
        assert not (home / "hub/owner--one/.partial").exists()

    def test_a_wrong_size_is_seen_at_every_load(self, served, home, capsys):
        served(one={"m.gguf": FILE})
        path = pull("hf:owner/one", progress=False)
        for content in (FILE[:-1], b"", FILE + b"x"):
            path.write_bytes(content)
            assert resolve("hf:owner/one/m.gguf", progress=False) == path and path.read_bytes() == FILE
            assert "was damaged and has been downloaded again" in capsys.readouterr().err

    def test_each_part_is_looked_at(self, served, home, capsys):
        names = [f"b-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
        server = served(one={name: FILE[i:] for i, name in enumerate(names)})
        first = pull("hf:owner/one", progress=False)
        for i, name in enumerate(names):
            path = first.with_name(name)
            path.write_bytes(bytes(len(FILE) - i))
            del server.requests[:]
            assert self.check() == first and path.read_bytes() == FILE[i:]
            assert [request[1].rpartition("/")[2] for request in server.requests if "resolve" in request[1]] == [name]
        first.with_name(names[2]).unlink()
        assert self.check() == first and first.with_name(names[2]).read_bytes() == FILE[2:]

    def test_each_file_of_a_directory_is_looked_at(self, served, home, tmp_path, capsys):
        local = tiny_models.directory("llama", tmp_path / "made", n_shards=2)
        files = {path.name: path.read_bytes() for path in local.iterdir()}
        served(one=files)
        directory = pull("hf:owner/one", progress=False)
        for name, content in files.items():
            path = directory / name
            path.write_bytes(bytes(len(content)))
            assert self.check() == directory and path.read_bytes() == content
            assert capsys.readouterr().err == f"{path} was damaged and has been downloaded again\n"
        assert {path.name for path in directory.iterdir()} == set(files)

    def test_the_same_commit_is_pulled_again(self, served, home):
        """Not what the revision means by now: a model stays what it was."""
        server = served(one={"m.gguf": FILE})
        path = pull("hf:owner/one", progress=False)
        path.write_bytes(bytes(len(FILE)))
        del server.requests[:]
        self.check()
        asked = [request[1] for request in server.requests]
        assert asked == [f"api/models/owner/one/revision/{COMMIT}", f"owner/one/resolve/{COMMIT}/m.gguf"]

    def test_what_cannot_be_mended(self, served, home, capsys):
        server = served(one={"m.gguf": FILE})
        path = pull("hf:owner/one", progress=False)
        path.write_bytes(bytes(len(FILE)))
        server.wrong.add("m.gguf")
        with pytest.raises(ModelError) as caught:
            self.check()
        assert str(caught.value).startswith(f"{path} was damaged: hf:owner/one: m.gguf does not have the hash ")
        assert path.read_bytes() == bytes(len(FILE)), "what is there is not lost before there is better"

    @pytest.mark.parametrize(
        "record", [None, b"{", b"[]", b'{"files/m.gguf": 3}', b'{"files/m.gguf": {"name": "../x"}}'], ids=repr
    )
    def test_without_a_record_it_says_so(self, served, home, capsys, record):
        served(one={"m.gguf": FILE})
        path = pull("hf:owner/one", progress=False)
        file = home / "hub/owner--one/pulled.json"
        file.unlink() if record is None else file.write_bytes(record)
        assert self.check() == path
        said = f"{path} was not checked: there is no record of its hash; delete it to have it pulled again\n"
        assert capsys.readouterr().err == said

    def test_the_choice_that_was_kept_is_not_believed(self, served, home):
        served(one={"m.gguf": FILE})
        path = pull("hf:owner/one", progress=False)
        for text in (b"../../../x.gguf", b"/etc/passwd", b"\xff", b"", b"m.bin"):
            (home / "hub/owner--one/chosen").write_bytes(text)
            assert pull("hf:owner/one", progress=False) == path


class TestHostileHubs:
    """What a hub says is checked before a path, a name or a line is made of it."""

    @pytest.mark.parametrize("digest", ["../../../../victim", "/etc/passwd", "", "x" * 64, "a" * 41, 5, None])
    def test_a_digest_is_no_path(self, served, home, digest):
        """It names the file that a download is kept in."""
        server = served(one={"m.gguf": FILE})
        victim = home.parent / "victim"
        victim.write_bytes(b"untouched")
        lfs = {"sha256": digest, "size": 1, "pointerSize": 1}
        server.describe_file = lambda name, data: {
            "rfilename": name, "size": len(data), "blobId": digest, "lfs": lfs,
        }  # fmt: skip
        refused("hf:owner/one")
        assert victim.read_bytes() == b"untouched" and not list(home.parent.rglob("*.part"))
        assert files_under(home) in ([], ["hub/owner--one/.lock"])

    @pytest.mark.parametrize(
        "name",
        [
            "../m.gguf", "/m.gguf", "a/../../m.gguf", "a\\..\\m.gguf", "a\nb.gguf", "\x1b[2Jm.gguf", "\ud800.gguf",
            "\0.gguf",
        ],
    )  # fmt: skip
    def test_names_that_are_none(self, served, home, name):
        server = served(one={"m.gguf": FILE})
        server.describe_file = lambda _, data: describe_file(name, data)
        assert refused("hf:owner/one") == "hf:owner/one: neither a GGUF file nor a directory of safetensors"

    def test_more_bytes_than_stated(self, served, home):
        server = served(one={"m.gguf": FILE})
        server.describe_file = lambda name, data: describe_file(name, data[:5000])
        assert refused("hf:owner/one") == "hf:owner/one: m.gguf is longer than the 5000 bytes that the hub states"
        assert files_under(home) == ["hub/owner--one/.lock"]

    @pytest.mark.parametrize(
        "to", ["file:///etc/passwd", "/owner/one/resolve/main/m.gguf", "http://127.0.0.1:9/x", "//"]
    )
    def test_redirects(self, served, home, to):
        """To what is no file of a hub, to itself, to where nobody answers."""
        server = served(one={"m.gguf": FILE})
        server.redirect["m.gguf"] = to
        refused("hf:owner/one")
        assert not list(home.rglob("*.gguf"))

    def test_a_redirect_to_the_bytes(self, served, home):
        server = served(one={"m.gguf": FILE}, two={"n.gguf": FILE})
        server.redirect["m.gguf"] = "/owner/two/resolve/main/n.gguf"
        assert pull("hf:owner/one", progress=False).read_bytes() == FILE

    def test_control_characters_of_an_error(self, served, home):
        server = served(one={"m.gguf": FILE})
        server.message = "bad\x1b[2Jnews" + "x" * 3000
        server.gated.add("owner/three")
        server.repos["owner/three"] = {"m.gguf": FILE}
        server.refuse["m.gguf"] = 100
        message = refused("hf:owner/one")
        assert message.isprintable() and len(message) < 500


class TestRefusals:
    @pytest.mark.parametrize(
        "name",
        [
            "hf:", "hf:owner", "hf:owner/one/x.bin", "hf:a/b/c", "hf:owner/one@/m.gguf", "hf:/x", "hf:a--b/c",
            "hf:a/b--c",
        ],
    )  # fmt: skip
    def test_names(self, home, name):
        assert refused(name) == f"{name}: not hf:owner/repo[@revision][/file.gguf]"

    @pytest.mark.parametrize("file", ["../m.gguf", "a/../../m.gguf", "/etc/m.gguf"])
    def test_paths_that_leave_the_repository(self, home, file):
        assert refused(f"hf:owner/one/{file}") == f"hf:owner/one/{file}: {file} is no path inside a repository"

    def test_what_is_not_there(self, served):
        served(one={"m.gguf": FILE}, none={"README.md": b"x"})
        assert (
            refused("hf:owner/two") == "hf:owner/two: no such repository on the hub, or a private one (`hf auth login`)"
        )
        assert refused("hf:owner/one/n.gguf") == "hf:owner/one/n.gguf: no file n.gguf in the repository"
        assert refused("hf:owner/none") == "hf:owner/none: neither a GGUF file nor a directory of safetensors"

    def test_gated(self, served):
        served(one={"m.gguf": FILE}).gated.add("owner/one")
        assert refused("hf:owner/one") == (
            "hf:owner/one: gated; accept its terms on the hub, then log in with `hf auth login`"
        )

    def test_no_hub(self, home, monkeypatch):
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        assert refused("hf:owner/one").startswith("hf:owner/one: ")

    def test_without_the_client(self, home, monkeypatch):
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        assert refused("hf:owner/one") == "hf:owner/one: needs the huggingface_hub package: pip install 'pagedkv[hf]'"


class TestDirectories:
    @pytest.mark.parametrize("n_shards", [1, 2])
    def test_a_directory_of_safetensors(self, served, home, tmp_path, n_shards):
        local = tiny_models.directory("llama", tmp_path / "made", n_shards=n_shards)
        files = {path.name: path.read_bytes() for path in local.iterdir()}
        served(one={**files, "pytorch_model.bin": FILE, "onnx/model.onnx": FILE})
        path = pull("hf:owner/one", progress=False)
        assert path == home / "hub/owner--one/directory" == pull("hf:owner/one/config.json", progress=False)
        assert {file.name: file.read_bytes() for file in path.iterdir()} == files
        assert load_model("hf:owner/one", threads=1).config.architecture == "llama"

    def test_nothing_half_pulled(self, served, home, tmp_path):
        local = tiny_models.directory("llama", tmp_path / "made", n_shards=2)
        files = {path.name: path.read_bytes() for path in local.iterdir()}
        shard = next(name for name in sorted(files) if name.startswith("model-00002"))
        server = served(one=files)
        server.wrong.add(shard)
        assert f"{shard} does not have the hash" in refused("hf:owner/one")
        assert not (home / "hub/owner--one/directory").exists()
        server.wrong.clear()
        del server.requests[:]
        assert {file.name for file in pull("hf:owner/one", progress=False).iterdir()} == set(files)
        assert [request[1].rpartition("/")[2] for request in server.requests if "resolve" in request[1]] == [shard]

    def test_an_index_that_points_elsewhere(self, served):
        index = json.dumps({"weight_map": {"a": "../x.safetensors"}}).encode()
        served(one={"config.json": b"{}", "model.safetensors.index.json": index})
        assert refused("hf:owner/one") == "hf:owner/one: no file ../x.safetensors in the repository"
        index = json.dumps({"weight_map": {"a": "x/y.safetensors"}}).encode()
        served(two={"config.json": b"{}", "model.safetensors.index.json": index, "x/y.safetensors": FILE})
        assert "x/y.safetensors is not beside it" in refused("hf:owner/two")


def test_a_name_for_every_command(served, home, pagedkv_command):
    served(one={"m.gguf": tiny.model()})
    result = pagedkv_command("pull", "hf:owner/one")
    assert result.stdout == f"{home}/hub/owner--one/files/m.gguf\n", result.stderr
    assert "llama" in pagedkv_command("info", "hf:owner/one").stdout
    broken = pagedkv_command("generate", "--model", "hf:owner/two", "--prompt", "x")
    assert broken.returncode and len(broken.stderr.strip().splitlines()) == 1


def test_two_pulls_at_once(served, home):
    """One waits for the other, and finds it done."""
    server = served(one={"m.gguf": FILE})
    code = "from pagedkv.models.catalogue import pull\nprint(pull('hf:owner/one', progress=False))"
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert {child.communicate()[0] for child in children} == {f"{home}/hub/owner--one/files/m.gguf\n"}
    assert len([request for request in server.requests if "resolve" in request[1]]) == 1


def test_progress_is_shown_where_asked(served, capsys):
    served(one={"m.gguf": FILE}, two={"n.gguf": FILE})
    pull("hf:owner/one", progress=False)
    assert capsys.readouterr().err == ""
    pull("hf:owner/two", progress=True)
    assert "n.gguf" in capsys.readouterr().err


def test_the_hub_is_asked_only_for_its_names(home, monkeypatch):
    monkeypatch.setattr(catalogue.hub, "pull", None)
    with pytest.raises(ModelError, match="no such file"):
        resolve("owner/one")
