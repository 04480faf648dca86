#!/usr/bin/env bash
# data/ids_to_shards and scripts/make_shards.py: the same shards as data/text_to_shards, from every kind of file; all
# or nothing; what the trainer says of another tokenizer's data. PYTHON: a python with numpy, pyarrow, tokenizers and
# zstandard.
cd "$(dirname "$0")/../../.." || exit 1
scratch=build/test/make_shards
. dev/test/check.sh
python=${PYTHON:-python3}
ids() { python3 dev/test/data/shard_inputs.py "$@"; }
write() { data/ids_to_shards --out $scratch/ids/a --vocab-size 10 --end-of-text 9 "$@"; }
left() { equals "$1" "$(ls $scratch/"$2" | grep -v '\.lock$' | tr '\n' ' ')"; }

for program in text_to_shards ids_to_shards longcrawl64; do
    check "$program --version" data/$program --version
    equals 1 "$(grep -cxE "$program [^ ]+" $scratch/stdout)" # and its commit
    said "compiler "
done

check "lines of every length" python3 dev/test/data/long_lines.py

# ids_to_shards: a stream, documents, and the shards of text_to_shards for the same ids
ids records $scratch/stream 2:1,2,3 0:4 3:7 2: 2:5 4:
check "a stream" write <$scratch/stream
equals "train: 3 documents, 8 tokens, 1 shard;val: 1 document, 2 tokens, 1 shard" "$(paste -sd';' $scratch/stdout)"
equals "9 1 2 3 4 9 9 5" "$(od -An -tu2 -v -j1024 $scratch/ids/a_train_000000.bin | xargs)"
equals "9 7" "$(od -An -tu2 -v -j1024 $scratch/ids/a_val_000000.bin | xargs)"
cp $scratch/ids/a_train_000000.bin $scratch/before
dies "--out: is empty: give PREFIX" write --out "" <$scratch/stream
dies "$scratch/stream: not an option; --help lists them" write $scratch/stream <$scratch/stream
dies "--out '$scratch/ids/': must end with the start of a file name" write --out $scratch/ids/ <$scratch/stream
ids records $scratch/cut 2:1,2,3 0:4
dies "end too early" write <$scratch/cut
head -c 20 $scratch/stream >$scratch/cut
dies "end too early" write <$scratch/cut
ids records $scratch/other 7:1 4:
dies "not a sequence of records" write <$scratch/other
ids records $scratch/high 2:1,10 4:
dies "token 2 has id 10, outside the vocabulary of 10" write <$scratch/high
ids records $scratch/none 4:
dies "the training split has no document" write <$scratch/none
ids records $scratch/failed 2:1 5:
check "kind 5" write <$scratch/failed
check "kind 5" write --out $scratch/ids/new/a <$scratch/failed
check "leaves no lock and no folder" [ ! -e $scratch/ids/new ]
left "a_train_000000.bin a_val_000000.bin " ids
same $scratch/ids/a_train_000000.bin $scratch/before
ids records $scratch/documents 2:1,2,3 0:4,5 2:6 2:7,8 3:1 4:
dies "the val split has no document of 2 tokens" write --doc-len 2 <$scratch/documents
ids records $scratch/documents 2:1,2,3 0:4,5 2:6 2:7,8 4:
check "documents" write --doc-len 2 <$scratch/documents
said "dropped 2 tokens"
equals "1 2 3 4 7 8" "$(od -An -tu2 -v -j1024 $scratch/ids/a_train_000000.bin | xargs)"
left "a_train_000000.bin " ids

dies "--roll: only documents of --doc-len can be rolled" write --roll 1 <$scratch/documents
check "rolled" write --doc-len 2 --roll 1 <$scratch/documents
equals "1 2 4 3 7 8" "$(od -An -tu2 -v -j1024 $scratch/ids/a_train_000000.bin | xargs)"

# a mask: bit 31 of an id, which is none without --masked
ids records $scratch/masked 2:1,2147483650 0:9,2147483648 4:
dies "token 2 has id 2147483650, outside" write <$scratch/masked
check "--masked" write --masked --doc-len 2 <$scratch/masked
equals "3 4 2 10" "$(od -An -td4 -v -j4 -N16 $scratch/ids/a_train_000000.bin | xargs)" # version, tokens, D, vocabulary
equals "1 2147483650 9 2147483648" "$(od -An -tu4 -v -j1024 $scratch/ids/a_train_000000.bin | xargs)"

# more than 65,536 ids: uint32, which the trainer reads
tiny="--set hidden_size=32 --set num_heads=2 --set num_hidden_layers=1 --seq-len 16 --batch-tokens 32 --max-steps 1"
fox() { ./train_fox --model fox-pro-nano $tiny "$@"; }
ids tokenizers $scratch || fail "tokenizers"
ids records $scratch/wide 2:$(seq -s, 65500 65999) 4:
encoded() { data/ids_to_shards --out $scratch/ids/$1 --tokenizer $scratch/$1.json "${@:2}"; }
check "uint32" encoded words --vocab-size 70000 --end-of-text 1 <$scratch/wide
equals "2 70000" "$(ids hash $scratch/ids/words_train_000000.bin | cut -d' ' -f1,2)"
equals "1 65500 65501" "$(od -An -tu4 -v -j1024 -N12 $scratch/ids/words_train_000000.bin | xargs)"
check "the trainer" fox --set vocab_size=70000 --set bos_token_id=1 --set eos_token_id=1 \
    --data $scratch/ids/words_train_000000.bin
equals "" "$(grep "begin with token" $scratch/stderr)"
check "without the data's end of text" fox --set vocab_size=70000 --data $scratch/ids/words_train_000000.bin
said "words_train_000000.bin': its texts begin with token 1, the model ends texts with 69999" stderr
dies "its vocabulary of 70000 is larger than the model's 257" fox --data $scratch/ids/words_train_000000.bin

# the hash of a vocabulary, whatever has its names: a tokenizer of the program, an object, a list. Another tokenizer's
# data is refused
ids records $scratch/narrow 2:$(seq -s, 0 255) 4:
check "text_to_shards" data/text_to_shards --tokenizer byte --out $scratch/ids/own llmc/base/common.h
sed 's/"!"/"?!"/' $scratch/byte.json >$scratch/renamed.json
for name in byte unigram renamed; do
    check $name encoded $name --vocab-size 257 --end-of-text 256 <$scratch/narrow
    same $scratch/$name.json $scratch/ids/${name}_tokenizer.json
done
# the tokenizer's file is replaced when ids are read already, which are more than a pipe holds
ids records $scratch/many 2:$(yes 1 | head -n 30000 | paste -sd,) 0:$(yes 2 | head -n 30000 | paste -sd,)
cp $scratch/byte.json $scratch/other.json
replaced() { cat $scratch/many && cp $scratch/renamed.json $scratch/other.json && cat $scratch/none; }
replaced | encoded other --vocab-size 257 --end-of-text 256 >$scratch/stdout
same $scratch/byte.json $scratch/ids/other_tokenizer.json
same <(ids hash $scratch/ids/byte_train_000000.bin) <(ids hash $scratch/ids/other_train_000000.bin)
byte=$scratch/ids/byte_train_000000.bin renamed=$scratch/ids/renamed_train_000000.bin own=$scratch/ids/own_train_000000.bin
same <(ids hash $own) <(ids hash $byte)
same <(ids hash $own) <(ids hash $scratch/ids/unigram_train_000000.bin)
check "another hash" [ "$(ids hash $own)" != "$(ids hash $renamed)" ]
check "train on bytes" fox --data $own --out $scratch/run
start=$scratch/run/step_00000001
cp $scratch/byte.json $start/tokenizer.json
check "the same tokenizer" ./train_fox --init $start $tiny --data $byte
dies "was encoded with another tokenizer than the model's, $start/tokenizer.json" \
    ./train_fox --init $start $tiny --data $renamed
dies "was encoded with another tokenizer than the model's" \
    ./train_fox --out $scratch/run --resume --max-steps 2 --data $renamed --data-changed
for measure in "--eval $scratch/measured --val-data" "--maps $scratch/measured --val-data" "--dump $scratch/measured --batch-tokens 16 --data"; do
    dies "'$renamed': was encoded with another tokenizer than the model's, $start/tokenizer.json" \
        ./train_fox --init $start --seq-len 16 $measure $renamed
    check "$measure, the same tokenizer" ./train_fox --init $start --seq-len 16 $measure $byte
done
dies "was encoded with another tokenizer than --data" fox --data $byte --val-data $renamed
dies "were encoded with different tokenizers" fox --data $byte,$renamed
# the file beside the shards is not theirs, or is missing
cp $scratch/renamed.json $scratch/ids/own_tokenizer.json
dies "ids/own_tokenizer.json: is not the tokenizer of the shards beside it" fox --data $own --out $scratch/swapped
equals "" "$(ls -d $scratch/swapped/step_* 2>&1 | grep -v 'No such')"
rm $scratch/ids/own_tokenizer.json
mv $scratch/ids/renamed_tokenizer.json $scratch/kept.json
check "without a tokenizer" fox --data $renamed --out $scratch/without
check "has not that of bytes" [ ! -e $scratch/without/step_00000001/tokenizer.json ]
check "resume" ./train_fox --out $scratch/without --resume --max-steps 2 --data $renamed
mv $scratch/kept.json $scratch/ids/renamed_tokenizer.json
# validation data that is training data
check "other validation data" fox --data $own --val-data $byte --val-tokens 16 --out $scratch/apart
equals "" "$(cat $scratch/stderr)"
check "bits per byte" grep -q bits_per_byte $scratch/apart/log.jsonl
check "257 tokens that are not bytes" fox --data $renamed --val-data $renamed --val-tokens 16 --out $scratch/others
equals 0 "$(grep -c bits_per_byte $scratch/others/log.jsonl)"
cp $own $scratch/ids/copy.bin
check "the same validation data" fox --data $own --val-data $scratch/ids/copy.bin --val-tokens 16 --out $scratch/same
said "warning: --val-data: $scratch/ids/copy.bin is also in --data" stderr
equals "run warning" "$(sed -n 's/^{"event":"\([a-z]*\)".*/\1/p' $scratch/same/log.jsonl | head -n 2 | xargs)"
dies "matches the same tokens twice, as $scratch/ids/copy.bin and as $own" fox --data "$own,$scratch/ids/copy.bin"
echo "not a tokenizer" >$start/tokenizer.json
check "a tokenizer that is not known" ./train_fox --init $start $tiny --data $renamed

if ! $python -c 'import numpy, pyarrow, tokenizers, zstandard' 2>$scratch/stderr; then
    skip "make_shards.py: $(tail -n 1 $scratch/stderr)"
    report
fi
ids() { $python dev/test/data/shard_inputs.py "$@"; }
shards() { # without the progress lines of a busy machine
    $python scripts/make_shards.py --tokenizer "$1.json" --out "$2" "${@:3}" 2>$scratch/errors
    local code=$?
    grep -v '^encoding: ' $scratch/errors >&2
    return $code
}
gpt2=$scratch/gpt2 in=$scratch/in
c() { data/text_to_shards --tokenizer gpt2 --vocab dev/test/fixtures/gpt2/vocab.bpe --out "$@"; }
ids inputs $in && ids broken $scratch/broken || fail "inputs"

# the name tells the kind, in capitals too: every line a document
cat >$scratch/lines.ndjson <<'END'
{"text": "one"}
{"text": "two"}
END
cp $scratch/lines.ndjson $scratch/LINES.JSONL
gzip -c $scratch/lines.ndjson >$scratch/Lines.Json.GZ
for file in lines.ndjson LINES.JSONL Lines.Json.GZ; do
    check $file shards $scratch/byte $scratch/kinds --jobs 1 $scratch/$file
    said "train: 2 documents, 8 tokens"
done

# interrupted: at its very end the shards are replaced, and it says so; before that they are as they were. No process is left
cat >$scratch/interrupted.py <<'END'
import concurrent.futures, os, runpy, signal, subprocess, sys
def before(owner, name):
    def strike(*arguments, **named):
        if name in where:
            where.remove(name)
            os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments, **named)
    original = getattr(owner, name)
    setattr(owner, name, strike)
if __name__ == "__main__":  # not in the processes of --jobs
    where = sys.argv.pop(1).split(",")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    before(concurrent.futures.Future, "result")
    before(concurrent.futures.ProcessPoolExecutor, "shutdown")
    before(subprocess.Popen, "wait")
    sys.path.insert(0, "scripts")
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
END
make_lines() { $python scripts/make_shards.py --tokenizer $scratch/byte.json --out $scratch/lines/a --jobs 1 "$@"; }
interrupted() { # WHERE CODE
    echo '{"text": "new"}' >$scratch/lines.ndjson
    # all of its processes have its standard output: the pipe ends when all of them have
    $python $scratch/interrupted.py $1 scripts/make_shards.py --tokenizer $scratch/byte.json \
        --out $scratch/lines/a --jobs 1 $scratch/lines.ndjson 2>$scratch/stderr | cat >$scratch/stdout
    equals "$2" "${PIPESTATUS[0]}"
    equals "" "$(cat $scratch/stderr)"
}
for where in result result,shutdown result,wait result,shutdown,wait; do
    check "shards" make_lines $scratch/LINES.JSONL
    cp $scratch/lines/a_train_000000.bin $scratch/before
    interrupted $where 130
    same $scratch/lines/a_train_000000.bin $scratch/before
    left "a_tokenizer.json a_train_000000.bin " lines
done
for where in shutdown wait; do
    check "shards" make_lines $scratch/LINES.JSONL
    interrupted $where 0
    said "train: 1 document, 4 tokens"
    differ $scratch/lines/a_train_000000.bin $scratch/before
done

# the bytes of text_to_shards
check "text_to_shards" c $scratch/c/stream $in/text
check "text_to_shards" c $scratch/c/documents --doc-len 256 --roll 5 --shard-tokens 100000 $in/text
check "text" shards $gpt2 $scratch/p/stream $in/text
said "for the trainer: --set vocab_size=50257 --set bos_token_id=50256 --set eos_token_id=50256"
same $scratch/c/stream_train_000000.bin $scratch/p/stream_train_000000.bin
same $scratch/gpt2.json $scratch/p/stream_tokenizer.json
check "documents" shards $gpt2 $scratch/p/documents --doc-len 256 --roll 5 --shard-tokens 100000 $in/text
for i in 0 1 2; do same $scratch/{c,p}/documents_train_00000$i.bin; done
equals "$(ls $scratch/c | grep -c documents_train)" "$(ls $scratch/p | grep -c documents_train)"
for kind in jsonl json.gz jsonl.zst parquet; do
    field=text
    [ $kind != parquet ] || field=content
    check $kind shards $gpt2 $scratch/p/$kind --text-field $field $in/all.$kind
    same $scratch/c/stream_train_000000.bin $scratch/p/${kind}_train_000000.bin
done
check "bytes" data/text_to_shards --tokenizer byte --out $scratch/c/byte $in/text
check "bytes" shards $scratch/byte $scratch/p/byte $in/text
same $scratch/c/byte_train_000000.bin $scratch/p/byte_train_000000.bin

# pieces have the tokens of the whole text, also with added tokens that reach across the end of a word
cat >$scratch/pieces.py <<'END'
import json, sys
sys.path.insert(0, "scripts")
import make_shards
make_shards.PIECE = 300
with open(sys.argv[1]) as f:
    plain = json.load(f)
texts = ["x" * i + " York New\nYork a New York b\n" * 50 for i in range(30)]
def added(content, **named):
    kind = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {**plain, "added_tokens": [*plain["added_tokens"], {"id": 50257, "content": content, **kind, **named}]}
fixed = {"type": "Sequence", "pretokenizers": [{"type": "FixedLength", "length": 8},
                                               {**plain["pre_tokenizer"], "use_regex": False}]}
cases = [plain, added("York"), added("York", special=True, rstrip=True), added("New York"), added("New\nYork"),
         added("New "), added("York", lstrip=True), added("York", rstrip=True), {**plain, "pre_tokenizer": fixed}]
for case, tokenizer in enumerate(cases):
    encoder = make_shards.Encoder("a.json", json.dumps(tokenizer))
    pieces = [list(encoder.pieces(text)) for text in texts]
    assert ["".join(p) for p in pieces] == texts and (len(pieces[0]) > 1 or case > 2), case
    if [[i for ids in encoder.encode(p) for i in ids] for p in pieces] != [list(ids) for ids in encoder.encode(texts)]:
        print("case", case, "differs")
END
check "pieces" $python $scratch/pieces.py $scratch/gpt2.json
equals "" "$(cat $scratch/stdout)"

# a draw may hold out no document: no shard, and a warning
check "half held out" shards $scratch/words $scratch/p/drawn --val-fraction 0.5 $in/words.jsonl
equals "" "$(cat $scratch/stderr)"
check "none held out" shards $scratch/words $scratch/p/drawn --val-fraction 1e-9 $in/words.jsonl
equals "warning: --val-fraction 1e-09: no document is held out; give a larger one" "$(cat $scratch/stderr)"
check "nor an older shard" test ! -e $scratch/p/drawn_val_000000.bin

# held-out documents do not depend on the number of processes
for jobs in 1 3; do
    check "--jobs $jobs" shards $scratch/words $scratch/p/jobs$jobs --jobs $jobs --val-fraction 0.2 $in/words.jsonl
done
same $scratch/p/jobs{1,3}_train_000000.bin
same $scratch/p/jobs{1,3}_val_000000.bin
equals 3100 "$(($(sed -n 's/^.*documents, \([0-9]*\) tokens.*/\1+/p' $scratch/stdout | tr -d '\n')0))"
check "--tokens" shards $scratch/words $scratch/p/part --tokens 300 $in/words.jsonl
said "train: 10 documents, 310 tokens"

# hf:// as huggingface_hub shows it
mkdir -p $scratch/hub/datasets
cp $in/all.jsonl $in/all.parquet $scratch/hub/datasets/
cat >$scratch/hub/huggingface_hub.py <<'END'
import hashlib, os
HERE = os.path.dirname(__file__)
class HfFileSystem:
    def find(self, path, detail):
        folder = path.removeprefix("hf://")
        names = sorted(os.listdir(os.path.join(HERE, folder)))
        return {f"{folder}/{n}": self.info(f"{folder}/{n}") for n in names}
    def info(self, path, refresh=False):
        with open(os.path.join(HERE, path.removeprefix("hf://")), "rb") as f:
            text = f.read()
        return {"size": len(text), "blob_id": hashlib.sha1(text).hexdigest()}
    def open(self, path, mode):
        return open(os.path.join(HERE, path.removeprefix("hf://")), mode)
END
mv $scratch/hub/datasets/all.parquet $scratch/hub/all.parquet
export PYTHONPATH=$scratch/hub
check "hf://" shards $gpt2 $scratch/p/hub hf://datasets
same $scratch/c/stream_train_000000.bin $scratch/p/hub_train_000000.bin
unset PYTHONPATH

# errors: one line, and the shards that were there remain
broken() { dies "$1" shards $scratch/byte $scratch/p/byte --jobs 1 "${@:2}"; }
b=$scratch/broken
broken "$b/cut.gz: is truncated" $in/words.jsonl $b/cut.gz
broken "$b/cut.txt.zst: is truncated" $b/cut.txt.zst
broken "$b/flipped.gz: damaged" $b/flipped.gz
broken "$b/latin1.txt: is not UTF-8" $b/latin1.txt
broken "$b/zero.txt: is not text: it has a zero byte" $b/zero.txt
broken "$b/half.jsonl:2: is not JSON" $b/half.jsonl
broken "$b/other.jsonl:2: has no text 'text' but body: --text-field names it" $b/other.jsonl
broken "$b/number.jsonl:1: 'text' is not text but 5" $b/number.jsonl
broken "$b/list.jsonl:1: has no text 'text' but no object" $b/list.jsonl
broken "$b/deep.jsonl:2: is not JSON" $b/deep.jsonl
broken "$b/keys.jsonl:1: has no text 'text' but a b" $b/keys.jsonl
broken "$b/fake.parquet: cannot read" $b/fake.parquet
broken "$b/page.parquet: row group 1 is damaged" $in/words.jsonl $b/page.parquet
broken "$b/snappy.parquet: row group 1 is damaged" $b/snappy.parquet
broken "$in/all.parquet: has no column 'text' but content, id" $in/all.parquet
broken "$b/two.parquet: has more than one column 'text'" $b/two.parquet
broken "no/such/file: No such file" no/such/file
broken "no?such?file: No such file" $'no\nsuch\rfile'
cp $b/half.jsonl $b/$'two\nlines.jsonl'
broken "$b/two?lines.jsonl:2: is not JSON" $b/$'two\nlines.jsonl'
broken "no input" $in/text/empty
gzip -c $in/text/empty >$scratch/empty.gz
broken "the training split has no document" $scratch/empty.gz
broken "--val-fraction 1.0: not from 0 to below 1" --val-fraction 1 $in/text
broken "--jobs 0: not from 1" --jobs 0 $in/text
shards $scratch/byte $scratch/p/byte --doc-len 1.5 $in/text 2>$scratch/stderr
equals "2 error: argument --doc-len: 1.5 is not a whole number (suffixes: k M G Ki Mi Gi)" "$? $(cat $scratch/stderr)"
shards $scratch/byte $scratch/p/byte --tokens 1e400 $in/text 2>$scratch/stderr
equals "2 error: argument --tokens: 1e400 is not a whole number (suffixes: k M G Ki Mi Gi)" "$? $(cat $scratch/stderr)"
broken "--eot <x>: is no token of" --eot '<x>' $in/text
broken "the train split has no document of 100000000 tokens" --doc-len 100M $in/words.jsonl
dies "which token ends a document? give --eot" shards $scratch/no_end $scratch/p/byte $in/text
dies "no_tokenizer.json: is not a tokenizer" shards $scratch/no_tokenizer $scratch/p/byte $in/text
for name in list number nothing binary cut deep no_tokens panic; do
    dies "$b/$name.json: is not a tokenizer" shards $b/$name $scratch/p/byte $in/text
done
dies "$b/no_unknown.json: cannot encode" shards $b/no_unknown $scratch/p/byte $in/text
mkdir $scratch/config
cp $scratch/byte.json $scratch/config/tokenizer.json
for config in '[]' 5 '{' "$(cat $b/deep.json)" '{"eos_token":["a"]}' '{"eos_token":{"content":{}}}'; do
    echo "$config" >$scratch/config/tokenizer_config.json
    dies "$scratch/config/tokenizer_config.json: " shards $scratch/config/tokenizer $scratch/p/byte $in/text
done
echo '{"eos_token":{}}' >$scratch/config/tokenizer_config.json
check "a usual name" shards $scratch/config/tokenizer $scratch/p/config $in/text/000.txt

# a file is replaced by another one when a process begins to read: SWAP=NEW:OLD
mkdir $scratch/hook
cat >$scratch/hook/sitecustomize.py <<'END'
import builtins, multiprocessing, os
def swap(*arguments, **named):
    new, old = os.environ["SWAP"].split(":")
    if multiprocessing.parent_process() and os.path.exists(new):
        os.replace(new, old)
    return original(*arguments, **named)
original = builtins.open
if "SWAP" in os.environ:
    builtins.open = swap
END
swapped() { # FILE REPORTED ARGUMENT...
    [ -e $scratch/new ] || cp $in/reversed.parquet $scratch/new
    PYTHONPATH=$scratch/hub:$scratch/hook SWAP=$scratch/new:$1 \
        broken "$2: changed while it was read" --text-field content "${@:3}"
}
old=$scratch/old.parquet
cp $in/few.parquet $old
swapped $old $old $old $in/few.parquet
swapped $old $old $in/few.parquet $old
swapped $old $old --tokens 10 $old
cp $scratch/renamed.json $scratch/new
swapped $scratch/byte.json $scratch/byte.json $in/few.parquet
mkdir $scratch/hub/swap
cp $in/few.parquet $scratch/hub/swap/
swapped $scratch/hub/swap/few.parquet hf://swap/few.parquet hf://swap

# no connection
cat >$scratch/hub/huggingface_hub.py <<'END'
class HfFileSystem:
    def find(self, path, detail):
        return {"a/b.txt": {"size": 1}} if path == "hf://a" else self.open(path, "rb")
    def open(self, path, mode):
        raise RuntimeError("no connection\nat all")
END
PYTHONPATH=$scratch/hub broken "hf://b: no connection" hf://b
PYTHONPATH=$scratch/hub broken "hf://a/b.txt: no connection" hf://a
same $scratch/c/byte_train_000000.bin $scratch/p/byte_train_000000.bin
equals 0 "$(ls $scratch/p | grep -c tmp)"

# a full disk
limited() { (ulimit -f 8 && shards "$@"); }
dies "cannot write" limited $scratch/byte $scratch/p/byte $in/text/0*0.txt
same $scratch/c/byte_train_000000.bin $scratch/p/byte_train_000000.bin
equals 0 "$(ls $scratch/p | grep -c tmp)"
report
