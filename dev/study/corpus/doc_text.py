"""
The documents of a Debian package of documentation (.deb): its pages of HTML as text, and its files of text. Standard
library only.

HTML becomes text by four rules. Elements that hold no text of the page are dropped (DROPPED by name; DROPPED_CLASS by
class, id or role: navigation, tables of contents, search, line numbers, links to the place itself). Each block is a
paragraph, wrapped at 79 characters; a list's items begin with "- "; <pre> stays as it is. An empty line stands
around headings, paragraphs, lists, tables and <pre>. Entities are resolved, and typographic quotes, dashes and
spaces written in ASCII. is_prose() tells pages from indexes.
"""
import gzip
import html
import io
import re
import tarfile

PAGES, TEXTS = ("html", "htm", "xhtml"), ("txt", "md", "rst", "info")
# names of what is no document: changes, licences, indexes, sources and their listings
NO_DOCUMENT = re.compile(r"""(^|/)(_sources|_modules|_static|_images|search|src|class-use|examples?)/
    |(^|/)(change|news|copying|copyright|licen[sc]e|authors|thanks|credits|todo|genindex|(py-)?modindex|search|index-all
    |all-?classes|functions_|globals_|namespacemembers|classes|hierarchy|inherits|annotated|files|dir_|graph_legend
    |doxygen|package-(tree|frame|use)|overview-(tree|frame)|robots|sources|requirements|cmakelists)[^/]*$
    |(_source|-members|_8\w*_source|-index)\.x?html?$""", re.I | re.X)
TAG = re.compile(r"(<!--.*?-->|<[^<>]*>)", re.S)
NAME = re.compile(r"</?\s*([a-zA-Z][a-zA-Z0-9]*)")
DROPPED = frozenset("""head script style nav header footer form select button svg noscript iframe object template audio
video canvas math""".split())
DROPPED_CLASS = re.compile(r"""\b(?:class|id|role)\s*=\s*["']?(?:[^"'>]*\s)?(?:nav\w*|nav-\w+|top|tabs\d?|related|sidebar|
    sphinxsidebar\w*|toc|table-of-contents|contents-menu|breadcrumbs?|menu\w*|footer|footline|summary|linenos?|
    headerlink|permalink|search\w*|MSearch\w*|navigation|banner|contentinfo|skip\w*|copyright|legal\w*|dynheader|
    dyncontent|ttc)\b""", re.I | re.X)
BLOCKS = frozenset("""p div br tr li ul ol dl dt dd h1 h2 h3 h4 h5 h6 table pre blockquote section article hr main address
center caption figure figcaption tbody thead fieldset details summary body html""".split())
APART = frozenset("p h1 h2 h3 h4 h5 h6 ul ol dl table pre blockquote section hr".split())
SPACE, WRAP = re.compile(r"[ \t\r\n\f]+"), re.compile(r"(.{1,79})(?: |$)")
ASCII = str.maketrans({"\u00a0": " ", "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-",
                       "\u2014": "--", "\u2026": "...", "\u2022": "-", "\u2010": "-", "\u2011": "-", "\u2009": " ",
                       "\u200b": None, "\u00b6": None, "\ufeff": None, "\u00ad": None})


def page_text(page):
    """The text of a page of HTML."""
    out, block, pre = [], [], []  # lines; pieces of the paragraph in progress; pieces of a <pre>, [] outside of it
    dropped, depth, in_pre, item = None, 0, False, False

    def end_block(apart):
        nonlocal item
        text = SPACE.sub(" ", "".join(block)).strip(" ")
        block.clear()
        if text:
            out.extend(WRAP.sub(r"\1\n", ("- " if item else "") + text).rstrip("\n").split("\n"))
            item = False
        if apart and out and out[-1]:
            out.append("")

    for piece in TAG.split(page):
        if piece[:1] != "<" or not (match := NAME.match(piece)):
            if not dropped and piece[:1] != "<":
                (pre if in_pre else block).append(html.unescape(piece) if "&" in piece else piece)
            continue
        name, closes = match[1].lower(), piece[1] == "/"
        if dropped:
            if name == dropped and not piece.endswith("/>"):
                depth += -1 if closes else 1
                dropped = dropped if depth else None
        elif not closes and (name in DROPPED or " " in piece and name not in ("body", "html", "main", "br", "hr", "img", "input",
                             "p", "link", "meta") and DROPPED_CLASS.search(piece)) and not piece.endswith("/>"):
            dropped, depth = name, 1
        elif in_pre:
            if name == "br":
                pre.append("\n")
            elif name == "pre" and closes:
                out.extend(line.rstrip() for line in "".join(pre).strip("\n").split("\n"))
                out.append("")
                pre.clear()
                in_pre = False
        elif name in BLOCKS:
            end_block(name in APART)
            in_pre = name == "pre" and not closes
            item = name == "li" and not closes or item and name not in ("li", "ul", "ol")
        elif name in ("td", "th"):
            block.append(" ")
    end_block(False)
    text = re.sub(r" +\n", "\n", "\n".join(out).translate(ASCII))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def is_prose(text):
    """Does half of the text stand in lines of 50 characters and more? Indexes and lists of names have short lines."""
    return 2 * sum(len(line) for line in text.split("\n") if len(line) >= 50) >= len(text)


def text_of(name, data):
    """The bytes of a document's text; b"": it is none."""
    if name.endswith(".gz"):
        name, data = name[:-3], gzip.decompress(data)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        if b"charset=iso-8859-1" not in data[:2000].lower():
            return b""
        text = data.decode("iso-8859-1")
    if name.rpartition(".")[2].lower() in PAGES:
        text = page_text(text)
    text = text.replace("\r\n", "\n")
    return text.encode() if is_prose(text) else b""


def archive(path):
    """The tar file with the files of a .deb."""
    with open(path, "rb") as f:
        assert f.read(8) == b"!<arch>\n", path
        while header := f.read(60):
            size = int(header[48:58])
            if header.startswith(b"data.tar"):
                return tarfile.open(fileobj=io.BytesIO(f.read(size)))
            f.seek(size + size % 2, 1)
    raise ValueError(f"{path}: has no data.tar")


def is_document(name):
    """Is a file of a package a document, by its name?"""
    kind = name.removesuffix(".gz").rpartition(".")[2].lower()
    return kind in (*PAGES, *TEXTS) and not NO_DOCUMENT.search(name)
