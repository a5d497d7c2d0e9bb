"""A page of the documentation: its blocks, its prose and its anchors."""

import os
import re



class Block:
    def __init__(self, line, info, text):
        self.line = line
        words = re.split(r"[,\s]+", info)
        self.language = words[0]
        self.flags = {word for word in words[1:] if "=" not in word}
        self.options = dict(word.split("=", 1) for word in words[1:] if "=" in word)
        self.text = text
        self.output = None  # the block with what this one prints


class Page:
    """A page: its blocks, and its prose as (line, text) without them."""

    def __init__(self, path, root):
        self.root = root
        self.path = path
        self.name = os.path.relpath(path, root)
        with open(path, encoding="utf-8") as file:
            self.source = file.read()
        self.blocks, self.prose = split(self.source, self.name)
        self.needs = set()
        for line in self.source.split("\n")[:5]:
            found = re.match(r"<!-- test: needs=([\w,]+) -->", line)
            if found:
                self.needs |= set(found.group(1).split(","))

    def anchors(self):
        seen, anchors = {}, set()
        for _, text in self.prose:
            anchors |= set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
            heading = re.match(r"#{1,6}\s+(.*?)\s*#*$", text)
            if not heading:
                continue
            title, own = heading.group(1), re.search(r"\{#([\w-]+)\}$", heading.group(1))
            if own:
                anchors.add(own.group(1))
                continue
            anchor = slug(title)
            count = seen.get(anchor, 0)
            seen[anchor] = count + 1
            anchors.add(anchor if not count else f"{anchor}-{count}")
        return anchors


def slug(title):
    title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
    return "".join("-" if c.isspace() else c for c in title.lower() if c.isalnum() or c in "_-" or c.isspace())


class Broken(Exception):
    pass


def split(source, name):
    """Blocks and prose. A hidden block is an HTML comment that begins with `<!-- sh`."""
    blocks, prose, fence = [], [], None
    gap = True  # anything but empty lines since the last block
    for number, line in enumerate(source.split("\n"), 1):
        if fence:
            mark, indent, began, info, lines = fence
            is_end = line.strip() == "-->" if mark == "-->" else re.fullmatch(re.escape(mark[0]) + "{%d,}" % len(mark), line.strip())
            if not is_end:
                lines.append(line[indent:] if not line[:indent].strip() else line)
                continue
            block = Block(began, info, "\n".join(lines) + "\n")
            is_output = block.language == "text" and "shown" not in block.flags and not gap
            if is_output and blocks and blocks[-1].language == "sh" and not blocks[-1].output:
                blocks[-1].output = block
            else:
                blocks.append(block)
            fence, gap = None, False
            continue
        opened = re.match(r"( *)(`{3,}|~{3,})\s*([^`]*)$", line)
        hidden = line.strip() == "<!-- sh"
        if opened or hidden:
            if opened:
                fence = (opened.group(2), len(opened.group(1)), number, opened.group(3).strip(), [])
            else:
                fence = ("-->", 0, number, "sh", [])
            continue
        if line.strip():
            gap = True
        prose.append((number, line))
    if fence:
        raise Broken(f"{name}:{fence[2]}: the block does not end")
    return blocks, prose


def summary(root):
    """The pages that SUMMARY.md names, and what is wrong with it."""
    path = os.path.join(root, "docs/SUMMARY.md")
    if not os.path.exists(path):
        return set(), []
    with open(path, encoding="utf-8") as file:
        names = ["docs/" + name for name in re.findall(r"\]\(([^)#]+\.md)\)", file.read())]
    wrong = [f"docs/SUMMARY.md: {name} is there twice" for name in set(names) if names.count(name) > 1]
    return set(names), wrong
