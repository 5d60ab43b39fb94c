"""Processes that a script under `mezzo run` starts: which ones it recognizes, reaches or refuses to start."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from mezzo.cli.main import main
from mezzo.pytorch.run import ranks as run_ranks
from mezzo.pytorch.run.ranks import _difference
from mezzo.runner import children

PYTHON = sys.executable
WORKER = Path(dist.__file__).parents[1] / "_inductor" / "compile_worker" / "__main__.py"


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["python", "train.py", "-I"], ("", ["train.py"])),
        (["/usr/bin/python3.11", "-IuX", "dev", "train.py"], ("Iu", ["train.py"])),
        ([Path(PYTHON), "-S", Path("train.py")], ("S", ["train.py"])),
        (["python", "-u", "-Wignore", "-m", "pack.train", "3"], ("u", ["-m", "pack.train"])),
        (["python", "-Impack"], ("I", ["-m", "pack"])),
        (["python", "-c", "print()"], None),
        (["python", "-Ic", "print()"], None),
        (["python", "-I", "-m", "pip", "list"], None),
        (["python"], None),
        ([PYTHON, str(WORKER), "--pickler=x"], None),  # compile worker of torch.compile
        (["git", "status"], None),
        ("python train.py", None),
        (b"python", None),
        (["/opt/bin/torchrun", "--standalone", "train.py"], ("", ["-m", "torch.distributed.run"])),
        (["bash", "-c", f"cd there && OMP_NUM_THREADS=1 '{PYTHON}' -S train.py; ls"], ("S", ["train.py"])),
        (["torchrun", "--no-python", "mezzo", "run", "train.py"], None),
        (["nice", "-n", "5", "python", "train.py"], ("", ["train.py"])),
        (["env", "PYTHONPATH=src", "python", "train.py"], ("PYTHONPATH=src", ["train.py"])),
        (["bash", "-c", "PYTHONPATH=src:$PYTHONPATH python train.py"], ("", ["train.py"])),
        (["bash", "-c", "export PYTHONPATH=src\npython train.py"], ("PYTHONPATH=src", ["train.py"])),
        (["python", "train.py", "PYTHONPATH=src"], ("", ["train.py"])),
        (["bash", "-c", "apt install python3 git; echo python train.py 'open"], None),
        ([PYTHON, "-E", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()"], ("E", [])),
        ([PYTHON, "-E", "-c", "from multiprocessing.resource_tracker import main;main(3)"], None),
    ],
)
def test_commands_that_run_a_script(command: Any, found: Any) -> None:
    assert children.scripts_of(command) == ([] if found is None else [found])


RUN = "subprocess.run([PYTHON, *{}], env={}, check=True)"
EVERYWHERE = "{**os.environ, 'PYTHONPATH': 'src'}"
ELSEWHERE = "os.environ['PYTHONPATH'] = 'src'; "
SPAWNED = "p = mp.get_context('spawn').Process(target=child.look); p.start(); p.join()"
SPAWNED_E = "mp.util.spawnv_passfds(PYTHON, [PYTHON, '-E', '-c', f'from {mp.spawn.__name__} import x'], ())"


@pytest.mark.parametrize(
    ("start", "fix"),
    [
        (RUN.format(["-I", "child.py", "4"], "None"), "Leave -I out"),
        (RUN.format(["-uS", "-m", "child"], "None"), "mezzo run --precision bf16 -m child"),
        (RUN.format(["child.py"], "{'PATH': os.environ['PATH']}"), "env={**os.environ"),
        (RUN.format(["-I", "-c", "print('reached True')"], "{}"), ""),
        (RUN.format(["path.py"], EVERYWHERE), ""),
        (ELSEWHERE + "subprocess.run([PYTHON, 'child.py'])", ""),
        (ELSEWHERE + "os.system(f'{PYTHON} child.py')", ""),
        (ELSEWHERE + "os.waitpid(os.fork() or os.execv(PYTHON, [PYTHON, 'child.py']), 0)", ""),
        (ELSEWHERE + SPAWNED, ""),
        (f"subprocess.run(['bash', '-c', f'{{PYTHON}} child.py'], env={EVERYWHERE})", ""),
        ("subprocess.run(['bash', 'child.sh'], env={'PYTHON': PYTHON, 'PATH': os.environ['PATH']})", ""),
        ("subprocess.run(['bash', '-c', f'{PYTHON} child.py'], env={})", "env={**os.environ"),
        ("subprocess.run(f'{PYTHON} child.py', shell=True, env={})", "env={**os.environ"),
        ("subprocess.run(['torchrun', 'child.py'], env={})", "bf16 -m torch.distributed.run"),
        ("subprocess.run(f'PYTHONPATH=Src {PYTHON} child.py', shell=True)", "PYTHONPATH=Src:$PYTHONPATH"),
        ("os.execve(PYTHON, [PYTHON, 'child.py'], {})", "env={**os.environ"),
        (SPAWNED_E, "-E out"),
        ("os.environ.clear(); subprocess.run([PYTHON, 'child.py'])", "env={**os.environ"),
    ],
)
def test_a_process_is_reached_or_ends_the_run(
    start: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also if the script catches the error. The process has nothing of Mezzo, and the path it was given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    reached = "any('Waits' in str(hook) for hook in sys.meta_path) and 'mezzo' not in sys.modules"
    look = f"def look():\n    print('reached', {reached}, flush=True)\n"
    Path("child.py").write_text(f"import sys\n{look}if __name__ == '__main__':\n    look()\n")
    Path("path.py").write_text(
        f"import child, sys\nassert sys.path[1] == '{tmp_path / 'src'}'\nchild.look()\n"
    )
    Path("child.sh").write_text('"$PYTHON" child.py\n')
    code = "import child, multiprocessing as mp, multiprocessing.spawn, os, subprocess, sys\nPYTHON = sys.executable"
    caught = f"try:\n        {start}\n    except ValueError as error:\n        print('caught', type(error).__name__)"
    Path("start.py").write_text(f"{code}\nif __name__ == '__main__':\n    {caught}\n")
    with mock.patch.dict(os.environ):
        before = dict(os.environ)
        status = main(["run", "--precision", "bf16", "start.py"])
        if "os.environ" not in start.partition("subprocess")[0]:  # the script changes nothing itself
            assert dict(os.environ) == before
    told = capfd.readouterr()
    assert (status, fix in told.err, "Traceback" in told.err) == (2 if fix else 0, True, False)
    assert told.out == ("caught UsageError\n" if fix else "reached True\n")


def test_an_existing_sitecustomize_runs_and_nothing_of_mezzo_does(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\n")
    look = "import sys; print('mezzo' in sys.modules, sys.modules['sitecustomize'].__file__, sys.path[1])"
    paths = os.pathsep.join([children.STARTUP, str(tmp_path)])
    for request, hooked in (("", False), ('{"seed_offset": null}', True)):
        env = {**os.environ, "PYTHONPATH": paths, children.VARIABLE: request}
        code = f"{look}; print(any('Waits' in str(hook) for hook in sys.meta_path))"
        ran = subprocess.run([PYTHON, "-c", code], env=env, capture_output=True, text=True, check=True)
        theirs = tmp_path / "sitecustomize.py"
        assert ran.stdout.splitlines() == ["theirs", f"False {theirs} {tmp_path}", str(hooked)]
        assert ran.stderr == ""


def test_ranks_compare_their_options() -> None:
    for options in (["fp16"] * 3, ["fp16", "fp16", "bf16"], ["bf16", "fp16", "fp32"]):
        store, answers = dist.HashStore(), dict[int, str]()

        def ask(rank: int) -> None:
            for _ in range(2):  # a process may make its group again
                answers[rank] = _difference(store, rank, 3, f"--precision {options[rank]}")  # noqa: B023

        threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(answers.values())) == 1
        if options[0] == options[2]:
            assert answers[0] == ""
        else:
            assert f"rank 0 has `--precision {options[0]}`" in answers[0]
            assert "rank 2" in answers[0] or "rank 1" in answers[0]


def test_a_rank_without_mezzo_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    monkeypatch.setattr(run_ranks, "PATIENCE", timedelta(seconds=0.2))
    told = _difference(dist.HashStore(), 0, 2, "--precision fp16")
    assert "--no-python mezzo run" in told
