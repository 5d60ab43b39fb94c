"""Every block of Python in docs/tensorflow.md runs, in order, with warnings as errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mezzo.tensorflow

PAGE = Path(__file__).parent.parent.parent / "docs" / "tensorflow.md"


def test_the_code_of_the_page_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in re.findall(r'environ\["(\w+)"\]', PAGE.read_text(encoding="utf-8")):
        monkeypatch.setenv(name, "")  # what the page sets is taken back
    text = PAGE.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    names: dict[str, object] = {}
    try:
        for block in blocks:
            line = text[: block.start(1)].count("\n")
            exec(compile("\n" * line + block.group(1), str(PAGE), "exec"), names)
    finally:
        mezzo.tensorflow.uninstall()
    told = capsys.readouterr()
    first = re.search(r"^```\n(mezzo: .*?)^```", text, re.MULTILINE | re.DOTALL)
    assert first is not None
    on_stderr, on_stdout = first.group(1).splitlines()
    assert told.err.splitlines()[0] == on_stderr
    assert told.out.splitlines()[0] == on_stdout
    assert "[20, 1024.0, 0]" in told.out.replace("np.int64(", "").replace("np.float32(", "").replace(")", "")
    assert "Gradients that are not finite: culprit:0." in told.out
    assert len(blocks) == 10
