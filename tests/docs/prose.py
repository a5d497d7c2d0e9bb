"""What the text says: sentences that are too long, words that the rules of the house forbid, links that lead nowhere."""

import os
import re

from pages import Page

WORDS = 35
# Forms of the passive in one sentence, from which on it is a chain.
CHAIN = 3
PASSIVE = re.compile(
    r"\b(?:is|are|was|were|be|been|being)\s+(?:\w+ly\s+|not\s+|then\s+)?"
    r"(?:(?!unknown)\w{3,}(?:ed|wn|ept|ent)|done|found|given|held|kept|known|lost|made|put|read|run|said|sent|set|taken|written)\b"
)
# Measured by other means, or generated.
FREE_TEXT = ("docs/reference/", "docs/configuration.md", "docs/architecture.md", "docs/SUMMARY.md")
FORBIDDEN = [
    (re.compile(r"\bnobody\b", re.I), "nobody"),
    (re.compile(r"\btold\b", re.I), "told"),
    (re.compile(r"\bsuch\b(?! as\b)", re.I), "such (`such as` is fine)"),
    (re.compile(r"(?:^|[.!:]\s+)What is\b[^?]*$"), "`What is` as a subject"),
    (re.compile(r"\bwhoever\b|\bwhom\b", re.I), "whoever, whom"),
    (re.compile(r"\bso it is with\b", re.I), "so it is with"),
    (re.compile(r"\bsimply\b|\bblazing|\bseamless|\bpowerful\b", re.I), "marketing"),
]


def without_markup(text):
    text = re.sub(r"<!--.*?-->", "", text)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"<[^>]+>", "", text)
    return re.sub(r"[*_]{1,2}", "", text)


def paragraphs(prose):
    """Runs of prose: (line, text). A table is none; a list's item is one of its own, a heading too."""
    out, in_comment = [], False
    for number, line in prose:
        if in_comment or line.lstrip().startswith("<!--"):
            in_comment = "-->" not in line
            out.append(None)
            continue
        if not line.strip() or line.lstrip().startswith("|"):
            out.append(None)
            continue
        item = re.match(r"\s*(?:[-*+]|\d+\.)\s+|#{1,6}\s+|>\s*", line)
        text = line[item.end():] if item else line.strip()
        if item or not out or out[-1] is None:
            out.append([number, text])
        else:
            out[-1][1] += " " + text
        if line.startswith("#"):
            out.append(None)
    return [tuple(entry) for entry in out if entry]


def sentences(text):
    return re.split(r"(?<=[.!?])[\"')]*\s+(?=[\"'(]?[A-Z0-9]|code\b|oncegate\b)", without_markup(text))


def name_files(page):
    """A block that is written to a file says to which: the reader sees no more than the text before it."""
    wrong = []
    for block in page.blocks:
        name = block.options.get("file")
        before = [text for line, text in page.prose if line < block.line]
        since = next((at for at in range(len(before) - 1, -1, -1) if before[at].startswith("#")), 0)
        if name and not any(name in text for text in before[since:]):
            wrong.append(f"{page.name}:{block.line}: the text before the block does not name its file, {name}")
    return wrong


def read_text(page):
    wrong = name_files(page)
    if page.name.startswith(FREE_TEXT):
        return wrong
    for line, text in paragraphs(page.prose):
        for sentence in sentences(text):
            count = len([word for word in sentence.split() if re.search(r"\w", word)])
            if count > WORDS:
                wrong.append(f"{page.name}:{line}: a sentence of {count} words: {sentence[:60]}...")
            if len(PASSIVE.findall(sentence)) >= CHAIN:
                wrong.append(f"{page.name}:{line}: a chain of passives: {sentence[:80]}")
            for pattern, word in FORBIDDEN:
                if pattern.search(sentence):
                    wrong.append(f"{page.name}:{line}: write it without {word}: {sentence[:80]}")
    return wrong


def follow_links(page, pages, expected):
    """Every relative link of a page: (how many, what is wrong). Pages of `expected` may not exist yet."""
    wrong, count = [], 0
    text = "\n".join(line for _, line in page.prose)
    text = re.sub(r"`[^`\n]*`", lambda code: "`" + "x" * (len(code.group()) - 2) + "`", text)
    numbers = [number for number, _ in page.prose]
    found = list(re.finditer(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)", text))
    found += list(re.finditer(r"^\[[^\]]+\]:\s*(\S+)", text, re.M))
    found += list(re.finditer(r"(?:src|href|srcset)=\"([^\"]+)\"", text))
    for match in found:
        target = match.group(1)
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        count += 1
        line = numbers[text.count("\n", 0, match.start())]
        path, _, anchor = target.partition("#")
        file = os.path.normpath(os.path.join(os.path.dirname(page.path), path)) if path else page.path
        where = f"{page.name}:{line}: {target}"
        if not os.path.exists(file):
            if os.path.relpath(file, page.root) not in expected:
                wrong.append(f"{where}: no file of this name")
            continue
        if page.name.startswith("docs/") and not file.startswith(os.path.join(page.root, "docs") + os.sep):
            wrong.append(f"{where}: leads out of docs/, and would be dead in the book")
        if anchor and file.endswith(".md"):
            if file not in pages:
                pages[file] = Page(file, page.root)
            if anchor not in pages[file].anchors():
                wrong.append(f"{where}: no heading has this anchor")
    return count, wrong
