"""
Finds messages that would say `1 tokens`, for structure.py: a number is printed before a noun in the plural, where
counted() of llmc/base/common.h, or of scripts/common.py, prints 1 token, 2 tokens.
"""
import ast
import re

# A format string of several literals; characters, so that '"' begins none
STRINGS = re.compile(r"'(?:\\.|[^'\\\n])'|" r'(?:"(?:\\.|[^"\\\n])*"\s*)+')
CONVERSION = re.compile(r"%([-+ #0-9.*]*)(?:hh?|ll?|[zjt])?([a-zA-Z%])")
# Behind a count: a noun in the plural, or what only looks like one
PLURAL = re.compile(r" (?:([a-z][a-z-]*) )??([A-Za-z][A-Za-z-]*s)\b(?!/| as )")
NO_NOUN = set("across as begins differs does ends gives has is its learns less makes minus needs occurs reads takes this uses "
              "was".split())
NO_ADJECTIVE = set("and are at by for from in is of on the to with".split())
SAYS, VARIABLE = re.compile(r"\b(?:echo|printf|die|fail|warn)\b"), re.compile(r"(?:%d|\$\w+|\$\{[^}]*\})(?=( .*))")
PROMPTS = "scripts/eval/tasks/ruler_prompts.py"  # whose words are RULER's


def counts_plural(behind):
    """Does a text that follows a number begin with a noun in the plural?"""
    match = PLURAL.match(behind)
    return match and match[1] not in NO_ADJECTIVE and match[2] not in NO_NOUN


def find_arguments(code, at):
    """The arguments behind a format string that ends there."""
    found, depth, begin = [], 0, at
    for match in re.compile(STRINGS.pattern + r"|[][(){},;]").finditer(code, at):
        token = match.group()
        depth += (token in "([{") - (token in ")]}") if len(token) == 1 else 0
        if depth < 0 or token == ";" or token == "," and depth == 0:
            found.append(code[begin:match.start()].strip())
            begin = match.end()
        if depth < 0 or token == ";":
            break
    return found[1:]


def find_c_counts(code):
    """(line, text) of format strings of C that print a number of things, unless it is a named constant."""
    for match in STRINGS.finditer(code):
        text, index = re.sub(r'"\s*"', "", match.group().strip()), -1
        for conversion in CONVERSION.finditer(text):
            index += (conversion[2] != "%") + conversion[1].count("*")
            number = conversion[2] in "diu" or conversion[2] == "f" and conversion[1] == ".0"
            if number and counts_plural(text[conversion.end():]):
                argument = (find_arguments(code, match.end()) + [""] * (index + 1))[index]
                if not re.fullmatch(r"[A-Z][A-Z0-9_]{3,}( [-+] 1)?", argument):
                    yield code.count("\n", 0, match.start()) + 1, text[conversion.start():]


def find_python_counts(text):
    """(line, text) of f-strings likewise. A number with a format of its own is no count, nor is a list of numbers."""
    for node in ast.walk(ast.parse(text)):
        for value, behind in zip(node.values, node.values[1:]) if isinstance(node, ast.JoinedStr) else ():
            if not isinstance(value, ast.FormattedValue) or not isinstance(behind, ast.Constant) or value.format_spec:
                continue
            names = [n.id for n in ast.walk(value.value) if isinstance(n, ast.Name)]
            joined = isinstance(value.value, ast.Call) and getattr(value.value.func, "attr", "") == "join"
            if counts_plural(behind.value) and not joined and names and not names[0].isupper():
                yield value.lineno, behind.value


def find_shell_counts(text):
    for number, line in enumerate(text.split("\n"), 1):
        for match in VARIABLE.finditer(line) if SAYS.search(line) else ():
            if counts_plural(match[1]):
                yield number, match[1]


def find_counts(path, text, code):
    """(line, text behind the number) of messages in a file; code: without comments, of C and CUDA alone."""
    if code is not None and path.startswith(("llmc/", "data/", "train_fox.")):
        return find_c_counts(code)
    if path.endswith(".py") and path.startswith(("scripts/", "dev/study/")) and path != PROMPTS:
        return find_python_counts(text)
    return find_shell_counts(text) if path.endswith(".sh") and not path.startswith("dev/test/") else ()
