"""Python processes that import what this one would: the checkout, or the installed wheel."""

import json
import os
import subprocess
import sys
from typing import NamedTuple

# Forks of one process each: importing torch takes seconds, and a test may need many.
_RUN = """
import json, os, sys, tempfile, traceback
import torch.distributed.checkpoint

def run(script, environment, out, err):
    os.environ.update(environment)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    try:
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
        return 0
    except BaseException:
        traceback.print_exc()
        return 1

ends = []
for script, environment in json.load(sys.stdin):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if not (child := os.fork()):
            code = run(script, environment, out, err)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
        ends.append([code, *texts])
print(json.dumps(ends))
"""


def run_python(*arguments, timeout=60, given=None, **environment):
    """Run Python with ``given`` on its standard input; return how it ended."""
    return subprocess.run(
        [sys.executable, *arguments],
        input=given,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


class Done(NamedTuple):
    """How a script ended."""

    returncode: int
    stdout: str
    stderr: str


def run_after_torch(scripts):
    """Run scripts where torch is imported already, and this package is not; return how each ended, by name.

    Args:
        scripts: by name, each with what to add to its environment.
    """
    done = run_python("-W", "ignore", "-c", _RUN, given=json.dumps(list(scripts.values())), timeout=120)
    assert done.returncode == 0, done.stderr
    return {name: Done(*end) for name, end in zip(scripts, json.loads(done.stdout), strict=True)}
