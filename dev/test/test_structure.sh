#!/usr/bin/env bash
# dev/structure.py: this repository keeps its rules, and small trees that break one rule each are reported.
scratch=build/test/structure
. dev/test/check.sh

# checker KERNELS [PHRASES]: the script with other tables of long kernels and of phrases
checker() {
    cp dev/counts.py dev/functions.py "$scratch"
    sed "/^KERNELS_OVER_120 = {/,/^}/c KERNELS_OVER_120 = {$1}
         /^PHRASES = {/,/^}/c PHRASES = {${2:-}}" dev/structure.py >"$scratch/structure.py"
}

# lines N: a comment of N lines
lines() { printf '//\n%.0s' $(seq "$1"); }

# body HEAD N: a definition whose head is followed by lines until it has N
body() { echo "$1 {"; lines $(($2 - 2)); echo "}"; }

# section TITLE N: a section of N lines
section() { printf '// %080d\n// %s\n' 0 "$1" | tr 0 -; [ "$2" -lt 3 ] || lines $(($2 - 2)); }

# make_sound: a tree in $tree that breaks no rule, at every limit
make_sound() {
    mkdir -p "$tree"/llmc/{base,formats,model,ranks,cuda,run/command} "$tree"/{data,dev/test/fixtures,dev/fuzz/seeds}
    touch "$tree"/{Makefile,README.md,LICENSE} "$tree"/llmc/{base/base.h,formats/json.h,ranks/world.h}
    printf '/ignored\n*.o\n' >"$tree/.gitignore"
    touch "$tree/ignored" "$tree/data/a.o"
    { echo '#include "../formats/json.h"'; echo '#include <nowhere.h>'; } >"$tree/llmc/model/config.h"
    { echo '#include "../../model/config.h"'; echo '#define OPTIONS(GROUP, ROW) \'
      printf 'ROW(A, b) \\\n%.0s' $(seq 64); echo 'ROW(A, b)'; } >"$tree/llmc/run/command/options.h"
    { echo '#include "llmc/run/command/options.h"'; lines 1116; section "the trainer" 280; section "the model" 0
      echo '//'; } >"$tree/train_fox.c"
    { body "void f(void)" 100; lines 600; } >"$tree/data/tool.c"
    touch "$tree"/dev/{1..16}.c "$tree"/dev/test/fixtures/{1..17}.json "$tree"/dev/fuzz/seeds/{1..17}
    # 8 parameters, however they are written
    cat >"$tree/llmc/cuda/k.cuh" <<'END'
// void comment(int, int, int, int, int, int, int, int, int) {
#define MACRO(a, b, c, d, e, f, g, h, i) void f(int a, int b, int c) {
const char* text = "{ (";
template <class T, int N = (3 > 2)>
static __global__ void __launch_bounds__(N, 2)
    first(T* a, int b, int c,
          int d, int e, int f, const float (&g)[N], void (*h)(int, int)) {
    auto lambda = [](int a, int b, int c, int d, int e, int f, int g, int h, int i) { return '{'; };
    first<T, N>(1, 2, 3, 4, 5, 6, 7, 8, 9);
}
namespace inside {
struct Pair {
    int a = {3}, b[2] = {1, 2};
    Pair(map<int, int> a, int b) : a{b}, b(a) {}
    __device__ Pair& operator()(int a) const { return *this; }
};
}
extern "C" {
#if defined(A)
__attribute__((noinline, used)) static int second(void) {
#else
static int second(int a, int b, int c, int d, int e, int f, int g, int h, int i) {
#endif
    struct Local {
        int method(int a, Pair b = {1, 2}) { return a; }
    };
    return 0;
}
}
static const int table[] = {first(1), second(), 3, 4, 5, 6, 7};
static const Pair five = {1, 2, 3, 4, 5}, *named = &(Pair){.a = 1, .b = 2, .c = 3, .d = 4, .e = 5, .f = 6};
END
    body "__global__ void long_kernel(int a)" 120 >>"$tree/llmc/cuda/k.cuh"
}

# fresh: $tree is sound again
fresh() {
    rm -rf "$scratch/tree"
    cp -r "$scratch/sound" "$scratch/tree"
    tree=$scratch/tree
}

# run: on the tree, with the script of the last `checker`
run() { python3 "$scratch/structure.py" "$tree"; }

# broken PLACE MESSAGE: the tree has this violation and no other
broken() {
    local code=0
    run >"$scratch/stdout" 2>"$scratch/stderr" || code=$?
    equals 1 $code
    said "$1: $2"
    said "passed, 1 failed"
    fresh
}

# ----------------------------------------------------------------------------

check "this repository" dev/structure.py
equals "$(dev/structure.py --rooms)" "$(sed -n '/^    train .*->/,/^$/s/^    //p' dev/README.md)" # the page has the rooms
for page in README.md data/README.md dev/*.md; do # as a merge leaves it
    equals "" "$(uniq -d "$page" | sed "/^\$/d; s|^|$page has twice: |")"
done
[ $failed = 0 ] || grep -E '^[^ ]+:[0-9]+: ' "$scratch/stdout"

tree=$scratch/sound
make_sound
fresh
checker ''
check "a tree at every limit" run
said " passed, 0 failed"
check "the whole lists" python3 "$scratch/structure.py" --all "$tree"
while read -r parameters name line; do
    said "$(printf '%8d  %-44sllmc/cuda/k.cuh:%d' "$parameters" "$name" "$line")"
done <<'END'
8 first 6
2 Pair 14
1 operator() 15
0 second 20
2 method 25
1 long_kernel 32
END
said "7 functions, 65 options; "
check "the rooms" python3 "$scratch/structure.py" --rooms "$tree"
said "checkpoint run plan     -> model"
said "model ranks             -> formats"
dies "usage: dev/structure.py" python3 "$scratch/structure.py" --most
dies "usage: dev/structure.py" python3 "$scratch/structure.py" "$tree" "$tree"

echo "void f(int a, int b, int c, int d, int e, int f, int g, int h, ...) {}" >"$tree/llmc/base/base.h"
broken llmc/base/base.h:1 "f has 9 parameters, at most 8"
sed -i 's/Pair(map/Pair(int c, int d, int e, int f, int g, int h, int i, map/' "$tree/llmc/cuda/k.cuh"
broken llmc/cuda/k.cuh:14 "Pair has 9 parameters"
sed -i 's/int d, int e, int f, const/int d, map<int, int> e, int f, int x, const/' "$tree/llmc/cuda/k.cuh"
broken llmc/cuda/k.cuh:6 "first has 9 parameters"
sed -i 's/(int a, Pair b/(int c, int d, int e, int f, int g, int h, int i, int a, Pair b/' "$tree/llmc/cuda/k.cuh"
broken llmc/cuda/k.cuh:25 "method has 9 parameters"

body "__device__ void f()" 101 >"$tree/llmc/base/base.h"
broken llmc/base/base.h:1 "f has 101 lines, at most 100"
body "__global__ void listed()" 121 >"$tree/llmc/base/base.h"
broken llmc/base/base.h:1 "kernel listed has 121 lines"
checker '"listed": "why"'
body "__global__ void listed()" 121 >"$tree/llmc/base/base.h"
check "a long kernel with a reason" run
body "__global__ void listed()" 120 >"$tree/llmc/base/base.h"
broken dev/structure.py:1 "KERNELS_OVER_120: no kernel listed has more than 120 lines"
checker ''

for file in llmc/base/base.h data/tool.py data/tool.sh test_fox.cu; do
    lines 701 >"$tree/$file"
    broken $file:1 "701 lines, at most 700"
done
lines 1401 >"$tree/train_fox.cu"
broken train_fox.cu:1 "1401 lines, at most 1400"
lines 501 >"$tree/llmc/base/base.h"
lines 501 >"$tree/data/tool.py"
lines 1251 >"$tree/train_fox.cu"
touch "$tree"/llmc/formats/{1..12}.h
check "large files" run
said "warning: llmc/base/base.h: 501 lines, more than 500: are these two subjects?"
said "warning: train_fox.cu: 1251 lines, more than 1250"
said "warning: llmc/formats: 13 files, more than 12"
equals 4 "$(grep -c '^warning' "$scratch/stdout")"
fresh
checker '' 'r"^Of ": (1, "the subject first")'
printf '// Of one\nint a; // of course\n/*\nWhat.\nOf two\n*/\n' >"$tree/llmc/base/base.h"
check "a phrase that is still there" run
printf 'const char* text = "// Of three"; // Of four\n' >"$tree/data/tool.c"
broken llmc/base/base.h:1 "/^Of / is 2 times in comments, at most 1: the subject first"
printf '/*\nOf one\n*/\n' >"$tree/llmc/base/base.h"
printf '# Of one\n' >"$tree/data/tool.sh"
printf 'def f():\n    %s""Of two"""\n' '"' >"$tree/data/tool.py"
broken llmc/base/base.h:2 "/^Of / is 3 times in comments, at most 1: the subject first"
checker ''
printf '#include "llmc/base/base.h" // defines: one, on_*; includes two\n' >"$tree/train_fox.cu"
printf 'int one, on_off; // two\n' >"$tree/llmc/base/base.h"
broken train_fox.cu:1 "llmc/base/base.h defines no two"
printf 'int one, on_off, two;\n' >"$tree/llmc/base/base.h"
check "what an include defines" run
{ lines 79; section "inference (llmc/model)" 21; } >"$tree/train_fox.cu"
broken train_fox.cu:1 "21 of 100 lines are in sections that are not the model, at most a fifth"
touch "$tree"/llmc/base/{1..16}.h
broken llmc/base:1 "17 files, at most 16"
echo 'int same() { return 1; }' | tee "$tree/llmc/base/base.h" >"$tree/llmc/formats/json.h"
printf '#include "../base/base.h"\n' >>"$tree/llmc/run/command/options.h"
sed -i 's|../base/base.h|../../base/base.h|' "$tree/llmc/run/command/options.h"
broken llmc/base/base.h:1 "same is also defined in llmc/formats/json.h, which train_fox.c includes too"
echo 'int same() { return 1; } int same(int a) { return a; } struct A { int f() {} }; struct B { int f() {} };' >"$tree/llmc/formats/json.h"
check "overloads in a file, and methods" run
fresh
printf 'int f() { return 1; }\n#include <late.h>\n' >"$tree/llmc/base/base.h"
broken llmc/base/base.h:2 "an #include behind a function"
defines() { echo 'void f() {} typedef struct { int a; } Shape; struct Pile { int b; }; typedef struct Open Open;' >"$tree/llmc/base/base.h"; }
while read -r name code; do
    defines
    printf '\n%s\n' "$code" >"$tree/llmc/formats/json.h"
    broken llmc/formats/json.h:2 "names $name of llmc/base/base.h, which it does not include"
done <<'END'
f void g() { f(); }
Shape void g(Shape s) {}
Pile struct Other { struct Pile* p; };
END
defines
printf '#include "../base/base.h"\n' >"$tree/llmc/formats/safetensors.h"
cat >"$tree/llmc/formats/json.h" <<'END'
#include "safetensors.h"
void g(Shape s) { f(); }
END
cat >"$tree/llmc/ranks/world.h" <<'END'
typedef struct Open Open;
template <class Shape> void h(Shape* s, Open* o, int f) { s->f(); }
END
check "names that are reached, and others' of the same name" run
fresh
echo 'static const Shape six = {1, 2, {3, 4}, 5, f(6, 7), 8};' >"$tree/llmc/base/base.h"
broken llmc/base/base.h:1 "an initializer of 6 fields without names, at most 5"
echo 'Shape f() { return {1, 2, 3, 4, 5, 6}; }' >"$tree/llmc/base/base.h"
broken llmc/base/base.h:1 "an initializer of 6 fields without names, at most 5"
echo 'void f(int** p) { for (int i = 0; p[i] && i < 2; i++) {} }' >"$tree/llmc/base/base.h"
broken llmc/base/base.h:1 "an element is read before its index i is bounded"
echo 'void f(int** p) { for (int i = 0; i < 2 && p[i]; i++) {} }' >"$tree/llmc/base/base.h"
check "an element behind the bound of its index" run
for name in llmc/gone llmc/run/command/gone.h run/gone.h; do
    printf '// llmc/run, model/config.h, llmc/model/config.h.\n// Called by %s: for a test.\n' $name >"$tree/data/tool.h"
    broken data/tool.h:2 "names llmc/${name#llmc/}, which does not exist"
    echo "Line, \`llmc/model\`, and ($name)" >"$tree/README.md"
    broken README.md:1 "names llmc/${name#llmc/}, which does not exist"
done

# A count before a plural, in C, Python and shell
mkdir "$scratch/sound/scripts"
fresh
while read -r line; do
    echo "void f(long n) { $line; }" >"$tree/llmc/base/base.h"
    broken llmc/base/base.h:1 "'%"
done <<'END'
printf("%ld tokens\n", n)
printf("has %-5ld open files", n)
fail(err, "%s: %d of %" "d shards" " are left", path, g(a, b), n)
die("at most %d%% of %.*s (a, b) and %zu bytes", MOST, MOST, n, size)
puts("'"), printf("%.0f targets", x)
END
cat >"$tree/llmc/base/base.h" <<'END'
// printf("%d tokens")
enum { MOST = 2 };
void f(int n) { printf("more than %d tokens, %.*s, %d bytes", MOST, n, "(,", MAX_BYTES - 1); }
void g(int n) { printf("%d is odd, %s, %d tokens/s, %d of %d, %.1f hours", n, counted(n, "row").text, n, n, 2, 0.5); }
END
check "constants and what is no count" run
while read -r line; do
    echo "$line" >"$tree/scripts/a.py"
    broken scripts/a.py:1 "' "
done <<'END'
f"{n} files"
print(f"{len(X)} of {'a' if n else 2} other files: {x}")
END
cat >"$tree/scripts/a.py" <<'END'
f"{MOST} files, {MOST - 1} files, {', '.join(x)} files, {n:.1f} hours, {n} is, {n} times as long"
END
check "the same in Python" run
echo 'echo "$m of ${n%.*} files"' >"$tree/scripts/a.sh"
broken scripts/a.sh:1 "' files"
printf '%s\n' '[ $n files ]' 'echo "files: $n" && echo "$n is not $m in files"' >"$tree/scripts/a.sh"
check "the same in shell" run
fresh
rmdir "$scratch/sound/scripts" "$tree/scripts"
touch "$tree/dev/17.c"
broken dev:1 "17 files, at most 16"
touch "$tree/notes.txt"
broken notes.txt:1 "not among what the top level holds"
mkdir "$tree/llmc/other"
touch "$tree/llmc/other/other.h"
broken llmc/other/other.h:1 "its folder llmc/other is not in LADDER"
touch "$tree/llmc/other.h"
broken llmc/other.h:1 "its folder llmc/ is not in LADDER"
sed -i 's/ROW(A, b)$/& ROW(A, b) \\\nROW(A, b)/' "$tree/llmc/run/command/options.h"
broken llmc/run/command/options.h:2 "66 options, at most 65"
: >"$tree/llmc/run/command/options.h"
broken llmc/run/command/options.h:1 "no rows ROW(...) of a macro OPTIONS found"

while read -r file target message; do
    printf '\n  # include "%s"\n' "$target" >"$tree/$file"
    broken "$file:2" "includes $message"
done <<'END'
llmc/base/base.h ../formats/json.h llmc/formats/json.h: in LADDER formats is above base
llmc/model/config.h ../ranks/world.h llmc/ranks/world.h: in LADDER ranks is above model
llmc/cuda/device.cuh ../run/command/options.h llmc/run/command/options.h: in LADDER run is above cuda
llmc/run/run.h ../../train_fox.c train_fox.c; it may include llmc
llmc/run/run.h ../../data/tool.c data/tool.c; it may include llmc
llmc/run/run.h ../../dev/1.c dev/1.c; it may include llmc
data/tool.c ../dev/1.c dev/1.c; it may include data, llmc
train_fox.cu data/tool.c data/tool.c; it may include llmc
llmc/run/run.h ../model/none.h llmc/model/none.h, which does not exist
END
printf '#include "k.cuh"\n' >"$tree/llmc/cuda/c.h"
broken llmc/cuda/c.h:1 "includes llmc/cuda/k.cuh: a header for C needs nothing of CUDA"
printf '#include "../base/base.h"\n' >"$tree/llmc/run/command/cli.h"
broken llmc/run/command/cli.h:1 "includes llmc/run/base/base.h, which does not exist"

# --bench sums times by kernels' names: of a model with layers of several kinds nearly all of them
names=$(grep -rh 'Range range(' llmc train_fox.cu | grep -o '"[^"]*"' | sort -u | wc -l)
most=$(sed -nE 's/.*RANGE_LOG_NAMES = ([0-9]+).*/\1/p' llmc/cuda/range.cuh)
check "$names names of ranges, room for $most" test "$names" -gt 20 -a "$names" -le "$most"
report
