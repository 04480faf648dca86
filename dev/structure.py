#!/usr/bin/env python3
"""Checks the rules that keep the source readable, and lists what is close to breaking one.

    dev/structure.py [--all | --rooms] [ROOT]     ROOT: the repository's root by default; --all: whole lists, not
                                                  the largest five; --rooms: only which rooms include which

Rules: at most 8 parameters a function; at most 100 lines a function, __global__ kernels apart, which above 120 lines are
named with their reason in KERNELS_OVER_120; at most 700 lines a file, 1400 a trainer, of which those sections that
NOT_MODEL names have a fifth, and 16 files a folder; includes only down LADDER, before the first definition; no function
twice in what a trainer includes; functions and types of llmc/ only where their file is included; initializers of more than
5 fields name them; only TOP_LEVEL at the top; at most 65 options; no `x[i] && i < N`, of which compilers may leave out i <
N; PHRASES in comments no oftener than today; paths of llmc/ in comments and pages exist, and what is said to be defined at
a trainer's includes; counts in messages are printed by counted (counts.py). Warns, without failing, where a file of llmc/
has more than 500 lines, a trainer 1250, a folder 12 files.

Prints a violation as `path:line: message` and closes with `N passed, N failed`, one check per rule and item. Exit code 1
if a rule is broken. Standard library only.
"""
import fnmatch
import os
import re
import subprocess
import sys
from collections import Counter

from counts import find_counts
from functions import CLOSING, COMMENT_OR_STRING, close, count_parameters, find_functions, is_name, strip_comments, tokenize

MAX_PARAMETERS = 8
MAX_FUNCTION_LINES = 100
MAX_KERNEL_LINES = 120
FILE_LINES = 500, 700  # signs of two subjects in one place: above the first a warning, above the second a failure
TRAINER_LINES = 1250, 1400
FOLDER_FILES = 12, 16
MAX_SHARE_NOT_MODEL = 0.2
MAX_UNNAMED_FIELDS = 5
MAX_OPTIONS = 65  # 64 until --skip-spikes, a guard that data and no other option can stand for

# __global__ kernels that may have more than 120 lines: name -> why it is not split.
KERNELS_OVER_120 = {
    # "name": "reason",
}

# How the titles of a trainer's sections begin that are not the model and its update.
NOT_MODEL = ("inference", "the trainer")

# The rooms of llmc/, its top folders. Each includes itself and the rooms before it: above, or left in its line.
LADDER = [rung.split() for rung in """
base formats tokens config
model ranks
cpu cuda
layers attention
exchange sequence
inference baselines
checkpoint run plan
serve eval
train
""".strip().split("\n")]
ROOMS = sum(LADDER, [])
# What else may be included. Tests and benchmarks (dev/, test_fox.cu) may include anything.
OUTSIDE_INCLUDES = {"llmc": ("llmc",), "data": ("data", "llmc"), "train_fox.c": ("llmc",), "train_fox.cu": ("llmc",)}

# Regular expressions that comments do not match: (how often they still do, which may only fall; what is better)
PHRASES = {
    r"(^|[.:;]\s+)Of ": (0, "the subject first"),
    r"\bmultiprocessors?\b": (0, "SM"),
    r"\b[Dd]eal(s|t|ing)?\b": (0, "assign"),
    r"\bin passing\b": (0, "fused"),
    r"\bon (its|their) way\b": (0, "in flight"),
    r"\blies? close\b|\bat rest\b|\bnobody's\b|\bonce more\b|\badd(s|ed|ing)? up\b|\bhangs? on\b": (0, "the field's word"),
}

TRAINERS = ("train_fox.c", "train_fox.cu")
TOP_LEVEL = set("Makefile README.md LICENSE train_fox.c train_fox.cu test_fox.cu llmc dev scripts data .ci .github "
                ".clang-format .gitignore".split())
OPTIONS = "llmc/run/command/options.h"


# ----------------------------------------------------------------------------
# files


def list_files(root):
    """Paths below root: those that git tracks, or without git all that .gitignore does not name."""
    if os.path.exists(os.path.join(root, ".git")):
        try:
            listed = subprocess.run(["git", "-C", root, "ls-files", "-z"], capture_output=True, check=True).stdout
            paths = [p for p in listed.decode().split("\0") if p]
            return sorted(p for p in paths if os.path.exists(os.path.join(root, p)))
        except (OSError, subprocess.CalledProcessError):
            pass
    ignored = [".git"]
    if os.path.exists(os.path.join(root, ".gitignore")):
        ignored += open(os.path.join(root, ".gitignore")).read().split()

    def is_ignored(path):
        for pattern in ignored:
            anchored, pattern = "/" in pattern.rstrip("/"), pattern.strip("/")
            if fnmatch.fnmatch(path if anchored else os.path.basename(path), pattern):
                return True
        return False

    found = []
    for folder, folders, files in os.walk(root):
        relative = os.path.relpath(folder, root)
        join = lambda name: os.path.normpath(os.path.join(relative, name))
        folders[:] = [f for f in folders if not is_ignored(join(f))]
        found += [join(f) for f in files if not is_ignored(join(f))]
    return sorted(found)


# ----------------------------------------------------------------------------
# the rules


class Checks:
    def __init__(self):
        self.count, self.violations, self.warnings = 0, [], []

    def check(self, good, path, line, message):
        self.count += 1
        if not good:
            self.violations.append(f"{path}:{line}: {message}")


def check_functions(checks, functions):
    for f in functions:
        checks.check(f.parameters <= MAX_PARAMETERS, f.path, f.line,
                     f"{f.name} has {f.parameters} parameters, at most {MAX_PARAMETERS}")
        if f.kernel:
            checks.check(f.lines <= MAX_KERNEL_LINES or f.name in KERNELS_OVER_120, f.path, f.line,
                         f"kernel {f.name} has {f.lines} lines; above {MAX_KERNEL_LINES} KERNELS_OVER_120 must say why")
        else:
            checks.check(f.lines <= MAX_FUNCTION_LINES, f.path, f.line,
                         f"{f.name} has {f.lines} lines, at most {MAX_FUNCTION_LINES}")
    long_kernels = {f.name for f in functions if f.kernel and f.lines > MAX_KERNEL_LINES}
    for name in KERNELS_OVER_120:
        checks.check(name in long_kernels, "dev/structure.py", 1,
                     f"KERNELS_OVER_120: no kernel {name} has more than {MAX_KERNEL_LINES} lines")


def check_sizes(checks, lines, folders):
    sizes = [(p, n, "lines", TRAINER_LINES if p in TRAINERS else FILE_LINES) for p, n in lines.items()]
    for path, count, unit, (sign, most) in sizes + [(p, n, "files", FOLDER_FILES) for p, n in folders.items()]:
        checks.check(count <= most, path, 1, f"{count} {unit}, at most {most}")
        if sign < count <= most and (path in TRAINERS or path.startswith("llmc/")):
            checks.warnings.append(f"warning: {path}: {count} {unit}, more than {sign}: are these two subjects?")


def check_sections(checks, texts):
    """A trainer is the model: its other sections have a fifth of it."""
    for path in TRAINERS:
        lines = texts.get(path, "").splitlines()
        bars = [i for i, line in enumerate(lines) if re.match(r"// -{20,}$", line)] + [len(lines)]
        others = sum(end - begin for begin, end in zip(bars, bars[1:])
                     if lines[begin + 1].removeprefix("// ").startswith(NOT_MODEL))
        checks.check(others <= MAX_SHARE_NOT_MODEL * len(lines), path, 1,
                     f"{others} of {len(lines)} lines are in sections that are not the model, at most a fifth")


def included(path, codes):
    """The files of this repository that one includes, itself among them."""
    found, waiting = set(), [path]
    while waiting:
        path = waiting.pop()
        if path in found or path not in codes:
            continue
        found.add(path)
        for target in re.findall(r'^\s*#\s*include\s*"([^"]*)"', codes[path], re.MULTILINE):
            waiting.append(os.path.normpath(os.path.join(os.path.dirname(path), target)))
    return found


def check_names(checks, functions, codes):
    """No function of one name in two files that a trainer includes, methods apart."""
    for trainer in TRAINERS:
        files, places = included(trainer, codes), {}
        for f in functions:
            if f.path in files and not f.member:
                places.setdefault(f.name, []).append(f)
        for name, same in places.items():
            other = next((f for f in same if f.path != same[0].path), None)
            checks.check(other is None, same[0].path, same[0].line,
                         f"{name} is also defined in {other and other.path}, which {trainer} includes too")


def find_types(tokens):
    """Types that a file defines, has as parameters of templates, or leaves open to others (typedef struct X X)."""
    found = set()
    for i, (token, _) in enumerate(tokens[:-2]):
        following = tokens[i + 2][0]
        if token in ("struct", "class", "union", "enum") and following in "{:":
            found.add(tokens[i + 1][0])
        if token in ("class", "typename", "using"):
            found.add(tokens[i + 1][0])
        if token == "typedef":
            k = i
            while k < len(tokens) and tokens[k][0] != ";":
                k = close(tokens, k) + 1 if tokens[k][0] in CLOSING else k + 1
            found.add(tokens[k - 1][0])
    return {name for name in found if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name)}


def check_reach(checks, functions, codes):
    """What a file of llmc/ calls and which types it names are its own, or of a file that it includes."""
    tokens = {path: tokenize(code) for path, code in codes.items() if path.startswith("llmc/")}
    homes = {}  # name -> files
    for f in functions:
        if f.path in tokens and not f.member:
            homes.setdefault(f.name, set()).add(f.path)
    for path in tokens:
        for name in find_types(tokens[path]):
            homes.setdefault(name, set()).add(path)
    for path, own in tokens.items():
        files = included(path, codes)
        for i, (name, line) in enumerate(own[:-1]):
            if name in homes and (own[i + 1][0] == "(" or name[:1].isupper()) and own[i - 1][0] not in (".", "->", "::"):
                checks.check(homes[name] & files, path, line,
                             f"names {name} of {min(homes[name])}, which it does not include")


def check_include_order(checks, codes, functions):
    first = {}
    for f in functions:
        first[f.path] = min(first.get(f.path, f.line), f.line)
    for path, code in codes.items():
        if not path.startswith("llmc/") and path not in TRAINERS:
            continue
        for number, line in enumerate(code.split("\n"), 1):
            if re.match(r"\s*#\s*include\b", line):
                checks.check(number < first.get(path, number + 1), path, number, "an #include behind a function")


def check_initializers(checks, codes):
    """TYPE name = {...} and return {...} of structs, whose names begin with a capital letter."""
    for path, code in codes.items():
        if not path.startswith("llmc/") and path not in TRAINERS:
            continue
        tokens = tokenize(code)
        for i, (token, line) in enumerate(tokens):
            if token != "{" or i < 3:
                continue
            before = [t for t, _ in tokens[i - 3:i]]
            struct = before[2] == "=" and is_name(before[1]) and before[0][:1].isupper() and not before[0].isupper()
            if not struct and before[2] != "return":
                continue
            inside = tokens[i + 1:close(tokens, i)]
            unnamed = bool(inside) and inside[0][0] != "."
            fields = count_parameters(inside) - (bool(inside) and inside[-1][0] == ",") if unnamed else 0
            checks.check(fields <= MAX_UNNAMED_FIELDS, path, line,
                         f"an initializer of {fields} fields without names, at most {MAX_UNNAMED_FIELDS}")


def check_bounds(checks, codes):
    """x[i] && i < N: x[i] is read first, so that a compiler may take i < N for granted."""
    for path, code in codes.items():
        late = re.search(r"\[(\w+)\](?:[=!<>]=|[^;|(?,=])*&& \1 <", code)
        checks.check(not late, path, 1 + code.count("\n", 0, late.start()) if late else 1,
                     f"an element is read before its index {late and late[1]} is bounded")


def comments(path, text):
    """(line, text) of comments and docstrings; lines of // or # that follow each other are one."""
    if path.endswith((".py", ".sh")):
        matches = re.finditer(r'(?<![^ \n])#[^\n]*|(?<=""").*?(?=""")', text, re.MULTILINE | re.DOTALL)
    else:
        matches = (m for m in COMMENT_OR_STRING.finditer(text) if m.group("comment"))
    found, end = [], -1
    for m in matches:
        line = 1 + text.count("\n", 0, m.start() + re.search(r"[/*#\s]*", m.group()).end())
        words = re.sub(r"^[ \t]*(//+|/\*|\*/|#+)?[ \t]*", "", m.group(), flags=re.MULTILINE).strip()
        if found and re.fullmatch(r"\n[ \t]*", text[end:m.start()]):
            found[-1] = found[-1][0], f"{found[-1][1]}\n{words}"
        else:
            found.append((line, words))
        end = m.end()
    return found


def check_phrases(checks, texts):
    found = [(path, line, words) for path, text in texts.items() for line, words in comments(path, text)]
    for phrase, (most, better) in PHRASES.items():
        hits = [(path, line + words.count("\n", 0, m.start()))
                for path, line, words in found for m in re.finditer(phrase, words)]
        path, line = hits[-1] if hits else ("", 0)
        checks.check(len(hits) <= most, path, line, f"/{phrase}/ is {len(hits)} times in comments, at most {most}: {better}")
        if len(hits) < most:
            checks.warnings.append(f"warning: dev/structure.py: PHRASES: /{phrase}/ is {len(hits)} times in comments by now")


def check_paths(checks, root, paths):
    """Files and folders of llmc/ that comments and pages name exist, whether with llmc/ or as room/file.h."""
    named = re.compile(rf"(?<![\w/.$])(?:llmc/([\w/]*[\w.]*\w)|((?:{'|'.join(ROOMS)})/[\w/]+\.c?u?h))\b")
    for path in paths:
        if not path.endswith((".c", ".h", ".cu", ".cuh", ".py", ".sh", ".md")) or path == "dev/test/test_structure.sh":
            continue
        text = open(os.path.join(root, path), encoding="utf-8").read()
        for match in named.finditer(text):
            name = f"llmc/{match.group(1) or match.group(2)}"
            checks.check(any(p.startswith(name) for p in paths), path, 1 + text.count("\n", 0, match.start()),
                         f"names {name}, which does not exist")


def check_defines(checks, texts, codes):
    """Names behind `// defines:` at an include, NAME or PREFIX_*, are in that file or in those that it includes."""
    for path in TRAINERS:
        for number, line in enumerate(texts.get(path, "").split("\n"), 1):
            match = re.match(r'#include "([^"]*)" *// defines: (.*)', line)
            words = " ".join(codes[p] for p in included(match[1], codes)) if match else ""
            for name in re.findall(r"\w+", match[2].replace("; includes", "")) if match else []:
                whole = not re.search(rf"\b{name}\*", line)
                checks.check(re.search(rf"\b{name}" + r"\b" * whole, words), path, number, f"{match[1]} defines no {name}")


def check_top_level(checks, paths):
    for name in sorted({p.split("/")[0] for p in paths}):
        checks.check(name in TOP_LEVEL, name, 1, "not among what the top level holds")


def room(path):
    """The top folder of llmc/ that a path is in, None outside llmc/."""
    parts = path.split("/")
    return "/".join(parts[1:2] if len(parts) > 2 else "") if parts[0] == "llmc" else None


def find_includes(path, code):
    """(line, target) of what a file of this repository includes of it."""
    for number, line in enumerate(code.split("\n"), 1):
        match = re.match(r'\s*#\s*include\s*"([^"]*)"', line)
        target = match and os.path.normpath(os.path.join(os.path.dirname(path), match.group(1)))
        if target and not target.startswith("build/"):  # which the Makefile makes
            yield number, target


def check_includes(checks, root, codes):
    for path, code in codes.items():
        top, own = path.split("/")[0], room(path)
        if top == "llmc":
            checks.check(own in ROOMS, path, 1, f"its folder llmc/{own} is not in LADDER")
        for number, target in find_includes(path, code):
            exists = os.path.isfile(os.path.join(root, target))
            checks.check(exists, path, number, f"includes {target}, which does not exist")
            if not exists:
                continue
            to = room(target)
            if top == "llmc" and own in ROOMS and to in ROOMS:
                checks.check(ROOMS.index(to) <= ROOMS.index(own), path, number,
                             f"includes {target}: in LADDER {to} is above {own}")
            else:
                allowed = OUTSIDE_INCLUDES.get(top, (target.split("/")[0],))
                checks.check(target.split("/")[0] in allowed, path, number,
                             f"includes {target}; it may include {', '.join(allowed)}")
            checks.check(not path.endswith(".h") or not target.endswith(".cuh"), path, number,
                         f"includes {target}: a header for C needs nothing of CUDA")


def check_counts(checks, texts, codes):
    for path, text in texts.items():
        found = list(find_counts(path, text, codes.get(path)))
        for line, said in found or [(1, "")]:
            checks.check(not found, path, line, f"'{said[:40]}': a count before a plural: print counted()")


def check_options(checks, codes):
    """Returns the number of rows of the macro OPTIONS."""
    code = codes.get(OPTIONS, "")
    macro = re.search(r"#define OPTIONS\(.*?[^\\]\n", code, re.DOTALL)
    rows = len(re.findall(r"^\s*ROW\(", macro.group(), re.MULTILINE)) if macro else 0
    checks.check(rows > 0, OPTIONS, 1, "no rows ROW(...) of a macro OPTIONS found")
    line = code[:macro.start()].count("\n") + 1 if macro else 1
    checks.check(rows <= MAX_OPTIONS, OPTIONS, line, f"{rows} options, at most {MAX_OPTIONS}")
    return rows


# ----------------------------------------------------------------------------
# the report


def print_rooms(codes):
    """A rung of LADDER a line: its rooms, and the rooms that they include but those that these include."""
    stands_on = {room: set() for room in ROOMS}
    for path, code in codes.items():
        if room(path) in ROOMS:
            stands_on[room(path)] |= {room(target) for _, target in find_includes(path, code)} & set(ROOMS)
    below = {}
    for own in ROOMS:  # from the bottom
        below[own] = set().union(*({r} | below.get(r, set()) for r in stands_on[own] - {own}))
    for rung in reversed(LADDER):
        found = set().union(*(stands_on[r] for r in rung)) - set(rung)
        found -= set().union(*(below[r] for r in found))
        print(f"{' '.join(rung):<24}{'-> ' * bool(found)}{' '.join(r for r in ROOMS if r in found)}".rstrip())


def print_largest(title, rows, whole):
    """rows: (size, name, where)"""
    print(f"{title}")
    for size, name, where in sorted(rows, key=lambda r: (-r[0], r[1:]))[:None if whole else 5]:
        print(f"  {size:6d}  {name:<44}{where}".rstrip())


def main(arguments):
    if {"-h", "--help"} & set(arguments):
        print(__doc__.strip())
        return 0
    whole = "--all" in arguments
    roots = [a for a in arguments if a not in ("--all", "--rooms")]
    if len(roots) > 1 or any(r.startswith("-") for r in roots):
        print("error: usage: dev/structure.py [--all | --rooms] [ROOT]", file=sys.stderr)
        return 1
    root = roots[0] if roots else os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
    paths = list_files(root)
    texts = {p: open(os.path.join(root, p), encoding="utf-8").read() for p in paths
             if p.endswith((".c", ".h", ".cu", ".cuh", ".py", ".sh"))}
    codes = {p: strip_comments(t) for p, t in texts.items() if not p.endswith((".py", ".sh"))}
    if "--rooms" in arguments:
        return print_rooms(codes)
    lines = {p: t.count("\n") for p, t in texts.items()}
    folders = Counter(os.path.dirname(p) or "." for p in paths if not re.search(r"/(fixtures|seeds)/|\.md$", p))
    functions = [f for p, code in codes.items() for f in find_functions(tokenize(code), p)]

    checks = Checks()
    check_functions(checks, functions)
    check_sizes(checks, lines, folders)
    check_sections(checks, texts)
    check_names(checks, functions, codes)
    check_include_order(checks, codes, functions)
    check_reach(checks, functions, codes)
    check_initializers(checks, codes)
    check_bounds(checks, codes)
    check_phrases(checks, texts)
    check_defines(checks, texts, codes)
    check_paths(checks, root, paths)
    check_top_level(checks, paths)
    check_includes(checks, root, codes)
    check_counts(checks, texts, codes)
    options = check_options(checks, codes)

    where = lambda f: f"{f.path}:{f.line}"
    print_largest("functions by parameters", [(f.parameters, f.name, where(f)) for f in functions], whole)
    print_largest("functions by lines", [(f.lines, f.name, where(f)) for f in functions if not f.kernel], whole)
    print_largest("kernels by lines", [(f.lines, f.name, where(f)) for f in functions if f.kernel], whole)
    print_largest("files by lines", [(n, p, "") for p, n in lines.items()], whole)
    print_largest("folders by files", [(n, f, "") for f, n in folders.items()], whole)
    code_lines = Counter()
    for path, code in codes.items():
        code_lines[room(path) or path] += sum(bool(line.strip()) for line in code.split("\n"))
    of_program = [(code_lines[r], r, "") for r in (*ROOMS, *TRAINERS)]
    print_largest("rooms by lines of code, without comments and blank lines", of_program, whole)
    print(f"{len(functions)} functions, {options} options; {sum(n for n, *_ in of_program)} lines of code in llmc/ and the "
          "trainers, without comments and blank lines")
    for warning in sorted(checks.warnings):
        print(warning)
    for violation in checks.violations:
        print(violation)
    failed = len(checks.violations)
    print(f"{checks.count - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
