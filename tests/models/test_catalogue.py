"""resolve and pull: names, paths, and every way a download can go wrong. Only the last test uses the network."""

import hashlib
import multiprocessing
import threading
import zipfile
from types import SimpleNamespace

import pytest

from pagedkv.models import catalogue
from pagedkv.models.catalogue import CATALOGUE, CatalogueEntry, pull, resolve
from pagedkv.models.errors import ModelError

CONTENT = bytes(range(256)) * 5000
PARTS = (("tiny-model-a==1.0", "tiny/m.part0"), ("tiny-model-b==1.0", "data/m.part1"))


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDKV_HOME", str(tmp_path / "home"))
    entry = CatalogueEntry("m.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), PARTS, "MIT")
    monkeypatch.setitem(CATALOGUE, "tiny", entry)
    return tmp_path / "home"


class FakePip:
    """Stands in for pip: writes the wheels it is asked for, or fails as told."""

    def __init__(self, contents=(CONTENT[:700_000], CONTENT[700_000:]), status=0, complaint="", member=None):
        self.wheels = dict(zip((requirement for requirement, _ in PARTS), contents, strict=True))
        self.status, self.complaint, self.member = status, complaint, member
        self.calls: list[list[str]] = []
        self.lock = threading.Lock()

    def __call__(self, arguments, scratch, watch):
        with self.lock:
            self.calls.append(arguments)
        watch()
        requirement = arguments[-1]
        if not self.status:
            wheel = scratch / f"{requirement.split('==')[0].replace('-', '_')}-1.0-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(self.member or dict(PARTS)[requirement], self.wheels[requirement])
            watch()
        return self.status, self.complaint


def install(monkeypatch, **options) -> FakePip:
    pip = FakePip(**options)
    monkeypatch.setattr(catalogue, "run_pip", pip)
    return pip


def leftovers(home) -> list[str]:
    return sorted(path.name for path in (home / "models").iterdir() if path.suffix != ".lock")


class TestPull:
    def test_parts_are_joined(self, home, monkeypatch):
        pip = install(monkeypatch)
        path = pull("tiny", progress=False)
        assert path == home / "models" / "m.gguf" and path.read_bytes() == CONTENT
        assert leftovers(home) == ["m.gguf"]
        assert [call[-1] for call in pip.calls] == [requirement for requirement, _ in PARTS]
        assert all(call[0] == "download" and "--no-deps" in call for call in pip.calls)

    def test_a_present_file_is_not_pulled_again(self, home, monkeypatch):
        pip = install(monkeypatch)
        assert pull("tiny", progress=False) == pull("tiny", progress=False)
        assert len(pip.calls) == 2

    def test_a_file_of_the_wrong_size_is_pulled_again(self, home, monkeypatch):
        install(monkeypatch)
        path = pull("tiny", progress=False)
        path.write_bytes(CONTENT[:-1])
        assert pull("tiny", progress=False).read_bytes() == CONTENT

    def test_progress_goes_to_standard_error(self, home, monkeypatch, capsys):
        install(monkeypatch)
        pull("tiny", progress=True)
        captured = capsys.readouterr()
        assert captured.out == "" and "tiny" in captured.err and "100%" in captured.err

    def test_silence(self, home, monkeypatch, capsys):
        install(monkeypatch)
        pull("tiny", progress=False)
        assert capsys.readouterr() == ("", "")

    def test_unknown_name(self, home):
        with pytest.raises(ModelError, match=r"'nope' is not in the catalogue: .*smollm2-135m-instruct"):
            pull("nope")

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"contents": (CONTENT[:700_000], CONTENT[700_000:-1] + b"\0")}, "sha256"),
            ({"contents": (CONTENT[:700_000], b"")}, "expected 1280000"),
            ({"contents": (CONTENT, CONTENT)}, "more than the expected 1280000 bytes"),
            ({"member": "elsewhere/m.gguf"}, "no item named"),
            (
                {"status": 1, "complaint": "WARNING: x\nERROR: No matching distribution found for y\n"},
                "No matching distribution",
            ),
            (
                {"status": 1, "complaint": "WARNING: Retrying after NewConnectionError(...)\nERROR: z"},
                "index cannot be reached",
            ),
            ({"status": 1, "complaint": ""}, "no reason given"),
            (
                {
                    "status": 1,
                    "complaint": "ERROR: Could not install packages due to an OSError: [Errno 28] No space "
                    "left on device\n\n",
                },
                "with pip: No space left on device",
            ),
            (
                {
                    "status": 2,
                    "complaint": "WARNING: Retrying, connection broken\nERROR: Exception:\nTraceback (most "
                    "recent call last):\n  File x\nOSError: [Errno 28] No space left on device\n",
                },
                "with pip: No space left on device",
            ),
            (
                {
                    "status": 2,
                    "complaint": "ERROR: Exception:\nTraceback (most recent call last):\n  File x\n"
                    "OSError: [Errno 122] Disk quota exceeded: '/x'\n",
                },
                "with pip: Disk quota exceeded",
            ),
            (
                {
                    "status": 2,
                    "complaint": "ERROR: Exception:\nTraceback (most recent call last):\n  File x\n"
                    "PermissionError: [Errno 13] Permission denied: '/x'\nWARNING: old pip\n",
                },
                "with pip: PermissionError: [Errno 13] Permission denied: '/x'",
            ),
            ({"status": 1, "complaint": "/usr/bin/python: No module named pip\n"}, "No module named pip"),
        ],
    )
    def test_failures_are_one_line_and_leave_nothing(self, home, monkeypatch, options, says):
        install(monkeypatch, **options)
        with pytest.raises(ModelError) as caught:
            pull("tiny", progress=False)
        assert says in str(caught.value) and "\n" not in str(caught.value)
        assert leftovers(home) == []

    def test_a_damaged_wheel(self, home, monkeypatch):
        def pip(arguments, scratch, watch):
            (scratch / "x.whl").write_bytes(b"not a zip")
            return 0, ""

        monkeypatch.setattr(catalogue, "run_pip", pip)
        with pytest.raises(ModelError, match=r"x\.whl: File is not a zip file"):
            pull("tiny", progress=False)

    def test_a_cache_that_cannot_be_written(self, home, monkeypatch):
        install(monkeypatch)
        home.write_text("a file where the directory should be")
        with pytest.raises(ModelError, match=r"cannot pull tiny into .*: "):
            pull("tiny", progress=False)

    def test_a_damaged_file_of_the_right_size_is_mended_when_asked_to_look(self, home, monkeypatch, capsys):
        pip = install(monkeypatch)
        path = pull("tiny", progress=False, verify=True)
        assert pull("tiny", progress=False, verify=True) == path and len(pip.calls) == 2
        for at in (0, len(CONTENT) // 2, len(CONTENT) - 1):
            damaged = bytearray(CONTENT)
            damaged[at] ^= 1
            path.write_bytes(damaged)
            assert capsys.readouterr() == ("", "")
            assert pull("tiny", progress=False) == path and path.read_bytes() == damaged  # at each load: not looked at
            assert pull("tiny", progress=False, verify=True) == path and path.read_bytes() == CONTENT
            assert capsys.readouterr() == ("", f"{path} was damaged and has been downloaded again\n")
        assert leftovers(home) == ["m.gguf"]

    def test_a_damaged_file_that_cannot_be_mended(self, home, monkeypatch, capsys):
        install(monkeypatch)
        path = pull("tiny", progress=False)
        path.write_bytes(CONTENT[:-1] + b"?")
        install(monkeypatch, status=1, complaint="ERROR: Max retries exceeded")
        with pytest.raises(ModelError) as caught:
            pull("tiny", progress=False, verify=True)
        assert str(caught.value) == (
            f"{path} was damaged: cannot download {PARTS[0][0]} with pip: the package index cannot be reached"
        )
        assert capsys.readouterr() == ("", "")

    def test_what_pip_says_needs_no_disk(self, home, tmp_path, monkeypatch):
        """On a full disk a log file would stay empty: the complaint is kept elsewhere."""
        before = set(tmp_path.iterdir())
        during = []
        _, complaint = catalogue.run_pip(["no-such-command"], tmp_path, lambda: during.extend(tmp_path.iterdir()))
        assert "no-such-command" in complaint and set(during) == before

    def test_what_a_killed_pull_left_behind_is_removed(self, home, monkeypatch):
        install(monkeypatch)
        stale = home / "models" / ".tiny-dead"
        stale.mkdir(parents=True)
        (stale / "m.gguf").write_bytes(b"half")
        pull("tiny", progress=False)
        assert leftovers(home) == ["m.gguf"]

    def test_concurrent_pulls_download_once(self, home, monkeypatch):
        pip = install(monkeypatch)
        results = []
        threads = [threading.Thread(target=lambda: results.append(pull("tiny", progress=False))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 6 and {path.read_bytes() for path in results} == {CONTENT}
        assert len(pip.calls) == 2

    def test_concurrent_processes_download_once(self, home, monkeypatch):
        install(monkeypatch)
        context = multiprocessing.get_context("fork")
        marks = home.parent / "marks"
        marks.mkdir()

        def work(i):
            pip = install(monkeypatch)
            pull("tiny", progress=False)
            (marks / str(i)).write_text(str(len(pip.calls)))

        workers = [context.Process(target=work, args=(i,)) for i in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert sorted(path.read_text() for path in marks.iterdir()) == ["0", "0", "2"]

    def test_pip_is_run_with_the_users_environment(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
        monkeypatch.setenv("PIP_FIND_LINKS", "")
        seen = []
        status, complaint = catalogue.run_pip(["config", "debug"], tmp_path, lambda: seen.append(1))
        assert (status, complaint) == (0, "")
        status, complaint = catalogue.run_pip(["no-such-command"], tmp_path, lambda: seen.append(1))
        assert status != 0 and 'ERROR: unknown command "no-such-command"' in complaint
        assert seen


class TestResolve:
    def test_catalogue_name(self, home, monkeypatch):
        install(monkeypatch)
        assert resolve("tiny", progress=False) == home / "models" / "m.gguf"

    def test_path(self, tmp_path, monkeypatch):
        path = tmp_path / "x.gguf"
        path.write_bytes(b"")
        assert resolve(str(path)) == resolve(path) == path
        monkeypatch.chdir(tmp_path)
        assert resolve("x.gguf").read_bytes() == b""

    @pytest.mark.parametrize("name", ["missing.gguf", "some/where", "/no/such"])
    def test_missing_file(self, name):
        with pytest.raises(ModelError, match=f"{name}: no such file"):
            resolve(name)

    def test_unknown_name_lists_the_catalogue(self):
        with pytest.raises(ModelError, match=r"'gpt5' is neither a file nor in the catalogue: .*smollm2-135m-instruct"):
            resolve("gpt5")

    def test_directories(self, tmp_path):
        with pytest.raises(ModelError, match=r"a directory without config\.json, not a model"):
            resolve(tmp_path)
        (tmp_path / "config.json").write_text("{}")
        assert resolve(tmp_path) == tmp_path


def test_default_home(monkeypatch, tmp_path):
    monkeypatch.delenv("PAGEDKV_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert catalogue.home() == tmp_path / ".cache" / "pagedkv"
    monkeypatch.setenv("PAGEDKV_HOME", "~/elsewhere")
    assert catalogue.home() == tmp_path / "elsewhere"


@pytest.mark.parametrize("given", [None, ""])
def test_home_without_a_variable(monkeypatch, tmp_path, given):
    """Never the root of the file system, which an empty HOME would stand for."""
    monkeypatch.delenv("PAGEDKV_HOME", raising=False)
    monkeypatch.delenv("HOME")
    if given is not None:
        monkeypatch.setenv("HOME", given)
    monkeypatch.setattr(catalogue.pwd, "getpwuid", lambda uid: SimpleNamespace(pw_dir=str(tmp_path)))
    assert catalogue.home() == tmp_path / ".cache" / "pagedkv"
    monkeypatch.setattr(catalogue.pwd, "getpwuid", lambda uid: {}[uid])
    with pytest.raises(ModelError, match="set PAGEDKV_HOME"):
        catalogue.home()


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_entries_are_well_formed(name):
    entry = CATALOGUE[name]
    assert len(entry.sha256) == 64 and entry.n_bytes > 0 and entry.file_name.endswith(".gguf") and entry.licence
    assert all("==" in requirement and member for requirement, member in entry.parts)


def test_the_real_model(smollm2_path):
    with open(smollm2_path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
