"""
Finds the functions of C and CUDA files, for structure.py, with a tokenizer that knows comments, strings, preprocessor
lines and brackets, no types. Where the branches of an #if have unbalanced braces it reads the first.
"""
import functools
import re
from collections import namedtuple

Function = namedtuple("Function", "name path line lines parameters kernel member")


# ----------------------------------------------------------------------------
# from text to tokens

COMMENT_OR_STRING = re.compile(
    r'(?P<comment>//[^\n]*|/\*.*?\*/)|R"(?P<delimiter>[^(\s]*)\(.*?\)(?P=delimiter)"'
    r'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
TOKEN = re.compile(r'\.?\d(?:[eEpP][+-]|\'?[\w.])*|\w+|""|::|->|\.\.\.|[=!<>+\-*/%&|^]=|\S')
DIRECTIVE = re.compile(r"\s*#\s*(\w*)")


def strip_comments(text):
    """The text with comments as blanks, and its lines where they were."""
    blank = lambda m: re.sub(r"[^\n]", " ", m.group()) if m.group("comment") else m.group()
    return COMMENT_OR_STRING.sub(blank, text)


@functools.lru_cache(maxsize=None)  # several rules read the same file
def tokenize(code):
    """(token, line) pairs of a text without comments; strings are "", preprocessor lines are left out."""
    code = COMMENT_OR_STRING.sub(lambda m: '""' + "\n" * m.group().count("\n"), code)
    tokens, depth, branches, directive = [], 0, [], False  # branches: [depth at its #if, is this branch skipped]
    for number, line in enumerate(code.split("\n"), 1):
        match = DIRECTIVE.match(line)
        if directive or match:
            word = "" if directive else match.group(1)
            directive = line.rstrip().endswith("\\")
            if word in ("if", "ifdef", "ifndef"):
                branches.append([depth, False])
            elif word in ("else", "elif") and branches and depth != branches[-1][0]:
                branches[-1][1] = True
            elif word == "endif" and branches:
                branches.pop()
            continue
        if any(skipped for _, skipped in branches):
            continue
        for token in TOKEN.findall(line):
            depth += (token == "{") - (token == "}")
            tokens.append((token, number))
    return tokens


# ----------------------------------------------------------------------------
# from tokens to functions

CLOSING = {"(": ")", "[": "]", "{": "}"}
# Names before parentheses that are no parameters
NO_FUNCTION = set("__attribute__ __launch_bounds__ __cluster_dims__ __maxnreg__ __align__ __declspec alignas _Alignas "
                  "alignof decltype sizeof noexcept explicit requires asm __asm__ typeof __typeof__ static_assert "
                  "_Static_assert if for while switch return".split())


def close(tokens, i):
    """The index of the bracket that closes the one at i."""
    depth = 0
    for k in range(i, len(tokens)):
        token = tokens[k][0]
        depth += (token in "([{") - (token in ")]}") if len(token) == 1 else 0
        if depth == 0:
            return k
    return len(tokens) - 1


def close_angle(tokens, i):
    """The index of the > that closes the < at i, or i where it is a comparison."""
    depth, k = 0, i
    while k < len(tokens):
        token = tokens[k][0]
        if token in CLOSING:
            k = close(tokens, k)
        depth += (token == "<") - (token == ">")
        if depth == 0:
            return k
        if token == ";":
            break
        k += 1
    return i


def split_top(tokens):
    """Indices of a statement's tokens outside of brackets; a bracket counts by its opening token."""
    top, i = [], 0
    while i < len(tokens):
        top.append(i)
        i = close(tokens, i) + 1 if tokens[i][0] in CLOSING else i + 1
    return top


def is_name(token):
    return re.fullmatch(r"[A-Za-z_]\w*", token) is not None


def find_declarator(tokens):
    """(index of the name, index of the parenthesis that opens the parameters) of a function's head, or None."""
    found, top = [], split_top(tokens)
    for n, i in enumerate(top):
        token = tokens[i][0]
        if token in (":", "->") and found:
            break
        if token in ("struct", "class", "union", "enum", "typedef", "namespace"):
            found = []  # what stood before is a macro: MACRO(x) struct y {
        if token == "operator":
            opening = [k for k in top[n + 1:] if tokens[k][0] == "("]
            if opening and opening[0] == i + 1 and len(opening) > 1:  # operator()
                opening = opening[1:]
            return (i, opening[0]) if opening else None
        if token != "(" or n == 0:
            continue
        name = tokens[top[n - 1]][0]
        if i + 1 < len(tokens) and tokens[i + 1][0] in "*&":  # a function that returns a pointer to one
            inner = find_declarator(tokens[i + 1:close(tokens, i)])
            if inner:
                found.append((inner[0] + i + 1, inner[1] + i + 1))
        elif is_name(name) and name not in NO_FUNCTION:
            found.append((top[n - 1], i))
    lower = [f for f in found if not tokens[f[0]][0].isupper()]  # MACRO(x) void f(...), void f(...) MACRO(x)
    return (lower or found or [None])[-1]


def count_parameters(tokens):
    """The number of parameters in the tokens between a function's parentheses."""
    if not tokens or [t for t, _ in tokens] == ["void"]:
        return 0
    count, i = 1, 0
    while i < len(tokens):
        token = tokens[i][0]
        count += token == ","
        i = close(tokens, i) if token in CLOSING else close_angle(tokens, i) if token == "<" else i
        i += 1
    return count


def find_functions(tokens, path, inside_function=False, of_record=False):
    """Definitions in a file, in its structs and namespaces, and in structs inside functions."""
    functions, start, i = [], 0, 0
    while i < len(tokens):
        token, _ = tokens[i]
        if token == ";" or token == "}":
            start = i + 1
        elif token == ":" and i == start + 1 and tokens[start][0] in ("public", "private", "protected"):
            start = i + 1
        elif token == "template" and i + 1 < len(tokens) and tokens[i + 1][0] == "<":
            i = close_angle(tokens, i + 1)
            start = i + 1 if i + 1 > start else start
        elif token in "([" and len(token) == 1:
            i = close(tokens, i)
        elif token == "{":
            head, end = tokens[start:i], close(tokens, i)
            top = [head[k][0] for k in split_top(head)]
            declarator = None if inside_function else find_declarator(head)
            record = next((t for t in top if t in ("struct", "class", "union", "namespace")), None)
            member = declarator and ":" in top and (is_name(top[-1]) or top[-1] == ">")  # of an initializer list
            if inside_function and record is None:
                start = i + 1  # a block: its statements are searched for structs
            elif "=" in top and "operator" not in top or "enum" in top and not declarator or member:
                i = end  # an initializer; the statement goes on
            elif declarator:
                name, opening = declarator
                line = head[name][1]
                parameters = count_parameters(head[opening + 1:close(head, opening)])
                text = "".join(t for t, _ in head[name:opening])
                functions.append(Function(text, path, line, tokens[end][1] - line + 1, parameters, "__global__" in top,
                                          of_record))
                functions += find_functions(tokens[i + 1:end], path, True, True)
                i, start = end, end + 1
            elif record or top[:1] == ["extern"]:
                functions += find_functions(tokens[i + 1:end], path, False, of_record or record not in (None, "namespace"))
                i = end
                if record in (None, "namespace"):  # no ; follows
                    start = end + 1
            else:
                i = end
        i += 1
    return functions
