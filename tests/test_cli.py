"""Each command, its help, its exit codes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import hf_kvcache
from hf_kvcache import cli

ROOT = Path(__file__).parents[1]


COMMANDS = [[], ["list"], ["plan"], ["advise"], ["report"], ["calibrate"], ["eval"], *(["eval", name] for name in cli.EVALS)]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_an_example(command, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([*command, "--help"])
    assert caught.value.code == 0
    assert "example" in capsys.readouterr().out


def test_list_names_every_cache(capsys):
    assert cli.main(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(hf_kvcache.cache_names())


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"hf-kvcache {hf_kvcache.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["none-such"], ["eval"], ["eval", "perplexity", "--bos", "perhaps"]])
def test_a_wrong_command_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_bad_input_is_one_line_and_exit_code_2(capsys):
    assert cli.main(["eval", "perplexity", "--chunk", "0"]) == 2
    assert capsys.readouterr().err == "hf-kvcache: error: --chunk is 0, and has to be at least 1\n"


def test_the_entry_point_exists():
    line = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("hf-kvcache = "))
    module, _, function = line.split('"')[1].partition(":")
    assert getattr(importlib.import_module(module), function) is cli.main


def test_help_and_list_import_neither_torch_nor_transformers():
    code = "import sys, hf_kvcache.cli as cli; cli.main(['list']); print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "set()"
