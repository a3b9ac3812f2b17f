"""Sessions on a page: how they are read, run and compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.transcripts import Step, differences, fits, run_steps, shell_environment, steps_of

PAGE = """
Text, and a block of another language:

```bash
$ not this
```

```console
$ name='two
  lines'
$ echo "$name" \\
  and more
two
  lines and …
$ cat <<'EOF'
$ inside
EOF
$ inside
```

```console
$ false
$ ls nowhere
ls: … No such file or directory
$ printf '1\\n2\\n3\\n'
…
3
```
"""


def test_commands_and_outputs_are_told_apart() -> None:
    assert steps_of(PAGE) == [
        Step("name='two\n  lines'", ()),
        Step('echo "$name" \\\n  and more', ("two", "  lines and …")),
        Step("cat <<'EOF'\n$ inside\nEOF", ()),
        Step("inside", ()),
        Step("false", ()),
        Step("ls nowhere", ("ls: … No such file or directory",)),
        Step("printf '1\\n2\\n3\\n'", ("…", "3")),
    ]
    with pytest.raises(ValueError, match="begins with a command"):
        steps_of("```console\noutput\n```\n")


def test_commands_share_a_shell_and_a_silent_failure_is_a_difference(tmp_path: Path) -> None:
    shown = [step for step in steps_of(PAGE) if step.command != "inside"]
    found = run_steps(shown, tmp_path, shell_environment(), {})
    assert [step.output for step in found][:3] == [(), ("two", "  lines and more"), ("$ inside",)]
    assert [text.splitlines()[0] for text in differences(shown, found)] == ["$ cat <<'EOF'", "$ false"]


@pytest.mark.parametrize(
    ("shown", "output", "same"),
    [
        (["a … c"], ["a b c"], True),
        (["a … c"], ["a b c d"], False),
        (["a…c"], ["a", "c"], False),
        (["a", "…", "c"], ["a", "c"], True),
        (["a", "…", "c"], ["a", "b", "b", "c"], True),
        (["a", "…"], ["b"], False),
        (["…"], [], True),
        ([], ["a"], False),
        (["a.c"], ["abc"], False),
    ],
)
def test_an_ellipsis_stands_for_text_or_for_lines(shown: list[str], output: list[str], same: bool) -> None:
    assert fits(shown, output) is same


def test_addresses_are_replaced_in_commands_and_back_in_outputs(tmp_path: Path) -> None:
    steps = [Step("text='at :8000'; echo $text; echo ${#text}", ())]
    (step,) = run_steps(steps, tmp_path, shell_environment(), {":8000": ":12345"})
    assert step.output == ("at :8000", "9")


def test_a_shell_that_ends_early_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ended after 1 commands"):
        run_steps([Step("true", ()), Step("exit 3", ()), Step("true", ())], tmp_path, shell_environment(), {})
