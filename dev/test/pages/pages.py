"""Prints what is wrong with the pages, the tracked .md files, for test_pages.sh: links to no file or to no heading, and more
words than a person reads. Words are those of `wc -w`, so that the bars of a table count."""
import re
import subprocess
from pathlib import Path

PAGES = [Path(p) for p in subprocess.run(["git", "ls-files", "*.md"], capture_output=True, text=True).stdout.split()]
PAGES = [p for p in PAGES or [Path("README.md"), *Path("dev").glob("*.md")] if p.exists()]

WORDS = 48000  # of all pages
README = Path("README.md")
FIRST_SCREEN, README_LINES, PARAGRAPH_WORDS, CAPTION_WORDS = 42, 180, 90, 60


def prose(page):
    """The page without its blocks of code, whose lines are empty here."""
    fenced, lines = False, []
    for line in page.read_text(encoding="utf-8").split("\n"):
        fence = line.lstrip().startswith("```")
        lines.append("" if fenced or fence else line)
        fenced ^= fence
    return "\n".join(lines)


def anchors(page):
    """Names of the page's headings, as GitHub makes them."""
    names = []
    for title in re.findall(r"(?m)^#{1,6} (.*)", prose(page)):
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).strip().lower()
        name = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
        names.append(name if name not in names else f"{name}-{names.count(name)}")
    return names


def broken_links(page):
    text = prose(page)
    for link in re.finditer(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text):
        target = link[1] or link[2]
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        line = text.count("\n", 0, link.start()) + 1
        if not file.exists():
            yield f"{page}:{line}: {target}: no such file"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            yield f"{page}:{line}: {target}: no such heading"


def sizes():
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in PAGES)
    if words > WORDS:
        yield f"the pages have {words} words, at most {WORDS}"
    lines = README.read_text(encoding="utf-8").split("\n")[:-1]
    first = next((i for i, line in enumerate(lines) if line.startswith("## ")), len(lines))
    for what, count, most in ("README.md", len(lines), README_LINES), ("its first screen", first, FIRST_SCREEN):
        if count > most:
            yield f"{what} has {count} lines, at most {most}"
    paragraphs = re.split(r"\n\s*\n|\n(?=- )", prose(README))
    for before, paragraph in zip(["", *paragraphs], paragraphs):
        words, most = len(paragraph.split()), CAPTION_WORDS if before.startswith("![") else PARAGRAPH_WORDS
        if words > most and not paragraph.startswith(("|", "    ")):
            yield f"README.md: a paragraph of {words} words, at most {most}: {paragraph.strip()[:60]}"


for message in [*(m for page in PAGES for m in broken_links(page)), *sizes()]:
    print(message)
