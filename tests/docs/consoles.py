"""Blocks that no test machine can run: their commands have to be ones that could be run."""

import os
import re
import shlex
import subprocess

# Where the files of the repository are that a command may name.
OURS = re.compile(r"(?:deploy|config|tests|migrations|docs)/[\w./-]*[\w-]")
OPERATORS = {"|", "||", "&", "&&", ";", ">", ">>", "<"}


def read_consoles(page, oncegate):
    """What is wrong: a command of a shell that does not parse, one of oncegate that it does not take, a file that is not
    there."""
    wrong = []
    for block in page.blocks:
        if block.language != "console":
            continue
        made = []
        for command in commands(block.text):
            where = f"{page.name}:{block.line}: {command}"
            parsed = subprocess.run(["bash", "-n"], input=command, capture_output=True, text=True)
            if parsed.returncode:
                wrong.append(f"{where}: {parsed.stderr.strip()}")
                continue
            words = split(command)
            if words[:1] == ["mkdir"]:
                made.append(words[-1])
            for name in filter(OURS.fullmatch, words):
                is_made = any(name == one or name.startswith(one + "/") for one in made)
                if not is_made and not os.path.exists(os.path.join(page.root, name)):
                    wrong.append(f"{where}: no file {name}")
            if words[:1] == ["oncegate"]:
                own = words[1:next((at for at, word in enumerate(words) if word in OPERATORS), len(words))]
                asked = subprocess.run([oncegate, *own, "--help"], capture_output=True, text=True)
                if asked.returncode:
                    wrong.append(f"{where}: {asked.stderr.strip()}")
    return wrong


def commands(text):
    """Those behind a prompt, without their continuation lines broken."""
    whole = text.replace("\\\n", " ")
    return [line[2:] for line in whole.split("\n") if line.startswith("$ ")]


def split(command):
    reader = shlex.shlex(command, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    return list(reader)
