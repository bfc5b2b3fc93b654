"""The command line, as a person types it: what it prints, how it exits, and no traceback."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import typer
import websocket

import labkit
from labkit.cli import SHIPPED, _find
from labkit.course.machine import doctor
from labkit.course.machine.doctor import Finding, MachineReport
from labkit.course.server.headless import Channel, Jupyter
from labkit.launch.gpu_facts import Gpu, GpuFacts
from labkit.launch.hang_diagnosis import Autopsy
from labkit.launch.progress import Bar
from labkit.launch.reply import Failure
from labkit.launch.verdict import CheckResult, Verdict
from tests.plan.test_compared_with_published import some
from tests.typed import typed
from tests.waiting import LONG_S, until

ROOT = Path(__file__).resolve().parents[1]
LABKIT = (sys.executable, "-m", "labkit")
ONE_WAY = ("--recompute", "full", "--micro", 1)
"""Choices that are made for a search which is a test's means and not its matter: it takes a tenth of the time."""
EXPERTS = ("--model", "mixtral-8x7b", "--gpus", 16, "--batch", 16, "--seq", "4k", "--strategy", "zero1", *ONE_WAY)


def test_the_version_is_the_one_of_the_package():
    """Would catch a version that is written down twice, and a package that cannot be run as one."""
    done = subprocess.run([*LABKIT, "--version"], capture_output=True, text=True, timeout=LONG_S)
    assert done.stdout == f"{labkit.__version__}\n"


def test_the_console_script_is_installed_beside_python():
    """Would catch a wrong entry point in pyproject.toml."""
    script = Path(sys.executable).parent / "labkit"
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=LONG_S)
    assert done.stdout.strip() == labkit.__version__


@pytest.mark.parametrize(
    "words", ["nosuch", "lab 77", "bench nosuch", "lab 0 --port", "lab --port=x", "--nosuch", "lab --workshop 3h"]
)
def test_a_command_that_makes_no_sense_exits_with_2_and_a_sentence(words):
    """Would catch a traceback, and an exit code that a script cannot tell from a failure."""
    done = typed(*words.split())
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert words.split()[-1].split("=")[0] in done.stderr


def test_an_unknown_lab_is_answered_with_the_labs_that_there_are():
    """Would catch a bare 'not found'."""
    assert "00_doctor_and_first_cluster" in re.sub(r"[\s│]+", "", typed("lab", "77").stderr)


def test_a_workshop_opens_its_agenda_and_an_unknown_one_is_answered_with_those_that_there_are():
    """Would catch an agenda that is not found, and a length that is silently another lab."""
    assert _find("workshop_2h").name == "workshop_2h.ipynb"
    assert "2h,4h,1d,2d" in re.sub(r"[\s│]+", "", typed("lab", "--workshop", "3h").stderr)


def test_a_failure_exits_with_1_and_one_sentence_and_debug_shows_the_traceback(monkeypatch):
    """Would catch a traceback for a learner, and a failure that cannot be looked into."""
    monkeypatch.setattr("labkit.cli.SHIPPED", Path("elsewhere"))
    done = typed("bench", "launch")
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "benchmarks are run from a checkout of labkit" in done.stderr
    with pytest.raises(ValueError, match="benchmarks are run from a checkout of labkit"):  # Python shows its traceback
        typed("--debug", "bench", "launch")


def test_a_failure_of_ranks_is_told_in_one_line_too(monkeypatch):
    """Would catch the traceback of a rank, which is of no use to whoever has typed a command."""

    def fails():
        same = Failure("ValueError", "no", "Traceback ...", False, None)
        raise labkit.WorkerError(0, "rank 0 raised ValueError: no", {0: same}, Autopsy("", ()), ["Do this instead."])

    monkeypatch.setattr(doctor, "doctor", fails)
    done = typed("doctor")
    assert (done.returncode, done.stderr) == (1, "labkit: rank 0 raised ValueError: no Do this instead.\n")


def test_the_doctor_prints_plain_data_or_a_table(monkeypatch):
    """Would catch a word beside the data, which no JSON reader forgives, and a table without its numbers."""
    findings = (
        Finding("latency alpha", 20.5, "us", "of a message"),
        Finding("bandwidth 1/beta", 1.25, "GB/s", "the fit"),
    )
    monkeypatch.setattr(doctor, "doctor", lambda: MachineReport(findings, None))
    data, table = typed("doctor", "--json", "-"), typed("doctor")
    assert data.returncode == table.returncode == 0
    plain = json.loads(data.stdout)
    assert plain["latency alpha"] == {"value": 20.5, "unit": "us", "why": "of a message"}
    assert plain["GPU facts"] is plain["self-test"] is None
    assert "latency alpha" in data.stderr
    assert "latency alpha" in table.stdout
    assert re.search(r"bandwidth 1/beta\s*│\s*1.25 GB/s", table.stdout)


def test_what_a_stranger_sends_has_all_facts_and_each_part(monkeypatch, tmp_path):
    """Would catch `labkit doctor --json`, which a first line asks for, refused or with less than is known."""
    gpus = GpuFacts((Gpu("Tesla T4", (7, 5)),), torch="2.13.0", driver="535.1", messages=("a warning",))
    part = CheckResult("verbs", "failed", "all_reduce gave rank 0 other numbers than the host", 1.5)
    verdict = Verdict((part,), gpus.as_dict(), "cuda", 1, "box", "2026-01-02", "0.1", "3.11.7")
    monkeypatch.setattr(doctor, "doctor", lambda: MachineReport((Finding("GPUs", 1),), None, gpus, verdict))
    bare, named, debug = typed("doctor", "--json"), typed("doctor", "--json", "-"), typed("doctor", "--json", "--help")
    assert bare.stdout == named.stdout
    assert debug.returncode == 0
    plain = json.loads(bare.stdout)
    assert plain["GPU facts"] == gpus.as_dict()
    assert plain["GPU facts"]["driver"] == "535.1"
    assert plain["self-test"]["parts"] == [part._asdict()]
    assert plain["self-test"]["passed"] is False
    assert plain["machine"]
    assert typed("doctor", "--json", tmp_path / "box.json").returncode == 0
    assert json.loads((tmp_path / "box.json").read_text()) == plain


def test_a_doctor_who_finds_no_ranks_exits_with_1(monkeypatch):
    """Would catch a script that goes on because the doctor always exits with 0."""

    def broken():
        raise RuntimeError("no ranks today")

    monkeypatch.setattr(doctor, "zygote", broken)
    done = typed("doctor", "--json", "-")
    assert done.returncode == 1
    assert "no ranks today" in json.loads(done.stdout)["ranks"]["why"]


@pytest.mark.parametrize("name", ["0", "00", "00_doctor", "00_doctor_and_first_cluster.ipynb"])
def test_a_lab_is_found_by_number_name_and_path(name, tmp_path, monkeypatch):
    """Would catch a command that works in one folder only."""
    lab = SHIPPED / "notebooks" / "00_doctor_and_first_cluster.ipynb"
    monkeypatch.chdir(tmp_path)
    assert _find(name) == lab
    monkeypatch.chdir(SHIPPED)
    assert _find("notebooks/00_doctor_and_first_cluster.ipynb") == lab
    with pytest.raises(typer.BadParameter):
        _find("*")


def test_a_benchmark_gets_the_path_of_its_numbers(tmp_path, monkeypatch, capfd):
    """Would catch a --json that is swallowed, and an exit code that is lost."""
    (tmp_path / "benchmarks").mkdir()
    program = '"""How long it takes."""\nimport sys; print(sys.argv[1:]); sys.exit(3)'
    (tmp_path / "benchmarks" / "launch.py").write_text(program)
    monkeypatch.setattr("labkit.cli.SHIPPED", tmp_path)
    done = typed("bench", "launch", "--json", "numbers.json")
    assert (done.returncode, done.stdout.splitlines()[0]) == (3, "How long it takes.")
    assert capfd.readouterr().out.strip() == "['--json', 'numbers.json']"


@pytest.mark.parametrize(
    ("width", "words"),
    [
        (80, ("plan", "--gpus", 8)),
        (60, ("plan", *EXPERTS)),
        (80, ("cards", "--list")),
        (60, ("cards", "--covers")),
        (60, ("claims", "c12", "--stored")),
    ],
    ids=str,
)
def test_no_table_cuts_a_word_on_a_narrow_terminal(words, width, monkeypatch, tmp_path):
    """A bug: "para...", "grad...", "opti..." were the columns of labkit train at 80 letters."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    done = typed(*words)
    assert done.returncode == 0
    assert "…" not in done.stdout


def test_a_terminal_of_80_columns_has_room_for_the_table_of_plans(monkeypatch):
    """A bug: eight plans were told as eight lists of twelve lines."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = typed("plan", "--model", "llama-7b", "--gpus", 8).stdout.splitlines()
    (head,) = (number for number, line in enumerate(shown) if line.split()[:2] == ["dp", "pp"])
    assert {"step", "MFU", "memory", "exposed"} < set(shown[head].split())
    assert len(shown[head + 1].split()) >= len(shown[head].split())
    assert any("no room for: bubble" in line for line in shown)


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--gpus", 8),
        ("plan", "--model", "gpt2", "--gpus", 8, "--tokens", "1B"),
        ("claims", "c61"),
        ("quiz", "--topic", "LoRA", "-n", 1, "--prove", "--round", "--key", "key.md"),
        ("export", "site", "--lab", "02"),
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_a_command_that_takes_long_says_what_it_does_to_a_person_alone(words, monkeypatch, tmp_path):
    """A bug: labkit export site took 28 s without a word. (What a person sees of a bar: launch/test_progress.py.)"""
    monkeypatch.chdir(tmp_path)
    done = says_what_it_does(monkeypatch, *words)
    assert done.returncode == 0, done.stderr


def says_what_it_does(monkeypatch, *words):
    """`typed(*words)`, which draws a bar and ends it, and lets nothing of it into what it prints."""
    drawn, ended = list[str](), list[str]()
    monkeypatch.setattr(Bar, "draw", lambda self, share, text: drawn.append(text))
    monkeypatch.setattr(Bar, "end", lambda self, text: ended.append(text))
    done = typed(*words)
    assert drawn
    assert ended
    assert not any(text in done.stdout + done.stderr for text in drawn)
    return done


@pytest.mark.parametrize("words", [("plan", "--gpus", 8), ("claims", "c12", "--stored")], ids=str)
def test_every_command_gives_its_data_to_a_file_or_to_standard_output(words, tmp_path):
    """Would catch a command whose `--json` means something else than the others', and words among the data."""
    beside, alone = typed(*words, "--json", tmp_path / "data.json"), typed(*words, "--json", "-")
    assert beside.returncode == alone.returncode
    assert type(json.loads(alone.stdout)) is type(json.loads((tmp_path / "data.json").read_text()))
    assert alone.stderr.count("\n") == beside.stdout.count("\n") > 0


@pytest.mark.parametrize("terminal", [False, True])
def test_the_launchers_benchmark_says_which_part_begins_where_there_is_no_terminal(terminal, monkeypatch, capsys):
    """A bug: labkit bench launch said nothing for 100 s to whoever read it through a pipe. Would catch lines that come
    when a part is over, too."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location("launch_benchmark", ROOT / "benchmarks/launch.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    began, drawn = list[tuple[str, str]](), list[str]()

    def part(name, value):
        def run(*_):
            began.append((name, capsys.readouterr().err))
            return value

        return run

    for name in ("median_of", "warm_calls", "bandwidth", "private_memory", "many_ranks"):
        monkeypatch.setattr(bench, name, part(name, 1.0))
    for name, value in {"fresh_cluster": (1.0, 1.0), "ipyparallel_call": None, "ray_call": None}.items():
        monkeypatch.setattr(bench, name, part(name, value))
    monkeypatch.setattr(bench, "zygote", lambda: SimpleNamespace(ready=part("torch", None)))
    monkeypatch.setattr(Bar, "draw", lambda self, share, text: drawn.append(text))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    found = bench.measure(True)
    assert len(drawn) == len(found) + 1
    told = dict(reversed(began))  # what had been said when it began for the first time
    lines = {"torch": "importing torch\n", "fresh_cluster": "1 of 12: fresh cluster of 4 to the first all_reduce\n"}
    lines |= {"bandwidth": "6 of 12: 256 MB come back\n", "many_ranks": "8 of 12: 64 ranks, whole life\n"}
    assert {name: told[name] for name in lines} == (dict.fromkeys(lines, "") if terminal else lines)
    assert capsys.readouterr().err == ("" if terminal else "12 of 12: ray start\n")


def test_every_comparison_that_can_be_named_is_there():
    """Would catch `labkit bench memory`, which named a benchmark that was renamed, and one that has no name yet."""
    from labkit.cli import Benchmark

    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {
        "machine",
        "gpu_checks",
        "gpu_numbers",
        "tables",
    }  # what they share, and what writes of all
    assert {each.value for each in Benchmark} == scripts


def listens(host, port):
    """Whether somebody does."""
    with socket.socket() as knock:
        return knock.connect_ex((host, port)) == 0


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A server that `labkit lab` has started without an activated environment: no labkit is on the PATH, and a login
    shell would set a PATH of its own."""
    folder = tmp_path_factory.mktemp("opened")
    environment = {**os.environ, "PATH": os.defpath, "SHELL": "/bin/sh", "HOME": str(folder)}
    environment |= {"JUPYTER_RUNTIME_DIR": str(folder), "JUPYTER_CONFIG_DIR": str(folder)}
    (folder / ".profile").write_text(f"export PATH={os.defpath}\n")
    process = subprocess.Popen(
        [*LABKIT, "lab", "--no-browser", "--port", "0", "--home", str(folder / "my")],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    family = [psutil.Process(process.pid)]
    try:
        note = folder / f"jpserver-{process.pid}.json"  # the server runs in the place of the command
        assert until(lambda: process.poll() is not None or (note.exists() and note.read_text().endswith("}")))
        said = json.loads(note.read_text())
        host, _, port = said["url"].removeprefix("http://").strip("/").rpartition(":")
        assert until(lambda: listens(host, int(port)))  # on a busy machine the note is there before the server listens
        yield Jupyter(process, said["url"], said["token"])
        family += family[0].children(recursive=True)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG_S) is not None
        process.stdout.close()
    assert psutil.wait_procs(family, timeout=LONG_S)[1] == []


@pytest.mark.slow
def test_lab_opens_the_server_on_the_notebook_for_this_machine_only(opened):
    """Would catch a server that others can reach, a missing page, a fetch of news, and something left behind."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    page = f"{opened.url}/lab/tree/notebooks/ten_minutes.ipynb?token={opened.token}"
    assert opener.open(page, timeout=LONG_S).status == 200
    assert opened.ask("/api/contents/notebooks/00_doctor_and_first_cluster.ipynb")["type"] == "notebook"
    notes = opened.ask("/lab/api/settings/@jupyterlab/apputils-extension:notification")["schema"]["properties"]
    assert (notes["fetchNews"]["default"], notes["checkForUpdates"]["default"]) == ("false", False)
    server = psutil.Process(opened.process.pid)
    listening = set()
    for member in (server, *server.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # the server asks other programs for this and that at its start
            listening |= {c.laddr.ip for c in member.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}


@pytest.mark.slow
def test_a_cell_and_a_terminal_find_the_labkit_that_has_opened_them(opened):
    """Would catch `!labkit cards` that is "command not found" where nobody has activated the environment."""
    script = str(Path(sys.executable).parent / "labkit")
    kernel = opened.ask("/api/kernels", {"name": "python3"})["id"]
    channel = Channel(opened, kernel)
    assert channel.execute("found = !command -v labkit", "found[0]") == (None, script)
    channel.close()
    opened.ask(f"/api/kernels/{kernel}", method="DELETE")
    name = opened.ask("/api/terminals", {})["name"]
    address = f"{opened.url.replace('http', 'ws', 1)}/terminals/websocket/{name}?token={opened.token}"
    terminal = websocket.create_connection(address, timeout=LONG_S, http_no_proxy=["*"])
    terminal.send(json.dumps(["stdin", "echo it is $(command -v labkit) here\r"]))
    heard = ""
    while not (answer := re.search(r"it is (\S*) ?here", heard)):
        kind, *words = json.loads(terminal.recv())
        heard += words[0] if kind == "stdout" else ""
    assert answer[1] == script
    terminal.close()
    opened.ask(f"/api/terminals/{name}", method="DELETE")


@pytest.mark.parametrize("place", ["aaa", "zzz"])
def test_a_lab_in_the_present_folder_comes_before_that_of_the_checkout(place, tmp_path, monkeypatch):
    """A bug: of two labs with one name, the one whose path came first in the alphabet was opened."""
    monkeypatch.setattr("labkit.cli.SHIPPED", tmp_path / "mmm")
    for folder in ("mmm", place):
        (tmp_path / folder / "notebooks").mkdir(parents=True)
        (tmp_path / folder / "notebooks/00_doctor_and_first_cluster.ipynb").touch()
    monkeypatch.chdir(tmp_path / place)
    assert _find("0").parts[-3] == place
    assert _find("00_doctor_and_first_cluster.ipynb").parts[-3] == place


def test_a_plan_with_experts_tells_total_and_active_parameters_and_what_ep_does():
    """Would catch experts that are counted as if a token met them all, and an axis that nobody explains."""
    done = typed("plan", *EXPERTS)
    assert "46.7e9 parameters, of which a token meets 12.9e9 (2 of 8 experts" in done.stdout
    assert "ep=8: 8 neighbours along dp have 1 of 8 experts each, " in done.stdout
    assert re.search(r"^ *dp", done.stdout, re.M)
    assert re.search(r"\bep\b", done.stdout.split("1 memory")[0])


def test_a_plan_is_a_table_and_an_answer_in_order(monkeypatch):
    """Would catch a table without reasons, and an answer that begins with the strategy."""
    monkeypatch.setenv("COLUMNS", "120")
    done = typed("plan", "--model", "llama-70b", "--gpus", "64", "--gpu", "h100", "--batch", "512")
    assert done.returncode == 0
    assert "refused:" in done.stdout
    heading = "llama-70b on 64 h100, 8 a node: 512 rows x 4,096 = 2,097,152 tokens a step, bf16, adamw"
    assert done.stdout.splitlines()[0] == heading
    assert done.stdout.splitlines()[1].startswith(
        "machine: 8 nodes of 8 h100; inside a node nvlink, 450 GB/s a device, "
    )
    names, first = (line.split() for line in done.stdout.splitlines()[3:5])
    assert names[-7:] == ["recompute", "step", "MFU", "memory", "exposed", "bubble", "expected"]
    *_, bubble, expected, unit = first
    assert unit == "s"
    assert float(expected) > 0
    assert f"the bubble is {bubble} of the step" in done.stdout, "one meaning of waiting in table and answer"
    places = [
        done.stdout.index(word) for word in ("1 memory", "2 baselines", "3 simplest", "4 communication", "5 batch")
    ]
    assert places == sorted(places)


def test_an_answer_stands_beside_what_was_published():
    """Would catch a share of the peak that nobody can hold against anything."""
    done = typed("plan", "--model", "mpt-7b", "--gpus", "8", "--batch", "64")
    assert "published near this: " in done.stdout.splitlines()[-1]
    assert "(llm-foundry, mpt-7b on 8 h100, rows of" in done.stdout.splitlines()[-1]


def test_a_model_by_its_config_on_a_machine_of_ones_own_is_planned_as_it_was_asked(tmp_path):
    """Would catch words of the command line that reach no search, and a count of another model."""
    published = tomllib.loads((Path(__file__).parent / "plan/published_models.toml").read_text())["Qwen2-0.5B"]
    (tmp_path / "config.json").write_text(json.dumps(published["config"]))
    devices = (Path(labkit.__file__).parent / "plan/machine/devices.toml").read_text()
    (tmp_path / "mine.toml").write_text(f"{devices.replace('[device.', '[device.my-')}")
    words = ("--model", tmp_path, "--gpu", f"{tmp_path}/mine.toml:my-h100", "--gpus", "4", "--batch", "32")
    choices = ("--strategy", "fsdp", "--recompute", "full", "--micro", "2", "--precision", "pure-bf16")
    done = typed("plan", *words, *choices, "--memory", "40 GB", "--set", "seq=2k", "--json", "-")
    assert done.returncode == 0
    plans = [plan for plan in json.loads(done.stdout) if not plan["refused"]]
    assert {(plan["recipe"]["recompute"], plan["recipe"]["n_micro"]) for plan in plans} == {("full", 2)}
    assert {plan["recipe"]["strategy"] for plan in plans} == {"zero3"}
    assert f"{published['parameters']:,} parameters" in done.stderr
    assert "32 rows x 2,048 = 65,536 tokens a step, pure-bf16" in done.stderr
    assert "37.6 GB of 40.0 GB are planned with" in done.stderr


def test_one_small_gpu_is_told_what_it_can_do():
    """Would catch "nothing fits" as the last word on a gaming card, and an adapter's rank that is not asked for."""
    done = typed("plan", "--model", "llama-7b", "--gpu", "rtx-4090", "--gpus", "1")
    assert "nothing fits" in done.stdout
    assert "with --adapter qlora it fits, for fine-tuning: " in done.stdout
    done = typed("plan", "--model", "llama-7b", "--gpu", "rtx-4090", "--adapter", "qlora", "--adapter-rank", "4")
    assert done.returncode == 0
    assert "qlora of rank 4" in done.stdout
    assert "dp 1 x" in done.stdout


def test_a_plan_for_another_tool_is_all_of_standard_output_and_knows_what_was_asked_for(tmp_path):
    """Would catch a heading in a file that a shell is to run, and a default that passes for somebody's wish."""
    words = ("plan", "--model", "gpt2", "--gpus", "4", "--micro", "2", "--batch", "32")
    done = typed(*words, "--as", "torchrun", "--choice", "2")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "#!/usr/bin/env bash")
    assert "micro      2 micro-batches of" in done.stdout
    assert re.search(r"#   micro +2 .*: asked for$", done.stdout, re.MULTILINE)
    assert re.search(r"#   precision +bf16: assumed", done.stdout, re.MULTILINE)
    assert re.search(r"--nproc-per-node=4 +# devices of a node of h100", done.stdout)
    assert "--choice says which plan --as writes" in " ".join(typed(*words, "--choice", "2").stderr.split())
    lacking = typed(*words, "--as", "accelerate", "--strategy", "ddp")
    assert lacking.returncode == 1
    assert lacking.stdout == ""
    assert "Accelerate 1.15.0 cannot run plan 1" in lacking.stderr
    (tmp_path / "box.toml").touch()
    assert "--force" in typed("doctor", "--calibrate", tmp_path / "box.toml").stderr


def test_long_rows_and_larger_nodes_can_be_planned():
    """Would catch 128k read as 128,000 tokens, and nodes that stay at 8."""
    words = ("--model", "llama3-8b", "--gpus", 16, "--seq", "128k", "--batch", 2, "--strategy", "zero3", *ONE_WAY)
    done = typed("plan", *words, "--node-size", "16", "--json", "-")
    plans = json.loads(done.stdout)
    kept = [plan for plan in plans if not plan["refused"]]
    assert any(plan["layout"]["tp"] == 16 for plan in plans if "spans" not in plan["refused"])
    assert kept
    assert "2 rows x 131072 = 262,144 tokens" in done.stderr
    spans = [plan["refused"] for plan in json.loads(typed("plan", *words, "--json", "-").stdout)]
    assert any("tp=16 spans 2 nodes of 8" in reason for reason in spans)


def test_a_plan_for_long_rows_has_cp_in_the_table_the_words_and_the_data_and_a_published_run_beside_it():
    """Would catch an axis of which the command line tells nothing."""
    words = ("--model", "llama3-405b", "--gpus", 256, "--seq", "128k", "--batch", 8, "--strategy", "zero3", *ONE_WAY)
    done = typed("plan", *words, "--json", "-")
    best = next(plan for plan in json.loads(done.stdout) if not plan["refused"])
    assert best["layout"]["cp"] > 1
    assert best["recipe"]["context"] in ("ring", "gather", "ulysses")
    assert best["step_s"]["cp"] > 0
    assert f"cp={best['layout']['cp']} by {best['recipe']['context']}" in done.stderr
    assert "38% MFU (Llama 3, arXiv:2407.21783, table 4" in done.stderr.splitlines()[-1]


def test_a_budget_is_days_devices_and_money(tmp_path):
    """Would catch days of one device, and a price that is not multiplied by the hours."""
    words = ("plan", "--model", "gpt2", "--tokens", "10B", "--batch", "512", "--price", "2")
    done = typed(*words, "--gpus", "8", "--json", tmp_path / "eight.json")
    assert done.returncode == 0
    assert "10B tokens of gpt2 on 8 h100: " in done.stdout
    assert "llm.c's fused kernels" in done.stdout  # which are faster than those that are foretold
    eight = json.loads((tmp_path / "eight.json").read_text())
    assert eight["cost"] == pytest.approx(2 * 24 * 8 * eight["days"])
    asked = json.loads(typed(*words, "--days", eight["days"] * 1.01, "--json", "-").stdout)
    assert (asked["n_ranks"], asked["plan"]) == (8, eight["plan"])


def test_the_published_runs_are_a_table_and_a_picture(tmp_path, monkeypatch):
    """Would catch a picture of other runs than the table's, and errors that cannot be read by a program. Of some runs:
    to predict all of them takes long, and plan/test_compared_with_published.py does."""
    monkeypatch.setattr("labkit.plan.search.compared_with_published.compared", some)
    files = ("--svg", tmp_path / "runs.svg", "--json", tmp_path / "runs.json")
    done = says_what_it_does(monkeypatch, "plan", "--published", *files)
    assert done.returncode == 0
    rows = json.loads((tmp_path / "runs.json").read_text())
    every = [row for row in rows if row["band"] == "all"]
    count = sum(row["fitted"]["n_runs"] + row["held_out"]["n_runs"] for row in every)
    assert f"{count:,} published runs" in (tmp_path / "runs.svg").read_text()
    assert all(row["source"] in done.stdout for row in rows)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--days", "3"), "--tokens, too"),
        (("--price", "0"), "--tokens, too"),
        (("--tokens", "1T", "--days", "3", "--gpus", "8"), "leave one of them out"),
        (("--seq", "128kb"), "such as 8,192 or 128k"),
    ],
)
def test_a_question_that_makes_no_sense_exits_with_2(words, told):
    """Would catch a budget of nothing, and a question with its own answer in it."""
    done = typed("plan", *words)
    assert done.returncode == 2
    assert told in re.sub(r"[\s│]+", " ", done.stderr)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--model", "lama-70b"), "llama-70b"),
        (("--gpu", "h1000"), "h100"),
        (("--gpus", "0"), "0"),
        (("--tokens", "1TB"), "write 1T, 300B or 1.5e12"),
        (("--tokens", "1T", "--days", "0"), "days must be above 0"),
        (("--adapter", "dora"), "lora, qlora"),
        (("--node-size", "0"), "1 device or more"),
        (("--precision", "fp9"), "bf16"),
        (("--precision", "bf61"), "did you mean 'bf16'"),
        (("--strategy", "zero33"), "did you mean 'zero3'"),
        (("--micro", "0"), "n_micro is the option --micro"),
        (("--set", "d_modl=4"), "did you mean 'd_model'"),
        (("--model", "none/config.json"), "is not there"),
        (("--precision", "fp8", "--gpu", "a100-80gb"), "a device with such units: h100"),
    ],
)
def test_a_plan_for_what_there_is_not_is_refused_with_the_nearest(words, told):
    """Would catch a traceback for a typing error."""
    done = typed("plan", *words)
    assert done.returncode == 1
    assert told in done.stderr
    assert "Traceback" not in done.stderr
