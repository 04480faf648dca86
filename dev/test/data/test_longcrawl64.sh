#!/usr/bin/env bash
# Tests of data/longcrawl64 with small arrays of LongCrawl64's layout (dev/reference/make_zarr.py), in a
# folder and on a server with faults: the exact tokens, the requests, continuing after an interruption, a
# one-line error per fault.
scratch=build/test/longcrawl64
. dev/test/check.sh

tool=${LONGCRAWL64:-data/longcrawl64}
fixtures=dev/test/fixtures/zarr
export no_proxy=127.0.0.1

# tokens_are ARRAY FIRST DOCS D SHARD: header and tokens of the shard follow from the array's formula
tokens_are() { check "wrong tokens" python3 dev/reference/make_zarr.py check "$@"; }

# files FOLDER LIST: the folder and its subfolders contain exactly these files, apart from locks and the mark of an
# incomplete dataset; the list is sorted
files() {
    local found
    found=$(cd "$1" 2>/dev/null && find . -type f ! -name '*.lock' ! -name '*_incomplete.bin' -printf '%P\n' | LC_ALL=C sort | tr '\n' ' ')
    if [ "$found" = "${2:+$2 }" ]; then pass; else fail "$1 has files '$found', expected '$2'"; fi
}

# fetched LIST: the requests for chunks of train.zarr since the last call, sorted
fetched() {
    local found
    found=$(sed -n 's,train.zarr/\([0-9]\),\1,p' "$scratch/log" | LC_ALL=C sort | tr '\n' ' ')
    if [ "$found" = "${1:+$1 }" ]; then pass; else fail "requests for '$found', expected '$1'"; fi
    : >"$scratch/log"
}

# fresh: empties the folder of shards and the log of requests
fresh() {
    rm -rf "$out"
    mkdir -p "$out"
    : >"$scratch/log"
}

# train SOURCE OPTION...: writes the 3 documents of the fixture's train.zarr to two shards (2 documents, then
# 1)
prefix=
train() {
    local source=$1
    shift
    $prefix "$tool" --source "$source" --split train --tokens 48Ki --shard-tokens 32Ki --tries 2 \
        --out "$out/t" "$@"
}

train_is_right() {
    tokens_are train 0 2 16384 "$out/t_train_000000.bin"
    tokens_are train 2 1 16384 "$out/t_train_000001.bin"
    files "$out" "t_train_000000.bin t_train_000001.bin"
    check "complete" test ! -e "$out/t_train_incomplete.bin"
}

# incomplete: the loader's pattern includes an empty file, which it refuses (dev/test/tokens/test_shard.c)
incomplete() { check "marked as incomplete" test -f "$out/t_train_incomplete.bin" -a ! -s "$out/t_train_incomplete.bin"; }

out=$scratch/shards
if [ ! -x "$tool" ]; then
    fail "$tool is not built: run make data/longcrawl64"
    report
fi
if ! command -v python3 >/dev/null; then
    fail "python3 is missing; the test server needs it"
    report
fi
exec 3< <(exec python3 dev/test/data/serve.py "$fixtures" "$scratch/log")
server=$!
trap 'kill $server' EXIT
read -r port <&3
url=http://127.0.0.1:$port

# ----------------------------------------------------------------------------
# a local source

fresh
check "a folder" train $fixtures
train_is_right
check "all shards complete" train $fixtures
train_is_right

# rolled: each document rotated, another one by another offset, the same after an interruption
mv "$out" "$scratch/plain"
fresh
check "rolled" train $fixtures --roll 7
mkdir "$scratch/rolled" && cp "$out"/*.bin "$scratch/rolled"
check "rotations" python3 - "$scratch/plain" "$out" <<'END'
import sys
D, offsets = 16384, []
for shard in "t_train_000000.bin", "t_train_000001.bin":
    plain, rolled = (open(f"{folder}/{shard}", "rb").read()[1024:] for folder in sys.argv[1:])
    assert len(plain) == len(rolled)
    for i in range(0, len(plain), 2 * D):
        offsets.append((2 * plain[i:i + 2 * D]).find(rolled[i:i + 2 * D]) // 2)
assert len(set(offsets)) == 3 and min(offsets) > 0, offsets
END
rm "$out/t_train_000001.bin"
dies "--roll: $out/t_train_*.bin were made with --roll 7; remove" train $fixtures
dies "--roll: $out/t_train_*.bin were made with --roll 7; remove" train $fixtures --roll 8
check "the second shard again" train $fixtures --roll 7
for shard in "$scratch/rolled"/*; do same "$shard" "$out/${shard##*/}"; done
dies "--roll: $scratch/plain/t_train_*.bin were made without it; remove" train $fixtures --roll 7 --out "$scratch/plain/t"
dies "--roll -1: not a whole number from 0" train $fixtures --roll -1
dies "--cache: is empty: give DIR" train $fixtures --cache ""
dies "--source: is empty: give DIR|URL" train ""
mkdir "$scratch/nothing" # what a command leaves that fails at once
for source in "$scratch/none" http://127.0.0.1:1; do
    dies "$source/train.zarr/.zarray: " train "$source" --tries 1 --out "$scratch/nothing/new/t"
    equals "$scratch/nothing" "$(find "$scratch/nothing")"
done

fresh # chunks of LongCrawl64's shape; the last row of chunks is not full
heldout() { "$tool" --source $fixtures/ --split heldout --out "$out/h" "$@"; }
check "chunks of 2048 x 2048" heldout --columns=4096 --tokens 8601600
tokens_are heldout 0 2100 4096 "$out/h_val_000000.bin"
files "$out" h_val_000000.bin

fresh
check "without a vocabulary" train $fixtures
said "no $out/t_tokenizer.json: checkpoints of models trained on these shards will have no tokenizer; run again with --vocab"
check "with GPT-2's, later" train $fixtures --vocab dev/test/fixtures/gpt2/vocab.bpe
equals 1 "$(wc -l <"$scratch/stdout")"
files "$out" "t_tokenizer.json t_train_000000.bin t_train_000001.bin"
equals 50000 "$(python3 -c 'import json, sys; print(len(json.load(open(sys.argv[1]))["model"]["merges"]))' "$out/t_tokenizer.json")"
check "the other split, without" "$tool" --source $fixtures --split heldout --columns 64 --tokens 64 --out "$out/t"
equals 1 "$(wc -l <"$scratch/stdout")"
fresh
dies "README.md: does not start with '#version:': not GPT-2's vocab.bpe" train $fixtures --vocab README.md
files "$out" ""

fresh # documents and columns end within a chunk; --tokens is rounded up to whole documents
check "part of a chunk" heldout --columns 3000 --tokens 6000001
tokens_are heldout 0 2001 3000 "$out/h_val_000000.bin"

fresh
cp -r $fixtures "$scratch/copy"
rm "$scratch/copy/train.zarr/0.2"
dies "train.zarr/0.2: this chunk is missing" train "$scratch/copy"
files "$out" ""
head -c 1000 $fixtures/train.zarr/0.2 >"$scratch/copy/train.zarr/0.2"
dies "train.zarr/0.2: damaged: its blosc header claims 15807 bytes, the file has 1000" train "$scratch/copy"
: >"$scratch/copy/train.zarr/0.2"
dies "train.zarr/0.2: damaged: has 0 bytes, too few for a blosc chunk" train "$scratch/copy"
cp $fixtures/bad_id/train.zarr/0.0 "$scratch/copy/train.zarr/0.2"
dies "a chunk has 16384" train "$scratch/copy"
files "$out" ""
dies "bad_id/train.zarr/0.0: token 5 of row 1 is 50257" \
    "$tool" --source $fixtures/bad_id --split train --columns 64 --tokens 128 --out "$out/t"
files "$out" ""
check "the invalid id is in a document that is not read" \
    "$tool" --source $fixtures/bad_id --split train --columns 64 --tokens 64 --out "$out/t"

# ----------------------------------------------------------------------------
# unsupported arrays: each .zarray differs from LongCrawl64's in one value

while read -r from to message; do
    sed "s|$from|$to|" $fixtures/train.zarr/.zarray >"$scratch/copy/train.zarr/.zarray"
    dies "copy/train.zarr/.zarray: $message" train "$scratch/copy"
done <<'END'
"zarr_format":.2 "zarr_format":3 not an array of LongCrawl64: zarr_format must be 2
<u2 <i4 not an array of LongCrawl64: dtype must be "<u2"
<u2 >u2 not an array of LongCrawl64: dtype must be "<u2"
"C" "F" not an array of LongCrawl64: order must be "C"
"blosc" "zlib" not an array of LongCrawl64: compressor must have id "blosc"
"lz4" "zstd" not an array of LongCrawl64: compressor must have cname "lz4"
"shuffle":.1 "shuffle":2 not an array of LongCrawl64: compressor must have shuffle 1
"filters":.null "filters":[] not an array of LongCrawl64: filters must be null
"filters" "dimension_separator":"/","filters" not an array of LongCrawl64: dimension_separator must be "."
2, 0, not an array of LongCrawl64: chunks must be two sizes
4096 2e9 not an array of LongCrawl64: chunks must be below 2 GiB
4096 8388608 not an array of LongCrawl64: chunks must be at most 16 MiB
3, -3, not an array of LongCrawl64: shape must be two sizes
20480 20480,1 not an array of LongCrawl64: shape must be two sizes
"order" order bad JSON
END

# an array whose buffers would take 16 GiB: refused before they are allocated. ThreadSanitizer starts under no limit
case $tool in */tsan/*) most=unlimited ;; *) most=4000000 ;; esac
huge() { (ulimit -v $most && train "$scratch/huge" "$@"); }
mkdir -p "$scratch/huge/train.zarr"
sed 's/^ *2,$/    500000,/; s/^ *4096$/    1/; s/^ *3,$/    500000,/' $fixtures/train.zarr/.zarray >"$scratch/huge/train.zarr/.zarray"
dies "train.zarr: not an array of LongCrawl64: its chunks have 500000 rows of 1 token" huge
sed 's/^ *2,$/    1,/; s/^ *4096$/    1/; s/^ *3,$/    2000000000,/' $fixtures/train.zarr/.zarray >"$scratch/huge/train.zarr/.zarray"
dies "train.zarr: not an array of LongCrawl64: its chunks have 1 row of 1 token" huge --tokens 30000000000000
fresh
truncate -s 17M "$scratch/copy/train.zarr/0.2"
cp $fixtures/train.zarr/.zarray "$scratch/copy/train.zarr/"
dies "train.zarr/0.2: has 17825792 bytes, a chunk at most 16400" train "$scratch/copy"

# ----------------------------------------------------------------------------
# SHA-256 of the chunks

list=$scratch/list
(cd $fixtures && sha256sum train.zarr/.zarray train.zarr/?.?) >"$list"
rm -rf "$scratch/copy"
cp -r $fixtures "$scratch/copy"
fresh
check "without a list" train $fixtures
said "warning: NOT VERIFIED: 8 of 8 chunks: neither" stderr
fresh
check "a list" train $fixtures --sha256sums "$list"
equals "" "$(cat "$scratch/stderr")"
train_is_right
fresh
cp "$list" "$scratch/copy/SHA256SUMS"
check "a list in the source" train "$scratch/copy"
equals "" "$(cat "$scratch/stderr")"
# one bit, which the decompression does not notice
printf '%b' "$(printf '\\x%02x' $(($(od -An -tu1 -j8000 -N1 $fixtures/train.zarr/0.2) ^ 1)))" |
    dd of="$scratch/copy/train.zarr/0.2" bs=1 seek=8000 conv=notrunc status=none
fresh
dies "train.zarr/0.2: damaged: received data has SHA-256" train "$scratch/copy"
files "$out" ""
dies "train.zarr/0.2: damaged: received data has SHA-256" train "$scratch/copy" --sha256sums "$list"
sed -i '/0\.2/d' "$scratch/copy/SHA256SUMS"
check "a list in the source that lacks a chunk" train "$scratch/copy"
said "warning: NOT VERIFIED: 1 of 8 chunks: neither" stderr
fresh
cp $fixtures/train.zarr/0.2 "$scratch/copy/train.zarr/"
dies "the list of SHA-256 does not have train.zarr/0.2" train $fixtures --sha256sums "$scratch/copy/SHA256SUMS"
sed 's/^......../00000000/' "$list" >"$scratch/wrong"
dies ".zarray: received data has SHA-256" train $fixtures --sha256sums "$scratch/wrong"
printf 'no list\n' >"$scratch/wrong"
dies "wrong: line 1 is not a SHA-256 and a name" train $fixtures --sha256sums "$scratch/wrong"
: >"$scratch/wrong"
dies "wrong: lists no file" train $fixtures --sha256sums "$scratch/wrong"
dies "list/none: cannot open" train $fixtures --sha256sums "$scratch/list/none"
cp $fixtures/train.zarr/0.1 "$scratch/copy/train.zarr/1.0"
rm "$scratch/copy/SHA256SUMS"
dies "train.zarr/1.0: has the same bytes as chunk 0.1" train "$scratch/copy"

# ----------------------------------------------------------------------------
# options

train_with() { "$tool" --source $fixtures --split train --tokens 48Ki --out "$out/t" "$@"; }
fresh
dies "--split is missing" "$tool" --tokens 1 --out "$out/t"
dies "--split test: must be train or heldout" "$tool" --split test --tokens 1 --out "$out/t"
dies "--tokens is missing" "$tool" --split train --out "$out/t"
dies "--out is missing" "$tool" --split train --tokens 1
dies "--token: no such option" "$tool" --token 1
dies "--tokens: its N is missing" "$tool" --tokens
dies "--tokens 1.5: not a whole number" train_with --tokens 1.5
dies "--jobs 0: not a whole number from 1 to 64" train_with --jobs 0
dies "--keep-cache takes no value" train_with --keep-cache=1
dies "--columns 20481: a document of train.zarr has 20480 tokens" train_with --columns 20481
dies "--tokens 49153: requires 4 documents of 16384, but train.zarr has 3 (49152 tokens)" train_with --tokens 49153
# a plan is of what there is: of a folder by its .zarray, of a server, which is not asked, by what LongCrawl64 has
check "the plan of a folder" train_with --dry-run --tokens 32769
equals "train: 3 documents of 16384 tokens, 49152 tokens, 0.0 GB" "$(cat "$scratch/stdout")"
dies "--tokens 49153: requires 4 documents of 16384, but train.zarr has 3 (49152 tokens)" train_with --dry-run --tokens 49153
dies "--columns 20481: a document of train.zarr has 20480 tokens" train_with --dry-run --columns 20481
dies "no/such/train.zarr/.zarray: cannot open" train_with --dry-run --source no/such
dies "has 6609334 (6609334 tokens)" train_with --dry-run --source https://other --columns 1 --tokens 6609335
# the default source: 10 Gi tokens of train, 40 Gi of whole documents
default() { "$tool" --split train --out "$out/t" --dry-run "$@"; }
dies "--tokens 10737418241: 655361 documents of 16384 tokens, 1 times the 655360 that the default source has of train (10 Gi tokens, 40 Gi with --columns 65536)" \
    default --tokens 10737418241
dies "1.125 times the 655360" default --tokens 45Gi --columns 65536
dies "--tokens 854114305: requires 52132 documents of 16384, but heldout.zarr has 52131 (854114304 tokens)" \
    default --split heldout --tokens 854114305
dies "--columns 65537: a document of heldout.zarr has 65536 tokens" default --split heldout --tokens 1 --columns 65537
while IFS='|' read -r options says; do
    check "$options" default $options
    equals "$says" "$(cat "$scratch/stdout")"
done <<'END'
--tokens 10Gi|train: 655360 documents of 16384 tokens, 10737418240 tokens, 21.5 GB
--tokens 45Gi --at-most|train: 655360 documents of 16384 tokens, 10737418240 tokens, 21.5 GB
--tokens 45Gi --at-most --columns 65536|train: 655360 documents of 65536 tokens, 42949672960 tokens, 85.9 GB
--tokens 16385 --at-most|train: 2 documents of 16384 tokens, 32768 tokens, 0.0 GB
--tokens 45Gi --source https://other|train: 2949120 documents of 16384 tokens, 48318382080 tokens, 96.6 GB
--tokens 854114304 --split heldout|heldout: 52131 documents of 16384 tokens, 854114304 tokens, 1.7 GB
END
dies "--source ftp://x: must be a folder or start with https:// or http://" train_with --source ftp://x
dies "no/such/train.zarr/.zarray: cannot open" train_with --source no/such
files "$out" ""

# ----------------------------------------------------------------------------
# a server

fresh
check "a server" train "$url/plain"
fetched "0.0 0.1 0.2 0.3 1.0 1.1 1.2 1.3"
train_is_right # and the cache is deleted

fresh
check "one document" train "$url/plain/" --tokens 1 --columns 5000
fetched "0.0 0.1"
tokens_are train 0 1 5000 "$out/t_train_000000.bin"

fresh
check "keep the cache" train "$url/linked@0.1" --cache "$scratch/kept" --keep-cache
train_is_right
files "$scratch/kept/train.zarr" ".zarray 0.0 0.1 0.2 0.3 1.0 1.1 1.2 1.3"
fresh
check "use the cache as a source" train "$scratch/kept"
train_is_right
fresh
check "reuse the cache" train "$url/plain" --cache "$scratch/kept" --keep-cache
fetched ""
train_is_right
echo >>"$scratch/kept/train.zarr/.zarray"
dies "kept/train.zarr/.zarray: differs from" train "$url/plain" --cache "$scratch/kept" --out "$out/u"

fresh
check "no SHA-256" train "$url/plain"
said "warning: NOT VERIFIED: 8 of 8 chunks: neither" stderr
fresh
check "a flipped bit that nothing can notice" train "$url/flipped@0.1"
said "warning: NOT VERIFIED: 8 of 8 chunks: neither" stderr
fresh
check "a list" train "$url/plain" --sha256sums "$list"
equals "" "$(cat "$scratch/stderr")"
fresh
check "SHA-256 from the server" train "$url/linked@*"
equals "" "$(cat "$scratch/stderr")"
train_is_right
fresh
dies "train.zarr/0.1: has the same bytes as chunk 0.0: the source has one for the other" train "$url/first@*"
check "both are removed from the cache" test ! -e "$out/t.cache/train.zarr/0.0" -a ! -e "$out/t.cache/train.zarr/0.1"

fresh
check "a temporary error" train "$url/once@0.1"
fetched "0.0 0.1 0.1 0.2 0.3 1.0 1.1 1.2 1.3"
train_is_right

fresh
check "two of three documents" train "$url/plain" --tokens 32Ki
fetched "0.0 0.1 0.2 0.3"
check "continue after the first shard" train "$url/plain"
fetched "1.0 1.1 1.2 1.3"
train_is_right
check "fewer shards than exist" train "$url/plain" --tokens 32Ki
said "t_train_000001.bin: is left from an earlier" stderr
dies "has 32768 tokens in documents of 16384, but this command writes 16384 in documents of 8192" \
    train "$url/plain" --columns 8192 --tokens 24Ki --shard-tokens 16Ki
truncate -s -2 "$out/t_train_000001.bin"
dies "remove this file or choose another --out" train "$url/plain"

# fault NAME MESSAGE OPTION...: this fault of chunk 0.1 causes this error, no shard, and no damaged chunk in
# the cache
fault() {
    local name=$1 message=$2
    shift 2
    fresh
    dies "$url/$name@0.1/train.zarr/0.1: $message" train "$url/$name@0.1" --jobs 1 "$@"
    files "$out" "t.cache/train.zarr/.zarray t.cache/train.zarr/0.0"
    incomplete
}
fault error "the server answered HTTP 500 (tries: 2)"
fetched "0.0 0.1 0.1"
fault short "" # and libcurl's words
fault cut "its blosc header claims 15925 bytes, the file has 7962"
fault header "its blosc header claims 16640 bytes uncompressed, a chunk has 16384"
fault html "its blosc header claims"
fault swapped "received data has SHA-256"
fault resized "received 15925 bytes, the file has 15926"
fault flipped "received data has SHA-256" --sha256sums "$list"
fault ftp "is redirected to an address that is not followed from here: Protocol"
fault stall "Operation too slow" --timeout 3 --tries 1
read -r _ <&3

fresh
dies "$url/plain/train.zarr/0.4: this chunk is missing" \
    train "$url/plain" --columns 20480 --tokens 60Ki --jobs 1
fetched "0.0 0.1 0.2 0.3 0.4"
dies "$url/plain/none/train.zarr/.zarray: the server answered HTTP 404" train "$url/plain/none"
dies "bad JSON" train "$url/html@.zarray" --tries 1
dies "http://127.0.0.1:1/train.zarr/.zarray: Failed to connect" train http://127.0.0.1:1 --tries 1
if train http://127.0.0.1:1 --tries 3 2>"$scratch/stderr"; then fail "no network"; else pass; fi
equals "warning error" "$(sed 's/: .*//' "$scratch/stderr" | xargs)"
said "a download is tried up to 3 times, with pauses of up to 300 s" stderr
dies "log/train.zarr: cannot create this folder" train "$url/plain" --cache "$scratch/log"

# ----------------------------------------------------------------------------
# HTTPS: no redirect leads out of it

openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1 \
    -keyout "$scratch/key" -out "$scratch/certificate" 2>/dev/null || fail "openssl cannot make a certificate"
cat "$scratch/key" >>"$scratch/certificate"
${CC:-cc} -shared -fPIC dev/test/data/trust.c -o "$scratch/trust.so" || fail "cannot compile trust.c"
exec 4< <(exec python3 dev/test/data/serve.py "$fixtures" "$scratch/log" "$scratch/certificate" "$port")
secure_server=$!
trap 'kill $server $secure_server' EXIT
read -r secure_port <&4
secure=https://127.0.0.1:$secure_port
trusting() { TEST_CERTIFICATE=$scratch/certificate LD_PRELOAD=$scratch/trust.so train "$@"; }

fresh
check "HTTPS" trusting "$secure/plain"
train_is_right
fresh
check "a redirect from HTTPS to HTTPS" trusting "$secure/https@*"
train_is_right
fresh
dies "$secure/plainly@0.1/train.zarr/0.1: is redirected to an address that is not followed from here" \
    trusting "$secure/plainly@0.1" --jobs 1
fetched "0.0 0.1" # and nothing from the other server
dies "is redirected to an address" trusting "$secure/plainly@.zarray"
dies "SSL" train "$secure/plain"

# ----------------------------------------------------------------------------
# interruption: the server prints a line when it holds a request; then the program is killed

# interrupt SIGNAL CHUNK: sends the signal while the chunk is downloaded; sets $code to the exit code and
# writes the output to $scratch/interrupted
interrupt() {
    (prefix="exec" && train "$url/stall@$2" --jobs 1) >"$scratch/interrupted" 2>&1 &
    local pid=$!
    read -r _ <&3
    dies "--out $out/t: another process writes these shards" train "$url/plain"
    dies "t.cache/train.zarr: another process uses this cache" train "$url/plain" --cache "$out/t.cache" --out "$out/u"
    kill "-$1" $pid
    code=0
    wait $pid 2>/dev/null || code=$?
}

fresh
interrupt KILL 0.3
files "$out" "t.cache/train.zarr/.zarray t.cache/train.zarr/0.0 t.cache/train.zarr/0.1 t.cache/train.zarr/0.2"
fetched "0.0 0.1 0.2 0.3"
head -c 100 "$out/t.cache/train.zarr/0.0" >"$scratch/cut"
mv "$scratch/cut" "$out/t.cache/train.zarr/0.0"
check "continue after SIGKILL" train "$url/plain"
said "t.cache/train.zarr/0.0: damaged in the cache" stderr
fetched "0.0 0.3 1.0 1.1 1.2 1.3"
train_is_right

fresh # the first shard may be complete or not; the result is the same
interrupt KILL 1.2
incomplete
check "continue after SIGKILL in the second shard" train "$url/plain"
train_is_right

fresh
interrupt TERM 0.3
check "the output is one line" test "$code $(cat "$scratch/interrupted")" = \
    "1 error: interrupted; run the same command again to continue"
files "$out" "t.cache/train.zarr/.zarray t.cache/train.zarr/0.0 t.cache/train.zarr/0.1 t.cache/train.zarr/0.2"
fetched "0.0 0.1 0.2 0.3"
check "continue after SIGTERM" train "$url/plain"
fetched "0.3 1.0 1.1 1.2 1.3"
train_is_right

report
